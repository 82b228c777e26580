// SPDX-License-Identifier: Apache-2.0
// Adapters against what PEFT computes with them, mixed in one batch without a
// changed bit, and files that are refused by name.

#include "engine/model/lora.h"

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/golden_row.h"
#include "tests/engine/rig.h"

namespace tandem::engine {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json Adapters() { return ReadGolden("adapters.json"); }

// One adapter's golden, its base model, and both on disk.
class LoraGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  LoraGoldenTest() : adapter_(Adapters()[GetParam()]) {
    const json spec = LoadCases()[adapter_["base"].get<std::string>()];
    WriteCheckpoint(spec, base_);
    WriteAdapter(adapter_, lora_);
    options_.load.max_positions = spec.value("served", 0);
    options_.adapters = {lora_.path()};
  }

  TempDir base_;
  TempDir lora_;
  json adapter_;
  RigOptions options_;
};

TEST_P(LoraGoldenTest, LogitsAndTokensArePefts) {
  const auto backend = NewCpu(2);
  Rig rig(base_.path(), backend.get(), options_);
  for (const json& prompt : adapter_["prompts"]) {
    SCOPED_TRACE(absl::StrCat("prompt of ", prompt["ids"].size()));
    const auto ids = prompt["ids"].get<std::vector<int32_t>>();
    const auto length = static_cast<int>(ids.size());
    TestSequence sequence = rig.NewSequence(ids, length + 64);
    sequence.adapter = 0;
    TestSequence* one = &sequence;
    ExpectRow(rig.Advance({&one, 1}, 1).logits.at(0), prompt["first"], "first");
    sequence.computed = 0;
    const StepOutput last = rig.Advance({&one, 1}, length);
    ASSERT_TRUE(last.status.ok()) << last.status;
    ExpectRow(last.logits[0], prompt["last"], "last");
    sequence.computed = 0;
    const auto greedy = prompt["greedy_ids"].get<std::vector<int32_t>>();
    rig.Greedy({&one, 1}, 16, static_cast<int>(greedy.size()));
    EXPECT_EQ(
        std::vector<int32_t>(sequence.ids.begin() + length, sequence.ids.end()),
        greedy);
  }
}

INSTANTIATE_TEST_SUITE_P(, LoraGoldenTest,
                         testing::Values("llama_all", "llama_other",
                                         "llama_patterns", "phi3_fused",
                                         "phi4_mini_fused", "gpt2_all",
                                         "mixtral_attention", "glm_all",
                                         "gemma3_whole"),
                         [](const auto& param) { return param.param; });

// Two adapters of one model, and what only a file's text changes.
class LoraTest : public testing::Test {
 protected:
  LoraTest() {
    spec_ = LoadCases()["llama2_mha_f32"];
    WriteCheckpoint(spec_, base_);
    WriteAdapter(adapters_["llama_all"], all_);
    WriteAdapter(adapters_["llama_other"], other_);
  }

  absl::StatusOr<LoraAdapter> Read(const std::string& directory,
                                   int max_rank = 8) {
    const absl::StatusOr<ModelSpec> spec = LoadModelSpec(base_.path());
    EXPECT_TRUE(spec.ok()) << spec.status();
    return ReadLoraAdapter(directory, *spec, LoraLayout(*spec, max_rank));
  }
  // llama_all with one field of its config exchanged.
  absl::StatusOr<LoraAdapter> ReadWith(const char* field, const json& value) {
    json adapter = adapters_["llama_all"];
    adapter["config"][field] = value;
    const TempDir dir;
    WriteAdapter(adapter, dir);
    return Read(dir.path());
  }

  const json adapters_ = Adapters();
  json spec_;
  TempDir base_;
  TempDir all_;
  TempDir other_;
};

// Logits of five sequences after each chunk: alone or together, in chunks of
// any size.
TEST_F(LoraTest, ABatchOfSeveralAdaptersChangesNoBit) {
  const std::vector<int> adapters = {0, -1, 1, 1, 0};
  std::vector<std::vector<float>> expected;
  for (const char* isa : {"avx2", "avx512"}) {
    if (!HasIsa(isa)) continue;
    const auto backend = NewCpu(2, isa);
    RigOptions options;
    options.adapters = {all_.path(), other_.path()};
    Rig rig(base_.path(), backend.get(), options);
    const auto make = [&](size_t i) {
      TestSequence sequence =
          rig.NewSequence(PromptIds(spec_, 20 + 3 * static_cast<int>(i)), 64);
      sequence.adapter = adapters[i];
      return sequence;
    };
    if (expected.empty()) {
      for (size_t i = 0; i < adapters.size(); ++i) {
        TestSequence alone = make(i);
        TestSequence* one = &alone;
        expected.push_back(rig.Advance({&one, 1}, 64).logits.at(0));
      }
    }
    for (const int chunk : {1, 7, 64}) {
      std::vector<TestSequence> sequences;
      for (size_t i = 0; i < adapters.size(); ++i) sequences.push_back(make(i));
      std::vector<std::vector<float>> got(adapters.size());
      for (bool left = true; left;) {
        std::vector<TestSequence*> running;
        std::vector<size_t> which;
        for (size_t i = 0; i < sequences.size(); ++i) {
          TestSequence& s = sequences[i];
          if (s.computed == static_cast<int>(s.ids.size())) continue;
          running.push_back(&s);
          which.push_back(i);
        }
        left = !running.empty();
        if (!left) break;
        const StepOutput output = rig.Advance(running, chunk);
        ASSERT_TRUE(output.status.ok()) << output.status;
        for (size_t i = 0; i < which.size(); ++i) {
          got[which[i]] = output.logits[i];
        }
      }
      EXPECT_EQ(got, expected) << isa << ", chunks of " << chunk;
    }
  }
  EXPECT_NE(expected[0], expected[4]);
}

TEST_F(LoraTest, ASequenceWithoutAnAdapterIsTheBaseModels) {
  const auto backend = NewCpu(1);
  RigOptions options;
  Rig plain(base_.path(), backend.get(), options);
  options.adapters = {all_.path()};
  Rig rig(base_.path(), backend.get(), options);
  std::vector<std::vector<float>> rows;
  for (Rig* const each : {&plain, &rig}) {
    TestSequence base = each->NewSequence(PromptIds(spec_, 30), 32);
    TestSequence adapted = each->NewSequence(PromptIds(spec_, 30), 32);
    adapted.adapter = each == &rig ? 0 : -1;
    TestSequence* both[] = {&base, &adapted};
    const StepOutput output = each->Advance(both, 30);
    rows.insert(rows.end(), output.logits.begin(), output.logits.end());
  }
  EXPECT_EQ(rows[0], rows[1]);
  EXPECT_EQ(rows[0], rows[2]);
  EXPECT_NE(rows[0], rows[3]);
}

TEST_F(LoraTest, ASlotTakesAnotherAdapterBehindTheStepsBefore) {
  const auto backend = NewCpu(2);
  RigOptions options;
  options.adapters = {all_.path(), other_.path()};
  Rig rig(base_.path(), backend.get(), options);
  const auto logits = [&](int adapter) {
    TestSequence sequence = rig.NewSequence(PromptIds(spec_, 12), 12);
    sequence.adapter = adapter;
    TestSequence* one = &sequence;
    return rig.Advance({&one, 1}, 12).logits.at(0);
  };
  const auto all = logits(0);
  const auto other = logits(1);
  const absl::StatusOr<LoraAdapter> read = Read(other_.path());
  ASSERT_TRUE(read.ok()) << read.status();
  rig.loop().RunSync([&] { rig.executor().PutAdapter(0, *read, [] {}); });
  EXPECT_EQ(logits(0), other);
  EXPECT_NE(all, other);
}

TEST_F(LoraTest, AStepMayNotNameASlotThatIsNotThere) {
  const auto backend = NewCpu(1);
  Rig rig(base_.path(), backend.get());
  TestSequence sequence = rig.NewSequence(PromptIds(spec_, 5), 5);
  sequence.adapter = 0;
  TestSequence* one = &sequence;
  EXPECT_EQ(rig.Advance({&one, 1}, 5).status.message(),
            "step: adapter 0 is outside -1 to -1");
}

TEST_F(LoraTest, TheDigestIsOfFactorsAndScales) {
  const auto all = Read(all_.path());
  const auto larger = Read(all_.path(), 16);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_TRUE(larger.ok()) << larger.status();
  EXPECT_EQ(all->digest.size(), 64u);
  EXPECT_EQ(all->digest, larger->digest);  // room is not content
  const auto scaled = ReadWith("lora_alpha", 17);
  const auto same = ReadWith("lora_dropout", 0.5);
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_NE(scaled->digest, all->digest);
  EXPECT_EQ(same->digest, all->digest);
  const auto other = Read(other_.path());
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE(other->digest, all->digest);
}

// As an adapter of a model that sees too calls them.
TEST_F(LoraTest, PatternsNameModulesOfATextPart) {
  const std::string module = "layers.0.self_attn.q_proj";
  const auto said = ReadWith("alpha_pattern", {{"model." + module, 17}});
  ASSERT_TRUE(said.ok()) << said.status();
  EXPECT_NE(said->digest, Read(all_.path())->digest);
  for (const char* whole :
       {"language_model.", "model.language_model.", "language_model.model."}) {
    const auto read = ReadWith("alpha_pattern", {{whole + module, 17}});
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->digest, said->digest) << whole;
  }
}

TEST_F(LoraTest, WhatIsNotPlainLoraIsRefusedByName) {
  const struct {
    const char* field;
    json value;
    const char* message;
  } kCases[] = {
      {"peft_type", "IA3", "peft_type: IA3; must be LORA"},
      {"use_dora", true, "use_dora: true; must be left out"},
      {"bias", "all", "bias: all; must be none"},
      {"modules_to_save", json::array({"lm_head"}), "modules_to_save: "},
      {"layer_replication", json::array({json::array({0, 2})}),
       "layer_replication: "},
      {"target_parameters", json::array({"w"}), "target_parameters: "},
      {"init_lora_weights", "pissa_niter_4", "init_lora_weights: pissa"},
      {"init_lora_weights", "PiSSA", "init_lora_weights: "},
      {"init_lora_weights", "olora", "init_lora_weights: "},
      {"init_lora_weights", "corda", "init_lora_weights: "},
      {"init_lora_weights", "loftq", "init_lora_weights: "},
      {"init_lora_weights", "lora_ga", "init_lora_weights: "},
      {"init_lora_weights", "of_a_later_version", "init_lora_weights: "},
      {"init_lora_weights", 1, "init_lora_weights: "},
      {"rank_pattern", {{"q_proj", 0.5}}, "a whole number in 1..65536"},
      {"rank_pattern", {{"q_proj", 8.5}}, "a whole number in 1..65536"},
      {"rank_pattern", {{"q_proj", 65537}}, "a whole number in 1..65536"},
      {"rank_pattern", {{"q_proj", 1e300}}, "a whole number in 1..65536"},
      {"alpha_pattern", {{"q_proj", 1e300}}, "at most 1e6"},
      {"lora_alpha", 1e300, "lora_alpha: "},
      {"rank_pattern", {{"^model.*", 4}}, "regular expressions"},
      {"alpha_pattern", {{"q_proj", -1}}, "a number above 0"},
      {"r", 0, "r: 0;"},
      {"r", 4, "rank 8, but adapter_config.json says 4"},
      {"rank_pattern", {{"q_proj", 7}}, "adapter_config.json says 7"},
      {"lora_alpha", "x", "lora_alpha: "},
  };
  for (const auto& [field, value, message] : kCases) {
    const auto read = ReadWith(field, value);
    ASSERT_FALSE(read.ok()) << field;
    EXPECT_EQ(read.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(message));
  }
  // These begin elsewhere, and leave the base model as it is.
  for (const json& init : {json(true), json(false), json(nullptr),
                           json("gaussian"), json("eva"), json("orthogonal")}) {
    EXPECT_TRUE(ReadWith("init_lora_weights", init).ok()) << init;
  }
}

TEST_F(LoraTest, TensorsThatDoNotFitAreRefusedByName) {
  const auto read_with = [&](const char* from, const char* to, json shape) {
    json adapter = adapters_["llama_all"];
    for (json& tensor : adapter["tensors"]) {
      if (tensor[0] != from) continue;
      tensor[0] = to;
      if (!shape.is_null()) tensor[1] = std::move(shape);
      break;
    }
    const TempDir dir;
    WriteAdapter(adapter, dir);
    return Read(dir.path());
  };
  const std::string layer = "base_model.model.model.layers.0.";
  const std::string q = layer + "self_attn.q_proj.lora_A.weight";
  const struct {
    std::string to;
    json shape;
    const char* message;
  } kCases[] = {
      {"base_model.model.lm_head.lora_A.weight", nullptr, "lora_A.weight"},
      {layer + "self_attn.q_proj.lora_magnitude_vector", nullptr,
       "is missing beside the other factor"},
      {q, json::array({8, 65}), "shape [8, 65]"},
      {q, json::array({9, 64}), "rank 9, but"},
  };
  for (const auto& [to, shape, message] : kCases) {
    const auto read = read_with(q.c_str(), to.c_str(), shape);
    ASSERT_FALSE(read.ok()) << to;
    EXPECT_THAT(read.status().message(), HasSubstr(message));
  }
  EXPECT_THAT(Read(all_.path(), 4).status().message(),
              HasSubstr("rank 8, at most 4 are served: raise "
                        "--max-lora-rank"));
  EXPECT_EQ(Read(base_.path()).status().code(), absl::StatusCode::kNotFound);
  const TempDir cut;
  WriteAdapter(adapters_["llama_all"], cut);
  cut.Write("adapter_model.safetensors", "short");
  EXPECT_EQ(Read(cut.path()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(LoraTest, LatentAttentionTakesNone) {
  const TempDir base;
  WriteCheckpoint(LoadCases()["deepseek_v2_f32"], base);
  const TempDir dir;
  WriteAdapter(adapters_["llama_all"], dir);
  const absl::StatusOr<ModelSpec> spec = LoadModelSpec(base.path());
  ASSERT_TRUE(spec.ok()) << spec.status();
  const auto read = ReadLoraAdapter(dir.path(), *spec, LoraLayout(*spec, 8));
  EXPECT_THAT(read.status().message(),
              HasSubstr("models with latent attention take no adapters here"));
}

TEST_F(LoraTest, LayersWithOtherHeadsAndKeysThatAreValuesTakeNone) {
  const TempDir dir;
  WriteAdapter(adapters_["llama_all"], dir);
  const json config = LoadCases()["gemma4_f32"]["config"];
  for (const bool alike : {false, true}) {
    json own = config;
    if (alike) {
      own["global_head_dim"] = own["head_dim"];
      own["num_global_key_value_heads"] = own["num_key_value_heads"];
    }
    const auto spec = ParseModelSpec("config.json", own.dump(), "", "");
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_EQ(spec->mixed_heads(), !alike);
    const auto read = ReadLoraAdapter(dir.path(), *spec, LoraLayout(*spec, 8));
    EXPECT_THAT(read.status().message(),
                HasSubstr("models whose layers differ in their heads or share "
                          "K and V, or whose keys are their values, take no "
                          "adapters"));
  }
}

TEST_F(LoraTest, LayersThatShareKvTakeNone) {
  const TempDir dir;
  WriteAdapter(adapters_["llama_all"], dir);
  json config = LoadCases()["gemma4_few_f32"]["config"];
  config["global_head_dim"] = config["head_dim"];
  for (const int shared : {0, 3}) {
    config["num_kv_shared_layers"] = shared;
    const auto spec = ParseModelSpec("config.json", config.dump(), "", "");
    ASSERT_TRUE(spec.ok()) << spec.status();
    EXPECT_FALSE(spec->mixed_heads());
    EXPECT_EQ(LoraLayout(*spec, 8).sections().empty(), shared > 0);
  }
}

TEST_F(LoraTest, ModulesThatHaveNoFactorsHereAreNamed) {
  json adapter = adapters_["mixtral_attention"];
  const json mixtral = LoadCases()["mixtral_f32"];
  const TempDir base;
  WriteCheckpoint(mixtral, base);
  adapter["tensors"].push_back(json::array(
      {"base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_A."
       "weight",
       json::array({4, 64})}));
  const TempDir dir;
  WriteAdapter(adapter, dir);
  const absl::StatusOr<ModelSpec> spec = LoadModelSpec(base.path());
  ASSERT_TRUE(spec.ok()) << spec.status();
  const auto read = ReadLoraAdapter(dir.path(), *spec, LoraLayout(*spec, 8));
  EXPECT_THAT(read.status().message(),
              HasSubstr("experts.0.w1.lora_A.weight': adapts nothing that is "
                        "supported here; of a layer (model.layers.N.) that is "
                        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, "
                        "self_attn.o_proj"));
}

}  // namespace
}  // namespace tandem::engine
