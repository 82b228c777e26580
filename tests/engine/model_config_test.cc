// SPDX-License-Identifier: Apache-2.0
// What a config says is read as `transformers` reads it; what cannot be
// served right is refused with file, field, value and range.

#include "engine/model_config.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

json Llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 64},
          {"intermediate_size", 128},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"vocab_size", 100}};
}

json Mistral() {
  json config = Llama();
  config["architectures"] = {"MistralForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["max_position_embeddings"] = 1024;
  config["sliding_window"] = nullptr;
  return config;
}

json Qwen2() {
  json config = Llama();
  config["architectures"] = {"Qwen2ForCausalLM"};
  config["num_key_value_heads"] = 2;
  config["use_sliding_window"] = true;
  config["sliding_window"] = 512;
  config["max_window_layers"] = 1;
  return config;
}

json Gemma3() {
  json config = Llama();
  config["architectures"] = {"Gemma3ForCausalLM"};
  config["head_dim"] = 16;
  config["sliding_window"] = 512;
  config["sliding_window_pattern"] = 2;
  return config;
}

json Mixtral() {
  json config = Mistral();
  config["architectures"] = {"MixtralForCausalLM"};
  config["num_local_experts"] = 4;
  config["num_experts_per_tok"] = 2;
  return config;
}

json Qwen3Moe() {
  json config = Llama();
  config["architectures"] = {"Qwen3MoeForCausalLM"};
  config["moe_intermediate_size"] = 32;
  config["num_experts_per_tok"] = 2;
  return config;
}

json Gpt2() {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"n_embd", 64},
          {"n_layer", 2},
          {"n_head", 4},
          {"vocab_size", 100}};
}

absl::StatusOr<ModelSpec> Parse(const json& config,
                                std::string generation = "") {
  return ParseModelSpec("d/config.json", config.dump(),
                        "d/generation_config.json", generation);
}

json With(json config, const json& changes) {
  config.update(changes);
  return config;
}

TEST(ModelConfig, AbsentKeysMeanWhatTransformersTakesThemFor) {
  const auto spec = Parse(Llama());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->kv_heads, 4);
  EXPECT_EQ(spec->head_dim, 16);
  EXPECT_EQ(spec->max_positions, 2048);
  EXPECT_EQ(spec->norm_eps, 1e-6);
  EXPECT_EQ(spec->rope.theta, 10000);
  EXPECT_EQ(spec->rope.kind, RopeSpec::Kind::kDefault);
  EXPECT_FALSE(spec->tied_head);
  EXPECT_FALSE(spec->qkv_bias);
  EXPECT_TRUE(spec->eos_ids.empty());
  EXPECT_EQ(spec->qkv_rows(), 12 * 16);
}

TEST(ModelConfig, ReadsScaledRopeOldAndNew) {
  const json scaling = {{"factor", 8.0},
                        {"low_freq_factor", 1.0},
                        {"high_freq_factor", 4.0},
                        {"original_max_position_embeddings", 8192},
                        {"rope_type", "llama3"}};
  const auto old = Parse(
      With(Llama(), {{"rope_theta", 500000.0}, {"rope_scaling", scaling}}));
  json both = scaling;
  both["rope_theta"] = 500000.0;
  const auto renewed = Parse(With(Llama(), {{"rope_parameters", both}}));
  ASSERT_TRUE(old.ok()) << old.status();
  ASSERT_TRUE(renewed.ok()) << renewed.status();
  EXPECT_EQ(old->rope.kind, RopeSpec::Kind::kLlama3);
  EXPECT_EQ(old->rope.theta, 500000);
  EXPECT_EQ(old->rope.factor, 8);
  EXPECT_EQ(old->rope.original_max_positions, 8192);
  EXPECT_EQ(old->Canonical(), renewed->Canonical());
}

// transformers: standardize_rope_params and Phi3Config.
TEST(ModelConfig, LongRopeFindsTheFirstContextWhereTransformersDoes) {
  const json factors(8, 1.5);
  const auto scaled = [&](json config, const json& own, const json& beside) {
    json scaling = {{"rope_type", "longrope"},
                    {"short_factor", factors},
                    {"long_factor", factors}};
    scaling.update(own);
    config.update({{"max_position_embeddings", 8192},
                   {"hidden_size", 192},
                   {"num_attention_heads", 12},
                   {"rope_scaling", scaling}});
    config.update(beside);
    return Parse(config);
  };
  const json phi = With(Llama(), {{"model_type", "phi3"},
                                  {"architectures", {"Phi3ForCausalLM"}}});
  const char* const kOriginal = "original_max_position_embeddings";
  const struct {
    const char* why;
    json config, own, beside;
    int original;
    double attention;
  } cases[] = {{"of the scaling",
                Llama(),
                {{kOriginal, 512}},
                {},
                512,
                std::sqrt(1 + std::log(16.0) / std::log(512.0))},
               {"beside it goes first",
                Llama(),
                {{kOriginal, 512}},
                {{kOriginal, 2048}},
                2048,
                std::sqrt(1 + std::log(4.0) / std::log(2048.0))},
               {"nowhere", Llama(), json::object(), {}, 8192, 1},
               {"a factor goes before the ratio",
                Llama(),
                {{kOriginal, 512}, {"factor", 2.0}},
                {},
                512,
                std::sqrt(1 + std::log(2.0) / std::log(512.0))},
               {"Phi3's default",
                phi,
                json::object(),
                {},
                4096,
                std::sqrt(1 + std::log(2.0) / std::log(4096.0))},
               {"which goes before the scaling's",
                phi,
                {{kOriginal, 512}},
                {},
                4096,
                std::sqrt(1 + std::log(2.0) / std::log(4096.0))},
               {"and is given",
                phi,
                {{kOriginal, 512}},
                {{kOriginal, 1024}},
                1024,
                std::sqrt(1 + std::log(8.0) / std::log(1024.0))}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const auto spec =
        scaled(c.config, c.own, c.beside.is_null() ? json::object() : c.beside);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->rope.original_max_positions, c.original);
    EXPECT_DOUBLE_EQ(spec->rope.attention_factor, c.attention);
  }
}

TEST(ModelConfig, WindowsAreOfTheLayersThatTheFamilySays) {
  using Layers = std::vector<bool>;
  const auto windows = [](const json& config) {
    const auto spec = Parse(config);
    EXPECT_TRUE(spec.ok()) << spec.status();
    return spec.ok() ? std::pair(spec->window, spec->windowed)
                     : std::pair(-1, Layers());
  };
  EXPECT_EQ(windows(With(Llama(), {{"sliding_window", 512}})),
            std::pair(0, Layers()));
  EXPECT_EQ(windows(With(Mistral(), {{"sliding_window", 512}})),
            std::pair(512, Layers({true, true})));
  EXPECT_EQ(windows(With(Mistral(), {{"sliding_window", 1024}})),
            std::pair(0, Layers()));
  json silent = With(Mistral(), {{"max_position_embeddings", 32768}});
  silent.erase("sliding_window");
  EXPECT_EQ(windows(silent), std::pair(4096, Layers({true, true})));
  EXPECT_EQ(windows(Qwen2()), std::pair(512, Layers({false, true})));
  EXPECT_EQ(windows(With(Qwen2(), {{"use_sliding_window", false}})),
            std::pair(0, Layers()));
  EXPECT_EQ(windows(With(Qwen2(), {{"layer_types",
                                    {"sliding_attention", "full_attention"}}})),
            std::pair(512, Layers({true, false})));
  EXPECT_EQ(windows(Gemma3()), std::pair(512, Layers({true, false})));
}

TEST(ModelConfig, LocalLayersTurnByTheirOwnTheta) {
  const json old = With(
      Gemma3(), {{"rope_theta", 5e5},
                 {"rope_local_base_freq", 2e4},
                 {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8}}}});
  const json renewed =
      With(Gemma3(),
           {{"rope_parameters",
             {{"full_attention",
               {{"rope_type", "linear"}, {"factor", 8}, {"rope_theta", 5e5}}},
              {"sliding_attention", {{"rope_theta", 2e4}}}}}});
  for (const json& config : {old, renewed}) {
    const auto spec = Parse(config);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->rope.theta, 5e5);
    EXPECT_EQ(spec->rope.factor, 8);
    EXPECT_EQ(spec->local_rope.theta, 2e4);
    EXPECT_EQ(spec->local_rope.kind, RopeSpec::Kind::kDefault);
    EXPECT_EQ(spec->max_positions, 131072);  // scaling included
  }
  EXPECT_EQ(Parse(old)->Canonical(), Parse(renewed)->Canonical());
}

TEST(ModelConfig, ScalingsMakePositions) {
  const auto positions = [](const json& scaling) {
    return Parse(With(Llama(), {{"max_position_embeddings", 4096},
                                {"rope_scaling", scaling}}))
        ->max_positions;
  };
  EXPECT_EQ(positions({{"type", "linear"}, {"factor", 2.5}}), 10240);
  EXPECT_EQ(positions({{"type", "dynamic"}, {"factor", 4}}), 16384);
  EXPECT_EQ(positions({{"type", "yarn"},
                       {"factor", 4},
                       {"original_max_position_embeddings", 2048}}),
            8192);
  EXPECT_EQ(positions({{"type", "yarn"}, {"factor", 4}}), 16384);
}

TEST(ModelConfig, EndIdsAreOneOrMany) {
  EXPECT_THAT(Parse(With(Llama(), {{"eos_token_id", 7}}))->eos_ids,
              ElementsAre(7));
  EXPECT_THAT(Parse(With(Llama(), {{"eos_token_id", {7, 9}}}))->eos_ids,
              ElementsAre(7, 9));
  EXPECT_THAT(Parse(With(Llama(), {{"eos_token_id", nullptr}}))->eos_ids,
              ElementsAre());
}

TEST(ModelConfig, IdsThatTheVocabularyLacksEndNothing) {
  const auto ends = [](const json& changes, const char* generation) {
    const auto spec = Parse(With(Llama(), changes), generation);
    EXPECT_TRUE(spec.ok()) << spec.status();
    return spec.ok() ? spec->eos_ids : std::vector<int32_t>{-2};
  };
  EXPECT_THAT(ends({{"eos_token_id", {2, 100}}}, ""), ElementsAre(2));
  EXPECT_THAT(ends({{"eos_token_id", -1}}, ""), ElementsAre());
  EXPECT_THAT(ends({{"eos_token_id", UINT64_MAX}}, ""), ElementsAre());
  EXPECT_THAT(ends({{"eos_token_id", 7}}, R"({"eos_token_id": [100, 9]})"),
              ElementsAre(9));
  EXPECT_THAT(ends({{"eos_token_id", 7}}, R"({"eos_token_id": 100})"),
              ElementsAre(7));
  EXPECT_THAT(ends({{"eos_token_id", 7}, {"bos_token_id", 1000}}, ""),
              ElementsAre(7));
}

TEST(ModelConfig, GenerationConfigHasTheLastWordAndTheSampling) {
  const auto spec =
      Parse(With(Llama(), {{"eos_token_id", 7}}),
            R"({"eos_token_id":[8,9],"do_sample":true,"temperature":0.6,
                "top_p":0.9,"top_k":50,"min_p":0.05,"unknown":{"a":[1]}})");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(spec->eos_ids, ElementsAre(8, 9));
  EXPECT_EQ(spec->sampling.do_sample, true);
  EXPECT_EQ(spec->sampling.temperature, 0.6);
  EXPECT_EQ(spec->sampling.top_p, 0.9);
  EXPECT_EQ(spec->sampling.min_p, 0.05);
  EXPECT_EQ(spec->sampling.top_k, 50);
}

// transformers 4, 5, and both.
TEST(ModelConfig, Qwen3MoeCountsItsExpertsUnderEitherKey) {
  for (const json& changes :
       {json{{"num_experts", 8}}, json{{"num_local_experts", 8}},
        json{{"num_experts", 8}, {"num_local_experts", 8}}}) {
    json config = With(Qwen3Moe(), {{"num_key_value_heads", 2}});
    config.update(changes);
    const auto spec = Parse(config);
    ASSERT_TRUE(spec.ok()) << changes << ": " << spec.status();
    EXPECT_EQ(spec->experts, 8);
  }
}

TEST(ModelConfig, FamiliesAndVariantsThatAreServed) {
  const std::pair<const char*, json> kConfigs[] = {
      {"unknown keys",
       With(Llama(), {{"auto_map", {{"x", "y.py"}}}, {"pad", nullptr}})},
      {"no architectures, but a type",
       [] {
         json config = With(Llama(), {{"model_type", "llama"}});
         config.erase("architectures");
         return config;
       }()},
      {"a Mistral without window", Mistral()},
      {"a window as long as the context",
       With(Mistral(), {{"sliding_window", 1024}})},
      {"wide heads", With(Llama(), {{"head_dim", 32}})},
      {"heads that do not divide the width, with head_dim",
       With(Llama(), {{"num_attention_heads", 5}, {"head_dim", 16}})},
      {"rope of kind default",
       With(Llama(), {{"rope_scaling", {{"type", "default"}}}})}};
  for (const auto& [why, config] : kConfigs) {
    EXPECT_TRUE(Parse(config).ok()) << why << ": " << Parse(config).status();
  }
}

TEST(ModelConfig, CanonicalTextIgnoresHowFilesAreWritten) {
  const auto spec = Parse(Llama());
  EXPECT_EQ(Parse(With(Llama(), {{"head_dim", 16},
                                 {"num_key_value_heads", 4},
                                 {"rope_theta", 1e4},
                                 {"torch_dtype", "bfloat16"}}))
                ->Canonical(),
            spec->Canonical());
  EXPECT_NE(Parse(With(Llama(), {{"rms_norm_eps", 1e-5}}))->Canonical(),
            spec->Canonical());
}

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

json Quantised(const json& config) {
  return With(Llama(), {{"quantization_config", config}});
}

std::vector<HostileConfig> HostileConfigs() {
  const auto llama = [](const json& changes) { return With(Llama(), changes); };
  const auto mistral = [](const json& changes) {
    return With(Mistral(), changes);
  };
  return {
      {"an array", json::array(), "must be a JSON object"},
      {"a string", "config", "must be a JSON object"},
      {"nothing", json::object(), "architectures: missing"},
      {"another family", llama({{"architectures", {"MambaForCausalLM"}}}),
       "architectures: \"MambaForCausalLM\"; must be one of "
       "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"},
      {"a family that is a number", llama({{"architectures", {7}}}),
       "architectures: 7"},
      {"two families",
       llama({{"architectures", {"LlamaForCausalLM", "MistralForCausalLM"}}}),
       "architectures: an array of 2"},
      {"a family that is a string",
       llama({{"architectures", "LlamaForCausalLM"}}), "architectures:"},
      {"another type and no family",
       With(Without(Llama(), "architectures"), {{"model_type", "mamba"}}),
       "model_type: \"mamba\"; must be one of llama, mistral, qwen2"},
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
       "rope_scaling.short_factor: missing; must be a list of head_dim / 2 = 8 "
       "positive numbers"},
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
       "hidden_act: \"gelu\"; must be silu, gelu_pytorch_tanh or gelu_new"},
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
      {"experts in some layers", With(Mixtral(), {{"decoder_sparse_step", 2}}),
       "decoder_sparse_step"},
      {"layers without experts", With(Mixtral(), {{"mlp_only_layers", {0}}}),
       "mlp_only_layers: an array of 1; must be empty"},
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
      {R"({"top_k": -1})", "top_k: -1"},
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

TEST(ModelConfig, QuantisationIsReadFromEitherFile) {
  using Method = Quantisation::Method;
  const json awq = {{"quant_method", "awq"}, {"bits", 4}};
  const json null = {{"quantization_config", nullptr}};
  const struct {
    const char* why;
    json config;
    const char* quantize;
    Method method;
    int bits;
    int group;
    bool act_order;
  } cases[] = {
      {"neither", Llama(), "", Method::kNone, 0, 0, false},
      {"AutoGPTQ's own, of before it named its method", Llama(),
       R"({"bits":4,"group_size":128,"damp_percent":0.01,"desc_act":true,
           "sym":true,"true_sequential":true,"model_name_or_path":null})",
       Method::kGptq, 4, 128, true},
      {"and of later", With(Llama(), null),
       R"({"quant_method":"gptq","bits":8,"group_size":-1,"desc_act":true,
           "checkpoint_format":"gptq","is_marlin_format":false})",
       Method::kGptq, 8, 0, false},
      {"config.json has the last word", Quantised(awq), R"({"bits":8})",
       Method::kAwq, 4, 0, false},
      {"whatever the other file is", Quantised(awq), "{", Method::kAwq, 4, 0,
       false},
  };
  for (const auto& c : cases) {
    const auto spec = ParseModelSpec("d/config.json", c.config.dump(), "", "",
                                     "d/quantize_config.json", c.quantize);
    ASSERT_TRUE(spec.ok()) << c.why << ": " << spec.status();
    EXPECT_EQ(spec->quantisation.method, c.method) << c.why;
    EXPECT_EQ(spec->quantisation.bits, c.bits) << c.why;
    EXPECT_EQ(spec->quantisation.group, c.group) << c.why;
    EXPECT_EQ(spec->quantisation.act_order, c.act_order) << c.why;
  }
}

TEST(ModelConfig, HostileQuantizeConfigsAreRefused) {
  const std::pair<std::string, const char*> kTexts[] = {
      {" ", "not valid JSON"},
      {"{", "not valid JSON"},
      {"[]", "must be a JSON object"},
      {std::string(500000, '['), "not valid JSON"},
      {"{}", "bits: missing; must be a whole number from 1 to 16"},
      {R"({"bits":3})", "bits: 3; must be 4 or 8"},
      {R"({"bits":"4"})", "bits: \"4\""},
      {R"({"bits":4,"group_size":18446744073709551615})", "group_size: 184"},
      {R"({"bits":4,"group_size":0})",
       "group_size: 0; must be -1 or a multiple of 32"},
      {R"({"bits":4,"desc_act":"no"})", "desc_act: \"no\""},
      {R"({"bits":4,"quant_method":"awq"})",
       "quant_method: \"awq\"; must be gptq"},
      {R"({"bits":4,"checkpoint_format":"marlin"})", "checkpoint_format: "},
      {R"({"bits":4,"is_marlin_format":true})",
       "is_marlin_format: true; must be false"}};
  for (const auto& [text, complaint] : kTexts) {
    const absl::Status status =
        ParseModelSpec("d/config.json", Llama().dump(), "", "",
                       "d/quantize_config.json", text)
            .status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << complaint;
    const std::string message(status.message());
    EXPECT_THAT(message, testing::StartsWith("d/quantize_config.json: "));
    EXPECT_THAT(message, HasSubstr(complaint));
  }
}

TEST(ModelConfig, ScalesOfAKvCacheAreNoReasonToRefuse) {
  const json weights = {{"num_bits", 8}, {"type", "float"}};
  const json cache = {{"num_bits", 8}, {"type", "float"}};
  for (const bool scales : {false, true}) {
    json fp8 = {{"quant_method", "fp8"}};
    json compressed = {{"quant_method", "compressed-tensors"},
                       {"format", "float-quantized"},
                       {"config_groups", {{"group_0", {{"weights", weights}}}}},
                       {"kv_cache_scheme", nullptr}};
    if (scales) {
      fp8["kv_cache_scheme"] = "static";
      compressed["kv_cache_scheme"] = cache;
    }
    for (const json& config : {fp8, compressed}) {
      const auto spec = Parse(Quantised(config));
      ASSERT_TRUE(spec.ok()) << spec.status();
      EXPECT_EQ(spec->quantisation.kv_scales, scales);
      EXPECT_EQ(spec->Canonical(),
                Parse(Quantised({{"quant_method", "fp8"}}))->Canonical());
    }
  }
}

// Those of weights are in them; others would have to be computed.
TEST(ModelConfig, TransformsOfActivationsAreRefused) {
  const auto parse = [](const json& transforms) {
    return Parse(Quantised(
        {{"quant_method", "compressed-tensors"},
         {"format", "pack-quantized"},
         {"config_groups",
          {{"group_0", {{"weights", {{"num_bits", 4}, {"type", "int"}}}}}}},
         {"transform_config", transforms}}));
  };
  const auto applied = [](const json& list) {
    return json{
        {"config_groups", {{"R1", {{"type", "hadamard"}, {"apply", list}}}}}};
  };
  const json to_weights = {{{"location", "weight_output"}, {"targets", {"a"}}},
                           {{"location", "weight_input"}, {"targets", {"b"}}}};
  for (const json& served :
       {json(), json::object(), json{{"config_groups", json::object()}},
        applied(json::array()), applied(to_weights)}) {
    EXPECT_TRUE(parse(served).ok()) << served << ": " << parse(served).status();
  }
  json online = to_weights;
  online.push_back({{"location", "input"}, {"targets", {"c"}}});
  const std::pair<json, const char*> kRefused[] = {
      {applied(online),
       "location: \"input\"; must be weight_input or weight_o"},
      {applied({{{"location", "k_cache"}}}), "location: \"k_cache\""},
      {applied({{{"targets", {"c"}}}}), "location: missing"},
      {applied({"input"}), "location: \"input\""},
      {applied(1), "transform_config"},
      {json::array({1}), "transform_config"},
      {{{"config_groups", {1}}}, "transform_config"},
      {{{"config_groups", {{"R1", 1}}}}, "transform_config"}};
  for (const auto& [refused, complaint] : kRefused) {
    const absl::Status status = parse(refused).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr("quantization_config.transform_conf"),
                               HasSubstr(complaint)));
  }
}

TEST(ModelConfig, FilesOfTheDirectoryAreRead) {
  TempDir dir;
  EXPECT_EQ(LoadModelSpec(dir.path()).status().code(),
            absl::StatusCode::kNotFound);
  dir.Write("config.json", Llama().dump());
  EXPECT_TRUE(LoadModelSpec(dir.path()).ok());
  dir.Write("generation_config.json", R"({"eos_token_id":5})");
  EXPECT_THAT(LoadModelSpec(dir.path())->eos_ids, ElementsAre(5));
  dir.Write("generation_config.json", "");
  EXPECT_THAT(std::string(LoadModelSpec(dir.path()).status().message()),
              HasSubstr("generation_config.json: not valid JSON"));
  dir.Write("generation_config.json", "{}");
  dir.Write("quantize_config.json", R"({"bits":4,"group_size":64})");
  EXPECT_EQ(LoadModelSpec(dir.path())->quantisation.group, 64);
  dir.Write("quantize_config.json", "");
  EXPECT_THAT(std::string(LoadModelSpec(dir.path()).status().message()),
              HasSubstr("quantize_config.json: not valid JSON"));
  dir.Write("quantize_config.json", std::string(kMaxConfigBytes + 1, ' '));
  EXPECT_THAT(std::string(LoadModelSpec(dir.path()).status().message()),
              HasSubstr("at most 1048576 are read"));
  dir.Write("config.json", std::string(kMaxConfigBytes + 1, ' '));
  EXPECT_THAT(std::string(LoadModelSpec(dir.path()).status().message()),
              HasSubstr("at most 1048576 are read"));
}

}  // namespace
}  // namespace tandem::engine
