// SPDX-License-Identifier: Apache-2.0
// Makes KV caches (kv_layout.h), and carries ranges of them to and from the
// wire on the calling thread, for handoffs.

#ifndef TANDEM_KERNELS_CPU_CPU_KV_CACHE_H_
#define TANDEM_KERNELS_CPU_CPU_KV_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/allocator.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"

namespace tandem::kernels::cpu {

// INVALID_ARGUMENT: not a shape for a CPU.
absl::StatusOr<std::unique_ptr<KvCache>> NewCpuKvCache(
    DeviceAllocator& allocator, const KvShape& shape);

// The digest of a range, whose wire bytes go to `staging` if it is not null,
// else piece by piece to `scratch` [CpuQueue::kScratchBytes].
KvDigest ReadKv(const KernelTable& table, const CpuKvCache& cache,
                const KvRange& range, DType wire, uint64_t digest_key,
                std::byte* staging, std::byte* scratch);

// Backend::KvScatter.
void WriteKv(const KernelTable& table, const CpuKvCache& cache,
             const KvRange& range, DType wire, const std::byte* staging);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_CPU_KV_CACHE_H_
