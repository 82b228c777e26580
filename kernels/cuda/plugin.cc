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

constexpr Plugin kPlugin = {.abi = TANDEM_CUDA_ABI, .open = &Open};

}  // namespace
}  // namespace tandem::kernels::cuda

extern "C" __attribute__((visibility("default")))
const tandem::kernels::cuda::Plugin*
tandem_cuda_plugin() {
  return &tandem::kernels::cuda::kPlugin;
}
