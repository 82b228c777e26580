// SPDX-License-Identifier: Apache-2.0
// A device in host memory in the place of launch_library.cc's.

#include "kernels/cuda/testing/host_device.h"
#include "tests/kernels/cuda/device/launch_library.h"

namespace tandem::kernels::cuda {

absl::StatusOr<std::unique_ptr<Device>> LaunchLibraryDevice() {
  return testing::NewHostDevice();
}

}  // namespace tandem::kernels::cuda
