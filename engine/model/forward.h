// SPDX-License-Identifier: Apache-2.0
// The forward pass that all families share: a mixed batch of rows in, KV in
// the cache, logits of the rows that are sampled out. Prefill chunks and
// decodes are rows alike.

#ifndef TANDEM_ENGINE_MODEL_FORWARD_H_
#define TANDEM_ENGINE_MODEL_FORWARD_H_

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "engine/executor.h"
#include "engine/model/layer_parts.h"
#include "engine/model/lora_slots.h"
#include "engine/model/model.h"
#include "engine/model/workspace.h"
#include "kernels/backend.h"

namespace tandem::engine {

// Which of the step's rows get logits.
struct SampledRows {
  int count = 0;
  const int32_t* row_ids = nullptr;  // [count], device
  // As layers of each part see them, in ascending order, which go on alone from
  // the last K and V on. Empty: `row_ids` may be any, in any order, and they go
  // on alone from the last attention on.
  absl::Span<const kernels::Rows> rows = {};
};

// The adapters of a step's rows.
struct StepAdapters {
  const LoraSlots* slots = nullptr;  // null: no row has one
  const int32_t* rows = nullptr;     // [num_rows] slot or -1, device
  const int32_t* sampled = nullptr;  // [SampledRows::count], device
  uint32_t sections = 0;             // that any of them changes
};

// A row whose attention weights are wanted.
struct RowLook {
  const AttentionAsk* ask = nullptr;
  int entry = 0;  // of the step
  int drawn = 0;  // the row's index among those that are sampled
  // `out` is that of the first row of weights; factor, add and block_table are
  // not looked at.
  kernels::AttentionLook look;
};

// Issues the pass on `queue`. `kv_written(n)` is called when the KV of layers
// [0, n) has been issued, of those that have any. Logits are in
// workspace.logits, in the order of `sampled`. `rows` are as layers of each
// part see them, which `places` says.
void Forward(const Model& model, absl::Span<const kernels::Rows> rows,
             absl::Span<const LayerParts::Place> places,
             const SampledRows& sampled, const StepAdapters& adapters,
             kernels::Backend& backend, kernels::Queue& queue,
             kernels::KvCache& cache, Workspace& workspace,
             absl::FunctionRef<void(int)> kv_written,
             absl::Span<const RowLook> looks = {});

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_FORWARD_H_
