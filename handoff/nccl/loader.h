// SPDX-License-Identifier: Apache-2.0
// Opens NCCL at run time: libtandem_nccl.so (nccl_library.cc, built where a
// CUDA toolkit is) and through it the machine's own libnccl.so.2. A package
// without the one or a machine without the other has its other ways.

#ifndef TANDEM_HANDOFF_NCCL_LOADER_H_
#define TANDEM_HANDOFF_NCCL_LOADER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "handoff/nccl/communicator.h"

namespace tandem::handoff::nccl {

struct LibraryOptions {
  int device = 0;  // cuda:N
  // Thread blocks, and so SMs, that one operation may take. Four move a slab
  // at the rate of NVLink on an H100; more are taken from the compute that
  // they run beside. NCCL_MAX_CTAS overrides it.
  int max_ctas = 4;
  // libtandem_nccl.so; empty: beside the program, or in ../lib/tandem.
  std::string library;
  std::string nccl = "libnccl.so.2";
};

// NOT_FOUND: no such library here; FAILED_PRECONDITION: of another build, or
// an NCCL older than the one that it was built for; UNAVAILABLE: the device
// does not work.
absl::StatusOr<std::unique_ptr<Library>> OpenNccl(
    const LibraryOptions& options);

// What libtandem_nccl.so exports. `abi` is looked at before anything else.
struct Plugin {
  const char* abi;
  absl::StatusOr<std::unique_ptr<Library>> (*open)(
      const LibraryOptions& options);
};
inline constexpr char kPluginSymbol[] = "tandem_nccl_plugin";
using PluginFunction = const Plugin*();

}  // namespace tandem::handoff::nccl

#endif  // TANDEM_HANDOFF_NCCL_LOADER_H_
