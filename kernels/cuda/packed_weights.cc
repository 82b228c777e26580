// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/packed_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace tandem::kernels::cuda {
namespace {

uint16_t ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float FromF16(uint16_t bits) {
  const int biased = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  const float magnitude =
      biased == 0x1f ? (fraction == 0 ? HUGE_VALF : std::nanf(""))
      : biased == 0
          ? std::ldexp(static_cast<float>(fraction), -24)
          : std::ldexp(static_cast<float>(fraction | 0x400), biased - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t ToF16(float value) {
  const uint16_t sign =
      static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude == 0.0f) return sign;
  // In units of the last place, which are exact in f32.
  const int power = std::max(std::ilogb(magnitude), -14);
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - power)));
  // A carry into the exponent falls out of the addition.
  return static_cast<uint16_t>(sign | (((power + 14) << 10) + units));
}

float Load(const HostTensor& source, int64_t index) {
  const std::byte* const at =
      source.data + index * static_cast<int64_t>(SizeOf(source.dtype));
  if (source.dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return source.dtype == DType::kBF16
             ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
             : FromF16(bits);
}

}  // namespace

uint8_t ToE4M3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::min(std::fabs(value), 448.0f);
  if (std::isnan(value)) return sign | 0x7f;
  if (magnitude == 0.0f) return sign;
  const int power = std::max(std::ilogb(magnitude), -6);
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - power)));
  return static_cast<uint8_t>(sign | (((power + 6) << 3) + units));
}

float FromE4M3(uint8_t bits) {
  const int biased = bits >> 3 & 0xf;
  const int fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return std::nanf("");
  const float magnitude =
      biased == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                  : std::ldexp(static_cast<float>(fraction | 8), biased - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

PackedWeights PackWeights(const HostTensor& source, WeightType type) {
  const int rows = static_cast<int>(source.rows);
  const int cols = static_cast<int>(source.cols);
  PackedWeights packed;
  packed.bytes.resize(static_cast<size_t>(PackedBytes(rows, cols, type)));
  if (type == WeightType::kE4M3) packed.scales.assign(size_t(rows), 1.0f);
  for (int row = 0; row < rows; ++row) {
    const int64_t first = int64_t{row} * cols;
    float scale = 1.0f;
    if (type == WeightType::kE4M3) {
      float most = 0.0f;
      for (int col = 0; col < cols; ++col) {
        most = std::max(most, std::fabs(Load(source, first + col)));
      }
      if (most > 0.0f) scale = most / 448.0f;
      packed.scales[static_cast<size_t>(row)] = scale;
    }
    for (int col = 0; col < cols; ++col) {
      const float value = Load(source, first + col);
      std::byte* const to =
          packed.bytes.data() + PackedOffset(row, col, cols, type);
      if (type == WeightType::kF32) {
        std::memcpy(to, &value, 4);
      } else if (type == WeightType::kE4M3) {
        *to = static_cast<std::byte>(ToE4M3(value / scale));
      } else {
        const uint16_t bits =
            type == WeightType::kBF16 ? ToBf16(value) : ToF16(value);
        std::memcpy(to, &bits, 2);
      }
    }
  }
  return packed;
}

float UnpackWeight(const PackedWeights& packed, int row, int col, int cols,
                   WeightType type) {
  const std::byte* const at =
      packed.bytes.data() + PackedOffset(row, col, cols, type);
  if (type == WeightType::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  if (type == WeightType::kE4M3) {
    return FromE4M3(static_cast<uint8_t>(*at)) *
           packed.scales[static_cast<size_t>(row)];
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return type == WeightType::kBF16
             ? std::bit_cast<float>(static_cast<uint32_t>(bits) << 16)
             : FromF16(bits);
}

}  // namespace tandem::kernels::cuda
