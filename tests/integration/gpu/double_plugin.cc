// SPDX-License-Identifier: Apache-2.0
// libtandem_nccl_double.so: NCCL's double behind the real loader. Ranks meet in
// the file that TANDEM_TEST_FABRIC names; `--device cuda:N` is its GPU N.

#include <cstdlib>

#include "absl/status/status.h"
#include "handoff/nccl/loader.h"
#include "tests/handoff/nccl/double.h"

namespace {

using namespace tandem::handoff::nccl;  // NOLINT(google-build-using-namespace)

absl::StatusOr<std::unique_ptr<Library>> Open(const LibraryOptions& options) {
  const char* const path = std::getenv("TANDEM_TEST_FABRIC");
  if (path == nullptr) {
    return absl::NotFoundError("libnccl.so.2 cannot be loaded (double)");
  }
  testing::Fabric* const fabric = testing::Fabric::Open(path);
  if (fabric == nullptr || options.device >= testing::kGpus) {
    return absl::UnavailableError("no fabric (double)");
  }
  testing::DoubleOptions made;
  made.gpu = options.device;
  return testing::NewDouble(fabric, made);
}

}  // namespace

extern "C" const Plugin* tandem_nccl_plugin() {
  static constexpr Plugin kPlugin = {TANDEM_NCCL_ABI, &Open};
  return &kPlugin;
}
