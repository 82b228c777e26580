// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/scratch.h"

#include <utility>

#include "absl/status/statusor.h"

namespace tandem::kernels::cuda {
namespace {

size_t ExpertBytes(const WorkLimits& limits, DType activation) {
  if (limits.experts == 0) return 0;
  return ExpertScratch(nullptr,
                       {limits.rows, limits.hidden, limits.gated / 2,
                        limits.experts, limits.experts_per_row},
                       activation)
      .bytes();
}

}  // namespace

absl::Status ReservedScratch::Reserve(const WorkLimits& limits,
                                      DType activation, int code_inputs) {
  MutexLock lock(&mutex_);
  const std::pair<CudaQueue::Scratch, size_t> parts[] = {
      {CudaQueue::kAttention,
       AttentionScratchBytes(limits.spans, limits.heads, limits.head_dim,
                             limits.positions)},
      {CudaQueue::kSampling, SampleScratchBytes(limits.sampled, limits.vocab)},
      {CudaQueue::kCodes,
       static_cast<size_t>(CodeRowsBytes(
           limits.experts > 0
               ? static_cast<int>(MostExpertRows(limits.rows, limits.experts,
                                                 limits.experts_per_row))
               : limits.rows,
           code_inputs))},
      {CudaQueue::kExperts, ExpertBytes(limits, activation)}};
  for (const auto& [which, bytes] : parts) {
    if (bytes == 0) continue;
    if (reserved_[which] != nullptr && reserved_[which]->size() >= bytes) {
      continue;
    }
    absl::StatusOr<std::unique_ptr<Memory>> memory =
        Memory::OnDevice(device_, bytes);
    if (!memory.ok()) return memory.status();
    reserved_[which] = *std::move(memory);
  }
  return absl::OkStatus();
}

std::byte* ReservedScratch::Take(CudaQueue& queue, CudaQueue::Scratch which,
                                 size_t bytes) {
  if (!queue.has(which)) {
    MutexLock lock(&mutex_);
    if (reserved_[which] != nullptr) {
      queue.Adopt(which, std::move(reserved_[which]));
    }
  }
  return queue.scratch(which, bytes);
}

}  // namespace tandem::kernels::cuda
