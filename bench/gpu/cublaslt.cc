// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/cublaslt.h"

#include <dlfcn.h>

#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem::bench::cublaslt {

absl::StatusOr<Library> Load() {
  const char* const given = std::getenv("TANDEM_CUBLASLT");
  const char* const path = given != nullptr ? given : "libcublasLt.so.13";
  void* const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("cuBLASLt: ", dlerror(),
                     "; set TANDEM_CUBLASLT to a libcublasLt.so.13"));
  }
  Library library;
  library.path = path;
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) missing = name;
  };
  find(library.create, "cublasLtCreate");
  find(library.destroy, "cublasLtDestroy");
  find(library.version, "cublasLtGetVersion");
  find(library.desc_create, "cublasLtMatmulDescCreate");
  find(library.desc_set, "cublasLtMatmulDescSetAttribute");
  find(library.desc_destroy, "cublasLtMatmulDescDestroy");
  find(library.layout_create, "cublasLtMatrixLayoutCreate");
  find(library.layout_destroy, "cublasLtMatrixLayoutDestroy");
  find(library.preference_create, "cublasLtMatmulPreferenceCreate");
  find(library.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(library.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  find(library.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(library.matmul, "cublasLtMatmul");
  if (missing != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " has no ", missing));
  }
  return library;
}

}  // namespace tandem::bench::cublaslt
