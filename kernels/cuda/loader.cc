// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/loader.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/library.h"
#include "kernels/cuda/plugin.h"

namespace tandem::kernels::cuda {
namespace {

inline constexpr char kLibrary[] = "libtandem_cuda.so";

// "cuda", "cuda:0". -1: neither.
int Ordinal(std::string_view device) {
  if (device == "cuda") return 0;
  constexpr std::string_view kPrefix = "cuda:";
  if (device.substr(0, kPrefix.size()) != kPrefix) return -1;
  const std::string_view digits = device.substr(kPrefix.size());
  int ordinal = -1;
  if (digits.empty() || digits.size() > 3 ||
      digits.find_first_not_of("0123456789") != std::string_view::npos ||
      !absl::SimpleAtoi(absl::string_view(digits.data(), digits.size()),
                        &ordinal)) {
    return -1;
  }
  return ordinal;
}

absl::StatusOr<OpenedDevice> OpenCpu(const CpuOptions& options,
                                     std::string reason) {
  absl::StatusOr<std::unique_ptr<Backend>> backend = NewCpuBackend(options);
  if (!backend.ok()) return backend.status();
  return OpenedDevice{*std::move(backend), -1, std::move(reason)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> OpenCuda(
    const std::vector<std::string>& libraries, int ordinal,
    const CudaOptions& options) {
  // Before CUDA reads it: a kernel that is loaded only when it is first
  // launched may make that launch wait for the whole device, and so for a
  // handoff's receive whose sender waits for the launching thread.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  const absl::StatusOr<void*> library = LoadLibrary(libraries, "CUDA backend");
  if (!library.ok()) return library.status();
  const auto* const plugin =
      static_cast<const Plugin*>(dlsym(*library, kPluginSymbol));
  if (plugin == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        absl::StrJoin(libraries, ", "),
        " is no CUDA backend: it does not define ", kPluginSymbol));
  }
  if (std::string_view(plugin->abi) != TANDEM_CUDA_ABI) {
    return absl::FailedPreconditionError(absl::StrCat(
        kLibrary, " is of build '", plugin->abi, "', this program of '",
        TANDEM_CUDA_ABI, "': install both from one package"));
  }
  return plugin->open(ordinal, options);
}

absl::StatusOr<OpenedDevice> OpenDevice(const DeviceOptions& options) {
  if (options.device == "cpu") return OpenCpu(options.cpu, "--device cpu");
  const bool automatic = options.device == "auto";
  const int ordinal = automatic ? 0 : Ordinal(options.device);
  if (ordinal < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--device is '", options.device, "', expected auto, cpu or cuda:N"));
  }
  absl::StatusOr<std::unique_ptr<Backend>> backend =
      OpenCuda(LibraryPlaces(options.library, kLibrary), ordinal, options.cuda);
  if (backend.ok()) {
    return OpenedDevice{*std::move(backend), ordinal,
                        automatic ? "--device auto found a GPU"
                                  : absl::StrCat("--device ", options.device)};
  }
  if (!automatic) {
    return absl::Status(backend.status().code(),
                        absl::StrCat("--device ", options.device, ": ",
                                     std::string(backend.status().message())));
  }
  return OpenCpu(options.cpu,
                 absl::StrCat("--device auto: no GPU: ",
                              std::string(backend.status().message())));
}

}  // namespace tandem::kernels::cuda
