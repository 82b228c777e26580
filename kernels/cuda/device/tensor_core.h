// SPDX-License-Identifier: Apache-2.0
// One step of an NVIDIA tensor core, to the bit, for the host: what the
// emulator's matrix instructions compute. A step multiplies `k` pairs exactly,
// aligns the products and the f32 accumulator to the largest exponent among
// them, cuts each off (towards zero) a fixed number of bits below, adds
// exactly, and cuts the sum off to f32. So the order inside a step does not
// matter, and the order of steps does.
//
//   generation   a step for bf16 and f16    bits kept below the leading one
//   Ampere, Ada  8 products, low half of k first    24
//   Hopper on    16 products                        25
//
// Models of this kind agree with hardware bit for bit (arXiv 2511.10909,
// 2512.07004). Denormals count; products of zero never set the exponent.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_TENSOR_CORE_H_
#define TANDEM_KERNELS_CUDA_DEVICE_TENSOR_CORE_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace tandem::kernels::cuda {

enum class Generation : uint8_t { kAmpere, kHopper };

// Sixteen bf16 or f16 numbers, taken apart: significand * 2^(exponent - 10).
struct TensorVector {
  int32_t significand[16];
  int32_t exponent[16];
  bool special = false;  // some of them is infinite or not a number

  // Below every sum of two exponents of numbers that are not zero.
  static constexpr int32_t kZero = -1000;

  void SetBf16(int i, uint16_t bits) {
    const int32_t biased = bits >> 7 & 0xff;
    special |= biased == 0xff;
    const int32_t fraction = (bits & 0x7f) | (biased != 0 ? 0x80 : 0);
    Set(i, bits, fraction << 3, std::max(biased, 1) - 127);
  }
  void SetF16(int i, uint16_t bits) {
    const int32_t biased = bits >> 10 & 0x1f;
    special |= biased == 0x1f;
    const int32_t fraction = (bits & 0x3ff) | (biased != 0 ? 0x400 : 0);
    Set(i, bits, fraction, std::max(biased, 1) - 15);
  }

  // Right also for the infinite; only those matter here.
  double value(int i, bool half) const {
    if (half ? exponent[i] > 15 : exponent[i] > 127) {
      const bool whole = std::abs(significand[i]) == (half ? 0x400 : 0x80 << 3);
      if (!whole) return std::nan("");
      return significand[i] < 0 ? -HUGE_VAL : HUGE_VAL;
    }
    return std::ldexp(double(significand[i]), exponent[i] - 10);
  }

 private:
  void Set(int i, uint16_t bits, int32_t magnitude, int32_t power) {
    significand[i] = (bits & 0x8000) != 0 ? -magnitude : magnitude;
    exponent[i] = magnitude == 0 ? kZero : power;
  }
};

namespace internal {

// sum * 2^power, cut off to f32.
inline float TruncateToFloat(int64_t sum, int power) {
  if (sum == 0) return 0.0f;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0u;
  uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  const int leading = 63 - std::countl_zero(magnitude);
  // The unit in the last place of the result, at least that of denormals.
  const int unit = std::max(leading + power - 23, -149);
  const int drop = unit - power;
  magnitude = drop >= 64  ? 0
              : drop >= 0 ? magnitude >> drop
                          : magnitude << -drop;
  if (leading + power > 127) return std::bit_cast<float>(sign | 0x7f800000u);
  const uint32_t biased =
      magnitude >= (1u << 23) ? static_cast<uint32_t>(unit + 150) : 0;
  return std::bit_cast<float>(sign | biased << 23 |
                              (static_cast<uint32_t>(magnitude) & 0x7fffffu));
}

// Not inlined: it is rare, and large.
[[gnu::noinline]] inline float SpecialStep(const TensorVector& a,
                                           const TensorVector& b, int begin,
                                           int end, float c, bool half) {
  double sum = double(c);
  for (int i = begin; i < end; ++i) sum += a.value(i, half) * b.value(i, half);
  if (std::isnan(sum)) return std::bit_cast<float>(0x7fffffffu);
  return sum < 0 ? -HUGE_VALF : HUGE_VALF;
}

template <int kBegin, int kEnd, int kBits>
float Step(const TensorVector& a, const TensorVector& b, float c) {
  const uint32_t c_bits = std::bit_cast<uint32_t>(c);
  const int32_t c_biased = static_cast<int32_t>(c_bits >> 23 & 0xff);
  const int32_t c_fraction = static_cast<int32_t>(
      (c_bits & 0x7fffffu) | (c_biased != 0 ? 0x800000u : 0u));
  int32_t largest =
      c_fraction == 0 ? 2 * TensorVector::kZero : std::max(c_biased, 1) - 127;
  int32_t product[16];
  int32_t power[16];
  for (int i = kBegin; i < kEnd; ++i) {
    product[i] = a.significand[i] * b.significand[i];
    power[i] = a.exponent[i] + b.exponent[i];
  }
  for (int i = kBegin; i < kEnd; ++i) largest = std::max(largest, power[i]);
  if (largest < TensorVector::kZero / 2) return 0.0f;
  int64_t sum = 0;
  for (int i = kBegin; i < kEnd; ++i) {
    const uint32_t magnitude = static_cast<uint32_t>(std::abs(product[i]))
                               << (kBits - 20);
    const int32_t cut =
        static_cast<int32_t>(magnitude >> std::min(largest - power[i], 31));
    sum += product[i] < 0 ? -cut : cut;
  }
  if (c_fraction != 0) {
    const int32_t behind = largest - (std::max(c_biased, 1) - 127);
    const int32_t cut = (c_fraction << (kBits - 23)) >> std::min(behind, 31);
    sum += (c_bits >> 31) != 0 ? -cut : cut;
  }
  return TruncateToFloat(sum, largest - kBits);
}

}  // namespace internal

// c plus the 16 products of a and b. `half`: they were set from f16.
inline float TensorCoreStep(Generation generation, const TensorVector& a,
                            const TensorVector& b, float c, bool half) {
  const bool special = a.special || b.special || !std::isfinite(c);
  if (generation == Generation::kHopper) {
    return special ? internal::SpecialStep(a, b, 0, 16, c, half)
                   : internal::Step<0, 16, 25>(a, b, c);
  }
  if (special) return internal::SpecialStep(a, b, 0, 16, c, half);
  const float low = internal::Step<0, 8, 24>(a, b, c);
  if (!std::isfinite(low)) {
    return internal::SpecialStep(a, b, 8, 16, low, half);
  }
  return internal::Step<8, 16, 24>(a, b, low);
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_TENSOR_CORE_H_
