// SPDX-License-Identifier: Apache-2.0
// A decode worker's draft model (--speculative-config): from its directory to
// what an engine takes. It draws tokens for the model that is served, so both
// must mean the same by every id.

#ifndef TANDEM_WORKER_DRAFT_MODEL_H_
#define TANDEM_WORKER_DRAFT_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/loop.h"
#include "engine/device/device_executor.h"
#include "engine/draft_model.h"
#include "engine/kv/kv_pool.h"
#include "engine/model/model.h"
#include "engine/work.h"
#include "kernels/backend.h"

namespace tandem::worker {

// In order of construction: later ones use earlier ones. All null: there is no
// draft model.
struct DraftParts {
  std::unique_ptr<engine::Model> model;
  engine::WorkShape work;
  std::unique_ptr<engine::DeviceExecutor> executor;
  std::unique_ptr<engine::KvPool> pool;
};

// Whether tokens of both models' directories mean the same: the same number of
// ids and, where they have a tokenizer.json, the same text for each id. Errors:
// INVALID_ARGUMENT, which names both directories and the first difference.
absl::Status CheckSameVocabulary(const std::string& model_dir, int vocab_size,
                                 const std::string& draft_dir,
                                 int draft_vocab_size);

struct DraftLoad {
  std::string directory;
  std::string target_directory;
  int target_vocab_size = 0;
  engine::LoadOptions load;  // the target's, but for its own quantisation
};
// Checks it and loads its weights, with progress on standard error.
absl::StatusOr<std::unique_ptr<engine::Model>> LoadDraftModel(
    const DraftLoad& draft, kernels::Backend* backend);

// What its steps need of memory beside weights, KV cache and what the backend
// keeps for all (Backend::Reserve).
engine::DeviceExecutorOptions DraftExecutorOptions(
    const engine::DeviceExecutorOptions& target);
int64_t DraftWorkspaceBytes(const engine::Model& model,
                            const engine::DeviceExecutorOptions& target,
                            const kernels::Backend& backend);

// Its KV cache of so many blocks and what runs its steps. `max_model_len`: of
// the model that is served, as `target` and `target_work`; a warning says so
// where the draft model or its cache is too short for it. `tenant_share`: of
// its cache, as KvPool has it.
absl::StatusOr<engine::DraftModelOptions> StartDraftModel(
    const engine::DeviceExecutorOptions& target, int num_blocks,
    int max_model_len, double tenant_share,
    const engine::WorkShape& target_work, bool gpu, kernels::Backend* backend,
    Loop* loop, DraftParts* parts);

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_DRAFT_MODEL_H_
