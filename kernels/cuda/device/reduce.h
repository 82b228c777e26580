// SPDX-License-Identifier: Apache-2.0
// Integers of all threads of a warp or block as one: exact, so their order
// does not matter. All threads call, and get the result.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_REDUCE_H_
#define TANDEM_KERNELS_CUDA_DEVICE_REDUCE_H_

#include <cstdint>

#include "kernels/cuda/device/grid.h"

namespace tandem::kernels::cuda {

TANDEM_DEVICE uint64_t ShuffleXor64(Grid& g, uint64_t value, int mask) {
  const uint32_t low = g.ShuffleXor(static_cast<uint32_t>(value), mask);
  const uint32_t high = g.ShuffleXor(static_cast<uint32_t>(value >> 32), mask);
  return low | static_cast<uint64_t>(high) << 32;
}
TANDEM_DEVICE uint64_t Shuffle64(Grid& g, uint64_t value, int lane) {
  const uint32_t low = g.Shuffle(static_cast<uint32_t>(value), lane);
  const uint32_t high = g.Shuffle(static_cast<uint32_t>(value >> 32), lane);
  return low | static_cast<uint64_t>(high) << 32;
}

struct Sum64 {
  TANDEM_DEVICE uint64_t operator()(uint64_t a, uint64_t b) const {
    return a + b;
  }
};
struct Least64 {
  TANDEM_DEVICE uint64_t operator()(uint64_t a, uint64_t b) const {
    return a < b ? a : b;
  }
};

TANDEM_DEVICE uint32_t GreatestOfWarp(Grid& g, uint32_t value) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = g.ShuffleXor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

// `shared`: one for each of the block's warps. REQUIRES: those are a power of
// two.
TANDEM_DEVICE uint32_t GreatestOfBlock(Grid& g, uint32_t value,
                                       uint32_t* shared) {
  value = GreatestOfWarp(g, value);
  if (g.lane() == 0) shared[g.warp()] = value;
  g.Barrier();
  return GreatestOfWarp(g, shared[g.lane() & (g.threads() / 32 - 1)]);
}

template <typename Operation>
TANDEM_DEVICE uint64_t ReduceWarp(Grid& g, uint64_t value,
                                  const Operation& operation) {
  for (int mask = 16; mask > 0; mask /= 2) {
    value = operation(value, ShuffleXor64(g, value, mask));
  }
  return value;
}

// `shared`: one for each warp.
template <typename Operation>
TANDEM_DEVICE uint64_t ReduceBlock(Grid& g, uint64_t value, uint64_t* shared,
                                   const Operation& operation) {
  value = ReduceWarp(g, value, operation);
  if (g.lane() == 0) shared[g.warp()] = value;
  g.Barrier();
  value = shared[0];
  for (int i = 1; i < g.threads() / 32; ++i) {
    value = operation(value, shared[i]);
  }
  g.Barrier();
  return value;
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_REDUCE_H_
