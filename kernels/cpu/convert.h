// SPDX-License-Identifier: Apache-2.0
// Element conversions, one definition for packing, KV and tests. Rounding is
// to nearest, ties to even; NaN stays NaN.

#ifndef TANDEM_KERNELS_CPU_CONVERT_H_
#define TANDEM_KERNELS_CPU_CONVERT_H_

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/quantise.h"
#include "kernels/types.h"

namespace tandem::kernels::cpu {

inline float FloatFromBf16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

inline uint16_t Bf16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// In integers, so that no denormal is flushed on the way.
inline float FloatFromF16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1f) {
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  }
  if (exponent == 0) {
    if (mantissa == 0) return std::bit_cast<float>(sign);
    exponent = 1;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= 0x3ffu;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) |
                              (mantissa << 13));
}

// In integers, so that no denormal is flushed on the way.
inline uint16_t F16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000u) {  // 65520 rounds to infinity
    half = 0x7c00;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: normal
    half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  } else {
    half = RoundMagnitude(magnitude, 24);
  }
  return static_cast<uint16_t>(sign | half);
}

// Element `index` of a checkpoint tensor, which may be unaligned.
inline float LoadElement(const std::byte* data, DType type, int64_t index) {
  if (type == DType::kF32) {
    float value;
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + index * 2, 2);
  return type == DType::kBF16 ? FloatFromBf16(bits) : FloatFromF16(bits);
}

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_CONVERT_H_
