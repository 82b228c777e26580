// SPDX-License-Identifier: Apache-2.0
// The memory that a forward pass works in.

#ifndef TANDEM_ENGINE_MODEL_WORKSPACE_H_
#define TANDEM_ENGINE_MODEL_WORKSPACE_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/checkpoint/model_config.h"
#include "engine/model/lora.h"
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
  // Rows that are sampled, behind the last K and V that a layer has.
  void* sampled_x = nullptr;      // [max_sampled, hidden]
  void* sampled_heads = nullptr;  // [max_sampled, widest_qkv_rows]
  void* sampled_told = nullptr;   // [max_sampled, told_numbers()]
  float* logits = nullptr;        // [max_sampled, vocab]

 private:
  std::unique_ptr<kernels::Buffer> buffer_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_WORKSPACE_H_
