// SPDX-License-Identifier: Apache-2.0
// Every family through a whole cluster: a router, a prefill worker and a decode
// worker serve its tiny checkpoint, and give, split and local, the tokens that
// `transformers` gives.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint_maker.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

using nlohmann::json;

// Requests are token ids; what is decoded to text is of no matter.
constexpr char kTokenizer[] = R"({
  "version": "1.0", "added_tokens": [],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false,
                    "trim_offsets": true, "use_regex": false},
  "decoder": {"type": "ByteLevel", "add_prefix_space": false,
              "trim_offsets": true, "use_regex": false},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})";

class FamiliesTest : public testing::TestWithParam<std::string> {};

TEST_P(FamiliesTest, ItsTokensAreThoseOfTransformers) {
  const json spec = engine::LoadCases()[GetParam()];
  const json golden = engine::ReadGolden(GetParam() + ".json");
  engine::TempDir model;
  engine::WriteCheckpoint(spec, model);
  model.Write("tokenizer.json", kTokenizer);
  // In chunks, in f32, of the positions that the goldens were made for.
  ClusterOptions options{
      .model_dir = model.path(),
      .worker_arguments = {"--max-num-batched-tokens", "48", "--kv-cache-dtype",
                           "f32", "--num-kv-blocks", "64", "--max-model-len",
                           absl::StrCat(spec.value("served", 256))}};
  Cluster cluster(options);
  const absl::Status started = cluster.Start();
  ASSERT_TRUE(started.ok()) << started;
  for (const json& prompt : golden["prompts"]) {
    const auto ids = prompt["ids"].get<std::vector<uint32_t>>();
    const auto greedy = prompt["greedy_ids"].get<std::vector<int32_t>>();
    for (const bool split : {true, false}) {
      v1::GenerateRequest request;
      request.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
      request.mutable_sampling()->set_temperature(0);
      request.mutable_stopping()->set_max_tokens(
          static_cast<int>(greedy.size()));
      request.mutable_stopping()->set_ignore_eos(true);
      request.mutable_output()->set_text(false);
      request.mutable_output()->set_return_token_ids(true);
      // Everything is computed both times.
      request.mutable_cache()->set_cache_salt(split ? "split" : "local");
      request.set_placement(split ? v1::PLACEMENT_SPLIT : v1::PLACEMENT_LOCAL);
      const Outcome outcome = cluster.Generate(request);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.token_ids, greedy)
          << (split ? "split" : "local") << ", a prompt of " << ids.size();
      EXPECT_EQ(outcome.done.timings().kv_bytes() > 0, split);
    }
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(
    Cluster, FamiliesTest,
    testing::Values("qwen2_bf16", "qwen2_window_f32", "qwen3_f32", "gpt2_f32",
                    "gemma2_f32", "gemma3_f32", "phi3_long_f32", "mixtral_f32",
                    "qwen3_moe_f32", "mistral_window_f32", "starcoder2_f32"),
    [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tandem::integration
