// SPDX-License-Identifier: Apache-2.0
// Codes of a quantised KV cache (kernels/quantise.h) in device code. Which of
// the formats they have is known at run time: one kernel serves all.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_CODES_H_
#define TANDEM_KERNELS_CUDA_DEVICE_CODES_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cuda {

// A byte of a cache or of the wire: e4m3, int8 or two of int4.
struct Code {
  uint8_t bits;
};

// A vector of a cache or of the wire. E: its elements.
template <typename E>
struct KvVector {
  using Scales =
      std::conditional_t<std::is_const_v<E>, const std::byte, std::byte>;
  E* elements;
  Scales* scales;        // of Code alone: its first one
  int64_t scale_stride;  // bytes from one to the next
  DType type;            // of Code alone

  TANDEM_DEVICE float operator[](int i) const {
    if constexpr (std::is_same_v<std::remove_const_t<E>, Code>) {
      const uint8_t code =
          CodeAt(type, reinterpret_cast<const std::byte*>(elements), i);
      return Mul(FloatFromCode(type, code), ScaleOf(i));
    } else {
      return ToFloat(elements[i]);
    }
  }
  // Of element i.
  TANDEM_DEVICE float ScaleOf(int i) const {
    return type == DType::kInt4
               ? FloatFromBf16Bits(*reinterpret_cast<const uint16_t*>(
                     scales + i / kCodeGroup * scale_stride))
               : *reinterpret_cast<const float*>(scales);
  }
};

struct alignas(8) EightCodes {
  uint32_t word[2];
};

// Two codes of int4, the lower one first, times their scale, rounded to T.
template <typename T>
TANDEM_DEVICE uint32_t WidenInt4Pair(uint32_t pair, float scale) {
  // 2^23 + 8 + code is an f32 with the code in its last bits.
  const float low =
      Sub(BitsToFloat(0x4b000000u | ((pair & 0xfu) ^ 8u)), 8388616.0f);
  const float high =
      Sub(BitsToFloat(0x4b000000u | ((pair >> 4 & 0xfu) ^ 8u)), 8388616.0f);
  return PackPair<T>(Mul(low, scale), Mul(high, scale));
}

// Codes 2 * `half` and one more of a word, times their scale, rounded to T:
// a pair of operands. Exact but for the product and the rounding.
template <typename T>
TANDEM_DEVICE uint32_t WidenPair(DType type, uint32_t word, int half,
                                 float scale) {
  const uint32_t pair = word >> (half * 16) & 0xffffu;
  float low;
  float high;
  if (type == DType::kFp8) {
    const uint32_t wide = FromE4M3Pair<T>(pair);
    low = LowOfPair<T>(wide);
    high = LowOfPair<T>(wide >> 16);
  } else {
    // 2^23 + 128 + code is an f32 with the code in its last bits.
    low = Sub(BitsToFloat(0x4b000000u | ((pair & 0xffu) ^ 0x80u)), 8388736.0f);
    high = Sub(BitsToFloat(0x4b000000u | (pair >> 8 ^ 0x80u)), 8388736.0f);
  }
  return PackPair<T>(Mul(low, scale), Mul(high, scale));
}

// Eight neighbouring codes, at a multiple of their bytes.
template <typename T>
TANDEM_DEVICE Vector16 WidenCodes(DType type, const std::byte* codes,
                                  float scale) {
  if (type == DType::kInt4) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(codes);
    Vector16 wide;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      wide.word[i] = WidenInt4Pair<T>(word >> (i * 8), scale);
    }
    return wide;
  }
  const EightCodes v = *reinterpret_cast<const EightCodes*>(codes);
  Vector16 wide;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    wide.word[i] = WidenPair<T>(type, v.word[i / 2], i % 2, scale);
  }
  return wide;
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_CODES_H_
