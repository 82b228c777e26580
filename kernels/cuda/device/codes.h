// SPDX-License-Identifier: Apache-2.0
// Codes of a quantised KV cache (kernels/quantise.h) in device code. Which of
// the formats they have is known at run time: one kernel serves both.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_CODES_H_
#define TANDEM_KERNELS_CUDA_DEVICE_CODES_H_

#include <cstdint>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cuda {

// An element of a cache or of the wire: e4m3 or int8.
struct Code8 {
  uint8_t bits;
};

struct alignas(8) EightCodes {
  uint32_t word[2];
};

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

// Eight neighbouring codes, at a multiple of 8 bytes.
template <typename T>
TANDEM_DEVICE Vector16 WidenCodes(DType type, const std::byte* codes,
                                  float scale) {
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
