// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint/families.h"

namespace tandem::engine {
namespace {

constexpr TensorNames kFusedNames = {.qkv = "self_attn.qkv_proj",
                                     .gate_up = "mlp.gate_up_proj"};

constexpr TensorNames kMixtralNames = {.gate = "w1",
                                       .up = "w3",
                                       .down = "w2",
                                       .router = "block_sparse_moe.gate",
                                       .experts = "block_sparse_moe.experts."};

constexpr TensorNames kQwen3MoeNames = {.query_norm = "self_attn.q_norm",
                                        .key_norm = "self_attn.k_norm",
                                        .gate = "gate_proj",
                                        .up = "up_proj",
                                        .down = "down_proj",
                                        .router = "mlp.gate",
                                        .experts = "mlp.experts."};

constexpr TensorNames kGpt2Names = {
    .embedding = "transformer.wte",
    .positions = "transformer.wpe",
    .final_norm = "transformer.ln_f",
    .layers = "transformer.h.",
    .input_norm = "ln_1",
    .qkv = "attn.c_attn",
    .output = "attn.c_proj",
    .mlp_norm = "ln_2",
    .gate = "",
    .up = "mlp.c_fc",
    .down = "mlp.c_proj",
    .ignored_suffixes = {".attn.bias", ".attn.masked_bias"},
    .optional_prefix = "transformer.",
    .transposed = true};

constexpr TensorNames kGemma2Names = {
    .attention_output_norm = "post_attention_layernorm",
    .mlp_norm = "pre_feedforward_layernorm",
    .mlp_output_norm = "post_feedforward_layernorm"};

constexpr TensorNames kStarCoder2Names = {
    .gate = "", .up = "mlp.c_fc", .down = "mlp.c_proj"};

constexpr TensorNames WithHeadNorms(TensorNames names) {
  names.query_norm = "self_attn.q_norm";
  names.key_norm = "self_attn.k_norm";
  return names;
}

constexpr Family kFamilies[] = {
    {.architecture = "LlamaForCausalLM",
     .model_type = "llama",
     .biases = Biases::kByConfig},
    {.architecture = "MistralForCausalLM",
     .model_type = "mistral",
     .kv_heads = 8,
     .max_positions = 131072,
     .window = 4096,
     .windows = Windows::kAll},
    {.architecture = "Qwen2ForCausalLM",
     .model_type = "qwen2",
     .kv_heads = 32,
     .max_positions = 32768,
     .window = 4096,
     .biases = Biases::kQkv,
     .windows = Windows::kOptIn},
    {.architecture = "Qwen3ForCausalLM",
     .model_type = "qwen3",
     .kv_heads = 32,
     .head_dim = 128,
     .max_positions = 32768,
     .window = 4096,
     .biases = Biases::kByConfig,
     .windows = Windows::kOptIn,
     .names = WithHeadNorms({})},
    {.architecture = "MixtralForCausalLM",
     .model_type = "mixtral",
     .kv_heads = 8,
     .max_positions = 131072,
     .norm_eps = 1e-5,
     .rope_theta = 1e6,
     .windows = Windows::kAll,
     .routes_normalised = true,
     .names = kMixtralNames,
     .keys = {.experts = "num_local_experts"}},
    {.architecture = "Qwen3MoeForCausalLM",
     .model_type = "qwen3_moe",
     .kv_heads = 4,
     .max_positions = 32768,
     .biases = Biases::kByConfig,
     .names = kQwen3MoeNames,
     .keys = {.intermediate_size = "moe_intermediate_size",
              .experts = "num_experts"}},
    {.architecture = "Phi3ForCausalLM",
     .model_type = "phi3",
     .max_positions = 4096,
     .norm_eps = 1e-5,
     .windows = Windows::kAll,
     .partial_rope = true,
     .names = kFusedNames},
    {.architecture = "Gemma2ForCausalLM",
     .model_type = "gemma2",
     .kv_heads = 4,
     .head_dim = 256,
     .max_positions = 8192,
     .window = 4096,
     .window_pattern = 2,
     .score_cap = 50,
     .logit_cap = 30,
     .activation = "gelu_pytorch_tanh",
     .tied_head = true,
     .norm = NormKind::kOffset,
     .biases = Biases::kByConfig,
     .windows = Windows::kMixed,
     .scaled_embedding = true,
     .query_pre_scalar = true,
     .caps = true,
     .names = kGemma2Names,
     .keys = {.activation = "hidden_activation"}},
    {.architecture = "Gemma3ForCausalLM",
     .model_type = "gemma3_text",
     .kv_heads = 4,
     .head_dim = 256,
     .max_positions = 131072,
     .window = 4096,
     .window_pattern = 6,
     .rope_theta = 1e6,
     .local_rope_theta = 10000,
     .activation = "gelu_pytorch_tanh",
     .tied_head = true,
     .norm = NormKind::kOffset,
     .biases = Biases::kByConfig,
     .windows = Windows::kMixed,
     .scaled_embedding = true,
     .query_pre_scalar = true,
     .caps = true,
     .positions_include_scaling = true,
     .names = WithHeadNorms(kGemma2Names),
     .keys = {.activation = "hidden_activation"}},
    {.architecture = "Starcoder2ForCausalLM",
     .model_type = "starcoder2",
     .kv_heads = 2,
     .max_positions = 4096,
     .norm_eps = 1e-5,
     .activation = "gelu_pytorch_tanh",
     .tied_head = true,
     .norm = NormKind::kLayer,
     .biases = Biases::kAll,
     .windows = Windows::kAll,
     .names = kStarCoder2Names,
     .keys = {.norm_eps = "norm_epsilon"}},
    {.architecture = "GPT2LMHeadModel",
     .model_type = "gpt2",
     .max_positions = 1024,
     .norm_eps = 1e-5,
     .activation = "gelu_new",
     .tied_head = true,
     .norm = NormKind::kLayer,
     .biases = Biases::kAll,
     .rope = false,
     .names = kGpt2Names,
     .keys = {.hidden_size = "n_embd",
              .intermediate_size = "n_inner",
              .layers = "n_layer",
              .heads = "n_head",
              .max_positions = "n_positions",
              .norm_eps = "layer_norm_epsilon",
              .activation = "activation_function"}},
};

}  // namespace

absl::Span<const Family> Families() { return kFamilies; }

}  // namespace tandem::engine
