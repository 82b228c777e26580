// SPDX-License-Identifier: Apache-2.0
// The smallest config.json of some families, to be changed field by field.

#ifndef TANDEM_TESTS_ENGINE_CHECKPOINT_CONFIGS_H_
#define TANDEM_TESTS_ENGINE_CHECKPOINT_CONFIGS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/model_config.h"
#include "nlohmann/json.hpp"

namespace tandem::engine {

using nlohmann::json;

inline json Llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 64},
          {"intermediate_size", 128},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"vocab_size", 100}};
}

inline json Mistral() {
  json config = Llama();
  config["architectures"] = {"MistralForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["max_position_embeddings"] = 1024;
  config["sliding_window"] = nullptr;
  return config;
}

inline json Qwen2() {
  json config = Llama();
  config["architectures"] = {"Qwen2ForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["use_sliding_window"] = true;
  config["sliding_window"] = 512;
  config["max_window_layers"] = 1;
  return config;
}

inline json Gemma3() {
  json config = Llama();
  config["architectures"] = {"Gemma3ForCausalLM"};
  config["head_dim"] = 16;
  config["sliding_window"] = 512;
  config["sliding_window_pattern"] = 2;
  return config;
}

// Of the model that sees too.
inline json Gemma3Whole() {
  return {{"architectures", {"Gemma3ForConditionalGeneration"}},
          {"vision_config", {{"hidden_size", 16}}},
          {"eos_token_id", {1, 6}},
          {"text_config",
           {{"model_type", "gemma3_text"},
            {"hidden_size", 64},
            {"intermediate_size", 128},
            {"num_hidden_layers", 2}}}};
}

inline json SmolLm3() {
  json config = Llama();
  config["architectures"] = {"SmolLM3ForCausalLM"};
  return config;
}

inline json GptOss() {
  json config = Llama();
  config["architectures"] = {"GptOssForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["num_local_experts"] = 4;
  config["num_experts_per_tok"] = 2;
  config["rope_scaling"] = {{"rope_type", "yarn"},
                            {"factor", 4.0},
                            {"original_max_position_embeddings", 64},
                            {"truncate", false}};
  return config;
}

inline json Glm4() {
  json config = Llama();
  config["architectures"] = {"Glm4ForCausalLM"};
  config["head_dim"] = 16;
  return config;
}

inline json Mixtral() {
  json config = Mistral();
  config["architectures"] = {"MixtralForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["num_local_experts"] = 4;
  config["num_experts_per_tok"] = 2;
  return config;
}

inline json Qwen3Moe() {
  json config = Llama();
  config["architectures"] = {"Qwen3MoeForCausalLM"};
  config["moe_intermediate_size"] = 32;
  config["num_experts_per_tok"] = 2;
  return config;
}

// All layers with experts, and one that all rows take.
inline json Glm4Moe() {
  json config = Llama();
  config["architectures"] = {"Glm4MoeForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["moe_intermediate_size"] = 32;
  config["n_routed_experts"] = 8;
  config["num_experts_per_tok"] = 3;
  config["n_shared_experts"] = 1;
  config["first_k_dense_replace"] = 0;
  return config;
}

inline json DeepseekV2() {
  json config = Llama();
  config["architectures"] = {"DeepseekV2ForCausalLM"};
  config["num_hidden_layers"] = 2;
  config["num_attention_heads"] = config["num_key_value_heads"] = 4;
  config["kv_lora_rank"] = 32;
  config["qk_nope_head_dim"] = 16;
  config["qk_rope_head_dim"] = 8;
  config["v_head_dim"] = 16;
  config["moe_intermediate_size"] = 32;
  config["n_routed_experts"] = 8;
  config["num_experts_per_tok"] = 3;
  config["n_shared_experts"] = 2;
  config["first_k_dense_replace"] = 1;
  return config;
}

inline json Ernie4_5Moe() {
  json config = Llama();
  config["architectures"] = {"Ernie4_5_MoeForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["moe_intermediate_size"] = 32;
  config["moe_num_experts"] = 8;
  config["moe_k"] = 3;
  config["moe_num_shared_experts"] = 2;
  return config;
}

inline json Gpt2() {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"n_embd", 64},
          {"n_layer", 2},
          {"n_head", 4},
          {"vocab_size", 100}};
}

inline absl::StatusOr<ModelSpec> Parse(const json& config,
                                       std::string generation = "") {
  return ParseModelSpec("d/config.json", config.dump(),
                        "d/generation_config.json", generation);
}

inline json With(json config, const json& changes) {
  config.update(changes);
  return config;
}

inline json Quantised(const json& config) {
  return With(Llama(), {{"quantization_config", config}});
}

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_CHECKPOINT_CONFIGS_H_
