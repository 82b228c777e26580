// SPDX-License-Identifier: Apache-2.0
// A fault: what a block's threads share is read without waiting for any.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FAULTS_MISSING_BARRIER_H_
#define TANDEM_TESTS_KERNELS_CUDA_FAULTS_MISSING_BARRIER_H_

#include "kernels/cuda/device/async_copy.h"
#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"

#define Barrier thread

#endif  // TANDEM_TESTS_KERNELS_CUDA_FAULTS_MISSING_BARRIER_H_
