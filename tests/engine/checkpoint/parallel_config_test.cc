// SPDX-License-Identifier: Apache-2.0
// Configs of families whose attention and feed-forward part take the same
// rows: Cohere's, Phi's and, where they say so, StableLM's.

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint/configs.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

json Of(const char* architecture, const json& changes = json::object()) {
  json config = With(Llama(), {{"architectures", {architecture}},
                               {"layer_norm_eps", 2e-5},
                               {"num_key_value_heads", 2}});
  config.update(changes);
  return config;
}

// CohereConfig, CohereDecoderLayer.
TEST(ParallelConfig, CohereScalesItsLogitsAndCentresItsNorms) {
  const auto spec = Parse(Of("CohereForCausalLM"));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->parallel);
  EXPECT_EQ(spec->norm, NormKind::kCentred);
  EXPECT_EQ(spec->norm_eps, 2e-5);
  EXPECT_EQ(spec->logit_scale, 0.0625);
  EXPECT_TRUE(spec->rope.interleaved);
  EXPECT_EQ(spec->names.mlp_norm, "");
  EXPECT_THAT(spec->Canonical(), HasSubstr(" parallel=1"));
  const auto other = Parse(Of(
      "CohereForCausalLM", {{"logit_scale", 0.5}, {"attention_bias", true}}));
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->logit_scale, 0.5);
  EXPECT_TRUE(other->qkv_bias && other->output_bias);
  EXPECT_FALSE(other->mlp_bias);
  EXPECT_THAT(
      std::string(Parse(Of("Cohere2ForCausalLM", {{"use_qk_norm", true}}))
                      .status()
                      .message()),
      HasSubstr("use_qk_norm: true; must be false or left out"));
}

// CohereAttention, StableLmAttention.
TEST(ParallelConfig, HeadsHaveNormsWhereTheConfigSaysSo) {
  for (const auto& [architecture, key] :
       {std::pair("CohereForCausalLM", "use_qk_norm"),
        std::pair("StableLmForCausalLM", "qk_layernorm")}) {
    SCOPED_TRACE(architecture);
    const auto plain = Parse(Of(architecture, {{key, false}}));
    ASSERT_TRUE(plain.ok()) << plain.status();
    EXPECT_FALSE(plain->centres_heads());
    EXPECT_EQ(plain->names.key_norm, "");
    const auto normed = Parse(Of(architecture, {{key, true}}));
    ASSERT_TRUE(normed.ok()) << normed.status();
    EXPECT_TRUE(normed->centres_heads());
    EXPECT_THAT(normed->Canonical(), HasSubstr(" head_norms=1"));
    EXPECT_THAT(plain->Canonical(), Not(HasSubstr("head_norms")));
  }
}

// Cohere2Config, Cohere2Attention.
TEST(ParallelConfig, OfCohere2LayersTurnThatHaveAWindow) {
  const auto spec = Parse(Of("Cohere2ForCausalLM", {{"num_hidden_layers", 5},
                                                    {"sliding_window", 16}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->window, 16);
  EXPECT_THAT(spec->windowed, ElementsAre(true, true, true, false, true));
  EXPECT_THAT(spec->no_rope, ElementsAre(false, false, false, true, false));
  // One of the whole context is none, and turns what it turned.
  const auto wide = Parse(Of("Cohere2ForCausalLM", {{"num_hidden_layers", 5},
                                                    {"sliding_window", 8192}}));
  ASSERT_TRUE(wide.ok()) << wide.status();
  EXPECT_EQ(wide->window, 0);
  EXPECT_EQ(wide->no_rope, spec->no_rope);
  const auto none =
      Parse(Of("Cohere2ForCausalLM", {{"sliding_window", nullptr}}));
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_THAT(none->no_rope, ElementsAre(true, true));
}

// PhiConfig.
TEST(ParallelConfig, PhiHasBiasesEverywhereAndTurnsInHalf) {
  json config = Of("PhiForCausalLM", {{"num_key_value_heads", nullptr}});
  config.erase("hidden_act");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->parallel);
  EXPECT_TRUE(spec->qkv_bias && spec->output_bias && spec->mlp_bias);
  EXPECT_TRUE(spec->head_bias);
  EXPECT_FALSE(spec->is_gated());
  EXPECT_EQ(spec->kv_heads, spec->heads);
  EXPECT_EQ(spec->rope.rotary_dim, spec->head_dim / 2);
  EXPECT_EQ(spec->activation, kernels::Activation::kGeluTanh);
  EXPECT_THAT(std::string(Parse(Of("PhiForCausalLM", {{"qk_layernorm", true}}))
                              .status()
                              .message()),
              HasSubstr("qk_layernorm: true"));
}

// GPTNeoXConfig.
TEST(ParallelConfig, GptNeoXHasANormForEachPart) {
  json config = Of("GPTNeoXForCausalLM", {{"rotary_emb_base", 20000},
                                          {"num_key_value_heads", nullptr}});
  config.erase("hidden_act");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->parallel);
  EXPECT_EQ(spec->names.mlp_norm, "post_attention_layernorm");
  EXPECT_TRUE(spec->qkv_bias && spec->output_bias && spec->mlp_bias);
  EXPECT_EQ(spec->activation, kernels::Activation::kGelu);
  EXPECT_EQ(spec->rope.theta, 20000);
  EXPECT_EQ(spec->rope.rotary_dim, spec->head_dim / 4);
  config.update({{"use_parallel_residual", false},
                 {"attention_bias", false},
                 {"rotary_pct", 0.5}});
  const auto other = Parse(config);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_FALSE(other->parallel || other->qkv_bias || other->output_bias);
  EXPECT_TRUE(other->mlp_bias);
  EXPECT_EQ(other->rope.rotary_dim, other->head_dim / 2);
  EXPECT_NE(other->Canonical(), spec->Canonical());
  config["partial_rotary_factor"] = 0.25;
  EXPECT_THAT(std::string(Parse(config).status().message()),
              HasSubstr("partial_rotary_factor: 0.25; must be 0.5"));
}

// FalconConfig, FalconAttention, FalconDecoderLayer.
TEST(ParallelConfig, FalconsLayersAreOfAnOldKindOrANewOne) {
  const auto of = [](const json& changes) {
    json config = Of("FalconForCausalLM",
                     {{"layer_norm_epsilon", 2e-5}, {"num_kv_heads", 2}});
    config.update(changes);
    return config;
  };
  const auto old = Parse(of({{"alibi", false}, {"bias", true}}));
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_TRUE(old->parallel && old->tied_head);
  EXPECT_EQ(old->kv_heads, 1);
  EXPECT_EQ(old->names.input_norm, "input_layernorm");
  EXPECT_EQ(old->names.mlp_norm, "");
  EXPECT_EQ(old->intermediate_size, 4 * old->hidden_size);
  EXPECT_EQ(old->activation, kernels::Activation::kGelu);
  EXPECT_EQ(old->norm_eps, 2e-5);
  EXPECT_TRUE(old->qkv_bias && old->output_bias && old->mlp_bias);
  const auto serial =
      Parse(of({{"parallel_attn", false}, {"multi_query", false}}));
  ASSERT_TRUE(serial.ok()) << serial.status();
  EXPECT_FALSE(serial->parallel || serial->qkv_bias || serial->mlp_bias);
  EXPECT_EQ(serial->kv_heads, serial->heads);
  EXPECT_EQ(serial->names.mlp_norm, "post_attention_layernorm");
  const json config = of({{"new_decoder_architecture", true},
                          {"multi_query", true},
                          {"ffn_hidden_size", 96}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->parallel);
  EXPECT_EQ(spec->kv_heads, 2);
  EXPECT_EQ(spec->names.input_norm, "ln_attn");
  EXPECT_EQ(spec->names.mlp_norm, "ln_mlp");
  EXPECT_EQ(spec->intermediate_size, 96);
  const auto one = Parse(With(config, {{"num_ln_in_parallel_attn", 1}}));
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_TRUE(one->parallel);
  EXPECT_EQ(one->names.input_norm, "input_layernorm");
  EXPECT_EQ(one->names.mlp_norm, "");
  const std::pair<json, const char*> refused[] = {
      {With(config, {{"parallel_attn", false}}),
       "parallel_attn: false; must be true or left out where "
       "new_decoder_architecture is true"},
      {of({{"num_ln_in_parallel_attn", 2}}),
       "num_ln_in_parallel_attn: 2; must be 1 or left out unless "
       "new_decoder_architecture is true"},
      {With(config, {{"num_kv_heads", 3}}),
       "num_kv_heads: 3; must be a divisor of num_attention_heads, 4"},
      {of({{"alibi", true}}), "alibi: true; must be false or left out"}};
  for (const auto& [changed, complaint] : refused) {
    EXPECT_THAT(std::string(Parse(changed).status().message()),
                HasSubstr(complaint));
  }
}

// StableLmConfig.
TEST(ParallelConfig, StableLmIsParallelWhereItSaysSo) {
  const auto plain = Parse(Of("StableLmForCausalLM"));
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_FALSE(plain->parallel);
  EXPECT_FALSE(plain->qkv_bias);
  EXPECT_EQ(plain->names.mlp_norm, "post_attention_layernorm");
  EXPECT_EQ(plain->norm, NormKind::kLayer);
  EXPECT_EQ(plain->rope.rotary_dim, plain->head_dim / 4);
  const auto parallel =
      Parse(Of("StableLmForCausalLM",
               {{"use_parallel_residual", true}, {"use_qkv_bias", true}}));
  ASSERT_TRUE(parallel.ok()) << parallel.status();
  EXPECT_TRUE(parallel->parallel);
  EXPECT_TRUE(parallel->qkv_bias);
  EXPECT_EQ(parallel->names.mlp_norm, "");
  EXPECT_NE(parallel->Canonical(), plain->Canonical());
}

}  // namespace
}  // namespace tandem::engine
