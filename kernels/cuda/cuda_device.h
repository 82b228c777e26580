// SPDX-License-Identifier: Apache-2.0
// The device of the CUDA runtime. Built only where there is a toolkit.

#ifndef TANDEM_KERNELS_CUDA_CUDA_DEVICE_H_
#define TANDEM_KERNELS_CUDA_CUDA_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/device_api.h"

namespace tandem::kernels::cuda {

// UNAVAILABLE where there is no driver, it is too old or no such device, and
// FAILED_PRECONDITION where this library has no code for the device: both say
// what to do.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(int ordinal);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_CUDA_DEVICE_H_
