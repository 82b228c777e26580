// SPDX-License-Identifier: Apache-2.0
// What a config says is read as `transformers` reads it.

#include "engine/checkpoint/model_config.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint/configs.h"
#include "tests/engine/temp_dir.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

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
  EXPECT_EQ(spec->qkv_rows(0), 12 * 16);
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

TEST(ModelConfig, ScoresAreCappedInTheFamiliesThatDo) {
  const json config = With(Gemma3(), {{"attn_logit_softcapping", 5.0},
                                      {"final_logit_softcapping", 7.0}});
  const auto gemma2 =
      Parse(With(config, {{"architectures", {"Gemma2ForCausalLM"}}}));
  ASSERT_TRUE(gemma2.ok()) << gemma2.status();
  EXPECT_EQ(gemma2->score_cap, 5);
  EXPECT_EQ(gemma2->logit_cap, 7);
  const auto gemma3 = Parse(config);
  ASSERT_TRUE(gemma3.ok()) << gemma3.status();
  EXPECT_EQ(gemma3->score_cap, 0);  // as in transformers
  EXPECT_EQ(gemma3->logit_cap, 7);
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
  // As requests may say it.
  EXPECT_EQ(Parse(Llama(), R"({"top_k":-1})")->sampling.top_k, -1);
}

// Gemma3Config, Gemma3TextConfig.
TEST(ModelConfig, OfAModelThatSeesTheTextPartIsRead) {
  const auto whole = Parse(Gemma3Whole());
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->heads, 8);
  EXPECT_EQ(whole->kv_heads, 4);
  EXPECT_EQ(whole->head_dim, 256);
  EXPECT_EQ(whole->vocab_size, 262208);
  EXPECT_TRUE(whole->tied_head);
  EXPECT_THAT(whole->eos_ids, ElementsAre(1, 6));
  json text = Gemma3Whole()["text_config"];
  text["architectures"] = {"Gemma3ForCausalLM"};
  const auto alone = Parse(text);
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(whole->Canonical(), alone->Canonical());
}

TEST(ModelConfig, WhatTheWholeSaysGoesBeforeItsTextPart) {
  json config = With(Gemma3Whole(), {{"eos_token_id", {1, 6}}});
  config["text_config"]["eos_token_id"] = 3;
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(spec->eos_ids, ElementsAre(1, 6));
  config["eos_token_id"] = nullptr;
  EXPECT_THAT(Parse(config)->eos_ids, ElementsAre(3));
  config.erase("architectures");
  config["model_type"] = "gemma3";
  const auto by_type = Parse(config);
  ASSERT_TRUE(by_type.ok()) << by_type.status();
  EXPECT_EQ(by_type->Canonical(), spec->Canonical());
}

// Qwen2_5_VLConfig: on the hub flat, saved by transformers 5 in parts.
TEST(ModelConfig, OfQwen25ThatSeesTheTextPartIsReadFromEitherPlace) {
  const json text = {{"hidden_size", 64},
                     {"intermediate_size", 128},
                     {"num_hidden_layers", 2},
                     {"num_attention_heads", 8},
                     {"vocab_size", 100}};
  const json sections = {{"type", "mrope"}, {"mrope_section", {1, 1, 2}}};
  const json whole = {{"architectures", {"Qwen2_5_VLForConditionalGeneration"}},
                      {"vision_config", {{"depth", 1}}}};
  const auto flat =
      Parse(With(With(whole, text), {{"rope_scaling", sections}}));
  ASSERT_TRUE(flat.ok()) << flat.status();
  EXPECT_EQ(flat->rope.kind, RopeSpec::Kind::kDefault);
  EXPECT_EQ(flat->rope.theta, 1e6);
  EXPECT_TRUE(flat->qkv_bias);
  EXPECT_FALSE(flat->tied_head);
  json part = text;
  part["model_type"] = "qwen2_5_vl_text";
  part["rope_parameters"] = sections;
  const auto nested = Parse(With(whole, {{"text_config", part}}));
  ASSERT_TRUE(nested.ok()) << nested.status();
  EXPECT_EQ(nested->Canonical(), flat->Canonical());
  EXPECT_THAT(std::string(Parse(With(Llama(), {{"rope_scaling", sections}}))
                              .status()
                              .message()),
              HasSubstr("rope_scaling.rope_type: \"mrope\""));
}

TEST(ModelConfig, AHeadIsNotTiedIfTheWholeOrItsTextPartSaysSo) {
  const json silent;
  const struct {
    json whole;
    json part;
    bool tied;
    bool in_doubt;
  } kCases[] = {{silent, silent, true, false}, {true, silent, true, false},
                {silent, true, true, false},   {true, true, true, false},
                {false, silent, false, false}, {silent, false, false, false},
                {false, false, false, false},  {false, true, false, true},
                {true, false, false, true}};
  for (const auto& c : kCases) {
    json config = With(Gemma3Whole(), {{"tie_word_embeddings", c.whole}});
    config["text_config"]["tie_word_embeddings"] = c.part;
    const auto spec = Parse(config);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->tied_head, c.tied) << c.whole << c.part;
    EXPECT_EQ(spec->head_in_doubt, c.in_doubt) << c.whole << c.part;
  }
}

TEST(ModelConfig, AWholeModelSaysHowItsTextPartIsQuantised) {
  const json fp8 = {{"quant_method", "fp8"}};
  const auto spec = Parse(With(Gemma3Whole(), {{"quantization_config", fp8}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->quantisation.method, Quantisation::Method::kPlain);
  EXPECT_TRUE(spec->quantisation.e4m3);
}

// What changes the arithmetic and no tensor parts workers that would differ.
TEST(ModelConfig, CanonicalTextTellsHowLayersTurn) {
  const auto layers = [](const json& turned) {
    return Parse(With(SmolLm3(), {{"no_rope_layers", turned}}))->Canonical();
  };
  EXPECT_NE(layers({1, 0}), layers({0, 1}));
  EXPECT_NE(layers({1, 0}), layers({1, 1}));
  const auto queries = [](double beta) {
    const json yarn = {{"rope_type", "yarn"},
                       {"factor", 16.0},
                       {"original_max_position_embeddings", 64},
                       {"llama_4_scaling_beta", beta}};
    const auto spec =
        Parse(With(Mistral(), {{"architectures", {"Ministral3ForCausalLM"}},
                               {"rope_parameters", yarn}}));
    EXPECT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->rope.query_beta, beta);
    return spec->Canonical();
  };
  EXPECT_NE(queries(0.1), queries(0.2));
  EXPECT_NE(queries(0.1), queries(0));
}

// Gemma3ForConditionalGeneration, unlike Gemma3ForCausalLM.
TEST(ModelConfig, TheLogitsOfAModelThatSeesAreNotCapped) {
  json config = Gemma3Whole();
  config["text_config"]["final_logit_softcapping"] = 30.0;
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->logit_cap, 0);
}

// As files are that brought the model's code, before transformers had it.
TEST(ModelConfig, Ernie45HasTwoNames) {
  json config = With(Llama(), {{"architectures", {"Ernie4_5ForCausalLM"}}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  config["architectures"] = {"Ernie4_5_ForCausalLM"};
  config["auto_map"] = {{"AutoModel", "modeling_ernie4_5.Ernie4_5_Model"}};
  const auto old = Parse(config);
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(old->Canonical(), spec->Canonical());
}

// MistralConfig, SmolLM3Config: not what an absent key means.
TEST(ModelConfig, ANullForKeyHeadsMeansAsManyAsHeads) {
  for (const char* name : {"MistralForCausalLM", "SmolLM3ForCausalLM"}) {
    const auto spec = Parse(With(Llama(), {{"architectures", {name}},
                                           {"num_attention_heads", 2},
                                           {"num_key_value_heads", nullptr}}));
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->kv_heads, 2) << name;
  }
}

// SeedOssConfig, Ernie4_5Config.
TEST(ModelConfig, ANullForAHeadsWidthMeansAShareOfTheWhole) {
  for (const char* name : {"SeedOssForCausalLM", "Ernie4_5ForCausalLM"}) {
    const json config =
        With(Llama(), {{"architectures", {name}}, {"num_key_value_heads", 2}});
    EXPECT_EQ(Parse(config)->head_dim, 128) << name;
    EXPECT_EQ(Parse(With(config, {{"head_dim", nullptr}}))->head_dim, 16)
        << name;
  }
}

// SmolLM3Config.
TEST(ModelConfig, EveryFourthLayerOfSmolLm3DoesNotTurn) {
  const auto unturned = [](const json& changes) {
    return Parse(With(SmolLm3(), With({{"num_hidden_layers", 5}}, changes)))
        ->no_rope;
  };
  EXPECT_THAT(unturned(json::object()),
              ElementsAre(false, false, false, true, false));
  EXPECT_THAT(unturned({{"no_rope_layer_interval", 2}}),
              ElementsAre(false, true, false, true, false));
  // Longer lists than there are layers are allowed.
  EXPECT_THAT(unturned({{"no_rope_layers", {0, 1, 1, 1, 0, 0}}}),
              ElementsAre(true, false, false, false, true));
  EXPECT_THAT(unturned({{"no_rope_layers", {1, 1, 1, 1, 1}}}),
              testing::IsEmpty());
}

TEST(ModelConfig, LayersOfSmolLm3ThatDoNotTurnSeeTheWindow) {
  const json windows = {{"num_hidden_layers", 4},
                        {"use_sliding_window", true},
                        {"max_window_layers", 1},
                        {"sliding_window", 512}};
  const auto spec = Parse(With(SmolLm3(), windows));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_THAT(spec->windowed, ElementsAre(false, false, false, true));
  EXPECT_EQ(Parse(With(SmolLm3(), {{"sliding_window", 512}}))->window, 0);
}

// GlmConfig, Glm4Config, Ernie4_5Config.
TEST(ModelConfig, NeighboursTurnTogetherInSomeFamilies) {
  const auto glm = Parse(Glm4());
  ASSERT_TRUE(glm.ok()) << glm.status();
  EXPECT_TRUE(glm->rope.interleaved);
  EXPECT_EQ(glm->rope.rotary_dim, 8);  // half a head
  EXPECT_EQ(
      Parse(With(Glm4(), {{"partial_rotary_factor", 1.0}}))->rope.rotary_dim,
      0);
  const auto ernie =
      Parse(With(Glm4(), {{"architectures", {"Ernie4_5ForCausalLM"}}}));
  ASSERT_TRUE(ernie.ok()) << ernie.status();
  EXPECT_TRUE(ernie->rope.interleaved);
  EXPECT_EQ(ernie->rope.rotary_dim, 0);
  EXPECT_FALSE(Parse(Llama())->rope.interleaved);
}

// GptOssConfig.
TEST(ModelConfig, AbsentKeysOfGptOssMeanWhatTransformersTakesThemFor) {
  json config = With(GptOss(), {{"num_attention_heads", 16}});
  config.erase("num_key_value_heads");
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->kv_heads, 8);
  EXPECT_EQ(spec->head_dim, 64);
  EXPECT_EQ(spec->max_positions, 131072);
  EXPECT_EQ(spec->norm_eps, 1e-5);
  EXPECT_EQ(spec->rope.theta, 150000);
  EXPECT_EQ(spec->window, 128);
  EXPECT_THAT(spec->windowed, ElementsAre(true, false));
  EXPECT_TRUE(spec->routes.normalise);
  EXPECT_TRUE(spec->router_bias);
  EXPECT_THAT(spec->Canonical(), HasSubstr(" act=clamped_swiglu "));
  const auto coded = Parse(
      With(config, {{"quantization_config", {{"quant_method", "mxfp4"}}}}));
  ASSERT_TRUE(coded.ok()) << coded.status();
  EXPECT_THAT(coded->Canonical(),
              HasSubstr(" quantised=mxfp4 bits=4 group=32 "));
}

TEST(ModelConfig, BiasesAreWhereTheFamilyHasThem) {
  const auto biases = [](const char* architecture, const json& changes) {
    json config = With(Llama(), changes);
    config["architectures"] = {architecture};
    config["head_dim"] = 16;
    config["num_key_value_heads"] = 2;
    const auto spec = Parse(config);
    EXPECT_TRUE(spec.ok()) << spec.status();
    return std::vector<bool>{spec->qkv_bias, spec->output_bias, spec->mlp_bias};
  };
  const json none = json::object();
  EXPECT_THAT(biases("LlamaForCausalLM", {{"attention_bias", true}}),
              ElementsAre(true, true, false));
  EXPECT_THAT(biases("Qwen2ForCausalLM", none),
              ElementsAre(true, false, false));
  EXPECT_THAT(biases("Glm4ForCausalLM", none), ElementsAre(true, false, false));
  EXPECT_THAT(biases("Glm4ForCausalLM", {{"attention_bias", false}}),
              ElementsAre(false, false, false));
  EXPECT_THAT(biases("SeedOssForCausalLM", {{"attention_out_bias", true}}),
              ElementsAre(true, true, false));
  EXPECT_THAT(biases("Ernie4_5ForCausalLM", none),
              ElementsAre(false, false, false));
  EXPECT_THAT(biases("Ernie4_5ForCausalLM", {{"use_bias", true}}),
              ElementsAre(true, true, true));
  EXPECT_THAT(biases("Starcoder2ForCausalLM", none),
              ElementsAre(true, true, true));
  json gpt_oss = GptOss();
  EXPECT_THAT(biases("GptOssForCausalLM", gpt_oss),
              ElementsAre(true, true, true));
  gpt_oss["attention_bias"] = false;
  EXPECT_THAT(biases("GptOssForCausalLM", gpt_oss),
              ElementsAre(false, false, true));
}

// OlmoConfig, OlmoLayerNorm.
TEST(ModelConfig, Olmo1sNormsHaveNoWeightsAndOneEpsilon) {
  const json olmo = With(Llama(), {{"architectures", {"OlmoForCausalLM"}},
                                   {"rms_norm_eps", 0.05},
                                   {"clip_qkv", nullptr}});
  const auto spec = Parse(olmo);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->norm, NormKind::kBare);
  EXPECT_EQ(spec->norm_eps, 1e-5);
  EXPECT_THAT(spec->Canonical(), HasSubstr(" norm=layer "));
  EXPECT_THAT(
      std::string(Parse(With(olmo, {{"clip_qkv", 8.0}})).status().message()),
      HasSubstr("clip_qkv: 8.0; must be null or left out"));
}

// GraniteConfig; what layers add is scaled by a stream that is longer by as
// much.
TEST(ModelConfig, GranitesMultipliersScaleWhatIsAddedTo) {
  const json granite = With(Llama(), {{"architectures", {"GraniteForCausalLM"}},
                                      {"rms_norm_eps", 1e-5},
                                      {"embedding_multiplier", 12.0},
                                      {"attention_multiplier", 0.125},
                                      {"residual_multiplier", 0.5},
                                      {"logits_scaling", 8.0}});
  const auto spec = Parse(granite);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->embedding_scale, 24);
  EXPECT_FALSE(spec->embedding_scale_rounds);
  EXPECT_EQ(spec->norm_eps, 1e-5 / 0.25);
  EXPECT_EQ(spec->attention_scale, 0.125);
  EXPECT_EQ(spec->logit_scale, 0.125);
  for (const char* field : {"embedding_multiplier", "attention_multiplier",
                            "residual_multiplier", "logits_scaling"}) {
    EXPECT_NE(Parse(With(granite, {{field, 2.0}}))->Canonical(),
              spec->Canonical())
        << field;
  }
  const auto plain = Parse(With(Llama(), {{"embedding_multiplier", 12.0}}));
  EXPECT_EQ(plain->embedding_scale, 1);
}

// Olmo3Config: yarn is for the layers that see all.
TEST(ModelConfig, WindowedLayersOfOlmo3TurnAsTheyWereTrained) {
  const auto spec =
      Parse(With(Llama(), {{"architectures", {"Olmo3ForCausalLM"}},
                           {"num_hidden_layers", 5},
                           {"max_position_embeddings", 8192},
                           {"rope_scaling",
                            {{"rope_type", "yarn"},
                             {"factor", 8.0},
                             {"original_max_position_embeddings", 1024}}}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->wide_norms);
  EXPECT_EQ(spec->window, 4096);
  EXPECT_THAT(spec->windowed, ElementsAre(true, true, true, false, true));
  EXPECT_EQ(spec->rope.kind, RopeSpec::Kind::kYarn);
  EXPECT_EQ(spec->local_rope.kind, RopeSpec::Kind::kDefault);
  EXPECT_EQ(spec->rope.theta, 500000);
  EXPECT_EQ(spec->local_rope.theta, 500000);
  EXPECT_EQ(spec->max_positions, 8192);
}

TEST(ModelConfig, GemmasOldGeluMeansTanh) {
  const auto spec =
      Parse(With(Mistral(), {{"architectures", {"GemmaForCausalLM"}},
                             {"hidden_act", "gelu"}}));
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->activation, kernels::Activation::kGeluTanh);
  EXPECT_EQ(spec->embedding_scale, 8);
}

TEST(ModelConfig, ActivationsOfLayersWithoutGates) {
  const auto of = [](const char* name) {
    const auto spec = Parse(With(Gpt2(), {{"activation_function", name}}));
    EXPECT_TRUE(spec.ok()) << spec.status();
    return spec.ok() ? spec->activation : kernels::Activation::kSilu;
  };
  EXPECT_EQ(of("gelu"), kernels::Activation::kGelu);
  EXPECT_EQ(of("relu2"), kernels::Activation::kRelu2);
  EXPECT_EQ(of("gelu_fast"), kernels::Activation::kGeluTanh);
}

// NemotronConfig and ArceeConfig.
TEST(ModelConfig, NemotronAndArceeSquareWhatIsPositive) {
  const auto nemotron =
      Parse(With(Llama(), {{"architectures", {"NemotronForCausalLM"}},
                           {"norm_eps", 2e-5}}));
  ASSERT_TRUE(nemotron.ok()) << nemotron.status();
  EXPECT_EQ(nemotron->norm, NormKind::kLayerOffset);
  EXPECT_EQ(nemotron->norm_eps, 2e-5);
  EXPECT_EQ(nemotron->activation, kernels::Activation::kRelu2);
  EXPECT_EQ(nemotron->rope.rotary_dim, nemotron->head_dim / 2);
  EXPECT_FALSE(nemotron->is_gated() || nemotron->tied_head);
  EXPECT_THAT(nemotron->Canonical(), testing::HasSubstr("norm=layer"));
  const auto arcee = Parse(With(
      Llama(), {{"architectures", {"ArceeForCausalLM"}}, {"mlp_bias", true}}));
  ASSERT_TRUE(arcee.ok()) << arcee.status();
  EXPECT_EQ(arcee->activation, kernels::Activation::kRelu2);
  EXPECT_TRUE(arcee->mlp_bias);
  EXPECT_FALSE(arcee->is_gated() || arcee->qkv_bias);
}

// HunYuanDenseV1Config; its attention has norms whatever use_qk_norm says.
TEST(ModelConfig, HunyuanNormsHeadsOnceTheyHaveTurned) {
  const json config =
      With(Llama(), {{"architectures", {"HunYuanDenseV1ForCausalLM"}},
                     {"attention_bias", true},
                     {"use_qk_norm", true},
                     {"use_cla", false}});
  const auto spec = Parse(config);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_TRUE(spec->turned_norms);
  EXPECT_EQ(spec->names.key_norm, "self_attn.key_layernorm");
  EXPECT_TRUE(spec->qkv_bias && spec->output_bias);
  EXPECT_FALSE(spec->mlp_bias);
  EXPECT_THAT(
      std::string(
          Parse(With(config, {{"use_qk_norm", false}})).status().message()),
      HasSubstr("use_qk_norm: false; must be true or left out"));
  EXPECT_THAT(
      std::string(Parse(With(config, {{"use_cla", true}})).status().message()),
      HasSubstr("use_cla: true; must be false or left out"));
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
