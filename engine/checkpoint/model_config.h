// SPDX-License-Identifier: Apache-2.0
// What the configs of a model directory (LoadModelSpec has which) say, as
// plain data that one forward pass reads. A family of models is a row in the
// table of families.cc, not a class.
//
// All are untrusted: every value used is checked against a range, and an error
// names the file, the field, the value and what is allowed. Keys that are not
// used are ignored, and nothing is executed.

#ifndef TANDEM_ENGINE_CHECKPOINT_MODEL_CONFIG_H_
#define TANDEM_ENGINE_CHECKPOINT_MODEL_CONFIG_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/families.h"
#include "engine/checkpoint/quantisation.h"
#include "engine/checkpoint/rope_config.h"
#include "kernels/route.h"
#include "kernels/types.h"

namespace tandem::engine {

// Sampling that the model's authors recommend; unset where they are silent.
struct SamplingDefaults {
  std::optional<bool> do_sample;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<double> min_p;
  std::optional<double> repetition_penalty;
  std::optional<int> top_k;  // 0 and -1: all
};

struct ModelSpec {
  std::string architecture;  // "LlamaForCausalLM"
  TensorNames names;
  int hidden_size = 0;
  int intermediate_size = 0;  // of layers without experts; 0: all have some
  int expert_size = 0;        // of one expert
  int shared_size = 0;  // of what all rows take beside experts; 0: nothing
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  // Of layers that see all positions, where those with a window have others;
  // else 0. Which of the two takes more of a KV cache is the same in all of its
  // formats.
  int full_kv_heads = 0;
  int full_head_dim = 0;
  // The last layers that have no K and V: they look at those of the last layer
  // before them that sees as much. Their feed-forward layers may be twice as
  // wide.
  int shared_kv_layers = 0;
  bool wide_shared = false;
  // Numbers that each layer is told of a token beside the stream, and tokens
  // that there are such of; 0: none.
  int told = 0;
  int told_vocab = 0;
  // Of multi-head latent attention (DeepSeek-V2, section 2.1), else 0: what
  // keys and values of all heads are made of, the same for queries (0: the
  // hidden state), what of a head's queries does not turn, and a head's values.
  // One KV head of kv_rank + rope.rotary_dim, which is head_dim, serves all.
  int kv_rank = 0;
  int query_rank = 0;
  int still_dim = 0;
  int value_dim = 0;
  int vocab_size = 0;
  int max_positions = 0;
  NormKind norm = NormKind::kRms;
  double norm_eps = 1e-6;
  bool parallel = false;         // as families.h says
  bool wide_norms = false;       // of q and k: of all heads together
  bool turned_norms = false;     // of q and k: once they have turned
  bool normed_values = false;    // v too, head by head, without weights
  bool keys_are_values = false;  // of layers that see all
  RopeSpec rope;
  RopeSpec local_rope;         // of layers with a window
  std::vector<bool> no_rope;   // [layers] do not turn; empty: all do
  int window = 0;              // positions that those see; 0: there are none
  std::vector<bool> windowed;  // [layers], or empty without a window
  double attention_scale = 1;  // of scores
  double score_cap = 0;        // 0: none
  double logit_scale = 1;
  double logit_cap = 0;  // 0: none
  double embedding_scale = 1;
  bool embedding_scale_rounds = false;  // to the embedding's type
  bool qkv_bias = false;
  bool output_bias = false;
  bool mlp_bias = false;
  bool head_bias = false;
  bool router_bias = false;  // of what chooses experts
  kernels::Activation activation = kernels::Activation::kSilu;
  kernels::RouteOptions routes;  // without biases; no experts: none has any
  std::vector<bool> dense;       // [layers] have no experts; empty: all do
  int draft_layers = 0;    // behind the layers in files, for drafts: not read
  bool tied_head = false;  // logits by the embedding's matrix
  bool head_in_doubt = false;    // it is tied too if the file has no head
  std::vector<int32_t> eos_ids;  // any of them ends a sequence
  SamplingDefaults sampling;
  Quantisation quantisation;  // of the checkpoint

  // A layer's.
  struct KvHeads {
    int count = 0;
    int dim = 0;
    bool operator==(const KvHeads&) const = default;
  };
  bool mixed_heads() const { return full_head_dim > 0; }
  KvHeads kv_heads_of(int layer) const {
    return mixed_heads() && !is_windowed(layer)
               ? KvHeads{full_kv_heads, full_head_dim}
               : KvHeads{kv_heads, head_dim};
  }
  // Layers that have K and V, which come first, and whose a layer looks at.
  int kv_layers() const { return layers - shared_kv_layers; }
  bool has_kv(int layer) const { return layer < kv_layers(); }
  // -1: there is none. ParseModelSpec gives no such model.
  int kv_source(int layer) const {
    if (has_kv(layer)) return layer;
    int source = kv_layers() - 1;
    while (source >= 0 && is_windowed(source) != is_windowed(layer)) --source;
    return source;
  }
  // What all layers together are told.
  int told_numbers() const { return layers * told; }
  bool values_are_keys(int layer) const {
    return keys_are_values && !is_windowed(layer);
  }
  // Whether it is layers that see all whose heads take less of a KV cache.
  bool full_take_less() const {
    const int numbers = kv_heads * head_dim;
    const int of_full = full_kv_heads * full_head_dim;
    return of_full < numbers ||
           (of_full == numbers && full_kv_heads < kv_heads);
  }
  // Of layers that see all positions.
  int full_dim() const { return mixed_heads() ? full_head_dim : head_dim; }
  int widest_head_dim() const { return std::max(head_dim, full_head_dim); }
  int qkv_rows(int layer) const {
    const KvHeads kv = kv_heads_of(layer);
    return (heads + (has_kv(layer) ? 2 * kv.count : 0)) * kv.dim;
  }
  int widest_qkv_rows() const {
    return std::max((heads + 2 * kv_heads) * head_dim,
                    (heads + 2 * full_kv_heads) * full_head_dim);
  }
  bool latent() const { return kv_rank > 0; }
  // Of a head's queries before they meet keys, and of what attention gives;
  // the widest layer's.
  int query_dim() const {
    return latent() ? still_dim + rope.rotary_dim : widest_head_dim();
  }
  int output_dim() const { return latent() ? value_dim : widest_head_dim(); }
  bool has_experts(int layer) const {
    return routes.experts > 0 && (dense.empty() || !dense[layer]);
  }
  // Of the feed-forward layer that all rows take in a layer; 0: there is none.
  int dense_size(int layer) const {
    const int size = has_experts(layer) ? shared_size : intermediate_size;
    return wide_shared && !has_kv(layer) ? 2 * size : size;
  }
  int widest_dense_size() const {
    const int size = std::max(intermediate_size, shared_size);
    return wide_shared && shared_kv_layers > 0 ? 2 * size : size;
  }
  bool is_windowed(int layer) const { return window > 0 && windowed[layer]; }
  bool turns(int layer) const { return no_rope.empty() || !no_rope[layer]; }
  // Positions that no layer sees beyond; 0 if one sees all.
  int common_window() const {
    const bool all =
        std::find(windowed.begin(), windowed.end(), false) == windowed.end();
    return all ? window : 0;
  }
  // Heads of q and k, each with weights of its own.
  bool centres_heads() const {
    return !names.query_norm.empty() &&
           (norm == NormKind::kLayer || norm == NormKind::kCentred);
  }
  bool is_gated() const { return !names.gate.empty(); }

  // One line with all that the forward pass depends on, the same for equal
  // models however their files are written: part of the fingerprint.
  std::string Canonical() const;
};

// Largest config.json that is read.
inline constexpr uint64_t kMaxConfigBytes = 1 << 20;

// Reads config.json and, if they are there, generation_config.json and
// quantize_config.json or else hf_quant_config.json, which count where
// config.json names no quantisation.
absl::StatusOr<ModelSpec> LoadModelSpec(const std::string& directory);

// The same from text; an empty text is an absent file, but for `config`. The
// paths are for messages.
absl::StatusOr<ModelSpec> ParseModelSpec(const std::string& config_path,
                                         std::string_view config,
                                         const std::string& generation_path,
                                         std::string_view generation,
                                         const std::string& quantize_path = "",
                                         std::string_view quantize = "");

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_MODEL_CONFIG_H_
