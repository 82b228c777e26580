// SPDX-License-Identifier: Apache-2.0
// A fault: prefill kernels never look for values that are not finite.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FAULTS_UNGUARDED_VALUES_H_
#define TANDEM_TESTS_KERNELS_CUDA_FAULTS_UNGUARDED_VALUES_H_

#include "kernels/cuda/attention_tile.cuh"

namespace tandem::kernels::cuda {

template <typename T, int D, int kRows>
TANDEM_DEVICE bool BelieveFinite(Grid&, const std::byte*, int, int, int, int) {
  return true;
}

}  // namespace tandem::kernels::cuda

#define LooksFinite BelieveFinite

#endif  // TANDEM_TESTS_KERNELS_CUDA_FAULTS_UNGUARDED_VALUES_H_
