// SPDX-License-Identifier: Apache-2.0
// Numbers of eight and four bits, one definition for both backends, in integers
// where rounding matters, so that equal inputs give equal bits everywhere.
//
//   fp8   OCP e4m3: 4 bits of exponent, 3 of fraction, largest 448, no
//         infinities, NaN 0x7f and 0xff (which nothing here produces)
//   int8  two's complement, -127 .. 127
//   int4  two's complement, -8 .. 7
//
// A vector of a KV cache (K or V of one head at one position) is quantised by
// itself, so that nothing depends on what else is computed with it:
//
//   scale = amax / limit, code = x * (limit / amax) to the nearest code, ties
//   to even; amax is the vector's largest magnitude, limit 448 or 127, and
//   each operation is rounded to f32.
//
// In int4 each group of kCodeGroup elements is quantised like that by itself
// (the last one may be shorter), with
//
//   scale = bf16(most / -8), where most is the group's value of greatest
//   magnitude, a negative one before a positive one: so -8 is used;
//   code = x * (1 / scale) to the nearest, ties to even, kept within -8 .. 7
//
// An amax below 2^-100 gives scale 0 and codes 0: such vectors are zeros. An
// infinity or a NaN anywhere gives scale NaN and codes 0, so that it is as
// visible to whoever reads the vector as it would be in another format.
//
// A weight matrix in int8 or int4 has a power of two for each row and an f16
// scale for each group of kCodeGroup inputs (the last one may be shorter):
//
//   row    = 2^e with row <= (greatest magnitude of the row) / limit < 2 row
//   int8   scale = f16(amax / 127 / row)
//   int4   scale = f16(most / -8 / row), where most is the group's value of
//          greatest magnitude, the first of several: so -8 is used
//   code   = w / row * (1 / scale) to the nearest, ties to even, kept within
//            -127 .. 127 or -8 .. 7; each operation is rounded to f32
//
// and stands for code * scale * row. A row or group of zeros has scale 0; an
// infinity or a NaN makes its group's scale NaN. In a product with such a
// matrix each row x of activations is quantised in groups like a vector of a
// KV cache (int8), and
//
//   out = row * (chain of fma(dot, scale * x's scale, chain) over groups in
//         ascending order), dot = the exact integer sum of code * x's code
//
// where `scale * x's scale` and `dot` are f32 (|dot| < 2^24).
//
// A weight matrix in W8A8 has an f32 scale for each row, which is quantised
// like a vector of a KV cache in int8 (code -128, which checkpoints may hold,
// is taken as it is); and so is, by itself, each row x of activations:
//
//   out = row's scale * (f32(dot) * x's scale), dot = the exact integer sum of
//         code * x's code over all inputs
//
// f32(dot) is the nearest to it, ties to even.
//
// Over an int8 cache a CPU's attention is of integers, too (backends without
// this read code times scale): a query is quantised like a vector, with limit
// kQueryLimit; of each kAttentionSegment keys their weights, each times its
// value's scale, are so with limit kWeightLimit, and
//
//   score = f32(dot) * (the key's scale * the query's)
//   value = f32(dot) * the weights' scale
//
// where `dot` is the exact integer sum of codes' products, over dimensions or
// over the segment's keys.

#ifndef TANDEM_KERNELS_QUANTISE_H_
#define TANDEM_KERNELS_QUANTISE_H_

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace tandem::kernels {

inline constexpr float kLargestE4M3 = 448.0f;
inline constexpr float kLargestInt8 = 127.0f;
// So that sums of products with codes fit 32 bits.
inline constexpr float kQueryLimit = 16383.0f;
inline constexpr float kWeightLimit = 32767.0f;
static_assert(int64_t{16383} * 128 * kMaxHeadDim < int64_t{1} << 31);
static_assert(int64_t{32767} * 128 * kAttentionSegment < int64_t{1} << 31);

// `value` * 2^fraction_bits to the nearest integer, ties to even. REQUIRES:
// the magnitude of the result is below 2^24. Takes an f32's bits without sign.
constexpr uint32_t RoundMagnitude(uint32_t bits, int fraction_bits) {
  const int exponent = static_cast<int>(bits >> 23);
  if (exponent == 0) return 0;
  const uint32_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  const int shift = 150 - fraction_bits - exponent;
  if (shift > 24) return 0;  // below half of 1
  if (shift <= 0) return mantissa << -shift;
  return (mantissa + (1u << (shift - 1)) - 1 + ((mantissa >> shift) & 1u)) >>
         shift;
}

// To the nearest, ties to even; saturates at 448. NaN becomes 0x7f or 0xff.
// Without branches, for compilers to vectorise.
constexpr uint8_t E4M3FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t positive = bits & 0x7fffffffu;
  const uint32_t magnitude = positive < 0x43e00000u ? positive : 0x43e00000u;
  // Three bits of fraction; a carry into the exponent falls out of the
  // addition.
  const uint32_t normal =
      ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 in units of 2^-9, which is the last place of 2^14.
  const uint32_t small =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) & 0xfu;
  const uint32_t number = magnitude < 0x3c800000u ? small : normal;
  return static_cast<uint8_t>((bits >> 24 & 0x80u) |
                              (positive > 0x7f800000u ? 0x7fu : number));
}

constexpr float FloatFromE4M3(uint8_t code) {
  const uint32_t sign = (code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 8) {
    return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
  }
  const float value = static_cast<float>(magnitude) * 0x1p-9f;
  return sign != 0 ? -value : value;
}

// To the nearest, ties to even; saturates at 127. REQUIRES: finite.
constexpr int8_t Int8FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const int32_t code = magnitude >= 0x42fe0000u  // 127
                           ? 127
                           : static_cast<int32_t>(RoundMagnitude(magnitude, 0));
  return static_cast<int8_t>((bits >> 31) != 0 ? -code : code);
}

constexpr uint32_t MagnitudeBits(float value) {
  return std::bit_cast<uint32_t>(value) & 0x7fffffffu;
}
// A value's part in its vector's amax: the greatest of these, as integers, is
// of the value of greatest magnitude, a negative one before a positive one.
constexpr uint32_t MagnitudeKey(float value) {
  return std::rotl(std::bit_cast<uint32_t>(value), 1);
}

// `value` to the nearest integer, ties to even, kept within -8 .. 7.
// REQUIRES: finite.
constexpr int8_t Int4FromFloat(float value) {
  return Int8FromFloat(value < -8 ? -8 : value > 7 ? 7 : value);
}

// `value` to the nearest bf16, ties to even. REQUIRES: finite.
constexpr uint16_t Bf16Bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
constexpr float FloatFromBf16Bits(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// What a vector is quantised by; `amax` is the bits of its largest magnitude.
struct VectorScale {
  float scale = 0;
  float inverse = 0;  // 0: all codes are 0

  constexpr VectorScale(uint32_t amax, float limit) {
    if (amax >= 0x7f800000u) {
      scale = std::bit_cast<float>(0x7fc00000u);
    } else if (amax >= 0x0d800000u) {  // 2^-100
      const float most = std::bit_cast<float>(amax);
      scale = most / limit;
      inverse = limit / most;
    }
  }
};

// What turns the values of one vector, or of one group of kInt4, into codes.
struct VectorQuantiser {
  DType type;
  float scale;    // of kInt4 it is a bf16
  float inverse;  // 0: all codes are 0

  // `key`: the greatest MagnitudeKey of the vector or group.
  constexpr VectorQuantiser(DType code_type, uint32_t key)
      : type(code_type), scale(0), inverse(0) {
    const VectorScale whole(
        key >> 1, code_type == DType::kFp8 ? kLargestE4M3 : kLargestInt8);
    scale = whole.scale;
    inverse = whole.inverse;
    if (code_type == DType::kInt4 && inverse != 0) {
      const float most = std::bit_cast<float>(std::rotr(key, 1));
      scale = FloatFromBf16Bits(Bf16Bits(most / -8.0f));
      inverse = 1.0f / scale;
    }
  }

  // Of kInt4 in the low half, two's complement like int8.
  constexpr uint8_t operator()(float value) const {
    if (inverse == 0) return 0;
    const float scaled = value * inverse;
    if (type == DType::kFp8) return E4M3FromFloat(scaled);
    return static_cast<uint8_t>(type == DType::kInt4
                                    ? Int4FromFloat(scaled) & 0xf
                                    : Int8FromFloat(scaled));
  }
};

// A row's power of two: below `most` / limit, which must be finite.
constexpr float RowPower(float most, float limit) {
  const uint32_t exponent = std::bit_cast<uint32_t>(most / limit) >> 23 & 0xffu;
  return exponent == 0 ? 1.0f : std::bit_cast<float>(exponent << 23);
}

// The number that a code stands for, without its scale.
constexpr float FloatFromCode(DType type, uint8_t code) {
  if (type == DType::kFp8) return FloatFromE4M3(code);
  if (type == DType::kInt4) {  // of a KV cache: the low half
    return static_cast<float>((code & 0xf) < 8 ? code & 0xf
                                               : (code & 0xf) - 16);
  }
  return static_cast<float>(static_cast<int8_t>(code));
}

// Twice the numbers of e2m1, whole as they are.
inline constexpr int8_t kTwiceE2m1[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                          0, -1, -2, -3, -4, -6, -8, -12};

// Code `i` of a vector, as VectorQuantiser gave it.
constexpr uint8_t CodeAt(DType type, const std::byte* codes, int i) {
  return type == DType::kInt4
             ? static_cast<uint8_t>(codes[i / 2] >> (i % 2 * 4) &
                                    std::byte{0xf})
             : static_cast<uint8_t>(codes[i]);
}

}  // namespace tandem::kernels

#endif  // TANDEM_KERNELS_QUANTISE_H_
