// SPDX-License-Identifier: Apache-2.0
// How much KV cache a worker takes, and how long a sequence may then be:
// pure arithmetic over flags, model and memory.

#ifndef TANDEM_WORKER_KV_PLAN_H_
#define TANDEM_WORKER_KV_PLAN_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "engine/checkpoint/model_config.h"
#include "engine/kv/block_cells.h"
#include "kernels/backend.h"
#include "kernels/types.h"
#include "worker/bringup.h"

namespace tandem::worker {

// Of a GPU: the driver's own, the kernels' code, streams, small buffers.
inline constexpr int64_t kGpuOverheadBytes = int64_t{768} << 20;

// Rows of a step from which a token is drawn or scored, without speculation:
// each takes the memory of a row of logits.
int PlainDraws(const WorkerFlags& flags);

// A GPU's memory when all but the KV cache has its place.
struct GpuMemory {
  int64_t total_bytes = 0;
  int64_t used_bytes = 0;  // by this process, and soon to be
  int64_t free_bytes = 0;  // left by all, this process's coming needs deducted
};

// A CPU's, likewise. All that is taken is touched sooner or later, and who is
// over the limit then is killed in the midst of its streams.
struct HostMemory {
  int64_t limit_bytes = 0;    // of the machine or the control group; 0: unknown
  int64_t used_bytes = 0;     // by this process, and soon to be
  int64_t adapter_bytes = 0;  // of those, for LoRA slots
};

// Whether weights of at least `bytes` fit into what `host` has left before they
// are loaded; else INVALID_ARGUMENT that says both.
absl::Status CheckWeights(int64_t bytes, const HostMemory& host);

// A usage error where --dtype, which came to `weights`, leaves matrices in a
// type that a CPU has no form for.
absl::Status CheckCpuWeights(kernels::DType weights,
                             std::optional<kernels::DType> quantisation,
                             const engine::ModelSpec& spec);

// The same as CheckWeights for the slots of LoRA adapters, before adapters are
// read.
absl::Status CheckAdapterSlots(int64_t bytes, const HostMemory& host);

// Of a block of the KV cache in all layers, padding included.
int64_t KvBlockBytes(const kernels::KvShape& shape, bool on_gpu);

// The KV cache of a draft model, which comes out of the same memory.
struct DraftKv {
  int64_t block_bytes = 0;  // 0: there is none
  int num_blocks = 0;       // 0: as many as the other cache has
};

// Blocks that the flags ask for, and the longest sequence that they hold.
struct KvPlan {
  int num_blocks = 0;
  int max_model_len = 0;
};

// A usage error where --max-model-len is more than the model has positions.
absl::Status CheckMaxModelLen(const WorkerFlags& flags,
                              const engine::ModelSpec& spec);

// With a window of all layers (engine::EngineOptions) the pool holds what a
// sequence has at once, not all of it. Without `gpu` the default is 1 GiB, or
// what `host` has left.
// INVALID_ARGUMENT: what was asked for does not fit; says how much would.
absl::StatusOr<KvPlan> PlanKv(const WorkerFlags& flags,
                              const engine::ModelSpec& spec,
                              kernels::DType kv_dtype,
                              const std::optional<GpuMemory>& gpu,
                              const engine::KvWindow& window = {},
                              const DraftKv& draft = {},
                              const HostMemory& host = {});

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_KV_PLAN_H_
