// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/plugin.h"

#include <utility>

#include "kernels/cuda/cuda_device.h"

namespace tandem::kernels::cuda {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> Open(int ordinal,
                                              const CudaOptions& options) {
  absl::StatusOr<std::unique_ptr<Device>> device = OpenCudaDevice(ordinal);
  if (!device.ok()) return device.status();
  return NewCudaBackend(options, *std::move(device));
}

}  // namespace
}  // namespace tandem::kernels::cuda

extern "C" {
extern const tandem::kernels::cuda::Plugin tandem_cuda_plugin;
const tandem::kernels::cuda::Plugin tandem_cuda_plugin = {
    .abi = TANDEM_CUDA_ABI, .open = &tandem::kernels::cuda::Open};
}
