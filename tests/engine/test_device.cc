// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/test_device.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "kernels/cuda/loader.h"
#include "kernels/cuda/testing/host_device.h"

namespace tandem::engine {
namespace {

// Beside the programs, in the folder next to the tests'.
std::string Library() {
  std::error_code error;
  const auto test = std::filesystem::read_symlink("/proc/self/exe", error);
  return (test.parent_path() / "../bin/libtandem_cuda.so").lexically_normal();
}

}  // namespace

bool TestsRunOnGpu() { return std::getenv("TANDEM_TEST_DEVICE") != nullptr; }

std::unique_ptr<kernels::Backend> NewTestDevice(kernels::DType activation) {
  kernels::cuda::CudaOptions cuda;
  cuda.activation = activation;
  if (!TestsRunOnGpu()) {
    auto backend = kernels::cuda::testing::NewEmulatedBackend(cuda);
    if (backend.ok()) return *std::move(backend);
    std::fprintf(stderr, "%s\n", backend.status().ToString().c_str());
    std::abort();
  }
  kernels::cuda::DeviceOptions options;
  options.device = std::getenv("TANDEM_TEST_DEVICE");
  options.library = Library();
  options.cuda = cuda;
  auto opened = kernels::cuda::OpenDevice(options);
  if (opened.ok()) return std::move(opened->backend);
  std::fprintf(stderr, "%s\n", opened.status().ToString().c_str());
  std::abort();
}

}  // namespace tandem::engine
