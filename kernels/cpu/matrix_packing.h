// SPDX-License-Identifier: Apache-2.0
// Makes packed matrices of a checkpoint's: checks them, takes memory and packs
// panel by panel on the whole team.

#ifndef TANDEM_KERNELS_CPU_MATRIX_PACKING_H_
#define TANDEM_KERNELS_CPU_MATRIX_PACKING_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/allocator.h"
#include "kernels/cpu/code_matrix.h"
#include "kernels/cpu/thread_pool.h"

namespace tandem::kernels::cpu {

// Backend's; `raised`: whether codes of eight bits are kept so (CodeKind).
absl::StatusOr<std::unique_ptr<Matrix>> PackMatrix(ThreadPool& pool,
                                                   DeviceAllocator& allocator,
                                                   bool raised,
                                                   const HostTensor& source,
                                                   DType dtype);
absl::StatusOr<std::unique_ptr<Matrix>> PackCodes(ThreadPool& pool,
                                                  DeviceAllocator& allocator,
                                                  bool raised,
                                                  const HostCodes& source);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_MATRIX_PACKING_H_
