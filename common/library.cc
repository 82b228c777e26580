// SPDX-License-Identifier: Apache-2.0
#include "common/library.h"

#include <dlfcn.h>

#include <filesystem>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tandem {

namespace fs = std::filesystem;

std::vector<std::string> LibraryPlaces(const std::string& given,
                                       const std::string& name) {
  if (!given.empty()) return {given};
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (error) return {name};
  const fs::path folder = program.parent_path();
  return {folder / name, (folder / "../lib/tandem" / name).lexically_normal()};
}

absl::StatusOr<void*> LoadLibrary(const std::vector<std::string>& places,
                                  std::string_view what) {
  for (const std::string& path : places) {
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return library;
    return absl::FailedPreconditionError(
        absl::StrCat(path, " cannot be loaded: ", dlerror()));
  }
  return absl::NotFoundError(absl::StrCat("this installation has no ",
                                          std::string(what), " (",
                                          absl::StrJoin(places, ", "), ")"));
}

}  // namespace tandem
