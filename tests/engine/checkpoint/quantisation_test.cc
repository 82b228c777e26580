// SPDX-License-Identifier: Apache-2.0
// Which quantised checkpoints are read, by what their configs say.

#include "engine/checkpoint/quantisation.h"

#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint/configs.h"

namespace tandem::engine {
namespace {

using testing::HasSubstr;

TEST(Quantisation, IsReadFromEitherFile) {
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
  } cases[] = {
      {"neither", Llama(), "", Method::kNone, 0, 0},
      {"AutoGPTQ's own, of before it named its method", Llama(),
       R"({"bits":4,"group_size":128,"damp_percent":0.01,"desc_act":true,
           "sym":true,"true_sequential":true,"model_name_or_path":null})",
       Method::kGptq, 4, 128},
      {"and of later", With(Llama(), null),
       R"({"quant_method":"gptq","bits":8,"group_size":-1,"desc_act":true,
           "checkpoint_format":"gptq","is_marlin_format":false})",
       Method::kGptq, 8, 0},
      {"config.json has the last word", Quantised(awq), R"({"bits":8})",
       Method::kAwq, 4, 0},
      {"whatever the other file is", Quantised(awq), "{", Method::kAwq, 4, 0},
  };
  for (const auto& c : cases) {
    const auto spec = ParseModelSpec("d/config.json", c.config.dump(), "", "",
                                     "d/quantize_config.json", c.quantize);
    ASSERT_TRUE(spec.ok()) << c.why << ": " << spec.status();
    EXPECT_EQ(spec->quantisation.method, c.method) << c.why;
    EXPECT_EQ(spec->quantisation.bits, c.bits) << c.why;
    EXPECT_EQ(spec->quantisation.group, c.group) << c.why;
  }
}

TEST(Quantisation, ModelOptimizersConfigIsReadInEachPlace) {
  using Method = Quantisation::Method;
  const auto flat = [](json more) {
    more["quant_method"] = "modelopt";
    return Quantised(more);
  };
  const char kOwn[] = R"({"producer":{"name":"modelopt","version":"0.29.0"},
      "quantization":{"quant_algo":"%s","kv_cache_quant_algo":%s,
      "exclude_modules":["lm_head"]}})";
  const json nvfp4 = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
  const struct {
    json config;
    std::string own;
    Method method;
    int group;
    bool kv_scales;
  } cases[] = {
      {flat({{"quant_algo", "FP8"}}), "", Method::kPlain, 0, false},
      {flat({{"quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"}}), "", Method::kPlain,
       0, false},
      {flat(nvfp4), "", Method::kNvfp4, 16, false},
      {flat({{"quantization", nvfp4}}), "", Method::kNvfp4, 16, false},
      {flat({{"quant_algo", "FP8"}, {"kv_cache_scheme", {{"num_bits", 8}}}}),
       "", Method::kPlain, 0, true},
      {Llama(), absl::StrFormat(kOwn, "FP8", "null"), Method::kPlain, 0, false},
      {Llama(), absl::StrFormat(kOwn, "NVFP4", "\"FP8\""), Method::kNvfp4, 16,
       true}};
  for (const auto& c : cases) {
    const auto spec = ParseModelSpec("d/config.json", c.config.dump(), "", "",
                                     "d/hf_quant_config.json", c.own);
    ASSERT_TRUE(spec.ok()) << c.config << c.own << spec.status();
    EXPECT_EQ(spec->quantisation.method, c.method) << c.config << c.own;
    EXPECT_EQ(spec->quantisation.e4m3, c.method == Method::kPlain);
    EXPECT_EQ(spec->quantisation.group, c.group) << c.config << c.own;
    EXPECT_EQ(spec->quantisation.kv_scales, c.kv_scales) << c.config << c.own;
    EXPECT_EQ(spec->quantisation.DequantisedFor(),
              c.method == Method::kNvfp4 ? "nvfp4" : "");
  }
  const std::pair<json, const char*> kRefused[] = {
      {{{"quant_algo", "W4A8_AWQ"}}, "quant_algo: \"W4A8_AWQ\"; must be FP8"},
      {{{"bits", 4}}, "quant_algo: \"\"; must be FP8"},
      {{{"quant_algo", "NVFP4"}, {"group_size", 32}},
       "group_size: 32; must be 16"},
      {{{"quantization", 7}}, "quantization_config.quantization: 7; must be"}};
  for (const auto& [config, complaint] : kRefused) {
    EXPECT_THAT(std::string(Parse(flat(config)).status().message()),
                HasSubstr(complaint));
  }
}

TEST(Quantisation, CompressedFp4HasGroupsOfItsSize) {
  const auto parse = [](const json& weights,
                        const char* format = "nvfp4-pack-quantized") {
    return Parse(
        Quantised({{"quant_method", "compressed-tensors"},
                   {"format", format},
                   {"config_groups", {{"group_0", {{"weights", weights}}}}}}));
  };
  const json weights = {{"num_bits", 4},
                        {"type", "float"},
                        {"strategy", "tensor_group"},
                        {"group_size", 16}};
  const auto spec = parse(weights);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->quantisation.method, Quantisation::Method::kNvfp4);
  EXPECT_THAT(spec->Canonical(), HasSubstr("quantised=nvfp4 bits=4 group=16"));
  for (const json& other : {json{{"num_bits", 8}}, json{{"type", "int"}},
                            json{{"group_size", 32}}}) {
    EXPECT_THAT(std::string(parse(With(weights, other)).status().message()),
                HasSubstr("must be 4 of type float in groups of 16"))
        << other;
  }
  constexpr char kMxfp4[] = "mxfp4-pack-quantized";
  const json of32 = With(weights, {{"group_size", 32}});
  ASSERT_TRUE(parse(of32, kMxfp4).ok()) << parse(of32, kMxfp4).status();
  EXPECT_EQ(parse(of32, kMxfp4)->quantisation.method,
            Quantisation::Method::kPackedMxfp4);
  EXPECT_THAT(std::string(parse(weights, kMxfp4).status().message()),
              HasSubstr("must be 4 of type float in groups of 32"));
}

TEST(Quantisation, HostileQuantizeConfigsAreRefused) {
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
      {R"({"bits":4,"quant_method":"awq"})",
       "quant_method: \"awq\"; must be gptq"},
      {R"({"quantization":{}})", "quant_algo: \"\"; must be FP8"},
      {R"({"quantization":[]})", "quantization: an array"},
      {R"({"quantization":{},"quant_method":"gptq"})",
       "quant_method: \"gptq\"; must be modelopt"},
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

TEST(Quantisation, ScalesOfAKvCacheAreNoReasonToRefuse) {
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

// As quantisers write numbers of activations and of weights.
json Bytes(const json& changes) {
  return With({{"num_bits", 8},
               {"type", "int"},
               {"symmetric", true},
               {"group_size", nullptr},
               {"block_structure", nullptr},
               {"actorder", nullptr},
               {"dynamic", false},
               {"observer", "minmax"},
               {"observer_kwargs", json::object()}},
              changes);
}

// An int-quantized config of a group; `more` goes into the group.
json IntQuantized(const json& weights, const json& activations,
                  const json& more = json::object()) {
  const json group = With({{"targets", {"Linear"}},
                           {"weights", weights},
                           {"input_activations", activations},
                           {"output_activations", nullptr}},
                          more);
  return {{"quant_method", "compressed-tensors"},
          {"format", "int-quantized"},
          {"ignore", {"lm_head"}},
          {"kv_cache_scheme", nullptr},
          {"global_compression_ratio", 1.46},
          {"quantization_status", "compressed"},
          {"config_groups", {{"group_0", group}}}};
}

// What is published for vLLM as W8A8, and what only looks like it.
TEST(Quantisation, TokensWithAScaleEachMakeInt8OfRowsW8A8) {
  const json rows = Bytes({{"strategy", "channel"}, {"observer", "mse"}});
  const json tokens = Bytes(
      {{"strategy", "token"}, {"dynamic", true}, {"observer", "memoryless"}});
  const json tensor = Bytes({{"strategy", "tensor"}});
  const auto with = [](const json& config, const char* field,
                       const json& value) {
    return With(config, {{field, value}});
  };
  const json published = IntQuantized(rows, tokens);
  const struct {
    const char* why;
    json config;
    bool w8a8;
  } cases[] = {
      {"llm-compressor's W8A8", published, true},
      {"that of later versions",
       with(with(IntQuantized(with(rows, "scale_dtype", nullptr),
                              with(tokens, "observer", nullptr),
                              {{"format", "int-quantized"}}),
                 "transform_config", json::object()),
            "sparsity_config", json::object()),
       true},
      {"what was calibrated", with(published, "quantization_status", "frozen"),
       true},
      {"written as naive", with(published, "format", "naive-quantized"), true},
      {"a scale for the weights", IntQuantized(tensor, tokens), true},
      {"a scale for all tokens", IntQuantized(rows, tensor), true},
      {"which is found on the fly",
       IntQuantized(rows, with(tensor, "dynamic", true)), true},
      {"activations as compressed-tensors fills them in",
       IntQuantized(rows, json::object()), true},
      {"W8A16", IntQuantized(rows, nullptr), false},
      {"zeros of tokens", IntQuantized(rows, with(tokens, "symmetric", false)),
       false},
      {"tokens in groups",
       IntQuantized(rows,
                    With(tokens, {{"strategy", "group"}, {"group_size", 128}})),
       false},
      {"groups that name no strategy", IntQuantized(rows, {{"group_size", 32}}),
       false},
      {"more of activations", IntQuantized(rows, with(tokens, "num_bits", 16)),
       false},
      {"fp8 activations", IntQuantized(rows, with(tokens, "type", "float")),
       false},
      {"weights in groups",
       IntQuantized(With(rows, {{"strategy", "group"}, {"group_size", 128}}),
                    tokens),
       false},
      {"weights in blocks",
       IntQuantized(
           With(rows, {{"strategy", "block"}, {"block_structure", {128, 128}}}),
           tokens),
       false},
      {"weights with zeros",
       IntQuantized(with(rows, "symmetric", false), tokens), false},
      {"fp8 weights",
       with(IntQuantized(with(rows, "type", "float"), tokens), "format",
            "float-quantized"),
       false},
      {"packed bytes", with(published, "format", "pack-quantized"), false}};
  const absl::StatusOr<ModelSpec> groups =
      Parse(Quantised(IntQuantized(rows, nullptr)));
  ASSERT_TRUE(groups.ok()) << groups.status();
  for (const auto& c : cases) {
    const auto spec = Parse(Quantised(c.config));
    ASSERT_TRUE(spec.ok()) << c.why << ": " << spec.status();
    EXPECT_EQ(spec->quantisation.w8a8, c.w8a8) << c.why;
    EXPECT_EQ(spec->quantisation.DequantisedFor(), "") << c.why;
    // Workers that multiply otherwise do not take each other's streams.
    EXPECT_EQ(spec->Canonical() == groups->Canonical() + " w8a8=1", c.w8a8)
        << c.why << spec->Canonical();
  }
  const std::pair<json, const char*> kRefused[] = {
      {7, "config_groups.input_activations: 7; must be an object or null"},
      {json::array({8}), "config_groups.input_activations: an array of 1"},
      {{{"num_bits", "8"}}, "input_activations.num_bits: \"8\""},
      {{{"symmetric", 1}}, "input_activations.symmetric: 1"},
      {{{"strategy", 3}}, "input_activations.strategy: 3"}};
  for (const auto& [activations, complaint] : kRefused) {
    const absl::Status status =
        Parse(Quantised(IntQuantized(rows, activations))).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(complaint));
  }
}

json Packed(const json& changes) {
  return Quantised(
      With({{"quant_method", "compressed-tensors"},
            {"format", "pack-quantized"},
            {"config_groups",
             {{"group_0", {{"weights", {{"num_bits", 4}, {"type", "int"}}}}}}}},
           changes));
}

TEST(Quantisation, SparseWeightsAreRefused) {
  for (const json& dense :
       {json(), json::object(), json{{"format", "dense"}}}) {
    const auto spec = Parse(Packed({{"sparsity_config", dense}}));
    EXPECT_TRUE(spec.ok()) << dense << ": " << spec.status();
  }
  const std::pair<json, const char*> kRefused[] = {
      {{{"format", "sparse-24-bitmask"}},
       "sparsity_config.format: \"sparse-24-bitmask\"; must be dense"},
      {{{"format", 7}}, "sparsity_config.format: 7; must be"},
      {"dense", "sparsity_config: \"dense\"; must be an object"}};
  for (const auto& [sparse, complaint] : kRefused) {
    EXPECT_THAT(
        std::string(
            Parse(Packed({{"sparsity_config", sparse}})).status().message()),
        HasSubstr(complaint));
  }
}

// GPTQModel's rules by module: of modules that are left as they are, and of
// others with numbers of their own.
TEST(Quantisation, ModulesWithNumbersOfTheirOwnAreRefused) {
  const auto parse = [](const json& dynamic) {
    return Parse(Quantised(
        {{"quant_method", "gptq"}, {"bits", 4}, {"dynamic", dynamic}}));
  };
  for (const json& served :
       {json(), json::object(), json{{"-:.*mlp.*", json::object()}},
        json{{"+:.*mlp.*", json::object()}}}) {
    EXPECT_TRUE(parse(served).ok()) << served << ": " << parse(served).status();
  }
  const std::pair<json, const char*> kRefused[] = {
      {{{"+:.*mlp.*", {{"bits", 8}}}}, "dynamic.+:.*mlp.*: an object of 1; mu"},
      {{{".*mlp.*", {{"group_size", 32}}}}, "dynamic..*mlp.*: an object of 1"},
      {{{"+:.*", 8}}, "dynamic.+:.*: 8"},
      {json::array({1}), "dynamic: an array of 1; must be an object"}};
  for (const auto& [dynamic, complaint] : kRefused) {
    EXPECT_THAT(std::string(parse(dynamic).status().message()),
                HasSubstr(complaint));
  }
}

// Those of weights are in them; others would have to be computed.
TEST(Quantisation, TransformsOfActivationsAreRefused) {
  const auto parse = [](const json& transforms) {
    return Parse(Packed({{"transform_config", transforms}}));
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

}  // namespace
}  // namespace tandem::engine
