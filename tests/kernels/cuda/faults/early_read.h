// SPDX-License-Identifier: Apache-2.0
// A fault: kernels wait for one group of copies fewer than they must, and so
// read a tile that may not have landed.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FAULTS_EARLY_READ_H_
#define TANDEM_TESTS_KERNELS_CUDA_FAULTS_EARLY_READ_H_

#include "kernels/cuda/device/grid.h"

namespace tandem::kernels::cuda {

template <int kPending>
TANDEM_DEVICE void WaitForFewer(Grid& g) {
  CopyAsyncWait<(kPending == 0 ? 0 : kPending + 1)>(g);
}

}  // namespace tandem::kernels::cuda

#define CopyAsyncWait WaitForFewer

#endif  // TANDEM_TESTS_KERNELS_CUDA_FAULTS_EARLY_READ_H_
