// SPDX-License-Identifier: Apache-2.0
// Gemma 4: layers that see all have heads of their own.

#include <string>

#include "gtest/gtest.h"
#include "tests/engine/checkpoint/configs.h"

namespace tandem::engine {
namespace {

json Rope() {
  return {
      {"full_attention",
       {{"rope_type", "proportional"},
        {"partial_rotary_factor", 0.25},
        {"rope_theta", 1e6}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
}

// The shape of the 31B.
json Dense() {
  return {{"architectures", {"Gemma4ForConditionalGeneration"}},
          {"vision_config", {{"hidden_size", 16}}},
          {"eos_token_id", {1, 106}},
          {"text_config",
           {{"model_type", "gemma4_text"},
            {"hidden_size", 5376},
            {"intermediate_size", 21504},
            {"num_hidden_layers", 60},
            {"num_attention_heads", 32},
            {"num_key_value_heads", 16},
            {"num_global_key_value_heads", 4},
            {"attention_k_eq_v", true},
            {"sliding_window", 1024},
            {"final_logit_softcapping", 30.0},
            {"use_bidirectional_attention", "vision"},
            {"hidden_size_per_layer_input", 0},
            {"rope_parameters", Rope()}}}};
}

json WithText(const char* key, const json& value) {
  json config = Dense();
  config["text_config"][key] = value;
  return config;
}

TEST(Gemma4Config, LayersThatSeeAllHaveFewerAndWiderHeads) {
  const auto spec = Parse(Dense());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->is_windowed(4));
  EXPECT_FALSE(spec->is_windowed(5));
  EXPECT_EQ(spec->kv_heads_of(0), (ModelSpec::KvHeads{16, 256}));
  EXPECT_EQ(spec->kv_heads_of(5), (ModelSpec::KvHeads{4, 512}));
  EXPECT_FALSE(spec->values_are_keys(0));
  EXPECT_TRUE(spec->values_are_keys(5));
  EXPECT_EQ(spec->qkv_rows(0), (32 + 2 * 16) * 256);
  EXPECT_EQ(spec->qkv_rows(5), (32 + 2 * 4) * 512);
  EXPECT_EQ(spec->widest_qkv_rows(), 40 * 512);
  // A quarter of 512 dimensions turns, a quarter of their frequencies.
  EXPECT_EQ(spec->rope.kind, RopeSpec::Kind::kProportional);
  EXPECT_EQ(spec->rope.rotary_dim, 128);
  EXPECT_EQ(spec->rope.theta, 1e6);
  EXPECT_EQ(spec->local_rope.kind, RopeSpec::Kind::kDefault);
  EXPECT_EQ(spec->local_rope.rotary_dim, 0);
  EXPECT_EQ(spec->local_rope.theta, 1e4);
  EXPECT_EQ(spec->attention_scale, 1);
  EXPECT_EQ(spec->logit_cap, 30);
  EXPECT_TRUE(spec->normed_values);
}

TEST(Gemma4Config, APairTurnsAtLeast) {
  const auto turned = [](double factor) {
    json config = Dense();
    config["text_config"]["rope_parameters"]["full_attention"]
          ["partial_rotary_factor"] = factor;
    return Parse(config);
  };
  EXPECT_EQ(turned(0.0099)->rope.rotary_dim, 4) << "5 of 512";
  EXPECT_EQ(turned(1)->rope.rotary_dim, 0) << "all";
  const auto none = turned(0);
  ASSERT_FALSE(none.ok());
  EXPECT_NE(std::string(none.status().message())
                .find("partial_rotary_factor: 0; must be an even number of "
                      "the 512 dimensions"),
            std::string::npos)
      << none.status();
}

TEST(Gemma4Config, TheLastLayerSeesAll) {
  const auto spec = Parse(WithText("num_hidden_layers", 9));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->is_windowed(7));
  EXPECT_FALSE(spec->is_windowed(8));
}

// Only where keys are values does it count.
TEST(Gemma4Config, OtherLayersHaveAsManyKvHeadsUnlessKeysAreValues) {
  const auto spec = Parse(WithText("attention_k_eq_v", false));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->kv_heads_of(5), (ModelSpec::KvHeads{16, 512}));
  EXPECT_NE(spec->Canonical(), Parse(Dense())->Canonical());
}

TEST(Gemma4Config, FilesOfTransformers5SayItLayerByLayer) {
  json config = WithText("num_hidden_layers", 7);
  json& text = config["text_config"];
  const auto expected = Parse(config);
  ASSERT_TRUE(expected.ok()) << expected.status();
  text.erase("num_global_key_value_heads");
  for (const char* full : {"5", "6"}) {
    text["per_layer_config"][full] = {{"head_dim", 512},
                                      {"num_key_value_heads", 4}};
  }
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->Canonical(), expected->Canonical());
  // Of ten layers and more the first ones' numbers begin with a zero.
  json padded = config;
  json& layers = padded["text_config"]["per_layer_config"];
  layers = {{"05", layers["5"]}, {"06", layers["6"]}};
  EXPECT_EQ(Parse(padded)->Canonical(), expected->Canonical());
  const struct {
    const char* layer;
    json value;
    const char* message;
  } cases[] = {
      {"6", {{"head_dim", 256}}, "per_layer_config.6: an object of 1; must be"},
      {"0", {{"head_dim", 512}}, "per_layer_config.0: an object of 1; must be"},
      {"5",
       {{"sliding_window", 5}},
       "per_layer_config.5.sliding_window: 5; must be head_dim or"},
      {"5", {{"head_dim", -8}}, "per_layer_config.5.head_dim: -8; must be"}};
  for (const auto& c : cases) {
    json bad = config;
    bad["text_config"]["per_layer_config"][c.layer] = c.value;
    const auto refused = Parse(bad);
    ASSERT_FALSE(refused.ok()) << c.message;
    EXPECT_NE(std::string(refused.status().message()).find(c.message),
              std::string::npos)
        << refused.status();
  }
}

TEST(Gemma4Config, LayersThatAllSeeAllHaveTheirHeads) {
  const auto spec = Parse(WithText("layer_types", json(60, "full_attention")));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->mixed_heads());
  EXPECT_EQ(spec->kv_heads_of(0), (ModelSpec::KvHeads{4, 512}));
}

// One head of 136 has more numbers than 16 of 8, and fewer scales.
TEST(Gemma4Config, NeitherKindOfHeadsIsLargerInOneFormatAlone) {
  json config = WithText("head_dim", 8);
  config["text_config"]["num_global_key_value_heads"] = 1;
  config["text_config"]["global_head_dim"] = 136;
  const auto refused = Parse(config);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(std::string(refused.status().message())
                .find("text_config.global_head_dim: 136; must be one with "
                      "which keys of layers that see all take more or less "
                      "than those of 16 heads of 8 in every format"),
            std::string::npos)
      << refused.status();
  // Of as many numbers more heads take more.
  const auto equal = Parse(WithText("num_global_key_value_heads", 8));
  ASSERT_TRUE(equal.ok()) << equal.status();
  EXPECT_TRUE(equal->full_take_less());
}

json Experts() {
  json config = Dense();
  config["text_config"].update({{"enable_moe_block", true},
                                {"num_experts", 128},
                                {"top_k_experts", 8},
                                {"moe_intermediate_size", 704}});
  return config;
}

// Beside the layer that is always there.
TEST(Gemma4Config, ExpertsAreThereWhereTheConfigSaysSo) {
  const auto spec = Parse(Experts());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->routes.experts, 128);
  EXPECT_EQ(spec->routes.chosen, 8);
  EXPECT_TRUE(spec->routes.normalise);
  EXPECT_EQ(spec->routes.shared, kernels::SharedExpert::kNone);
  EXPECT_EQ(spec->expert_size, 704);
  EXPECT_EQ(spec->dense_size(0), 21504);
  json denied = Experts();
  denied["text_config"]["enable_moe_block"] = false;
  const auto without = Parse(denied);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_FALSE(without->has_experts(0));
  EXPECT_EQ(without->dense_size(0), 21504);
  EXPECT_NE(without->Canonical(), spec->Canonical());
  // Its products may be quantised, those of experts in one tensor not.
  const json gptq = {{"quant_method", "gptq"}, {"bits", 4}};
  denied["quantization_config"] = gptq;
  EXPECT_TRUE(Parse(denied).ok());
  json coded = Experts();
  coded["quantization_config"] = gptq;
  EXPECT_FALSE(Parse(coded).ok());
}

// The shape of E2B.
json Few() {
  json config = Dense();
  json& text = config["text_config"];
  text.update({{"hidden_size", 1536},
               {"intermediate_size", 6144},
               {"num_hidden_layers", 35},
               {"num_attention_heads", 8},
               {"num_key_value_heads", 1},
               {"attention_k_eq_v", false},
               {"sliding_window", 512},
               {"num_kv_shared_layers", 20},
               {"use_double_wide_mlp", true}});
  text.erase("num_global_key_value_heads");
  text.erase("hidden_size_per_layer_input");
  text["layer_types"] = json::array();
  for (int i = 0; i < 35; ++i) {
    text["layer_types"].push_back(i % 5 == 4 ? "full_attention"
                                             : "sliding_attention");
  }
  return config;
}

TEST(Gemma4Config, SmallModelsShareKvAndAreToldOfTokens) {
  const auto spec = Parse(Few());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->kv_layers(), 15);
  EXPECT_TRUE(spec->has_kv(14));
  EXPECT_FALSE(spec->has_kv(15));
  EXPECT_EQ(spec->kv_source(15), 13);
  EXPECT_EQ(spec->kv_source(19), 14);
  EXPECT_EQ(spec->qkv_rows(13), (8 + 2) * 256);
  EXPECT_EQ(spec->qkv_rows(15), 8 * 256);
  EXPECT_EQ(spec->qkv_rows(19), 8 * 512);
  EXPECT_EQ(spec->dense_size(14), 6144);
  EXPECT_EQ(spec->dense_size(15), 12288);
  EXPECT_EQ(spec->widest_dense_size(), 12288);
  EXPECT_EQ(spec->told, 256) << "where it is left out";
  EXPECT_EQ(spec->told_vocab, 262144);
  EXPECT_EQ(spec->told_numbers(), 35 * 256);
  const auto with = [](const char* key, const json& value) {
    json config = Few();
    config["text_config"][key] = value;
    const auto other = Parse(config);
    return other.ok() ? other->Canonical() : other.status().ToString();
  };
  for (const auto& other :
       {with("num_kv_shared_layers", 19), with("use_double_wide_mlp", false),
        with("hidden_size_per_layer_input", 0)}) {
    EXPECT_NE(other, spec->Canonical());
  }
  // Without layers that share nothing is twice as wide.
  EXPECT_EQ(with("num_kv_shared_layers", 0), [&] {
    json config = Few();
    config["text_config"]["num_kv_shared_layers"] = 0;
    config["text_config"]["use_double_wide_mlp"] = false;
    return Parse(config)->Canonical();
  }());
}

TEST(Gemma4Config, LayersAreToldOfEveryToken) {
  json config = Few();
  config["text_config"]["vocab_size_per_layer_input"] = 262143;
  const auto refused = Parse(config);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(std::string(refused.status().message())
                .find("text_config.vocab_size_per_layer_input: 262143; must be "
                      "at least vocab_size, 262144"),
            std::string::npos)
      << refused.status();
}

TEST(Gemma4Config, WhatIsNotServedIsRefused) {
  const struct {
    const char* key;
    json value;
    const char* message;
  } cases[] = {
      {"hidden_size_per_layer_input", -1,
       "text_config.hidden_size_per_layer_input: -1; must be"},
      {"num_kv_shared_layers", 60,
       "text_config.num_kv_shared_layers: 60; must be"},
      {"num_kv_shared_layers", 55,
       "text_config.num_kv_shared_layers: 55; must be so many that layers "
       "before them see as much as each"},
      {"enable_moe_block", true, "text_config.num_experts: missing"},
      {"use_bidirectional_attention", "all",
       "text_config.use_bidirectional_attention: \"all\"; must be"},
      {"global_head_dim", 500,
       "text_config.global_head_dim: 500; must be a "
       "multiple of 8"},
      {"global_head_dim", 584, "text_config.global_head_dim: 584; must be "},
      {"num_global_key_value_heads", 3,
       "text_config.num_global_key_value_heads: 3; must be a divisor of "
       "num_attention_heads, 32"},
      {"rope_parameters", nullptr,
       "text_config.rope_parameters: missing; must be an object"},
  };
  for (const auto& c : cases) {
    const auto spec = Parse(WithText(c.key, c.value));
    ASSERT_FALSE(spec.ok()) << c.key;
    EXPECT_NE(std::string(spec.status().message()).find(c.message),
              std::string::npos)
        << spec.status();
  }
}

}  // namespace
}  // namespace tandem::engine
