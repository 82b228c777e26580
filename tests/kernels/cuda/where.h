// SPDX-License-Identifier: Apache-2.0
// Whether the launch functions that a test is linked with are the emulator's
// or a GPU's. The same objects serve both: on a GPU all memory of the test,
// heap and stack, is pinned, so that kernels reach it (device/main.cc).

#ifndef TANDEM_TESTS_KERNELS_CUDA_WHERE_H_
#define TANDEM_TESTS_KERNELS_CUDA_WHERE_H_

namespace tandem::kernels::cuda {

// 0: emulated. Else the compute capability of the GPU times ten.
int DeviceGeneration();

inline bool OnDevice() { return DeviceGeneration() != 0; }

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_WHERE_H_
