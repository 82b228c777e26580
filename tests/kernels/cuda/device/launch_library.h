// SPDX-License-Identifier: Apache-2.0
// libtandem_cuda_launch.so: the launch functions of kernels/cuda/launch.h and
// of the probe, compiled by nvcc, for the kernels' tests. A library of its own
// because the tests hold the emulator's versions of the same templates.

#ifndef TANDEM_TESTS_KERNELS_CUDA_DEVICE_LAUNCH_LIBRARY_H_
#define TANDEM_TESTS_KERNELS_CUDA_DEVICE_LAUNCH_LIBRARY_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_api.h"

namespace tandem::kernels::cuda {

// The first GPU. UNAVAILABLE: there is none.
absl::StatusOr<std::unique_ptr<Device>> LaunchLibraryDevice();

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_TESTS_KERNELS_CUDA_DEVICE_LAUNCH_LIBRARY_H_
