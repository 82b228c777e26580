// SPDX-License-Identifier: Apache-2.0
// The families of models that are served, a row each: what they are called,
// what `transformers` takes for keys that a config.json leaves out, how they
// differ from Llama, and what their tensors are called. docs/adding-a-model-
// family.md tells how to add one.

#ifndef TANDEM_ENGINE_CHECKPOINT_FAMILIES_H_
#define TANDEM_ENGINE_CHECKPOINT_FAMILIES_H_

#include <array>
#include <cstdint>
#include <string_view>

#include "absl/types/span.h"

namespace tandem::engine {

enum class NormKind : uint8_t {
  kRms,          // x / rms(x) * weight
  kLayer,        // LayerNorm, with bias
  kCentred,      // the same without
  kOffset,       // x / rms(x) * (1 + weight)
  kLayerOffset,  // LayerNorm by 1 + weight, with bias
  kBare,         // LayerNorm without weight and bias: there is no tensor
};

// Whether a layer's experts are in one tensor, [experts, inputs, outputs], and
// how gates and what they open lie in it.
enum class ExpertStack : uint8_t {
  kNone,     // each is by itself
  kInTurns,  // one by one
  // All gates, then what they open. The tensor may be [experts, outputs,
  // inputs] as well, which it is where both fit.
  kHalves,
};

// Of latent attention (ModelSpec::kv_rank).
struct LatentNames {
  std::string_view query_down = "self_attn.q_a_proj";
  std::string_view query_norm = "self_attn.q_a_layernorm";
  std::string_view query_up = "self_attn.q_b_proj";
  // What keys and values are made of, and behind it what turns.
  std::string_view kv_down = "self_attn.kv_a_proj_with_mqa";
  std::string_view kv_norm = "self_attn.kv_a_layernorm";
  std::string_view kv_up = "self_attn.kv_b_proj";  // keys, values, by head
};

// A checkpoint's tensors, without ".weight" and ".bias"; empty: the model has
// none. Those below `layers` follow that, a layer's number and a dot.
struct TensorNames {
  std::string_view embedding = "model.embed_tokens";
  std::string_view positions = "";  // learned ones
  std::string_view final_norm = "model.norm";
  std::string_view head = "lm_head";

  std::string_view layers = "model.layers.";
  std::string_view input_norm = "input_layernorm";  // empty: not normed
  std::string_view query = "self_attn.q_proj";
  std::string_view key = "self_attn.k_proj";
  std::string_view value = "self_attn.v_proj";
  std::string_view qkv = "";  // all three, stacked in this order
  // Or for each head of keys its queries, itself and its values.
  bool qkv_in_groups = false;
  LatentNames latent = {};
  // Of all heads; where they are LayerNorms each head's own weights, in one
  // tensor or, where the name ends with a dot, a head's number behind it.
  std::string_view query_norm = "";
  std::string_view key_norm = "";
  std::string_view output = "self_attn.o_proj";
  std::string_view attention_output_norm = "";  // before the residual addition
  std::string_view mlp_norm = "post_attention_layernorm";
  std::string_view gate = "mlp.gate_proj";  // empty: the layer has no gates
  std::string_view up = "mlp.up_proj";
  std::string_view gate_up = "";  // both, stacked in this order
  std::string_view down = "mlp.down_proj";
  std::string_view mlp_output_norm = "";
  // A number that what a layer has added up is multiplied by; by itself.
  std::string_view layer_scale = "";
  // Where layers are told of tokens (ModelSpec::told): a table of all layers'
  // numbers, what makes as many of the embedding, and their norm; and of each
  // layer what lets numbers through, what makes them wide, and its norm.
  std::string_view told_table = "";
  std::string_view told_projection = "";
  std::string_view told_norm = "";
  std::string_view told_gate = "";
  std::string_view told_output = "";
  std::string_view told_output_norm = "";
  // Of many experts: what chooses, what is added to compare their scores, and
  // what stands before an expert's number and a dot, which gate, up and down
  // follow. So they do what stands before them where all rows take a feed-
  // forward layer: one beside the experts, or one in a layer without any.
  std::string_view router = "";
  std::string_view choice_bias = "";  // [experts] or [1, experts]
  std::string_view experts = "";
  std::string_view shared = "";
  std::string_view shared_gate = "";  // what the former is multiplied by
  std::string_view dense = "";
  // Or gate_up and down are of all experts, and their names end with the
  // suffix; their biases' with "_bias".
  ExpertStack stack = ExpertStack::kNone;
  std::string_view stack_gate_up = "";  // in place of gate_up
  std::string_view stack_suffix = "";
  // Where experts take the stream by a norm of their own, and so does what
  // chooses them: weights [hidden], of hidden^-0.5; what is made of each norm
  // is normed before both parts are added; and [experts] of their weights.
  std::string_view router_norm = "";
  std::string_view expert_scales = "";
  std::string_view expert_norm = "";
  std::string_view expert_output_norm = "";
  std::string_view shared_output_norm = "";
  // A score of each head for a key whose value is zero.
  std::string_view sinks = "";

  // Of buffers that old files carry, and that say nothing.
  std::array<std::string_view, 3> ignored_suffixes = {".rotary_emb.inv_freq"};
  // Some files have all names without it.
  std::string_view optional_prefix = "";
  bool transposed = false;  // layers' matrices are [inputs, outputs]
};

// What config.json calls things.
struct ConfigKeys {
  std::string_view hidden_size = "hidden_size";
  std::string_view intermediate_size = "intermediate_size";
  std::string_view layers = "num_hidden_layers";
  std::string_view heads = "num_attention_heads";
  std::string_view kv_heads = "num_key_value_heads";
  std::string_view max_positions = "max_position_embeddings";
  std::string_view norm_eps = "rms_norm_eps";  // empty: no key says it
  std::string_view activation = "hidden_act";
  std::string_view experts = "";  // how many there are
  std::string_view experts_per_token = "num_experts_per_tok";
  std::string_view expert_size = "";  // empty: intermediate_size
  // How many experts' sizes all rows take beside those that they choose, or
  // their size itself, which may be 0 where nothing gates them.
  std::string_view shared_experts = "";
  std::string_view shared_size = "";
  // Of a head the dimensions that turn, where no factor says it.
  std::string_view rotary_dim = "";
  std::string_view rotary_factor = "";  // or the factor's older name
  std::string_view rope_theta = "rope_theta";
  // Of layers that see all positions. Empty: theirs are as the others'.
  std::string_view full_head_dim = "";
  std::string_view full_kv_heads = "";  // only if `keys_are_values` is true
  // Whether their keys, before norms and turning, are their values.
  std::string_view keys_are_values = "";
};

// Which products have biases.
enum class Biases : uint8_t {
  kNone,
  kByConfig,   // "attention_bias": q, k, v and o; "mlp_bias": the rest
  kAttention,  // "attention_bias": q, k, v and o
  kQkv,        // q, k and v
  // "attention_bias" (true if left out): q, k and v; "attention_out_bias": o;
  // "mlp_bias": the rest
  kQkvByConfig,
  kQkvIfSaid,        // "attention_bias" (false if left out): q, k and v
  kQkvUnlessDenied,  // "qkv_bias" (true if left out): q, k and v
  kUseQkvBias,       // by "use_qkv_bias": q, k and v
  kUseBias,          // by "use_bias": all
  // "attention_bias" (true if left out): q, k, v and o; the rest always, what
  // chooses experts too
  kRestAlways,
  kAllIfSaid,  // "bias" (false if left out): all
  kAll,
};

// Which layers of a model with experts have none.
enum class DenseLayers : uint8_t {
  kNone,
  // The first "first_k_dense_replace", or those that "mlp_layer_types" says.
  kFirst,
  kListed,  // "mlp_only_layers", and all but each "decoder_sparse_step"-th
  // Those outside of "moe_layer_start_index" to "moe_layer_end_index", and all
  // but each "moe_layer_interval"-th.
  kOutside,
};

// Whether the weights of the experts that a row chooses add up to one.
enum class Normalised : uint8_t {
  kByConfig,      // "norm_topk_prob", false if left out
  kUnlessDenied,  // the same, true if left out
  kAlways,
};

// Whether attention and feed-forward part of a layer take the same rows, and
// both are added to them; else one after the other.
enum class Parallel : uint8_t {
  kNever,
  kByConfig,      // "use_parallel_residual"; one norm for both then
  kUnlessDenied,  // the same, true if left out; a norm of its own for each
  // "parallel_attn" (true if left out), or "new_decoder_architecture"; one norm
  // for both or, of the new one by "num_ln_in_parallel_attn", two. They also
  // say, with "multi_query", how many heads of keys there are.
  kByDecoder,
  kAlways,
};

// Which layers see a window of "sliding_window" positions alone.
enum class Windows : uint8_t {
  kNone,   // the key means nothing
  kAll,    // every layer
  kOptIn,  // with "use_sliding_window", those from "max_window_layers" on
  kLater,  // without it, the same
  kMixed,  // all but every n-th ("sliding_window_pattern")
};

// Which layers turn (see no_rope_interval, too).
enum class Turning : uint8_t {
  kAll,
  kWindowed,  // those that have a window
  // Where "sliding_window" is null all, else the same.
  kWindowedOrAll,
};

// In the order of reading: there is one row per family.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
struct Family {
  std::string_view architecture;  // "LlamaForCausalLM"
  std::string_view old_architecture = "";
  std::string_view model_type;  // "llama"
  // The model that sees and hears too, of which this is "text_config".
  std::string_view whole = "";
  std::string_view whole_type = "";
  bool flat_whole = false;  // whose keys may stand in the whole's config itself

  // Keys that are left out.
  int heads = 0;          // 0: must be there
  int vocab_size = 0;     // 0: must be there
  int kv_heads = 0;       // 0: as many as heads
  int head_dim = 0;       // 0: hidden_size / heads
  int full_head_dim = 0;  // by keys.full_head_dim
  int max_positions = 2048;
  int window = 0;          // 0: none
  int window_pattern = 0;  // every n-th layer sees all
  int max_window_layers = 28;
  double norm_eps = 1e-6;
  double rope_theta = 10000;
  double local_rope_theta = 0;  // 0: windowed layers turn as the others do
  double rotary_factor = 1;     // with partial_rope
  double score_cap = 0;
  double logit_cap = 0;
  std::string_view activation = "silu";
  bool tied_head = false;

  // What no key says.
  NormKind norm = NormKind::kRms;
  Biases biases = Biases::kNone;
  Windows windows = Windows::kNone;
  bool rope = true;           // else learned positions
  bool partial_rope = false;  // by "partial_rotary_factor"
  // Neighbours turn together; of latent attention only unless
  // "rope_interleave" is false.
  bool interleaved_rope = false;
  bool latent = false;  // ModelSpec::kv_rank, by "kv_lora_rank" and its like
  // Every n-th layer does not turn, unless "no_rope_layers" says which do; with
  // windows those see one. 0: all turn.
  int no_rope_interval = 0;
  bool scaled_embedding = false;  // times sqrt(hidden_size)
  bool multipliers = false;       // Granite's four
  bool wide_if_silent = false;    // no intermediate_size: 4 hidden_size
  bool depth_scale = false;   // "scale_emb", "scale_depth", "dim_model_base"
  bool wide_norms = false;    // of q and of k, all heads together
  bool turned_norms = false;  // of q and of k, once they have turned
  bool rope_alpha = false;    // "dynamic" by "alpha": a larger theta
  Parallel parallel = Parallel::kNever;
  Turning turning = Turning::kAll;
  bool head_bias = false;
  double logit_scale = 0;         // by "logit_scale", of this where left out
  bool scaled_queries = false;    // by "llama_4_scaling_beta"
  bool scaling_is_said = false;   // no "rope_parameters": refused
  bool query_pre_scalar = false;  // scores by "query_pre_attn_scalar"
  bool plain_scores = false;      // scores by 1
  bool last_sees_all = false;     // the last layer, whatever keys say of it
  bool normed_values = false;     // as queries and keys, without weights
  // Layers that share KV by "num_kv_shared_layers" and "use_double_wide_mlp",
  // and are told of tokens by "hidden_size_per_layer_input".
  bool small_kinds = false;
  bool caps = false;            // of scores and logits
  bool whole_caps = false;      // logits of the whole, too
  bool gelu_is_tanh = false;    // by old files' "gelu"
  bool clamped_swiglu = false;  // gates by "swiglu_limit" and alpha
  Normalised normalised = Normalised::kByConfig;
  bool sigmoid_routes = false;  // scores of experts; groups of them
  bool group_limits = false;    // groups of softmax, by "topk_method"
  bool expert_block = false;    // experts only by "enable_moe_block"
  DenseLayers dense = DenseLayers::kNone;
  int dense_layers = 0;  // of kFirst, where no key says
  // Of experts, where no key says.
  int expert_groups = 1;
  int chosen_groups = 1;
  double route_scale = 1;
  std::string_view norms_key = "";         // of q and k: only if it is true
  bool positions_include_scaling = false;  // "max_position_embeddings" does

  TensorNames names = {};
  ConfigKeys keys = {};
};

absl::Span<const Family> Families();

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_FAMILIES_H_
