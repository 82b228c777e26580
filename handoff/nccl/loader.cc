// SPDX-License-Identifier: Apache-2.0
#include "handoff/nccl/loader.h"

#include <dlfcn.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tandem::handoff::nccl {
namespace {

namespace fs = std::filesystem;

constexpr char kLibrary[] = "libtandem_nccl.so";

std::vector<std::string> Places(const std::string& given) {
  if (!given.empty()) return {given};
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) return {kLibrary};
  const fs::path folder = program.parent_path();
  return {folder / kLibrary,
          (folder / "../lib/tandem" / kLibrary).lexically_normal()};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Library>> OpenNccl(
    const LibraryOptions& options) {
  for (const std::string& path : Places(options.library)) {
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    // Never closed: NCCL's threads live in it until the process ends.
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " cannot be loaded: ", dlerror()));
    }
    auto* const function =
        reinterpret_cast<PluginFunction*>(dlsym(library, kPluginSymbol));
    if (function == nullptr ||
        std::strcmp(function()->abi, TANDEM_NCCL_ABI) != 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, " is not of this program's build '", TANDEM_NCCL_ABI, "'"));
    }
    return function()->open(options);
  }
  return absl::NotFoundError(
      absl::StrCat("this installation has no ", kLibrary));
}

}  // namespace tandem::handoff::nccl
