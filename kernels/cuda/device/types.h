// SPDX-License-Identifier: Apache-2.0
// Types that device code and the emulator share.

#ifndef TANDEM_KERNELS_CUDA_DEVICE_TYPES_H_
#define TANDEM_KERNELS_CUDA_DEVICE_TYPES_H_

#include <cstdint>

namespace tandem::kernels::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// In shared memory (async_copy.h).
struct AsyncBarrier {
  uint64_t state;
};

// A kernel that says `static constexpr bool kWaits = true` calls
// WaitForPrevious itself; for others it is called before they begin.
template <typename Kernel>
inline constexpr bool kWaitsItself = requires {
  Kernel::kWaits;
};

// Blocks of a grid.
struct Dim3 {
  int x = 1;
  int y = 1;
  int z = 1;
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_DEVICE_TYPES_H_
