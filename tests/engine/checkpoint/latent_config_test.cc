// SPDX-License-Identifier: Apache-2.0
// Configs of families with latent attention: DeepSeek's, and GLM's that has it.

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/configs.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// DeepseekV2Config.
TEST(LatentConfig, DeepseekV2TakesQueriesFromTheHiddenStateWhereNoRankIsSaid) {
  const auto spec = Parse(DeepseekV2());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->latent());
  EXPECT_EQ(spec->kv_rank, 32);
  EXPECT_EQ(spec->query_rank, 0);
  EXPECT_EQ(spec->head_dim, 32 + 8);
  EXPECT_EQ(spec->query_dim(), 24);
  EXPECT_EQ(spec->output_dim(), 16);
  EXPECT_EQ(spec->rope.rotary_dim, 8);
  EXPECT_TRUE(spec->rope.trailing);
  EXPECT_TRUE(spec->rope.interleaved);
  EXPECT_EQ(spec->kv_heads, 1);
  EXPECT_EQ(spec->attention_scale, 1 / std::sqrt(24.0));
  EXPECT_FALSE(spec->routes.sigmoid);
  EXPECT_FALSE(spec->routes.normalise);
  EXPECT_EQ(spec->routes.groups, 1);
  EXPECT_EQ(spec->shared_size, 64);
  EXPECT_EQ(spec->names.choice_bias, "");
  EXPECT_THAT(
      spec->Canonical(),
      HasSubstr(" latent=32 queries=0 still=16 values=16 turned=neighbours"));
  const auto ranked = Parse(With(DeepseekV2(), {{"q_lora_rank", 48}}));
  ASSERT_TRUE(ranked.ok()) << ranked.status();
  EXPECT_EQ(ranked->query_rank, 48);
  // Nulls as in published files; what transformers 5 adds when it saves.
  EXPECT_TRUE(Parse(With(DeepseekV2(), {{"q_lora_rank", nullptr},
                                        {"n_group", nullptr},
                                        {"topk_group", nullptr},
                                        {"head_dim", 8},
                                        {"qk_head_dim", 24},
                                        {"moe_layer_freq", 1}}))
                  .ok());
}

// DeepseekV2TopkRouter.
TEST(LatentConfig, DeepseekV2ComparesTheBestOfGroups) {
  const auto spec =
      Parse(With(DeepseekV2(), {{"topk_method", "group_limited_greedy"},
                                {"n_group", 4},
                                {"topk_group", 2},
                                {"routed_scaling_factor", 16.0}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->routes.groups, 4);
  EXPECT_EQ(spec->routes.chosen_groups, 2);
  EXPECT_EQ(spec->routes.group_scores, 1);
  EXPECT_EQ(spec->routes.scale, 16);
  EXPECT_THAT(spec->Canonical(), HasSubstr(" groups=2 of 4 scale=16"));
  const auto greedy = Parse(
      With(DeepseekV2(),
           {{"topk_method", "greedy"}, {"n_group", 4}, {"topk_group", 2}}));
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  EXPECT_EQ(greedy->routes.groups, 1);
  EXPECT_THAT(greedy->Canonical(), Not(HasSubstr("groups=")));
}

// DeepseekV3Config, Glm4MoeLiteConfig.
TEST(LatentConfig, WhatIsLeftOutOfRoutesIsTheFamilysOwn) {
  const auto read = [](const char* family, const json& changes) {
    return Parse(With(With(DeepseekV2(), {{"architectures", {family}},
                                          {"q_lora_rank", 40},
                                          {"n_routed_experts", 16}}),
                      changes));
  };
  const auto v3 = read("DeepseekV3ForCausalLM", json::object());
  ASSERT_TRUE(v3.ok()) << v3.status();
  EXPECT_EQ(v3->routes.groups, 8);
  EXPECT_EQ(v3->routes.chosen_groups, 4);
  EXPECT_EQ(v3->routes.scale, 2.5f);
  const auto two = read("DeepseekV3ForCausalLM", {{"n_group", 2}});
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(two->routes.chosen_groups, 2);
  const auto glm = read("Glm4MoeLiteForCausalLM", json::object());
  ASSERT_TRUE(glm.ok()) << glm.status();
  EXPECT_EQ(glm->routes.groups, 1);
  EXPECT_EQ(glm->routes.scale, 1.8f);
}

// DeepseekV3Config, DeepseekV3TopkRouter; yarn_apply_mscale.
TEST(LatentConfig, DeepseekV3ScalesScoresTwiceWhereYarnDoes) {
  const json config =
      With(DeepseekV2(), {{"architectures", {"DeepseekV3ForCausalLM"}},
                          {"q_lora_rank", 40},
                          {"n_group", 4},
                          {"topk_group", 2},
                          {"num_hidden_layers", 5},
                          {"topk_method", "noaux_tc"},
                          {"scoring_func", "sigmoid"}});
  const auto plain = Parse(Without(config, "first_k_dense_replace"));
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_TRUE(plain->routes.sigmoid);
  EXPECT_TRUE(plain->routes.normalise);
  EXPECT_EQ(plain->routes.group_scores, 2);
  EXPECT_THAT(plain->dense, ElementsAre(true, true, true, false, false));
  EXPECT_EQ(plain->names.choice_bias, "mlp.gate.e_score_correction_bias");
  json yarn = {{"type", "yarn"},
               {"factor", 40},
               {"original_max_position_embeddings", 4096},
               {"mscale", 1.0},
               {"mscale_all_dim", 1.0}};
  const auto scaled = Parse(With(
      config, {{"rope_scaling", yarn}, {"max_position_embeddings", 163840}}));
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  const double each = 0.1 * std::log(40.0) + 1;
  EXPECT_EQ(scaled->max_positions, 163840);
  EXPECT_EQ(scaled->rope.attention_factor, 1);
  EXPECT_EQ(scaled->attention_scale, each * each / std::sqrt(24.0));
  EXPECT_NE(scaled->Canonical(), plain->Canonical());
  yarn.erase("mscale_all_dim");
  const auto once = Parse(With(config, {{"rope_scaling", yarn}}));
  ASSERT_TRUE(once.ok()) << once.status();
  EXPECT_EQ(once->attention_scale, 1 / std::sqrt(24.0));
  EXPECT_EQ(once->rope.attention_factor, each);
  const auto halves = Parse(With(config, {{"rope_interleave", false}}));
  ASSERT_TRUE(halves.ok()) << halves.status();
  EXPECT_FALSE(halves->rope.interleaved);
  EXPECT_THAT(halves->Canonical(), HasSubstr(" turned=halves"));
}

// Glm4MoeLiteConfig.
TEST(LatentConfig, Glm4MoeLiteSaysOfEachLayerWhetherItHasExperts) {
  json config = With(Without(DeepseekV2(), "first_k_dense_replace"),
                     {{"architectures", {"Glm4MoeLiteForCausalLM"}},
                      {"num_hidden_layers", 3},
                      {"num_attention_heads", 3},
                      {"num_key_value_heads", 3},
                      {"v_head_dim", 24}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->heads, 3);
  EXPECT_EQ(spec->value_dim, spec->query_dim());
  EXPECT_THAT(spec->dense, ElementsAre(true, false, false));
  config["mlp_layer_types"] = {"sparse", "dense", "sparse"};
  EXPECT_THAT(Parse(config)->dense, ElementsAre(false, true, false));
}

// MiniCPM3Config, MiniCPM3DecoderLayer.
TEST(LatentConfig, MiniCpm3ScalesByItsDepth) {
  const json config = With(Llama(), {{"architectures", {"MiniCPM3ForCausalLM"}},
                                     {"hidden_size", 64},
                                     {"num_hidden_layers", 4},
                                     {"num_attention_heads", 4},
                                     {"num_key_value_heads", 4},
                                     {"kv_lora_rank", 32},
                                     {"qk_nope_head_dim", 16},
                                     {"qk_rope_head_dim", 8},
                                     {"rms_norm_eps", 1e-5}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_FALSE(spec->rope.interleaved);
  EXPECT_EQ(spec->value_dim, 16);
  EXPECT_DOUBLE_EQ(spec->embedding_scale, 12 / 0.7);
  EXPECT_DOUBLE_EQ(spec->norm_eps, 1e-5 / 0.49);
  EXPECT_EQ(spec->logit_scale, 256.0 / 64);
  EXPECT_EQ(spec->attention_scale, 1 / std::sqrt(24.0));
  const auto still = Parse(With(config, {{"scale_depth", nullptr},
                                         {"dim_model_base", nullptr},
                                         {"scale_emb", 1}}));
  ASSERT_TRUE(still.ok()) << still.status();
  EXPECT_EQ(still->embedding_scale, 1);
  EXPECT_EQ(still->norm_eps, 1e-5);
  EXPECT_EQ(still->logit_scale, 1);
}

TEST(LatentConfig, WhatDoesNotFitIsRefused) {
  const struct {
    const char* why;
    json config;
    const char* complaint;
  } cases[] = {
      {"no rank", Without(DeepseekV2(), "kv_lora_rank"),
       "kv_lora_rank: missing"},
      {"an odd rank", With(DeepseekV2(), {{"kv_lora_rank", 36}}),
       "kv_lora_rank: 36; must be a multiple of 8"},
      {"a rank of queries beyond all bounds",
       With(DeepseekV2(), {{"q_lora_rank", 1 << 24}}), "q_lora_rank: 16777216"},
      {"fewer heads of keys", With(DeepseekV2(), {{"num_key_value_heads", 2}}),
       "num_key_value_heads: 2; must be 4, as num_attention_heads"},
      {"more numbers than kernels take",
       With(DeepseekV2(), {{"kv_lora_rank", 576}}),
       "kv_lora_rank + qk_rope_head_dim: 584; must be at most 576"},
      {"values of nothing", With(DeepseekV2(), {{"v_head_dim", 0}}),
       "v_head_dim: 0"},
      {"experts in some layers", With(DeepseekV2(), {{"moe_layer_freq", 2}}),
       "moe_layer_freq: 2"},
      {"another choice", With(DeepseekV2(), {{"topk_method", "noaux_tc"}}),
       "topk_method: \"noaux_tc\"; must be greedy or group_limited_greedy"},
      {"other scores", With(DeepseekV2(), {{"scoring_func", "sigmoid"}}),
       "scoring_func: \"sigmoid\"; must be softmax or left out"},
      {"weights that add up to one",
       With(DeepseekV2(), {{"norm_topk_prob", true}}),
       "norm_topk_prob: true; must be false or left out"},
      {"layers of no kind",
       With(DeepseekV2(), {{"mlp_layer_types", {"sparse", "wide"}}}),
       "mlp_layer_types: \"wide\"; must be a list of 2 names, dense or sparse"},
      {"too few kinds", With(DeepseekV2(), {{"mlp_layer_types", {"sparse"}}}),
       "mlp_layer_types: an array of 1; must be a list of 2 names"}};
  for (const auto& c : cases) {
    const auto spec = Parse(c.config);
    EXPECT_THAT(std::string(spec.status().message()), HasSubstr(c.complaint))
        << c.why;
  }
}

}  // namespace
}  // namespace tandem::engine
