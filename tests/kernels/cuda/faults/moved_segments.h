// SPDX-License-Identifier: Apache-2.0
// A fault: the prefill kernel alone cuts keys elsewhere.

#ifndef TANDEM_TESTS_KERNELS_CUDA_FAULTS_MOVED_SEGMENTS_H_
#define TANDEM_TESTS_KERNELS_CUDA_FAULTS_MOVED_SEGMENTS_H_

#include "kernels/cuda/attention_decode.cuh"

#define kSegmentTiles 2

#endif  // TANDEM_TESTS_KERNELS_CUDA_FAULTS_MOVED_SEGMENTS_H_
