// SPDX-License-Identifier: Apache-2.0
// What cannot be served right is refused with file, field, value and range.

#include <string>
#include <utility>
#include <vector>

#include "engine/checkpoint/model_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint/configs.h"

namespace tandem::engine {
namespace {

using testing::HasSubstr;

struct HostileConfig {
  const char* why;
  json config;
  const char* complaint;
};

json Without(json config, const char* key) {
  config.erase(key);
  return config;
}

json Scaling(const json& changes) {
  json scaling = {{"factor", 8.0},
                  {"low_freq_factor", 1.0},
                  {"high_freq_factor", 4.0},
                  {"original_max_position_embeddings", 8192},
                  {"rope_type", "llama3"}};
  scaling.update(changes);
  return {{"rope_scaling", scaling}};
}

std::vector<HostileConfig> HostileConfigs() {
  const auto llama = [](const json& changes) { return With(Llama(), changes); };
  const auto mistral = [](const json& changes) {
    return With(Mistral(), changes);
  };
  const json moe =
      With(Qwen3Moe(), {{"num_experts", 8}, {"num_key_value_heads", 2}});
  return {
      {"an array", json::array(), "must be a JSON object"},
      {"a string", "config", "must be a JSON object"},
      {"nothing", json::object(), "architectures: missing"},
      {"another family", llama({{"architectures", {"MambaForCausalLM"}}}),
       "architectures: \"MambaForCausalLM\"; must be one of "
       "LlamaForCausalLM, MistralForCausalLM, "
       "Mistral3ForConditionalGeneration, "
       "Ministral3ForCausalLM, Qwen2ForCausalLM"},
      {"a family without a name", llama({{"architectures", {""}}}),
       "architectures: \"\"; must be one of"},
      {"a family that is a number", llama({{"architectures", {7}}}),
       "architectures: 7"},
      {"two families",
       llama({{"architectures", {"LlamaForCausalLM", "MistralForCausalLM"}}}),
       "architectures: an array of 2"},
      {"a family that is a string",
       llama({{"architectures", "LlamaForCausalLM"}}), "architectures:"},
      {"another type and no family",
       With(Without(Llama(), "architectures"), {{"model_type", "mamba"}}),
       "model_type: \"mamba\"; must be one of llama, mistral, mistral3, "
       "ministral3, qwen2"},
      {"no width", Without(Llama(), "hidden_size"),
       "hidden_size: missing; must be a whole number from 8 to 1048576"},
      {"width 0", llama({{"hidden_size", 0}}), "hidden_size: 0; must be"},
      {"negative width", llama({{"hidden_size", -64}}), "hidden_size: -64"},
      {"width as text", llama({{"hidden_size", "64"}}), "hidden_size: \"64\""},
      {"width as fraction", llama({{"hidden_size", 64.0}}),
       "hidden_size: 64.0"},
      {"width as list", llama({{"hidden_size", {64}}}),
       "hidden_size: an array of 1"},
      {"width true", llama({{"hidden_size", true}}), "hidden_size: true"},
      {"width beyond the limit", llama({{"hidden_size", 1 << 21}}),
       "hidden_size: 2097152"},
      {"width beyond 63 bits", llama({{"hidden_size", UINT64_MAX}}),
       "hidden_size: 18446744073709551615"},
      {"width that wraps to 64",
       llama({{"hidden_size", (uint64_t{1} << 32) + 64}}),
       "hidden_size: 4294967360"},
      {"10^18 layers", llama({{"num_hidden_layers", 1000000000000000000}}),
       "num_hidden_layers: 1000000000000000000; must be a whole number from "
       "1 to 1024"},
      {"no layers", llama({{"num_hidden_layers", 0}}), "num_hidden_layers: 0"},
      {"no heads", llama({{"num_attention_heads", 0}}),
       "num_attention_heads: 0"},
      {"heads that do not divide the width",
       llama({{"num_attention_heads", 5}}),
       "num_attention_heads: 5; must be a divisor of hidden_size, 64"},
      {"KV heads 0", llama({{"num_key_value_heads", 0}}),
       "num_key_value_heads: 0"},
      {"KV heads that do not divide", llama({{"num_key_value_heads", 3}}),
       "num_key_value_heads: 3; must be a divisor of num_attention_heads, 4"},
      {"more KV heads than heads", llama({{"num_key_value_heads", 8}}),
       "num_key_value_heads: 8"},
      {"odd head_dim", llama({{"head_dim", 15}}),
       "head_dim: 15; must be a multiple of 8 from 8 to 256"},
      {"even head_dim that is no multiple of 8", llama({{"head_dim", 20}}),
       "head_dim: 20"},
      {"head_dim 0", llama({{"head_dim", 0}}), "head_dim: 0"},
      {"huge head_dim", llama({{"head_dim", 512}}), "head_dim: 512"},
      {"implied head_dim of 4", llama({{"num_attention_heads", 16}}),
       "hidden_size / num_attention_heads: 4"},
      {"no vocabulary", llama({{"vocab_size", 0}}), "vocab_size: 0"},
      {"endless vocabulary", llama({{"vocab_size", 1LL << 40}}),
       "vocab_size: 1099511627776"},
      {"no positions", llama({{"max_position_embeddings", 0}}),
       "max_position_embeddings: 0"},
      {"endless positions", llama({{"max_position_embeddings", 1LL << 33}}),
       "max_position_embeddings: 8589934592"},
      {"epsilon 0", llama({{"rms_norm_eps", 0}}), "rms_norm_eps: 0"},
      {"negative epsilon", llama({{"rms_norm_eps", -1e-5}}), "rms_norm_eps:"},
      {"huge epsilon", llama({{"rms_norm_eps", 1e300}}), "rms_norm_eps:"},
      {"theta 0", llama({{"rope_theta", 0}}), "rope_theta: 0"},
      {"negative theta", llama({{"rope_theta", -10000.0}}), "rope_theta:"},
      {"rope scaling as text", llama({{"rope_scaling", "llama3"}}),
       "rope_scaling: \"llama3\"; must be an object or null"},
      {"another scaling", llama(Scaling({{"rope_type", "spiral"}})),
       "rope_scaling.rope_type: \"spiral\"; must be default, linear"},
      {"linear without a factor",
       llama({{"rope_scaling", {{"type", "linear"}}}}),
       "rope_scaling.factor: missing"},
      {"a factor that shrinks",
       llama({{"rope_scaling", {{"type", "dynamic"}, {"factor", 0.5}}}}),
       "rope_scaling.factor: 0.5; must be a number from 1"},
      {"yarn with its limits the wrong way round",
       llama(Scaling({{"rope_type", "yarn"}, {"beta_fast", 0.5}})),
       "rope_scaling.beta_fast: 0.5; must be at least beta_slow, 1"},
      {"long rope without factors", llama(Scaling({{"rope_type", "longrope"}})),
       "rope_scaling.short_factor: missing; must be a list of 8 positive "
       "numbers, one for each pair of dimensions that turn"},
      {"long rope with too few factors",
       llama(Scaling({{"rope_type", "longrope"}, {"short_factor", {1, 2}}})),
       "rope_scaling.short_factor: an array of 2"},
      {"long rope with a factor of 0",
       llama(Scaling({{"rope_type", "longrope"},
                      {"short_factor", {1, 1, 1, 1, 1, 1, 1, 0}}})),
       "rope_scaling.short_factor: 0"},
      {"factor missing", llama({{"rope_scaling", {{"rope_type", "llama3"}}}}),
       "rope_scaling.factor: missing"},
      {"factor 0", llama(Scaling({{"factor", 0}})), "rope_scaling.factor: 0"},
      {"equal band limits", llama(Scaling({{"high_freq_factor", 1.0}})),
       "rope_scaling.high_freq_factor: 1; must be above"},
      {"original context 0",
       llama(Scaling({{"original_max_position_embeddings", 0}})),
       "rope_scaling.original_max_position_embeddings: 0"},
      {"rope of a part", llama(Scaling({{"partial_rotary_factor", 0.5}})),
       "partial_rotary_factor"},
      {"another activation", llama({{"hidden_act", "gelu"}}),
       "hidden_act: \"gelu\"; must be silu, gelu_pytorch_tanh, gelu_new or "
       "gelu_fast"},
      {"quantised, nobody knows how",
       llama({{"quantization_config", {{"bits", 4}}}}),
       "quantization_config.quant_method: \"\"; must be gptq, awq, compr"},
      {"gptq of 3 bits", Quantised({{"quant_method", "gptq"}, {"bits", 3}}),
       "quantization_config.bits: 3; must be 4 or 8"},
      {"gptq in groups of 48",
       Quantised({{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 48}}),
       "quantization_config.group_size: 48; must be -1 or a multiple of 32"},
      {"gptq of Marlin",
       Quantised({{"quant_method", "gptq"},
                  {"bits", 4},
                  {"checkpoint_format", "marlin"}}),
       "quantization_config.checkpoint_format: \"marlin\""},
      {"awq for gemv",
       Quantised({{"quant_method", "awq"}, {"bits", 4}, {"version", "gemv"}}),
       "quantization_config.version: \"gemv\"; must be gemm"},
      {"sparse",
       Quantised({{"quant_method", "compressed-tensors"},
                  {"format", "sparse-24-bitmask"}}),
       "quantization_config.format"},
      {"several groups",
       Quantised({{"quant_method", "compressed-tensors"},
                  {"format", "int-quantized"},
                  {"config_groups", {{"a", 1}, {"b", 2}}}}),
       "quantization_config.config_groups"},
      {"a group that is no object",
       Quantised({{"quant_method", "compressed-tensors"},
                  {"format", "int-quantized"},
                  {"config_groups", {{"a", 1}}}}),
       "quantization_config.config_groups"},
      {"fp8 of another kind",
       Quantised({{"quant_method", "fp8"}, {"fmt", "e5m2"}}),
       "quantization_config.fmt: \"e5m2\"; must be e4m3"},
      {"fp8 in one number's blocks",
       Quantised({{"quant_method", "fp8"}, {"weight_block_size", 128}}),
       "quantization_config.weight_block_size: 128; must be two numbers"},
      {"fp8 in blocks of three sides",
       Quantised(
           {{"quant_method", "fp8"}, {"weight_block_size", {128, 128, 128}}}),
       "quantization_config.weight_block_size"},
      {"fp8 in blocks of no rows",
       Quantised({{"quant_method", "fp8"}, {"weight_block_size", {0, 128}}}),
       "quantization_config.weight_block_size"},
      {"fp8 in blocks of 2^40 rows",
       Quantised(
           {{"quant_method", "fp8"}, {"weight_block_size", {1LL << 40, 128}}}),
       "quantization_config.weight_block_size"},
      {"fp8 in blocks of -32 inputs",
       Quantised({{"quant_method", "fp8"}, {"weight_block_size", {128, -32}}}),
       "quantization_config.weight_block_size"},
      {"fp8 in blocks of 48 inputs",
       Quantised({{"quant_method", "fp8"}, {"weight_block_size", {128, 48}}}),
       "second a multiple of 32"},
      {"blocks without a size",
       Quantised({{"quant_method", "compressed-tensors"},
                  {"format", "float-quantized"},
                  {"config_groups",
                   {{"group_0",
                     {{"weights",
                       {{"num_bits", 8},
                        {"type", "float"},
                        {"strategy", "block"}}}}}}}}),
       "weights.block_structure: null; must be two numbers"},
      {"blocks that are packed",
       Quantised(
           {{"quant_method", "compressed-tensors"},
            {"format", "pack-quantized"},
            {"config_groups",
             {{"group_0",
               {{"weights", {{"num_bits", 4}, {"strategy", "block"}}}}}}}}),
       "weights.strategy: \"block\""},
      {"bias as text", llama({{"attention_bias", "yes"}}),
       "attention_bias: \"yes\"; must be true or false"},
      {"layer types of another model",
       With(Qwen2(), {{"layer_types", {"full_attention"}}}),
       "layer_types: an array of 1; must be a list of 2 names"},
      {"an unknown layer type",
       With(Qwen2(), {{"layer_types", {"full_attention", "linear_attention"}}}),
       "layer_types: \"linear_attention\""},
      {"a pattern of no layers",
       With(Gemma3(), {{"sliding_window_pattern", 0}}),
       "sliding_window_pattern: 0"},
      {"attention both ways",
       With(Gemma3(), {{"use_bidirectional_attention", true}}),
       "use_bidirectional_attention: true; must be false or left out"},
      {"a cap of 0", With(Gemma3(), {{"final_logit_softcapping", 0}}),
       "final_logit_softcapping: 0"},
      {"scores scaled by layer",
       With(Gpt2(), {{"scale_attn_by_inverse_layer_idx", true}}),
       "scale_attn_by_inverse_layer_idx: true"},
      {"more experts for a row than there are",
       With(Mixtral(), {{"num_experts_per_tok", 5}}),
       "num_experts_per_tok: 5; must be a whole number from 1 to 4"},
      {"no experts", Without(Mixtral(), "num_local_experts"),
       "num_local_experts: missing"},
      {"experts in two numbers",
       With(Qwen3Moe(), {{"num_experts", 8}, {"num_local_experts", 4}}),
       "num_local_experts: 4; must be 8, as num_experts, or left out"},
      {"experts each 0 layers", With(moe, {{"decoder_sparse_step", 0}}),
       "decoder_sparse_step: 0; must be a whole number from 1 to 1024"},
      {"a layer without experts by name",
       With(moe, {{"mlp_only_layers", {"0"}}}),
       "mlp_only_layers: an array of 1; must be a list of whole numbers"},
      {"layers without experts beside stacked ones",
       {{"architectures", {"Qwen3VLMoeForConditionalGeneration"}},
        {"text_config", With(moe, {{"model_type", "qwen3_vl_moe_text"},
                                   {"mlp_only_layers", {0}}})}},
       "mlp_only_layers or decoder_sparse_step"},
      {"no size of layers without experts",
       Without(With(Glm4Moe(), {{"first_k_dense_replace", 1}}),
               "intermediate_size"),
       "intermediate_size: missing"},
      {"groups of one expert", With(Glm4Moe(), {{"n_group", 8}}),
       "n_group: 8; must be groups of two and more of 8 experts"},
      {"groups that do not come out even", With(Glm4Moe(), {{"n_group", 3}}),
       "n_group: 3"},
      {"more groups than there are",
       With(Glm4Moe(), {{"n_group", 2}, {"topk_group", 3}}),
       "topk_group: 3; must be a whole number from 1 to 2"},
      {"groups of fewer experts than a token chooses",
       With(Glm4Moe(), {{"n_group", 4}, {"topk_group", 1}}),
       "topk_group: 1; must be groups of 3 experts"},
      {"scores of another kind", With(Glm4Moe(), {{"scoring_func", "softmax"}}),
       "scoring_func: \"softmax\"; must be sigmoid or left out"},
      {"shared experts beyond all bounds",
       With(Glm4Moe(), {{"n_shared_experts", 1 << 20}}),
       "n_shared_experts: 1048576"},
      {"experts with biases", With(Ernie4_5Moe(), {{"use_bias", true}}),
       "use_bias: true; must be false or left out"},
      {"a text part that is missing", Without(Gemma3Whole(), "text_config"),
       "text_config: missing; must be an object"},
      {"a text part that is a list",
       With(Gemma3Whole(), {{"text_config", {1}}}),
       "text_config: an array of 1; must be an object"},
      {"the text part of another family",
       With(Gemma3Whole(), {{"text_config", {{"model_type", "llama"}}}}),
       "text_config.model_type: \"llama\"; must be gemma3_text"},
      {"the text part of none that is known",
       With(Gemma3Whole(),
            {{"architectures", {"Mistral3ForConditionalGeneration"}}}),
       "text_config.model_type: \"gemma3_text\"; must be mistral or "
       "ministral3"},
      {"queries that grow by nothing",
       With(Mistral(), {{"architectures", {"Ministral3ForCausalLM"}}}),
       "rope_parameters: missing; must be an object"},
      {"gpt-oss without a rope scaling", Without(GptOss(), "rope_scaling"),
       "rope_parameters: missing; must be an object"},
      {"gates that are cut elsewhere", With(GptOss(), {{"swiglu_limit", 8.0}}),
       "swiglu_limit: 8; must be 7"},
      {"gates that are steeper", With(GptOss(), {{"swiglu_alpha", 1.0}}),
       "swiglu_alpha: 1; must be 1.702"},
      {"gates of another kind", With(GptOss(), {{"hidden_act", "gelu_new"}}),
       "hidden_act: \"gelu_new\"; must be silu"},
      {"stacked experts in GPTQ",
       With(GptOss(),
            {{"quantization_config", {{"quant_method", "gptq"}, {"bits", 4}}}}),
       "quantization_config: given; must be absent or mxfp4"},
      {"mxfp4 of all products", Quantised({{"quant_method", "mxfp4"}}),
       "quantization_config: given; must be absent or another"},
      {"queries that grow without a first context",
       With(Mistral(), {{"architectures", {"Ministral3ForCausalLM"}},
                        {"rope_parameters", {{"llama_4_scaling_beta", 0.1}}}}),
       "rope_parameters.rope_type: \"default\"; must be yarn beside"},
      {"a text part without its width",
       With(Gemma3Whole(), {{"text_config", json::object()}}),
       "text_config.hidden_size: missing"},
      {"a list of too few layers that turn",
       With(SmolLm3(), {{"no_rope_layers", {1}}}),
       "no_rope_layers: an array of 1; must be a list of 2 numbers"},
      {"a layer that turns by half",
       With(SmolLm3(), {{"no_rope_layers", {1, 2}}}),
       "no_rope_layers: 2; must be a list of 2 numbers, 1 for a layer"},
      {"layers with a window, and no windows",
       With(SmolLm3(),
            {{"sliding_window", 16},
             {"layer_types", {"full_attention", "sliding_attention"}}}),
       "layer_types: \"sliding_attention\"; must be full_attention where "
       "use_sliding_window is not true"},
      {"every zeroth layer", With(SmolLm3(), {{"no_rope_layer_interval", 0}}),
       "no_rope_layer_interval: 0"},
      {"an activation that no layer without gates has",
       With(Gpt2(), {{"activation_function", "relu"}}),
       "activation_function: \"relu\"; must be silu, gelu, gelu_pytorch_tanh, "
       "gelu_new, gelu_fast or relu2"},
      {"exact GELU where tanh is not what it means",
       With(Gemma3(), {{"hidden_activation", "gelu"}}), "hidden_activation"},
      {"products that are clipped", llama({{"clip_qkv", 8.0}}),
       "clip_qkv: 8.0; must be null or left out"},
      {"GPT-2 without its own keys",
       With(Llama(), {{"architectures", {"GPT2LMHeadModel"}}}),
       "n_embd: missing"},
      {"window 0", mistral({{"sliding_window", 0}}), "sliding_window: 0"},
      {"end id as fraction", llama({{"eos_token_id", {1, 2.0}}}),
       "eos_token_id: 2.0; must be a whole number"},
      {"end id as text", llama({{"eos_token_id", "</s>"}}),
       "eos_token_id: \"</s>\""},
      {"nested end ids", llama({{"eos_token_id", {{1}}}}), "eos_token_id:"},
      {"too many end ids", llama({{"eos_token_id", std::vector<int>(257, 1)}}),
       "eos_token_id: an array of 257"},
  };
}

TEST(ModelConfig, HostileConfigsAreRefusedByFieldAndRange) {
  const std::vector<HostileConfig> configs = HostileConfigs();
  RecordProperty("files", static_cast<int>(configs.size()));
  for (const HostileConfig& hostile : configs) {
    const absl::Status status = Parse(hostile.config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << hostile.why;
    const std::string message(status.message());
    EXPECT_THAT(message, testing::StartsWith("d/config.json: ")) << hostile.why;
    EXPECT_THAT(message, HasSubstr(hostile.complaint)) << hostile.why;
  }
}

TEST(ModelConfig, TextThatIsNoJsonIsRefused) {
  const std::pair<const char*, std::string> kTexts[] = {
      {"empty", ""},
      {"text after a NUL", std::string("{}\0{", 4)},
      {"cut short", R"({"hidden_size": 6)"},
      {"NaN", R"({"rms_norm_eps": NaN})"},
      {"infinity", R"({"rope_theta": Infinity})"},
      {"beyond a double", R"({"rope_theta": 1e400})"},
      {"bad UTF-8", "{\"a\": \"\xff\"}"},
      {"depth bomb", std::string(500000, '[')},
      {"depth bomb in a key",
       R"({"architectures":)" + std::string(500000, '[')}};
  for (const auto& [why, text] : kTexts) {
    const absl::Status status =
        ParseModelSpec("d/config.json", text, "", "").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("d/config.json: not valid JSON"))
        << why;
  }
}

TEST(ModelConfig, HostileGenerationConfigsAreRefused) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"[]", "must be a JSON object"},
      {"{", "not valid JSON"},
      {R"({"temperature": -1})", "temperature: -1"},
      {R"({"temperature": "hot"})", "temperature: \"hot\""},
      {R"({"top_p": 1.5})", "top_p: 1.5; must be a number from 0 to 1"},
      {R"({"top_k": -2})", "top_k: -2"},
      {R"({"top_k": 1e3})", "top_k: 1000.0"},
      {R"({"min_p": 2})", "min_p: 2"},
      {R"({"do_sample": 1})", "do_sample: 1"},
      {R"({"eos_token_id": "2"})", "eos_token_id: \"2\""}};
  for (const auto& [text, complaint] : kTexts) {
    const std::string message(Parse(Llama(), text).status().message());
    EXPECT_THAT(message, testing::StartsWith("d/generation_config.json: "));
    EXPECT_THAT(message, HasSubstr(complaint)) << text;
  }
}

}  // namespace
}  // namespace tandem::engine
