// SPDX-License-Identifier: Apache-2.0
// What the tests of the emulator share: a kernel that is any function of the
// thread.

#ifndef TANDEM_TESTS_KERNELS_CUDA_ANY_KERNEL_H_
#define TANDEM_TESTS_KERNELS_CUDA_ANY_KERNEL_H_

#include <functional>
#include <string>

#include "kernels/cuda/device/grid.h"

namespace tandem::kernels::cuda {

struct AnyKernel {
  const std::function<void(Grid&)>* body;
  void operator()(Grid& g) const { (*body)(g); }
};

// Shared memory.
inline float* Floats(Grid& g) { return reinterpret_cast<float*>(g.shared()); }

inline bool Says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_ANY_KERNEL_H_
