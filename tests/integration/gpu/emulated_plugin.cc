// SPDX-License-Identifier: Apache-2.0
// libtandem_cuda_emulated.so: the CUDA backend over host memory and the grid
// emulator, for whole workers with `--device cuda:N --cuda-library` on machines
// without a GPU. Never installed.

#include "kernels/cuda/plugin.h"
#include "kernels/cuda/testing/host_device.h"

namespace {

absl::StatusOr<std::unique_ptr<tandem::kernels::Backend>> Open(
    int /*ordinal*/, const tandem::kernels::cuda::CudaOptions& options) {
  return tandem::kernels::cuda::testing::NewEmulatedBackend(options);
}

}  // namespace

extern "C" {
extern const tandem::kernels::cuda::Plugin tandem_cuda_plugin;
const tandem::kernels::cuda::Plugin tandem_cuda_plugin = {
    .abi = TANDEM_CUDA_ABI, .open = &Open};
}
