// SPDX-License-Identifier: Apache-2.0
// The 16-bit formats of device/types.h, rounded as the device does: to even,
// and to its NaN.

#include <immintrin.h>

#include <algorithm>
#include <bit>

#include "kernels/cuda/emulator/emulator.h"

namespace tandem::kernels::cuda {

float ToFloat(Half value) {
  const int biased = value.bits >> 10 & 0x1f;
  const int fraction = value.bits & 0x3ff;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  if (biased == 0x1f) {
    return std::bit_cast<float>(sign | 0x7f800000u |
                                static_cast<uint32_t>(fraction) << 13);
  }
  const float magnitude =
      biased == 0
          ? static_cast<float>(fraction) * 0x1p-24f
          : std::bit_cast<float>(static_cast<uint32_t>(biased + 112) << 23 |
                                 static_cast<uint32_t>(fraction) << 13);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

template <>
BFloat16 FromFloat<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
Half FromFloat<Half>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00)};
  const int power = std::max(static_cast<int>(magnitude >> 23) - 127, -14);
  // The significand, then how many units of the result it makes.
  const uint32_t significand =
      (magnitude & 0x7fffffu) | (magnitude >= 0x800000u ? 0x800000u : 0u);
  const int drop =
      13 + std::max(0, -14 - (static_cast<int>(magnitude >> 23) - 127));
  if (drop > 24) return {static_cast<uint16_t>(sign)};
  const uint32_t half_unit = 1u << (drop - 1);
  const uint32_t odd = significand >> drop & 1u;
  const uint32_t units = (significand + half_unit - 1 + odd) >> drop;
  return {static_cast<uint16_t>(
      sign | ((static_cast<uint32_t>(power + 14) << 10) + units))};
}

uint32_t MulPairBf16(uint32_t a, uint32_t b) {
  // The device's keeps denormals.
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved & ~0x8040u);
  const uint32_t product = MulPairOf<BFloat16>(a, b);
  _mm_setcsr(saved);
  return product;
}
uint32_t MulPairF16(uint32_t a, uint32_t b) { return MulPairOf<Half>(a, b); }

}  // namespace tandem::kernels::cuda
