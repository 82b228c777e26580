// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/device/launch_library.h"

#include "kernels/cuda/cuda_device.h"

namespace tandem::kernels::cuda {

absl::StatusOr<std::unique_ptr<Device>> LaunchLibraryDevice() {
  return OpenCudaDevice(0);
}

}  // namespace tandem::kernels::cuda
