// SPDX-License-Identifier: Apache-2.0
// A fault: warps that share a ring do not wait for each other.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FAULTS_SKIPPED_PHASE_H_
#define TANDEM_TESTS_KERNELS_CUDA_FAULTS_SKIPPED_PHASE_H_

#include "kernels/cuda/device/async_copy.h"

namespace tandem::kernels::cuda {

TANDEM_DEVICE void SkipPhase(Grid&, AsyncBarrier*, int) {}

}  // namespace tandem::kernels::cuda

#define AwaitPhase SkipPhase

#endif  // TANDEM_TESTS_KERNELS_CUDA_FAULTS_SKIPPED_PHASE_H_
