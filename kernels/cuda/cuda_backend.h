// SPDX-License-Identifier: Apache-2.0
// kernels/backend.h over a Device and the launch functions. Knows no CUDA
// type: linked with nvcc's kernels and the CUDA device it is the backend of
// GPUs, with the emulator's and the host device it is what tests run.

#ifndef TANDEM_KERNELS_CUDA_CUDA_BACKEND_H_
#define TANDEM_KERNELS_CUDA_CUDA_BACKEND_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/device_api.h"

namespace tandem::kernels::cuda {

struct CudaOptions {
  DType activation = DType::kBF16;
};

// FAILED_PRECONDITION: the device cannot run all kernels.
absl::StatusOr<std::unique_ptr<Backend>> NewCudaBackend(
    const CudaOptions& options, std::unique_ptr<Device> device);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_CUDA_BACKEND_H_
