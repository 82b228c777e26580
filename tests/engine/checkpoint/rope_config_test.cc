// SPDX-License-Identifier: Apache-2.0
// Where a config.json says how queries and keys are turned: under the keys of
// transformers 4, of 5, or both, for all layers or for each type of them.

#include "engine/checkpoint/rope_config.h"

#include <cmath>
#include <string>
#include <utility>

#include "engine/checkpoint/model_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace tandem::engine {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using Kind = RopeSpec::Kind;

json Config(const char* architecture, const json& changes) {
  json config = {{"architectures", {architecture}},
                 {"hidden_size", 64},
                 {"intermediate_size", 128},
                 {"num_hidden_layers", 2},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"head_dim", 16},
                 {"vocab_size", 100},
                 {"max_position_embeddings", 4096}};
  config.update(changes);
  return config;
}

absl::StatusOr<ModelSpec> Parse(const char* architecture, const json& changes) {
  return ParseModelSpec("d/config.json", Config(architecture, changes).dump(),
                        "", "");
}

constexpr const char* kLlama = "LlamaForCausalLM";
constexpr const char* kQwen3 = "Qwen3ForCausalLM";
constexpr const char* kPhi3 = "Phi3ForCausalLM";
constexpr const char* kMistral = "MistralForCausalLM";
constexpr const char* kGemma2 = "Gemma2ForCausalLM";
constexpr const char* kGemma3 = "Gemma3ForCausalLM";
constexpr const char* kOriginal = "original_max_position_embeddings";

struct Refused {
  const char* why;
  const char* architecture;
  json changes;
  const char* complaint;
};

void ExpectRefused(const Refused& refused) {
  SCOPED_TRACE(refused.why);
  const absl::Status status =
      Parse(refused.architecture, refused.changes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("d/config.json: " + std::string(refused.complaint)));
}

// transformers 5: Gemma3TextConfig.convert_rope_params_to_dict.
TEST(RopeConfig, Gemma3ReadsEachTypeOfLayersByItself) {
  const json linear = {
      {"rope_type", "linear"}, {"factor", 8}, {"rope_theta", 5e5}};
  const json plain = {{"rope_type", "default"}, {"rope_theta", 2e4}};
  const struct {
    const char* why;
    json changes;
    Kind kind;
    double theta, local_theta;
  } cases[] = {
      {"both",
       {{"rope_parameters",
         {{"full_attention", linear}, {"sliding_attention", plain}}}},
       Kind::kLinear,
       5e5,
       2e4},
      {"full alone",
       {{"rope_parameters", {{"full_attention", linear}}}},
       Kind::kLinear,
       5e5,
       1e4},
      {"the other null",
       {{"rope_parameters",
         {{"full_attention", linear}, {"sliding_attention", nullptr}}}},
       Kind::kLinear,
       5e5,
       1e4},
      {"sliding alone",
       {{"rope_parameters", {{"sliding_attention", plain}}}},
       Kind::kDefault,
       1e6,
       2e4},
      {"thetas beside them",
       {{"rope_parameters",
         {{"full_attention", {{"rope_type", "linear"}, {"factor", 8}}},
          {"sliding_attention", {{"rope_type", "default"}}}}},
        {"rope_theta", 7e5},
        {"rope_local_base_freq", 3e4}},
       Kind::kLinear,
       7e5,
       3e4},
      {"a scaling added to a file of transformers 5",
       {{"rope_parameters",
         {{"full_attention", {{"rope_theta", 5e5}}},
          {"sliding_attention", plain}}},
        {"rope_scaling", {{"type", "linear"}, {"factor", 8}}}},
       Kind::kLinear,
       5e5,
       2e4}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const auto spec = Parse(kGemma3, c.changes);
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->rope.kind, c.kind);
    EXPECT_EQ(spec->rope.factor, c.kind == Kind::kLinear ? 8 : 1);
    EXPECT_EQ(spec->rope.theta, c.theta);
    EXPECT_EQ(spec->local_rope.kind, Kind::kDefault);
    EXPECT_EQ(spec->local_rope.theta, c.local_theta);
  }
}

TEST(RopeConfig, OtherFamiliesTakeNestedOnesThatHoldForAllLayers) {
  const json yarn = {{"rope_type", "yarn"},
                     {"factor", 4.0},
                     {"rope_theta", 1e6},
                     {kOriginal, 4096}};
  const json full = {{"full_attention", yarn}};
  const json same = {{"full_attention", yarn}, {"sliding_attention", yarn}};
  const struct {
    const char* architecture;
    json changes;
  } cases[] = {{kQwen3, {{"rope_parameters", full}}},
               {kQwen3, {{"rope_scaling", full}}},
               {kQwen3,
                {{"rope_parameters",
                  {{"full_attention", yarn}, {"sliding_attention", nullptr}}}}},
               {kGemma2, {{"rope_parameters", same}}}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.changes.dump());
    const auto spec = Parse(c.architecture, c.changes);
    ASSERT_TRUE(spec.ok()) << spec.status();
    for (const RopeSpec& rope : {spec->rope, spec->local_rope}) {
      EXPECT_EQ(rope.kind, Kind::kYarn);
      EXPECT_EQ(rope.factor, 4);
      EXPECT_EQ(rope.theta, 1e6);
    }
    EXPECT_EQ(spec->max_positions, 16384);
  }
}

TEST(RopeConfig, NestedOnesThatDifferByLayerAreRefused) {
  const json one = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  const json other = {{"rope_type", "default"}, {"rope_theta", 1e4}};
  const Refused cases[] = {
      {"two ways",
       kGemma2,
       {{"rope_parameters",
         {{"full_attention", one}, {"sliding_attention", other}}}},
       "rope_parameters: an object of 2; must be the same for full_attention "
       "and sliding_attention"},
      {"nothing for layers that slide",
       kMistral,
       {{"sliding_window", 512},
        {"rope_parameters", {{"full_attention", one}}}},
       "rope_parameters: an object of 1; must be the same"},
      {"nothing for the others",
       kQwen3,
       {{"rope_scaling", {{"sliding_attention", one}}}},
       "rope_scaling: an object of 1; must be the same"},
      {"no object",
       kGemma3,
       {{"rope_parameters",
         {{"full_attention", one}, {"sliding_attention", 1}}}},
       "rope_parameters.sliding_attention: 1; must be an object or null"}};
  for (const Refused& refused : cases) ExpectRefused(refused);
}

TEST(RopeConfig, OldAndNewKeyAddUp) {
  const json theta = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  const json yarn = {{"type", "yarn"}, {"factor", 4.0}, {kOriginal, 4096}};
  json whole = yarn;
  whole["rope_theta"] = 1e6;
  json renamed = whole;
  renamed["rope_type"] = "yarn";
  renamed["rope_theta"] = nullptr;
  const json cases[] = {
      {{"rope_parameters", theta}, {"rope_scaling", yarn}},
      {{"rope_parameters", {{"rope_theta", 1e6}}}, {"rope_scaling", yarn}},
      {{"rope_parameters", yarn}, {"rope_scaling", theta}},
      {{"rope_parameters", whole}, {"rope_scaling", yarn}},
      {{"rope_parameters", whole}, {"rope_scaling", renamed}},
      {{"rope_parameters", whole}, {"rope_scaling", {{"type", "default"}}}},
      {{"rope_parameters", whole}, {"rope_scaling", nullptr}}};
  const auto expected =
      Parse("Qwen2ForCausalLM", {{"rope_scaling", yarn}, {"rope_theta", 1e6}});
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_EQ(expected->rope.kind, Kind::kYarn);
  for (const json& changes : cases) {
    const auto spec = Parse("Qwen2ForCausalLM", changes);
    ASSERT_TRUE(spec.ok()) << changes << ": " << spec.status();
    EXPECT_EQ(spec->Canonical(), expected->Canonical()) << changes;
  }
}

TEST(RopeConfig, OldAndNewKeyThatDisagreeAreRefused) {
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  const auto both = [](const json& parameters, const json& scaling) {
    return json{{"rope_parameters", parameters}, {"rope_scaling", scaling}};
  };
  const Refused cases[] = {
      {"two factors", kLlama, both(yarn, {{"type", "yarn"}, {"factor", 2}}),
       "rope_scaling: an object of 2; must be as rope_parameters, which "
       "scales too, or left out"},
      {"two kinds", kLlama, both(yarn, {{"type", "linear"}, {"factor", 4.0}}),
       "rope_scaling: an object of 2; must be as rope_parameters"},
      {"more than the other says", kLlama,
       both(yarn, {{"type", "yarn"}, {"factor", 4.0}, {"beta_fast", 64}}),
       "rope_scaling: an object of 3; must be as rope_parameters"},
      {"two thetas", kLlama,
       both({{"rope_theta", 1e6}},
            {{"type", "linear"}, {"factor", 4}, {"rope_theta", 1e4}}),
       "rope_scaling.rope_theta: 10000.0; must be 1000000.0, as in "
       "rope_parameters, or left out"},
      {"a part", kLlama, both({{"partial_rotary_factor", 0.5}}, yarn),
       "rope_scaling.partial_rotary_factor"},
      {"a number", kLlama, both(yarn, 4),
       "rope_scaling: 4; must be an object or null"}};
  for (const Refused& refused : cases) ExpectRefused(refused);
}

TEST(RopeConfig, APartOfAHeadTurnsInPhi) {
  const auto with = [](json scaling, const json& beside) {
    json changes = {{"rope_scaling", std::move(scaling)}};
    changes.update(beside);
    return changes;
  };
  const json part = {{"partial_rotary_factor", 0.75}};
  const json factors = {1, 1, 1, 2, 2, 2};
  const json longrope = {{"rope_type", "longrope"},
                         {"short_factor", factors},
                         {"long_factor", factors}};
  json both = longrope;
  both.update(part);
  for (const json& changes :
       {part, json{{"rope_parameters", part}}, with(longrope, part),
        with(both, json::object()), with(both, part)}) {
    const auto spec = Parse(kPhi3, changes);
    ASSERT_TRUE(spec.ok()) << changes << spec.status();
    EXPECT_EQ(spec->rope.rotary_dim, 12) << changes;
    EXPECT_THAT(spec->Canonical(), HasSubstr(" rotary_dim=12"));
  }
  for (const double all : {1.0, 0.999}) {
    const auto spec = Parse(kPhi3, {{"partial_rotary_factor", all}});
    EXPECT_EQ(spec.ok(), all == 1) << spec.status();
    if (!spec.ok()) continue;
    EXPECT_EQ(spec->rope.rotary_dim, 0);
    EXPECT_EQ(spec->Canonical(), Parse(kPhi3, json::object())->Canonical());
  }
  const Refused cases[] = {
      {"nothing",
       kPhi3,
       {{"partial_rotary_factor", 0.0}},
       "partial_rotary_factor: 0; must be an even number of the 16"},
      {"an odd one",
       kPhi3,
       {{"partial_rotary_factor", 0.6}},
       "partial_rotary_factor: 0.6; must be an even number of the 16"},
      {"two", kPhi3, with(both, {{"partial_rotary_factor", 0.5}}),
       "rope_scaling.partial_rotary_factor: 0.75; must be 0.5, as beside it"},
      {"factors of all", kPhi3,
       with(longrope, {{"partial_rotary_factor", 0.5}}),
       "rope_scaling.short_factor: an array of 6; must be a list of 4"},
      {"another family",
       kQwen3,
       {{"partial_rotary_factor", 0.75}},
       "partial_rotary_factor: below 1; must be 1 or left out"}};
  for (const Refused& refused : cases) ExpectRefused(refused);
}

TEST(RopeConfig, TheFirstContextIsReadBesideTheScalingToo) {
  const json yarn = {{"rope_type", "yarn"}, {"factor", 8}};
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8},
                       {"low_freq_factor", 1},
                       {"high_freq_factor", 4}};
  for (const json& scaling : {yarn, llama3}) {
    json own = scaling;
    own[kOriginal] = 512;
    const auto expected = Parse(kLlama, {{"rope_scaling", own}});
    ASSERT_TRUE(expected.ok()) << expected.status();
    for (const json& changes :
         {json{{"rope_scaling", scaling}, {kOriginal, 512}},
          json{{"rope_scaling", own}, {kOriginal, 512}}}) {
      const auto spec = Parse(kLlama, changes);
      ASSERT_TRUE(spec.ok()) << changes << ": " << spec.status();
      EXPECT_EQ(spec->rope.original_max_positions, 512);
      EXPECT_EQ(spec->Canonical(), expected->Canonical());
    }
    ExpectRefused({"two of them",
                   kLlama,
                   {{"rope_scaling", own}, {kOriginal, 64}},
                   "rope_scaling.original_max_position_embeddings: 512; must "
                   "be 64, as beside it, or left out"});
  }
}

// HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters.
TEST(RopeConfig, HunyuansAlphaMakesThetaLargerAtAllLengths) {
  constexpr const char* kHunyuan = "HunYuanDenseV1ForCausalLM";
  const json dynamic = {{"type", "dynamic"}, {"factor", 2.0}};
  json alpha = dynamic;
  alpha["alpha"] = 1000.0;
  const auto spec = Parse(kHunyuan, {{"rope_scaling", alpha}});
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->rope.kind, Kind::kDefault);
  EXPECT_DOUBLE_EQ(spec->rope.theta, 1e4 * std::pow(1000.0, 16.0 / 14));
  EXPECT_EQ(spec->max_positions, 4096);
  EXPECT_NE(spec->Canonical(), Parse(kHunyuan, json::object())->Canonical());
  const auto without = Parse(kHunyuan, {{"rope_scaling", dynamic}});
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_EQ(without->rope.kind, Kind::kDynamic);
  EXPECT_EQ(Parse(kLlama, {{"rope_scaling", alpha}})->rope.theta, 1e4);
  alpha["alpha"] = 0.0;
  ExpectRefused({"alpha 0",
                 kHunyuan,
                 {{"rope_scaling", alpha}},
                 "rope_scaling.alpha: 0.0; must be a number from 1"});
}

// Exaone4Attention.
TEST(RopeConfig, OfExaone4LayersTurnThatHaveAWindowIfThereAreAny) {
  const auto parse = [](const json& changes) {
    json config = {{"num_hidden_layers", 5}, {"sliding_window", 16}};
    config.update(changes);
    return Parse("Exaone4ForCausalLM", config);
  };
  const auto spec = parse(json::object());
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->window, 16);
  EXPECT_THAT(spec->windowed, ElementsAre(true, true, true, false, true));
  EXPECT_THAT(spec->no_rope, ElementsAre(false, false, false, true, false));
  EXPECT_FALSE(spec->wide_norms);
  // As the 32B's config has both.
  const std::string full = "full_attention", window = "sliding_attention";
  const auto listed =
      parse({{"sliding_window_pattern", "LLLG"},
             {"layer_types", {window, full, window, window, full}}});
  ASSERT_TRUE(listed.ok()) << listed.status();
  EXPECT_THAT(listed->no_rope, ElementsAre(false, true, false, false, true));
  EXPECT_THAT(
      std::string(
          parse({{"sliding_window_pattern", "LLLG"}}).status().message()),
      HasSubstr("sliding_window_pattern: \"LLLG\""));
  const auto none = parse({{"sliding_window", nullptr},
                           {"sliding_window_pattern", nullptr},
                           {"layer_types", std::vector<std::string>(5, full)}});
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_TRUE(none->no_rope.empty());
  EXPECT_EQ(none->window, 0);
}

}  // namespace
}  // namespace tandem::engine
