// SPDX-License-Identifier: Apache-2.0
// A device in host memory, for the CUDA backend over the grid emulator.
// Kernels and copies run inside the call that puts them on a stream; host
// calls run in order on a thread of the device, as a driver's do. Work on a
// stream is thus always done when the next is put on it: what races between
// streams is for the late backend and for hardware.

#ifndef TANDEM_KERNELS_CUDA_TESTING_HOST_DEVICE_H_
#define TANDEM_KERNELS_CUDA_TESTING_HOST_DEVICE_H_

#include <atomic>
#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/device_api.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda::testing {

struct HostDeviceOptions {
  int generation = 90;
  int multiprocessors = 132;
  size_t shared_bytes = kMostSharedBytes;
  size_t total_bytes = size_t{1} << 32;  // more is refused
  int most_captures = 1 << 30;           // those beyond fail
  // From when it is true on the device is broken as a GPU is by a fault: host
  // calls are dropped, what is put on streams is refused.
  const std::atomic<bool>* broken = nullptr;
};

std::unique_ptr<Device> NewHostDevice(const HostDeviceOptions& options = {});

// The whole backend.
absl::StatusOr<std::unique_ptr<Backend>> NewEmulatedBackend(
    const CudaOptions& options, const HostDeviceOptions& device = {});

}  // namespace tandem::kernels::cuda::testing

#endif  // TANDEM_KERNELS_CUDA_TESTING_HOST_DEVICE_H_
