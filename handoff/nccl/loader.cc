// SPDX-License-Identifier: Apache-2.0
#include "handoff/nccl/loader.h"

#include <dlfcn.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/library.h"

namespace tandem::handoff::nccl {

absl::StatusOr<std::unique_ptr<Library>> OpenNccl(
    const LibraryOptions& options) {
  const std::vector<std::string> places =
      LibraryPlaces(options.library, "libtandem_nccl.so");
  const absl::StatusOr<void*> library = LoadLibrary(places, "NCCL handoff");
  if (!library.ok()) return library.status();
  auto* const function =
      reinterpret_cast<PluginFunction*>(dlsym(*library, kPluginSymbol));
  if (function == nullptr ||
      std::strcmp(function()->abi, TANDEM_NCCL_ABI) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        absl::StrJoin(places, ", "), " is not of this program's build '",
        TANDEM_NCCL_ABI, "': install both from one package"));
  }
  return function()->open(options);
}

}  // namespace tandem::handoff::nccl
