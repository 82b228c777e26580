// SPDX-License-Identifier: Apache-2.0
// The same tokens wherever, with whom and in which formats they are computed,
// and from whichever cache.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/integration/cluster.h"
#include "tests/integration/cluster_fixture.h"
#include "tests/integration/load.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

TEST_F(ClusterTest, SplitAndLocalAndEveryWayGiveTheSameTokens) {
  const std::string prompt =
      "Tom and his small dog ran to the river near the old house with the "
      "blue door and found a stone that was as big as an apple.";
  std::vector<std::vector<int32_t>> answers;
  for (const char* way : {"shm", "grpc"}) {
    Begin({.worker_arguments = {"--handoff", way}});
    for (const v1::Placement placement :
         {v1::PLACEMENT_SPLIT, v1::PLACEMENT_LOCAL, v1::PLACEMENT_AUTO}) {
      v1::GenerateRequest request = TextRequest(prompt, 48);
      request.mutable_stopping()->set_ignore_eos(true);
      request.mutable_cache()->set_bypass_prefix_cache(true);
      request.set_placement(placement);
      const Outcome outcome = cluster_->Generate(request);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      ASSERT_EQ(outcome.token_ids.size(), 48u);
      if (placement == v1::PLACEMENT_SPLIT) {
        EXPECT_EQ(outcome.done.timings().way(), way);
      }
      if (placement == v1::PLACEMENT_LOCAL) {
        EXPECT_EQ(outcome.done.workers().prefill(), "");
        EXPECT_EQ(outcome.done.timings().kv_bytes(), 0);
      }
      answers.push_back(outcome.token_ids);
    }
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
  }
  for (const auto& answer : answers) EXPECT_EQ(answer, answers[0]);
}

TEST_F(ClusterTest, SpeculationChangesNoTokenAndSaysWhatItGuessed) {
  std::vector<v1::GenerateRequest> requests;
  for (int i = 0; i < 6; ++i) {
    v1::GenerateRequest request = TextRequest(
        i % 2 == 0 ? "The cat sat. The dog sat. The cat sat. The dog sat. The"
                   : "Once upon a time there was a small red fox who",
        120);
    request.mutable_stopping()->set_ignore_eos(i != 2);
    request.mutable_output()->set_logprobs(1);
    if (i >= 3) {
      request.mutable_sampling()->set_temperature(0.7f);
      request.mutable_sampling()->set_top_p(0.9f);
      request.mutable_sampling()->set_seed(i);
    }
    if (i == 4) request.mutable_sampling()->set_repetition_penalty(1.2f);
    if (i == 5) request.mutable_sampling()->set_n(2);
    requests.push_back(request);
  }
  std::vector<std::vector<int32_t>> tokens[3];
  std::vector<std::string> logprobs[3];
  // The draft model is the model itself.
  const std::string configs[] = {
      "",
      R"({"method": "ngram", "num_speculative_tokens": 5,
          "prompt_lookup_min": 1, "prompt_lookup_max": 4})",
      absl::StrCat(R"({"model": ")", EmbeddedModel(),
                   R"(", "num_speculative_tokens": 4, "adaptive": false})")};
  for (size_t guess = 0; guess < std::size(configs); ++guess) {
    ClusterOptions options;
    if (guess > 0) {
      options.decode_arguments = {"--speculative-config", configs[guess]};
    }
    Begin(options);
    int accepted = 0, rejected = 0;
    for (const v1::GenerateRequest& request : requests) {
      const Outcome outcome = cluster_->Generate(request);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      tokens[guess].push_back(outcome.token_ids);
      for (const auto& [index, sequence] : outcome.sequences) {
        for (const v1::TokenLogprob& token : sequence.logprobs()) {
          logprobs[guess].push_back(token.ShortDebugString());
        }
      }
      const v1::Usage& usage = outcome.done.usage();
      accepted += usage.accepted_prediction_tokens();
      rejected += usage.rejected_prediction_tokens();
    }
    // How many, depends on what steps took.
    EXPECT_EQ(accepted > 0, guess > 0);
    if (guess == 0) {
      EXPECT_EQ(rejected, 0);
    }
    // A stop token may come within what was guessed.
    if (guess == 2) {
      EXPECT_LT(rejected, 10);
      // Who ends the call itself has heard of guesses by then.
      v1::GenerateRequest request = requests[0];
      const std::string whole = cluster_->Generate(request).text;
      request.mutable_stopping()->add_stop(
          whole.substr(whole.size() * 2 / 3, 4));
      const Outcome stopped = cluster_->Generate(request);
      EXPECT_LT(stopped.text.size(), whole.size());
      EXPECT_GT(stopped.done.usage().accepted_prediction_tokens(), 2);
    }
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
    EXPECT_EQ(tokens[guess], tokens[0]) << configs[guess];
    EXPECT_EQ(logprobs[guess], logprobs[0]) << configs[guess];
  }
}

TEST_F(ClusterTest, SixtyFourStreamsEqualTheirSingleRuns) {
  Begin({.prefill = 2, .decode = 2});
  std::vector<v1::GenerateRequest> requests;
  uint64_t seed = 1;
  for (const std::string& prompt : SomePrompts(64, 7)) {
    v1::GenerateRequest request = TextRequest(prompt, 40);
    if (++seed % 2 == 0) {
      request.mutable_sampling()->set_temperature(0.9f);
      request.mutable_sampling()->set_top_p(0.95f);
      request.mutable_sampling()->set_seed(seed);
    }
    requests.push_back(request);
  }
  const auto expectations = RunAlone(cluster_.get(), requests);
  for (const Expectation& e : expectations) ASSERT_FALSE(e.token_ids.empty());
  Load load(cluster_.get(), &expectations, 64);
  while (load.completed() < 256) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  // Placement is not what makes them equal: prefixes are reused by now.
  EXPECT_EQ(cluster_->WhatIsLeft("Story 0."), "");
}

TEST_F(ClusterTest, BlockSizesAndKvFormatsMayDiffer) {
  Begin({.prefill_arguments = {"--block-size", "8"},
         .decode_arguments = {"--block-size", "32"}});
  v1::GenerateRequest request = TextRequest(SomePrompts(1, 3)[0], 32);
  request.set_placement(v1::PLACEMENT_SPLIT);
  request.mutable_stopping()->set_ignore_eos(true);
  const Outcome split = cluster_->Generate(request);
  ASSERT_TRUE(split.status.ok()) << split.status;
  EXPECT_FALSE(split.done.not_reproducible());
  request.set_placement(v1::PLACEMENT_LOCAL);
  request.mutable_cache()->set_bypass_prefix_cache(true);
  EXPECT_EQ(split.token_ids, cluster_->Generate(request).token_ids);
  EXPECT_EQ(cluster_->WhatIsLeft(), "");

  for (const auto& [prefill, decode, same] :
       {std::tuple{"f32", "bf16", 32}, std::tuple{"fp8", "int4", 8},
        std::tuple{"bf16", "int8", 32}}) {
    SCOPED_TRACE(absl::StrCat(prefill, " to ", decode));
    Begin({.worker_arguments = {"--mixed-numerics"},
           .prefill_arguments = {"--kv-cache-dtype", prefill},
           .decode_arguments = {"--kv-cache-dtype", decode}});
    request.set_placement(v1::PLACEMENT_SPLIT);
    const Outcome mixed = cluster_->Generate(request);
    ASSERT_TRUE(mixed.status.ok()) << mixed.status;
    EXPECT_EQ(mixed.done.workers().prefill(), "prefill-0");
    EXPECT_EQ(mixed.done.workers().decode(), "decode-0");
    EXPECT_TRUE(mixed.done.not_reproducible());
    EXPECT_EQ(mixed.token_ids.size(), 32u);
    // Rounding may turn a token in the end, a wrong scale all of them at once.
    const auto [differs, unused] =
        std::mismatch(split.token_ids.begin(), split.token_ids.end(),
                      mixed.token_ids.begin(), mixed.token_ids.end());
    EXPECT_GE(differs - split.token_ids.begin(), same);
  }
}

TEST_F(ClusterTest, EveryNumberFormatGivesOneTextWhereverItIsPrefilled) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--kv-cache-dtype", "fp8", "--quantization",
                                 "fp8"},
        {"--kv-cache-dtype", "int8", "--quantization", "int8"},
        {"--kv-cache-dtype", "int4", "--quantization", "int4"},
        {"--kv-cache-dtype", "int8", "--quantization", "int4"},
        {"--kv-cache-dtype", "int8", "--quantization", "w8a8"},
        {"--activation-dtype", "bf16"},
        {"--activation-dtype", "bf16-amx"}}) {
    SCOPED_TRACE(absl::StrJoin(arguments, " "));
    Begin({.worker_arguments = arguments});
    v1::GenerateRequest request = TextRequest(SomePrompts(1, 3)[0], 32);
    request.mutable_stopping()->set_ignore_eos(true);
    request.set_placement(v1::PLACEMENT_SPLIT);
    const Outcome split = cluster_->Generate(request);
    ASSERT_TRUE(split.status.ok()) << split.status;
    EXPECT_EQ(split.done.workers().prefill(), "prefill-0");
    EXPECT_FALSE(split.done.not_reproducible());
    EXPECT_EQ(split.token_ids.size(), 32u);
    request.set_placement(v1::PLACEMENT_LOCAL);
    request.mutable_cache()->set_bypass_prefix_cache(true);
    EXPECT_EQ(split.token_ids, cluster_->Generate(request).token_ids);
    EXPECT_EQ(cluster_->WhatIsLeft(), "");
  }
}

TEST_F(ClusterTest, PairsThatDifferInNumericsAreNotUsedUnlessAllowed) {
  for (const auto& [flag, prefill, decode] :
       {std::tuple{"--kv-cache-dtype", "f32", "bf16"},
        std::tuple{"--activation-dtype", "bf16", "f32"},
        std::tuple{"--activation-dtype", "bf16", "bf16-amx"}}) {
    Begin({.prefill_arguments = {flag, prefill},
           .decode_arguments = {flag, decode}});
    v1::GenerateRequest request = TextRequest(SomePrompts(1, 3)[0], 8);
    request.set_placement(v1::PLACEMENT_AUTO);
    const Outcome outcome = cluster_->Generate(request);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.done.workers().prefill(), "") << flag;  // the short way
  }
}

TEST_F(ClusterTest, ARepeatedPromptIsMostlyCached) {
  Begin({});
  const v1::GenerateRequest request = TextRequest(SomePrompts(1, 11)[0], 8);
  const Outcome first = cluster_->Generate(request);
  const Outcome second = cluster_->Generate(request);
  ASSERT_TRUE(first.status.ok() && second.status.ok());
  EXPECT_EQ(first.token_ids, second.token_ids);
  EXPECT_EQ(first.done.usage().cached_tokens(), 0);
  EXPECT_GE(second.done.usage().cached_tokens(),
            first.done.usage().prompt_tokens() - 32);
}

// Pools too small for what is asked, over and over: what they evict comes back
// from memory and from a file, and the tokens are those of no cache at all.
TEST_F(ClusterTest, OffloadedPromptsComeBackWithTheSameTokens) {
  const std::string directory = std::filesystem::temp_directory_path();
  Begin(
      {.worker_arguments = {"--max-model-len", "256", "--num-kv-blocks", "24",
                            "--kv-offload-bytes", "200KiB", "--kv-offload-path",
                            directory, "--kv-offload-file-bytes", "16MiB"}});
  std::vector<Outcome> expected;
  std::vector<std::string> prompts;
  for (uint64_t seed = 21; seed < 37; ++seed) {
    prompts.push_back(absl::StrCat(
        absl::StrJoin(SomePrompts(2, seed), " "),
        " Then the cat, the dog and the duck went home and had some bread."));
  }
  for (const bool cached : {false, true, true, true}) {
    for (size_t i = 0; i < prompts.size(); ++i) {
      v1::GenerateRequest request = TextRequest(prompts[i], 24);
      request.set_placement(i % 2 == 0 ? v1::PLACEMENT_SPLIT
                                       : v1::PLACEMENT_LOCAL);
      request.mutable_cache()->set_bypass_prefix_cache(!cached);
      const Outcome outcome = cluster_->Generate(request);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_GT(outcome.done.usage().prompt_tokens(), 48);
      if (!cached) {
        expected.push_back(outcome);
      } else {
        EXPECT_EQ(outcome.token_ids, expected[i].token_ids) << i;
      }
    }
  }
  std::this_thread::sleep_for(milliseconds(1100));  // metrics of each second
  for (const char* worker : {"decode-0", "prefill-0"}) {
    SCOPED_TRACE(worker);
    std::map<std::string, double> count;
    for (const auto& [name, value] : cluster_->Metrics(worker)) {
      if (name.find("kv_offload") == std::string::npos) continue;
      for (const char* what : {"restored", "\"read\"", "errors"}) {
        if (name.find(what) != std::string::npos) count[what] += value;
      }
    }
    EXPECT_GT(count["restored"], 0);
    EXPECT_GT(count["\"read\""], 0);  // from the file
    EXPECT_EQ(count["errors"], 0);
  }
  EXPECT_EQ(cluster_->WhatIsLeft(), "");
}

TEST_F(ClusterTest, EveryTrainedGoldenComesOutExactly) {
  const char* const data = std::getenv("TANDEM_TEST_DATA");
  if (data == nullptr) GTEST_SKIP() << "TANDEM_TEST_DATA is not set";
  const std::string model = std::string(data) + "/models/stories260K";
  std::ifstream file(model + "/golden.json");
  ASSERT_TRUE(file.good()) << model;
  const json golden = json::parse(file);
  Begin({.model_dir = model, .prefill = 2, .decode = 2});
  for (const json& c : golden["cases"]) {
    for (const v1::Placement placement :
         {v1::PLACEMENT_SPLIT, v1::PLACEMENT_LOCAL}) {
      v1::GenerateRequest request =
          TextRequest(c["prompt"].get<std::string>(),
                      static_cast<int>(c["greedy_ids"].size()));
      request.set_placement(placement);
      request.mutable_stopping()->set_ignore_eos(true);
      const Outcome outcome = cluster_->Generate(request);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.token_ids, c["greedy_ids"].get<std::vector<int32_t>>())
          << c["prompt"];
    }
  }
}

}  // namespace
}  // namespace tandem::integration
