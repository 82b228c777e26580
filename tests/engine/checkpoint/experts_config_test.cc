// SPDX-License-Identifier: Apache-2.0
// What configs of models with experts say of them: which layers have some, how
// rows choose, and what all rows take beside them.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/configs.h"

namespace tandem::engine {
namespace {

using kernels::SharedExpert;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

json SomeQwen3Moe(const json& changes) {
  json config = With(Qwen3Moe(), {{"num_experts", 8},
                                  {"num_key_value_heads", 2},
                                  {"num_hidden_layers", 5}});
  config.update(changes);
  return config;
}

// transformers 4, 5, and both.
TEST(ExpertsConfig, Qwen3MoeCountsItsExpertsUnderEitherKey) {
  for (const json& changes :
       {json{{"num_experts", 8}}, json{{"num_local_experts", 8}},
        json{{"num_experts", 8}, {"num_local_experts", 8}}}) {
    json config = With(Qwen3Moe(), {{"num_key_value_heads", 2}});
    config.update(changes);
    const auto spec = Parse(config);
    ASSERT_TRUE(spec.ok()) << changes << ": " << spec.status();
    EXPECT_EQ(spec->routes.experts, 8);
  }
}

// Qwen3MoeDecoderLayer.
TEST(ExpertsConfig, LayersWithoutExpertsAreListedOrFollowAStep) {
  const auto dense = [](const json& changes) {
    const auto spec = Parse(SomeQwen3Moe(changes));
    EXPECT_TRUE(spec.ok()) << changes << ": " << spec.status();
    return spec.ok() ? spec->dense : std::vector<bool>{};
  };
  EXPECT_THAT(dense(json::object()), IsEmpty());
  EXPECT_THAT(dense({{"mlp_only_layers", nullptr}}), IsEmpty());
  EXPECT_THAT(dense({{"mlp_only_layers", {0, 3, 77}}}),
              ElementsAre(true, false, false, true, false));
  EXPECT_THAT(dense({{"decoder_sparse_step", 2}}),
              ElementsAre(true, false, true, false, true));
  EXPECT_THAT(dense({{"decoder_sparse_step", 2}, {"mlp_only_layers", {1}}}),
              ElementsAre(true, true, true, false, true));
}

TEST(ExpertsConfig, SizesAreOfTheLayersThatHaveThem) {
  const auto all = Parse(SomeQwen3Moe(json::object()));
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->intermediate_size, 0);
  EXPECT_EQ(all->expert_size, 32);
  EXPECT_EQ(all->dense_size(0), 0);
  const auto some = Parse(SomeQwen3Moe({{"mlp_only_layers", {0}}}));
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_FALSE(some->has_experts(0));
  EXPECT_TRUE(some->has_experts(1));
  EXPECT_EQ(some->dense_size(0), 128);
  EXPECT_EQ(some->dense_size(1), 0);
  EXPECT_EQ(some->widest_dense_size(), 128);
  EXPECT_THAT(some->Canonical(), HasSubstr(" dense=10000 expert_size=32"));
  EXPECT_NE(some->Canonical(), all->Canonical());
}

// Glm4MoeConfig, Glm4MoeTopkRouter.
TEST(ExpertsConfig, Glm4MoeChoosesBySigmoidsInGroups) {
  const auto plain = Parse(Glm4Moe());
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_TRUE(plain->routes.sigmoid);
  EXPECT_TRUE(plain->routes.normalise);
  EXPECT_EQ(plain->routes.scale, 1);
  EXPECT_EQ(plain->routes.groups, 1);
  EXPECT_EQ(plain->routes.shared, SharedExpert::kWhole);
  EXPECT_EQ(plain->shared_size, 32);
  EXPECT_EQ(plain->rope.rotary_dim, plain->head_dim / 2);
  EXPECT_EQ(plain->names.query_norm, "");
  EXPECT_FALSE(plain->qkv_bias);
  const auto all = Parse(With(Glm4Moe(), {{"first_k_dense_replace", 1},
                                          {"n_shared_experts", 2},
                                          {"routed_scaling_factor", 2.5},
                                          {"n_group", 2},
                                          {"topk_group", 1},
                                          {"use_qk_norm", true},
                                          {"attention_bias", true},
                                          {"norm_topk_prob", false}}));
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_THAT(all->dense, ElementsAre(true, false));
  EXPECT_EQ(all->shared_size, 64);
  EXPECT_EQ(all->dense_size(1), 64);
  EXPECT_FALSE(all->routes.normalise);
  EXPECT_EQ(all->routes.scale, 2.5f);
  EXPECT_EQ(all->routes.groups, 2);
  EXPECT_EQ(all->routes.chosen_groups, 1);
  EXPECT_EQ(all->names.query_norm, "self_attn.q_norm");
  EXPECT_TRUE(all->qkv_bias);
  EXPECT_FALSE(all->output_bias);
  EXPECT_THAT(all->Canonical(),
              HasSubstr(" shared=64 groups=1 of 2 scale=2.5 norms=1"));
  json config = Glm4Moe();
  config.erase("first_k_dense_replace");
  EXPECT_THAT(Parse(config)->dense, ElementsAre(true, false));
}

// Qwen2MoeConfig.
TEST(ExpertsConfig, Qwen2MoeHasAGatedOneForAllRows) {
  json config = With(Qwen3Moe(), {{"architectures", {"Qwen2MoeForCausalLM"}},
                                  {"num_experts", 8},
                                  {"num_key_value_heads", 2},
                                  {"shared_expert_intermediate_size", 40}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->routes.shared, SharedExpert::kGated);
  EXPECT_EQ(spec->shared_size, 40);
  EXPECT_EQ(spec->routes.logits(), 9);
  EXPECT_TRUE(spec->qkv_bias);
  EXPECT_FALSE(spec->routes.normalise);
  EXPECT_FALSE(Parse(With(config, {{"qkv_bias", false}}))->qkv_bias);
}

// Ernie4_5_MoeConfig, Ernie4_5_MoeDecoderLayer.
TEST(ExpertsConfig, Ernie45MoeHasExpertsFromOneLayerToAnother) {
  const auto spec = Parse(With(Ernie4_5Moe(), {{"num_hidden_layers", 6},
                                               {"moe_layer_start_index", 2},
                                               {"moe_layer_end_index", 4},
                                               {"num_nextn_predict_layers", 1},
                                               {"moe_layer_interval", 1}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(spec->dense, ElementsAre(true, true, false, false, false, true));
  EXPECT_EQ(spec->routes.chosen, 3);
  EXPECT_EQ(spec->shared_size, 64);
  EXPECT_FALSE(spec->routes.sigmoid);
  EXPECT_TRUE(spec->routes.normalise);
  EXPECT_TRUE(spec->rope.interleaved);
  EXPECT_EQ(spec->draft_layers, 1);
  const auto each_second = Parse(With(
      Ernie4_5Moe(), {{"num_hidden_layers", 6}, {"moe_layer_interval", 2}}));
  ASSERT_TRUE(each_second.ok()) << each_second.status();
  EXPECT_THAT(each_second->dense,
              ElementsAre(true, false, true, false, true, false));
}

// MiniMaxM2Config.
TEST(ExpertsConfig, MiniMaxM2TurnsAsManyDimensionsAsItSays) {
  const json config =
      With(Mixtral(), {{"architectures", {"MiniMaxM2ForCausalLM"}},
                       {"head_dim", 24},
                       {"rotary_dim", 16}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->rope.rotary_dim, 16);
  EXPECT_TRUE(spec->wide_norms);
  EXPECT_TRUE(spec->routes.sigmoid);
  EXPECT_EQ(spec->routes.shared, SharedExpert::kNone);
  EXPECT_EQ(
      Parse(With(config, {{"partial_rotary_factor", 0.25}}))->rope.rotary_dim,
      6);
}

// Dots1Config.
TEST(ExpertsConfig, Dots1HasWindowsInItsLaterLayersUnlessThereAreNone) {
  json config = With(Glm4Moe(), {{"architectures", {"Dots1ForCausalLM"}},
                                 {"sliding_window", 16},
                                 {"max_window_layers", 1}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->window, 16);
  EXPECT_THAT(spec->windowed, ElementsAre(false, true));
  EXPECT_THAT(spec->dense, IsEmpty());
  EXPECT_FALSE(spec->routes.normalise);
  config["sliding_window"] = nullptr;
  EXPECT_EQ(Parse(config)->window, 0);
}

// GraniteMoeSharedConfig.
TEST(ExpertsConfig, GraniteMayHaveAnExpertThatAllRowsTake) {
  const auto parse = [](const json& changes) {
    json config =
        With(Llama(), {{"architectures", {"GraniteMoeSharedForCausalLM"}},
                       {"num_local_experts", 6},
                       {"num_experts_per_tok", 2}});
    config.update(changes);
    return Parse(config);
  };
  const auto without = parse(json::object());
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ(without->shared_size, 0);
  EXPECT_EQ(without->routes.shared, SharedExpert::kNone);
  EXPECT_TRUE(without->routes.normalise);
  const auto spec = parse(
      {{"shared_intermediate_size", 40}, {"position_embedding_type", "rope"}});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->shared_size, 40);
  EXPECT_EQ(spec->routes.shared, SharedExpert::kWhole);
  EXPECT_NE(spec->Canonical(), without->Canonical());
  EXPECT_THAT(
      std::string(
          parse({{"position_embedding_type", "nope"}}).status().message()),
      HasSubstr("position_embedding_type: \"nope\"; must be rope"));
}

// HunYuanMoEV1Config, with keys of the published configs that its model does
// not read.
TEST(ExpertsConfig, HunyuansSayAllOfItForEachLayer) {
  const json config =
      With(Llama(), {{"architectures", {"HunYuanMoEV1ForCausalLM"}},
                     {"intermediate_size", 40},
                     {"num_experts", 6},
                     {"moe_topk", {2, 2}},
                     {"moe_intermediate_size", {40, 40}},
                     {"num_shared_expert", {1, 1}},
                     {"moe_layer_num_skipped", 0},
                     {"use_mixed_mlp_moe", true}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->routes.experts, 6);
  EXPECT_EQ(spec->routes.chosen, 2);
  EXPECT_TRUE(spec->routes.normalise);
  EXPECT_EQ(spec->routes.shared, SharedExpert::kWhole);
  EXPECT_EQ(spec->expert_size, 40);
  EXPECT_EQ(spec->shared_size, 40);
  EXPECT_TRUE(spec->turned_norms);
  EXPECT_EQ(Parse(With(config, {{"moe_topk", 3}}))->routes.chosen, 3);
  const struct {
    json changes;
    const char* complaint;
  } cases[] = {
      {{{"moe_topk", {2, 3}}},
       "moe_topk: an array of 2; must be one number for all layers"},
      {{{"moe_topk", json::array()}}, "moe_topk: an array of 0; must be one"},
      {{{"moe_topk", {2, 7}}}, "moe_topk: an array of 2; must be a list of"},
      {{{"moe_intermediate_size", 32}},
       "moe_intermediate_size: 32; must be 40, in all layers, or left out"},
      {{{"num_shared_expert", {2, 2}}},
       "num_shared_expert: an array of 2; must be 1, in all layers"},
      {{{"moe_layer_num_skipped", 1}}, "moe_layer_num_skipped: 1; must be 0"},
      {{{"use_mixed_mlp_moe", false}}, "use_mixed_mlp_moe: false; must be"},
      {{{"use_cla", true}}, "use_cla: true; must be false or left out"}};
  for (const auto& c : cases) {
    EXPECT_THAT(std::string(Parse(With(config, c.changes)).status().message()),
                HasSubstr(c.complaint));
  }
}

}  // namespace
}  // namespace tandem::engine
