// SPDX-License-Identifier: Apache-2.0
// What libtandem_cuda.so exports: one table, tandem_cuda_plugin. The program
// and the library exchange C++ types, so they must be built from the same
// headers by the same compiler: TANDEM_CUDA_ABI names both, and nothing else
// of the table is looked at before it is found equal.

#ifndef TANDEM_KERNELS_CUDA_PLUGIN_H_
#define TANDEM_KERNELS_CUDA_PLUGIN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_backend.h"

namespace tandem::kernels::cuda {

struct Plugin {
  // First in every version. "0.1.0 1a2b3c4d5e6f": release, headers, compiler.
  const char* abi;
  absl::StatusOr<std::unique_ptr<Backend>> (*open)(int ordinal,
                                                   const CudaOptions& options);
};

// A table and not a function that returns one: finding that it is another
// build's then calls nothing of it.
inline constexpr char kPluginSymbol[] = "tandem_cuda_plugin";

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_PLUGIN_H_
