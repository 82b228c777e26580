// SPDX-License-Identifier: Apache-2.0
// A fault: each step starts from zero and is added to the chain afterwards,
// as a kernel with split inputs would.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FAULTS_SPLIT_CHAIN_H_
#define TANDEM_TESTS_KERNELS_CUDA_FAULTS_SPLIT_CHAIN_H_

#include "kernels/cuda/device/tensor_ops.h"

namespace tandem::kernels::cuda {

template <typename T>
TANDEM_DEVICE void SplitStep(Grid& g, float (&d)[4], const uint32_t (&a)[4],
                             const uint32_t (&b)[2]) {
  float part[4] = {};
  MatrixStep<T>(g, part, a, b);
  for (int i = 0; i < 4; ++i) d[i] = Add(d[i], part[i]);
}

}  // namespace tandem::kernels::cuda

#define MatrixStep SplitStep

#endif  // TANDEM_TESTS_KERNELS_CUDA_FAULTS_SPLIT_CHAIN_H_
