// SPDX-License-Identifier: Apache-2.0
// Chooses the device that a worker computes on. The one part of a CPU program
// that knows of CUDA: it looks for libtandem_cuda.so when it is asked to, so
// one package serves machines with and without a GPU.

#ifndef TANDEM_KERNELS_CUDA_LOADER_H_
#define TANDEM_KERNELS_CUDA_LOADER_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace tandem::kernels::cuda {

struct DeviceOptions {
  std::string device = "auto";  // auto, cpu, cuda or cuda:N
  // The library; empty: beside the program, or in ../lib/tandem from there.
  std::string library;
  CudaOptions cuda;
  CpuOptions cpu;
};

struct OpenedDevice {
  std::unique_ptr<Backend> backend;
  int ordinal = -1;  // cuda:N; -1: the CPU
  bool is_cuda() const { return ordinal >= 0; }
  // Why it is this one, for one line of the log: "--device cpu", or what
  // kept `auto` from a GPU.
  std::string reason;
};

// With `auto` whatever is wrong with a GPU means the CPU, and is the reason;
// with `cuda` it is the error, and says what to do.
absl::StatusOr<OpenedDevice> OpenDevice(const DeviceOptions& options);

// The GPU alone. NOT_FOUND: no library; FAILED_PRECONDITION: not a library of
// this build; UNAVAILABLE: no driver or no such device.
absl::StatusOr<std::unique_ptr<Backend>> OpenCuda(
    const std::vector<std::string>& libraries, int ordinal,
    const CudaOptions& options);

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_LOADER_H_
