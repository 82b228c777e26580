// SPDX-License-Identifier: Apache-2.0

#include "worker/kv_plan.h"

#include <algorithm>
#include <climits>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/lifecycle.h"
#include "engine/engine.h"
#include "engine/model/layer_parts.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"

namespace tandem::worker {
namespace {

// Rows of a step that may score their prompt while all sequences draw a token.
inline constexpr int kScoredRows = 64;

inline constexpr int64_t kHostCacheBytes = int64_t{1} << 30;

int64_t Left(const HostMemory& host) {
  return host.limit_bytes > 0
             ? std::max<int64_t>(0, host.limit_bytes - host.used_bytes)
             : std::numeric_limits<int64_t>::max();
}

int64_t CacheBytes(const WorkerFlags& flags,
                   const std::optional<GpuMemory>& gpu,
                   const HostMemory& host) {
  if (flags.kv_cache_bytes > 0) return flags.kv_cache_bytes;
  if (!gpu.has_value()) return std::min(kHostCacheBytes, Left(host));
  const auto share = static_cast<int64_t>(
      static_cast<double>(gpu->total_bytes) * flags.gpu_memory_utilization);
  return std::max<int64_t>(0,
                           std::min(share - gpu->used_bytes, gpu->free_bytes));
}

// What to change when `fits` positions are too few.
std::string Advice(const WorkerFlags& flags, bool gpu, int64_t wanted_bytes,
                   int64_t fits) {
  const bool by_share = gpu && flags.kv_cache_bytes == 0;
  std::string advice =
      by_share
          ? absl::StrCat("raise --gpu-memory-utilization (now ",
                         flags.gpu_memory_utilization, "; the cache needs ",
                         wanted_bytes, " bytes)")
          : absl::StrCat("raise --kv-cache-memory-bytes to ", wanted_bytes);
  if (fits > 0)
    absl::StrAppend(&advice, ", or lower --max-model-len to ", fits);
  return advice;
}

// The most positions, up to `most`, of which there is room; 0: of none. More of
// them never need less.
template <typename Fits>
int LongestOf(int most, const Fits& fits) {
  int longest = 0;
  for (int too_many = most + 1; too_many - longest > 1;) {
    const int middle = longest + (too_many - longest) / 2;
    (fits(middle) ? longest : too_many) = middle;
  }
  return longest;
}

absl::Status CheckHost(const HostMemory& host, int64_t cache_bytes) {
  if (cache_bytes <= Left(host)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the KV cache takes ", cache_bytes, " bytes, and of the ",
      host.limit_bytes, " that this machine or its control group allows ",
      Left(host),
      " are left: lower --kv-cache-memory-bytes, --num-kv-blocks, "
      "--kv-offload-bytes",
      host.adapter_bytes > 0
          ? absl::StrCat(", --max-loras, --max-lora-rank (adapters take ",
                         host.adapter_bytes, " bytes)")
          : "",
      " or --max-model-len"));
}

}  // namespace

int64_t KvBlockBytes(const kernels::KvShape& shape, bool on_gpu) {
  return on_gpu ? shape.bytes_per_position() * shape.block_size
                : kernels::CpuKvBlockBytes(shape);
}

int PlainDraws(const WorkerFlags& flags) {
  return std::min(flags.max_num_seqs + kScoredRows,
                  flags.max_num_batched_tokens);
}

absl::Status CheckWeights(int64_t bytes, const HostMemory& host) {
  if (bytes <= Left(host)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the weights take at least ", bytes, " bytes, and of the ",
      host.limit_bytes, " that this machine or its control group allows ",
      Left(host),
      " are left: load them in fewer (--quantization int8 or int4), or see "
      "what `tandem plan` says"));
}

absl::Status CheckCpuWeights(kernels::DType weights,
                             std::optional<kernels::DType> quantisation,
                             const engine::ModelSpec& spec) {
  using kernels::DType;
  // Those leave no matrix in f16 but exact ones, as routers of experts are.
  const bool all_codes =
      quantisation.has_value() && kernels::HasIntegerProducts(*quantisation) &&
      spec.routes.experts == 0 && !spec.latent() && spec.told == 0;
  if (weights != DType::kF16 || all_codes) return absl::OkStatus();
  return UsageError("--dtype is f16, expected auto, f32 or bf16 on a CPU");
}

absl::Status CheckAdapterSlots(int64_t bytes, const HostMemory& host) {
  if (bytes <= Left(host)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the slots of LoRA adapters take ", bytes, " bytes, and of the ",
      host.limit_bytes, " that this machine or its control group allows ",
      Left(host), " are left: lower --max-loras or --max-lora-rank"));
}

absl::Status CheckMaxModelLen(const WorkerFlags& flags,
                              const engine::ModelSpec& spec) {
  if (flags.max_model_len <= spec.max_positions) return absl::OkStatus();
  return UsageError(absl::StrCat("--max-model-len ", flags.max_model_len,
                                 " is more than the model's ",
                                 spec.max_positions, " positions"));
}

absl::StatusOr<KvPlan> PlanKv(const WorkerFlags& flags,
                              const engine::ModelSpec& spec,
                              kernels::DType kv_dtype,
                              const std::optional<GpuMemory>& gpu,
                              const engine::KvWindow& window,
                              const DraftKv& draft, const HostMemory& host) {
  kernels::KvShape shape;
  const engine::LayerParts layers = engine::PartsOf(spec);
  shape.num_layers = layers.room();
  engine::SetHeads(spec, &shape);
  shape.dtype = kv_dtype;
  shape.block_size = flags.block_size;
  const int64_t block_bytes = KvBlockBytes(shape, gpu.has_value()) +
                              (draft.num_blocks == 0 ? draft.block_bytes : 0);
  const int64_t draft_bytes = draft.block_bytes * draft.num_blocks;
  KvPlan plan;
  const absl::Status length = CheckMaxModelLen(flags, spec);
  if (!length.ok()) return length;
  plan.max_model_len =
      flags.max_model_len > 0 ? flags.max_model_len : spec.max_positions;
  // Positions that one sequence needs room for.
  const auto at_once = [&](int positions) {
    const engine::EngineOptions options{
        .max_num_batched_tokens = flags.max_num_batched_tokens,
        .window = window};
    return flags.block_size *
           engine::Engine::BlocksAtOnce(options, flags.block_size, positions);
  };
  const auto needed_for = [&](int positions) {
    return window.positions > 0 ? at_once(positions) : positions;
  };
  const int needed = needed_for(plan.max_model_len);
  const int64_t needed_blocks =
      (int64_t{needed} + flags.block_size - 1) / flags.block_size;
  // Numbers of positions and cells are ints.
  const int most_blocks = static_cast<int>(
      INT_MAX / (flags.block_size * int64_t{layers.parts.count()}));
  if (flags.num_blocks > most_blocks) {
    return UsageError(absl::StrCat("--num-kv-blocks ", flags.num_blocks,
                                   ": at most ", most_blocks, " of ",
                                   flags.block_size, " positions"));
  }
  plan.num_blocks = flags.num_blocks;
  if (plan.num_blocks == 0) {
    // No more than every slot full: a small model needs no gigabyte.
    const int64_t useful =
        std::max<int64_t>(int64_t{flags.max_num_seqs} * 2 *
                              (at_once(plan.max_model_len) / flags.block_size),
                          needed_blocks);
    plan.num_blocks = static_cast<int>(std::min<int64_t>(
        {std::max<int64_t>(0, CacheBytes(flags, gpu, host) - draft_bytes) /
             block_bytes,
         useful, most_blocks}));
  }
  if (!gpu.has_value()) {
    const absl::Status fits_host =
        CheckHost(host, plan.num_blocks * block_bytes + draft_bytes);
    if (!fits_host.ok()) return fits_host;
  }
  const int64_t fits = int64_t{plan.num_blocks} * flags.block_size;
  if (fits < needed) {
    const int longest = LongestOf(plan.max_model_len, [&](int positions) {
      return needed_for(positions) <= fits;
    });
    if (flags.max_model_len > 0 || longest < flags.block_size) {
      // More than there is helps nobody to ask for.
      const int64_t wanted = block_bytes * needed_blocks + draft_bytes;
      if (!gpu.has_value() && wanted > Left(host)) {
        return CheckHost(host, wanted);
      }
      return absl::InvalidArgumentError(absl::StrCat(
          "the KV cache holds ", fits, " tokens, less than one sequence of ",
          plan.max_model_len, ": ",
          Advice(flags, gpu.has_value(), wanted, longest)));
    }
    plan.max_model_len = longest;
  }
  return plan;
}

}  // namespace tandem::worker
