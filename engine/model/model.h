// SPDX-License-Identifier: Apache-2.0
// A model's weights on a device, in the backend's own layout, and the one
// forward pass that all families share. The checkpoint may be closed after
// loading.

#ifndef TANDEM_ENGINE_MODEL_MODEL_H_
#define TANDEM_ENGINE_MODEL_MODEL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/backend.h"

namespace tandem::engine {

struct LoadOptions {
  // How matrices are kept. Unset: as in the checkpoint, f16 widened to f32.
  std::optional<kernels::DType> weight_dtype = std::nullopt;
  // kFp8, kInt8, kInt4 or kW8A8: the layers' matrices are quantised. The
  // embedding and the head, whose errors no later layer evens out, are not
  // beside fp8, and are kInt8 beside the others.
  std::optional<kernels::DType> quantisation = std::nullopt;
  // Positions that one sequence may have; 0: as many as the model allows.
  int max_positions = 0;
};

// Bytes of the checkpoint read so far, of all.
using LoadProgress = absl::FunctionRef<void(uint64_t done, uint64_t total)>;

class Model {
 public:
  // f32, device; null: there is none.
  struct Norm {
    const float* weight = nullptr;
    const float* bias = nullptr;  // of a LayerNorm
  };
  // Where attention is latent: in place of `qkv`. Queries, and keys and values
  // of all heads, are made of few numbers, which are normed before that. The
  // cache has those that keys and values are made of; what would make a head's
  // keys of them is applied to its queries, what would make its values to what
  // attention gives (DeepSeek-V2, appendix C, "absorbed"). What turns goes
  // through `kv` and `query_heads` as it is: its rows there have a single one.
  struct Latent {
    std::unique_ptr<kernels::Matrix> query_down;  // [query_rank, hidden]; or
                                                  // null: not of few
    Norm query_norm;                              // [query_rank]
    std::unique_ptr<kernels::Matrix> query;  // [heads * query_dim, query_rank]
                                             // or of the hidden state
    std::unique_ptr<kernels::Matrix> kv_down;  // [head_dim, hidden]
    Norm kv_norm;                              // [kv_rank]
    // [2 * head_dim, head_dim]: keys, their numbers where kernels turn them,
    // then values, zeros in place of what turns
    std::unique_ptr<kernels::Matrix> kv;
    // For MatMulHeads: head_dim outputs of query_dim, value_dim of head_dim.
    std::unique_ptr<kernels::Matrix> query_heads;
    std::unique_ptr<kernels::Matrix> value_heads;
  };
  // What layers are told of tokens, of all layers one after another: by the
  // token alone, times `scale`, and by its embedding. Each layer's is normed.
  struct Told {
    std::unique_ptr<kernels::Matrix> table;       // [told_vocab, told_numbers]
    std::unique_ptr<kernels::Matrix> projection;  // [told_numbers, hidden]
    Norm norm;                                    // [told]
    float scale = 1;
  };
  // What a layer does with it: the stream lets it through, number by number,
  // and what is made of that is normed and added.
  struct ToldLayer {
    std::unique_ptr<kernels::Matrix> gate;    // [told, hidden]; null: not told
    std::unique_ptr<kernels::Matrix> output;  // [hidden, told]
    Norm output_norm;
  };
  struct Layer {
    Norm input_norm;             // [hidden], as all but the heads'
    Norm attention_output_norm;  // before the residual addition
    Norm mlp_norm;
    Norm mlp_output_norm;
    Norm router_norm;  // where experts have norms of their own, as the next
    Norm expert_norm;
    Norm expert_output_norm;
    Norm shared_output_norm;
    Norm query_norm;  // [head_dim], or of all heads
    Norm key_norm;
    const float* value_norm = nullptr;  // [head_dim], device; null: none
    float scale = 1;                    // of what the layer has added up
    Latent latent;
    ToldLayer told;
    std::unique_ptr<kernels::Matrix> qkv;     // [qkv_rows, hidden]
    std::unique_ptr<kernels::Matrix> output;  // [hidden, heads * output_dim]
    // [2 * intermediate, hidden]; without gates [intermediate, hidden].
    std::unique_ptr<kernels::Matrix> gate_up;
    std::unique_ptr<kernels::Matrix> down;  // [hidden, intermediate]
    // Of many experts. Gate_up and down are then what all rows take beside
    // them, or null.
    std::unique_ptr<kernels::Matrix> router;  // [routes.logits(), hidden]
    std::vector<std::unique_ptr<kernels::Matrix>> expert_matrices;
    std::unique_ptr<kernels::ExpertSet> experts;
    const float* qkv_bias = nullptr;  // null: none; device
    const float* output_bias = nullptr;
    const float* gate_up_bias = nullptr;
    const float* down_bias = nullptr;
    kernels::ExpertBiases expert_biases;
    const float* router_bias = nullptr;
    const float* choice_bias = nullptr;    // [experts]
    const float* expert_scales = nullptr;  // [experts]
    const float* sinks = nullptr;          // [heads], device; null: none
  };

  // Blocks. Every tensor that the spec asks for must be there with its shape,
  // and no layer's tensor may be left over: a checkpoint that does not fit
  // its config is refused, not guessed at.
  static absl::StatusOr<std::unique_ptr<Model>> Load(
      const ModelSpec& spec, const Checkpoint& checkpoint,
      const LoadOptions& options, kernels::Backend* backend,
      LoadProgress progress);
  static absl::StatusOr<std::unique_ptr<Model>> Load(
      const ModelSpec& spec, const Checkpoint& checkpoint,
      const LoadOptions& options, kernels::Backend* backend);

  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelSpec& spec() const { return spec_; }
  int max_positions() const { return max_positions_; }
  // "f32", "bf16", or "bf16+fp8" and the like where matrices differ.
  const std::string& weight_format() const { return weight_format_; }
  // First tensors of matrices for which the checkpoint has codes that could not
  // be kept, and why: "X.weight (act-order)".
  const std::vector<std::string>& dequantised() const { return dequantised_; }

  const kernels::Matrix& embedding() const { return *embedding_; }
  // The embedding's own where the head is tied.
  const kernels::Matrix& head() const { return head_ ? *head_ : *embedding_; }
  const float* head_bias() const { return head_bias_; }  // null: none
  const Told& told() const { return told_; }  // no table: layers are not told
  const std::vector<Layer>& layers() const { return layers_; }
  const Norm& final_norm() const { return final_norm_; }
  const kernels::RopeTable& rope(int layer) const {
    if (!spec_.turns(layer)) return no_rope_;
    return spec_.is_windowed(layer) ? local_rope_ : rope_;
  }
  // Learned ones, [max_positions, hidden], f32, device; null: there are none.
  const float* positions() const { return positions_; }

 private:
  friend class ModelLoader;
  Model() = default;

  ModelSpec spec_;
  int max_positions_ = 0;
  std::string weight_format_;
  std::vector<std::string> dequantised_;
  std::unique_ptr<kernels::Matrix> embedding_;  // [vocab, hidden]
  std::unique_ptr<kernels::Matrix> head_;       // [vocab, hidden]
  Told told_;
  std::vector<Layer> layers_;
  Norm final_norm_;
  kernels::RopeTable rope_;
  kernels::RopeTable local_rope_;
  kernels::RopeTable no_rope_;  // nothing turns
  const float* positions_ = nullptr;
  const float* head_bias_ = nullptr;
  std::unique_ptr<kernels::Buffer> vectors_;  // norms, biases, rope tables
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_MODEL_H_
