// SPDX-License-Identifier: Apache-2.0
// The forward pass that all families share: a mixed batch of rows in, KV in
// the cache, logits of the rows that are sampled out. Prefill chunks and
// decodes are rows alike.

#ifndef TANDEM_ENGINE_MODEL_FORWARD_H_
#define TANDEM_ENGINE_MODEL_FORWARD_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/executor.h"
#include "engine/model/layer_parts.h"
#include "engine/model/lora_slots.h"
#include "engine/model/model.h"
#include "kernels/backend.h"

namespace tandem::engine {

// Device memory of a forward pass, sized once for the largest step. `void*` is
// the backend's activation type.
class Workspace {
 public:
  // `lora` is null where there are no adapters.
  static absl::StatusOr<Workspace> Create(const ModelSpec& spec, int max_rows,
                                          int max_sampled,
                                          const LoraLayout* lora,
                                          kernels::Backend* backend);
  static size_t Bytes(const ModelSpec& spec, int max_rows, int max_sampled,
                      const LoraLayout* lora, kernels::DType activation);

  void* x = nullptr;       // [max_rows, hidden], the residual stream
  void* normed = nullptr;  // [max_rows, hidden]
  // [max_rows, widest_qkv_rows]; of latent attention Q, then K and V of all
  // rows, and in the end its values [max_rows, heads * output_dim]
  void* qkv = nullptr;
  void* latent = nullptr;  // what those are made of, one after another
  // [max_rows, heads * head_dim]; of latent attention its queries before they
  // meet keys [max_rows, heads * query_dim]
  void* attention = nullptr;
  void* delta = nullptr;    // [max_rows, hidden], not yet added to x
  void* experts = nullptr;  // [max_rows, hidden], where normed by themselves
  // [max_rows, widest_dense_size()], or told_numbers() if those are more
  void* activated = nullptr;
  void* told = nullptr;  // [max_rows, told_numbers()]
  // Of many experts.
  float* route_logits = nullptr;   // [max_rows, routes.logits()]
  float* route_weights = nullptr;  // [max_rows, routes.weights()]
  // Of adapters.
  void* halves = nullptr;       // [max_rows, 2 * intermediate + 14]
  float* lora_inner = nullptr;  // [max_rows, max_rank]
  // Rows that are sampled, from the last layer's attention on.
  void* sampled_x = nullptr;          // [max_sampled, hidden]
  void* sampled_attention = nullptr;  // [max_sampled, heads * head_dim]
  void* sampled_told = nullptr;       // [max_sampled, told_numbers()]
  float* logits = nullptr;            // [max_sampled, vocab]

 private:
  std::unique_ptr<kernels::Buffer> buffer_;
};

// Which of the step's rows get logits.
struct SampledRows {
  int count = 0;
  const int32_t* row_ids = nullptr;  // [count], device
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
