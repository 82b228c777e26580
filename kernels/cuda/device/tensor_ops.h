// SPDX-License-Identifier: Apache-2.0
// Tensor-core steps and register conversions by activation type, above the
// primitives of grid.h. T is BFloat16 or Half; pairs are two T in a register,
// the lower index in the lower half.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_TENSOR_OPS_H_
#define TANDEM_KERNELS_CUDA_DEVICE_TENSOR_OPS_H_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/grid.h"

namespace tandem::kernels::cuda {

// A weight of 8 bits; FromE4M3Pair makes two of them operands.
struct E4M3 {
  uint8_t bits;
};

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kInfinity = __builtin_huge_valf();

TANDEM_DEVICE int Larger(int a, int b) { return a > b ? a : b; }
TANDEM_DEVICE int Smaller(int a, int b) { return a < b ? a : b; }

// d += a * b, 16 x 8 outputs over 16 inputs: one step of 16 chains.
template <typename T>
TANDEM_DEVICE void MatrixStep(Grid& g, float (&d)[4], const uint32_t (&a)[4],
                              const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    MmaBf16(g, d, a, b);
  } else {
    MmaF16(g, d, a, b);
  }
}

template <typename T>
TANDEM_DEVICE uint32_t PackPair(float low, float high) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return PackPairBf16(low, high);
  } else {
    return PackPairF16(low, high);
  }
}

template <typename T>
TANDEM_DEVICE float RoundTo(float value) {
  return ToFloat(FromFloat<T>(value));
}

template <typename T>
TANDEM_DEVICE float LowOfPair(uint32_t pair) {
  return ToFloat(T{static_cast<uint16_t>(pair & 0xffffu)});
}

template <typename T>
TANDEM_DEVICE float HighOfPair(uint32_t pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return BitsToFloat(pair & 0xffff0000u);
  } else {
    return ToFloat(T{static_cast<uint16_t>(pair >> 16)});
  }
}

// Two e4m3 (in the low 16 bits) as a pair of T: exact, denormals too. Sign,
// exponent and fraction are put in T's places; the exponents' biases differ
// by a power of two, which a product puts right.
template <typename T>
TANDEM_DEVICE uint32_t FromE4M3Pair(uint32_t pair) {
  const uint32_t spread = (pair & 0xffu) | (pair & 0xff00u) << 8;
  const uint32_t sign = (spread & 0x00800080u) << 8;
  if constexpr (std::is_same_v<T, BFloat16>) {
    return MulPairBf16(sign | (spread & 0x007f007fu) << 4, 0x7b807b80u);
  } else {
    return MulPairF16(sign | (spread & 0x007f007fu) << 7, 0x5c005c00u);
  }
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_TENSOR_OPS_H_
