// SPDX-License-Identifier: Apache-2.0
// Every family, and every form of quantised checkpoints, through a whole
// cluster: a router, a prefill worker and a decode worker serve a tiny
// checkpoint, and give, split and local, the tokens that `transformers` gives
// (of codes: that the engine gives in this process), beam searches and a lost
// decode worker included.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "engine/engine.h"
#include "engine/model/layer_parts.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/mxfp4_maker.h"
#include "tests/engine/rig.h"
#include "tests/integration/cluster.h"
#include "tests/integration/load.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Requests are token ids; what is decoded to text is of no matter.
constexpr char kTokenizer[] = R"({
  "version": "1.0", "added_tokens": [],
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false,
                    "trim_offsets": true, "use_regex": false},
  "decoder": {"type": "ByteLevel", "add_prefix_space": false,
              "trim_offsets": true, "use_regex": false},
  "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}})";

constexpr int kChunk = 48;

// Workers of a checkpoint: in chunks, in f32, of the positions that it is
// served for.
ClusterOptions Workers(const engine::TempDir& model, int positions,
                       int blocks = 64) {
  model.Write("tokenizer.json", kTokenizer);
  return {.model_dir = model.path(),
          .worker_arguments = {"--max-num-batched-tokens", absl::StrCat(kChunk),
                               "--kv-cache-dtype", "f32", "--num-kv-blocks",
                               absl::StrCat(blocks), "--max-model-len",
                               absl::StrCat(positions)}};
}

v1::GenerateRequest Request(const std::vector<int32_t>& prompt, int max_tokens,
                            bool split) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->mutable_ids()->Add(prompt.begin(), prompt.end());
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_output()->set_text(false);
  request.mutable_output()->set_return_token_ids(true);
  // Everything is computed both times.
  request.mutable_cache()->set_cache_salt(split ? "split" : "local");
  request.set_placement(split ? v1::PLACEMENT_SPLIT : v1::PLACEMENT_LOCAL);
  return request;
}

// The greedy tokens behind a prompt are these, wherever it is prefilled.
void ExpectTokens(Cluster& cluster, const std::vector<int32_t>& prompt,
                  const std::vector<int32_t>& tokens) {
  for (const bool split : {true, false}) {
    v1::GenerateRequest request =
        Request(prompt, static_cast<int>(tokens.size()), split);
    request.mutable_sampling()->set_temperature(0);
    const Outcome outcome = cluster.Generate(request);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.token_ids, tokens)
        << (split ? "split" : "local") << ", a prompt of " << prompt.size();
    EXPECT_EQ(outcome.done.timings().kv_bytes() > 0, split);
  }
}

class FamiliesTest : public testing::TestWithParam<std::string> {};

TEST_P(FamiliesTest, ItsTokensAreThoseOfTransformers) {
  const json spec = engine::LoadCases()[GetParam()];
  const json golden = engine::ReadGolden(GetParam() + ".json");
  engine::TempDir model;
  engine::WriteCheckpoint(spec, model);
  Cluster cluster(Workers(model, spec.value("served", 256)));
  const absl::Status started = cluster.Start();
  ASSERT_TRUE(started.ok()) << started;
  for (const json& prompt : golden["prompts"]) {
    ExpectTokens(cluster, prompt["ids"].get<std::vector<int32_t>>(),
                 prompt["greedy_ids"].get<std::vector<int32_t>>());
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(
    Cluster, FamiliesTest,
    testing::Values(
        "qwen2_bf16", "qwen2_window_f32", "qwen3_f32", "gpt2_f32", "gemma2_f32",
        "gemma3_f32", "gemma4_f32", "gemma4_moe_f32", "gemma4_few_f32",
        "gemma4_whole_bf16", "phi3_long_f32", "phi3_short_f32", "phi4_mini_f32",
        "mixtral_f32", "qwen3_moe_f32", "qwen3_moe_dense_f32", "qwen2_moe_f32",
        "glm4_moe_f32", "deepseek_v2_f32", "deepseek_v3_f32",
        "glm4_moe_lite_f32", "youtu_f32", "minicpm3_f32", "dots1_f32",
        "minimax_m2_f32", "ernie4_5_moe_f32", "gpt_neox_f32",
        "gpt_neox_serial_f32", "falcon_f32", "falcon_serial_f32",
        "falcon_new_f32", "nemotron_f32", "arcee_f32", "cohere_f32",
        "cohere_norms_f32", "stablelm_norms_f32", "cohere2_f32", "phi2_f32",
        "stablelm_f32", "stablelm_parallel_f32", "mistral_window_f32",
        "starcoder2_f32", "mistral3_whole_f32", "gemma3_whole_f32", "gemma_f32",
        "smollm3_f32", "glm_f32", "glm4_f32", "ernie45_f32", "seed_oss_f32",
        "granite_f32", "granitemoe_f32", "granitemoe_shared_f32", "exaone4_f32",
        "helium_f32", "olmo_f32", "olmo2_f32", "olmo3_f32", "olmoe_f32",
        "hunyuan_dense_f32", "gpt_oss_f32", "ministral3_whole_f32",
        "hunyuan_moe_f32", "qwen25_vl_f32", "qwen3_vl_f32", "qwen3_vl_moe_f32",
        "llama_linear_f32", "llama_dynamic_f32", "llama_yarn_f32",
        "llama_long_f32"),
    [](const auto& test) { return test.param; });

class QuantisedTest : public testing::TestWithParam<std::string> {};

TEST_P(QuantisedTest, ItsTokensAreThoseOfTheEngineAlone) {
  const bool mxfp4 = GetParam() == "mxfp4";
  const json spec = engine::LoadCases()[mxfp4 ? "gpt_oss_f32" : "qwen3_f32"];
  constexpr int kPositions = 256, kSteps = 16;
  engine::TempDir model;
  if (mxfp4) {
    engine::WriteMxfp4(spec, 5, model, nullptr);
  } else {
    engine::WriteCoded(spec, engine::CodedForms().at(GetParam()), model,
                       nullptr);
  }
  const auto backend = engine::NewCpu(1);
  engine::RigOptions options;
  options.load.max_positions = kPositions;
  options.executor.num_blocks = 64;
  options.executor.kv_dtype = kernels::DType::kF32;
  engine::Rig rig(model.path(), backend.get(), options);
  Cluster cluster(Workers(model, kPositions));
  const absl::Status started = cluster.Start();
  ASSERT_TRUE(started.ok()) << started;
  for (const int length : {1, 17, 66}) {
    const std::vector<int32_t> prompt = engine::PromptIds(spec, length);
    engine::TestSequence alone = rig.NewSequence(prompt, length + kSteps);
    engine::TestSequence* const one = &alone;
    rig.Greedy({&one, 1}, kChunk, kSteps);
    ExpectTokens(cluster, prompt,
                 {alone.ids.begin() + length, alone.ids.end()});
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(Cluster, QuantisedTest,
                         testing::Values("gptq_act_order", "awq", "packed_int4",
                                         "int8", "fp8", "fp8_blocks", "mxfp4"),
                         [](const auto& test) { return test.param; });

constexpr int kBlock = 16;  // as by default

// What one sequence has in a worker's pool.
int BlocksAtOnce(const engine::Rig& rig, int positions) {
  engine::EngineOptions options;
  options.max_num_batched_tokens = kChunk;
  options.window = engine::WindowOf(rig.spec());
  return engine::Engine::BlocksAtOnce(options, kBlock, positions);
}

// Pools of both workers that hold what a sequence has at once, where some
// layers see all: less than its prompt as a whole, of which not all is handed
// over.
class SmallPoolTest : public testing::TestWithParam<std::string> {};

TEST_P(SmallPoolTest, APromptIsServedThatDoesNotFitAsAWhole) {
  const json spec = engine::LoadCases()[GetParam()];
  constexpr int kPositions = 512, kSteps = 12;
  engine::TempDir model;
  engine::WriteCheckpoint(spec, model);
  const auto backend = engine::NewCpu(1);
  engine::RigOptions options;
  options.load.max_positions = kPositions;
  options.executor.num_blocks = 128;
  options.executor.kv_dtype = kernels::DType::kF32;
  engine::Rig rig(model.path(), backend.get(), options);
  ASSERT_TRUE(engine::WindowOf(rig.spec()).frees_parts());
  const int blocks = BlocksAtOnce(rig, kPositions);
  const std::vector<int> lengths = {kPositions - kSteps, kPositions - 60, 66};
  ASSERT_LT(blocks * kBlock, lengths[1]);
  Cluster cluster(Workers(model, kPositions, blocks));
  const absl::Status started = cluster.Start();
  ASSERT_TRUE(started.ok()) << started;
  std::vector<int64_t> bytes;
  for (const int length : lengths) {
    const std::vector<int32_t> prompt = engine::PromptIds(spec, length);
    engine::TestSequence alone = rig.NewSequence(prompt, length + kSteps);
    engine::TestSequence* const one = &alone;
    rig.Greedy({&one, 1}, kChunk, kSteps);
    ExpectTokens(cluster, prompt,
                 {alone.ids.begin() + length, alone.ids.end()});
    v1::GenerateRequest request = Request(prompt, kSteps, true);
    request.mutable_cache()->set_bypass_prefix_cache(true);
    const Outcome outcome = cluster.Generate(request);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    EXPECT_EQ(outcome.done.timings().retries(), 0);
    bytes.push_back(outcome.done.timings().kv_bytes());
  }
  // Of windowed layers not the more the longer a prompt is.
  EXPECT_LT(bytes[0], bytes[2] * lengths[0] / lengths[2]);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(Cluster, SmallPoolTest,
                         testing::Values("gemma3_f32", "gemma4_f32",
                                         "gemma4_few_f32", "gpt_oss_f32"),
                         [](const auto& test) { return test.param; });

// Of a pool that holds what so many sequences have at once, and not all that
// their beams compute.
class WindowedBeamsTest : public testing::TestWithParam<std::string> {};

TEST_P(WindowedBeamsTest, AreServedAsFarAsWindowsMakeRoom) {
  const json spec = engine::LoadCases()[GetParam()];
  constexpr int kPositions = 512, kPrompt = 66, kWidth = 3;
  engine::TempDir model;
  engine::WriteCheckpoint(spec, model);
  const auto backend = engine::NewCpu(1);
  engine::RigOptions options;
  options.load.max_positions = kPositions;
  const int blocks =
      kWidth * BlocksAtOnce(engine::Rig(model.path(), backend.get(), options),
                            kPositions);
  ASSERT_LT(blocks, kWidth * (kPositions / kBlock - kPrompt / kBlock));
  v1::GenerateRequest request =
      Request(engine::PromptIds(spec, kPrompt), kPositions - kPrompt, true);
  request.mutable_sampling()->set_n(kWidth);
  request.mutable_beam()->set_width(kWidth);
  std::vector<Outcome> outcomes;
  for (const int its : {blocks, kWidth * kPositions / kBlock}) {
    Cluster cluster(Workers(model, kPositions, its));
    const absl::Status started = cluster.Start();
    ASSERT_TRUE(started.ok()) << started;
    outcomes.push_back(cluster.Generate(request));
    ASSERT_TRUE(outcomes.back().status.ok()) << outcomes.back().status;
    if (its == blocks) {
      v1::GenerateRequest wider = request;
      wider.mutable_beam()->set_width(kWidth + 1);
      const absl::Status status = cluster.Generate(wider).status;
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_EQ(ErrorMetadata(status)["field"], "beam.width") << status;
    }
    EXPECT_EQ(cluster.WhatIsLeft(), "");
  }
  const Outcome& roomy = outcomes[1];
  EXPECT_EQ(roomy.sequences.size(), size_t{kWidth});
  EXPECT_EQ(Compare({request, roomy.token_ids, roomy.text, roomy.sequences,
                     roomy.prompt_logprobs},
                    outcomes[0]),
            "");
}

INSTANTIATE_TEST_SUITE_P(Cluster, WindowedBeamsTest,
                         testing::Values("mistral_window_f32", "gemma3_f32"),
                         [](const auto& test) { return test.param; });

class BeamsTest : public testing::TestWithParam<std::string> {};

TEST_P(BeamsTest, ItsHypothesesAreThoseOfTransformers) {
  std::ifstream stream(std::string(TANDEM_SOURCE_DIR) +
                       "/tests/golden/beams/checkpoints.json");
  const json golden = json::parse(stream, nullptr, false);
  ASSERT_TRUE(golden.is_object());
  const json spec = engine::LoadCases()[GetParam()];
  engine::TempDir model;
  engine::WriteCheckpoint(spec, model);
  Cluster cluster(Workers(model, 256));
  const absl::Status started = cluster.Start();
  ASSERT_TRUE(started.ok()) << started;
  for (const json& one : golden["cases"][GetParam()]) {
    const auto prompt = engine::PromptIds(spec, one["length"].get<int>());
    for (const bool split : {true, false}) {
      v1::GenerateRequest request =
          Request(prompt, one["max_tokens"].get<int>(), split);
      for (const json& end : one["ends"]) {
        request.mutable_stopping()->add_stop_token_ids(end.get<uint32_t>());
      }
      if (one.contains("repetition_penalty")) {
        request.mutable_sampling()->set_repetition_penalty(
            one["repetition_penalty"].get<float>());
      }
      request.mutable_sampling()->set_n(one["best"].get<int>());
      v1::BeamOptions* const beam = request.mutable_beam();
      beam->set_width(one["width"].get<int>());
      beam->set_length_penalty(one["length_penalty"].get<float>());
      const json& early = one["early_stopping"];
      beam->set_early_stopping(early == "never"    ? v1::EARLY_STOPPING_NEVER
                               : early.get<bool>() ? v1::EARLY_STOPPING_TRUE
                                                   : v1::EARLY_STOPPING_FALSE);
      const Outcome outcome = cluster.Generate(request);
      ASSERT_TRUE(outcome.status.ok()) << outcome.status;
      EXPECT_EQ(outcome.done.workers().prefill(), split ? "prefill-0" : "");
      ASSERT_EQ(outcome.sequences.size(), one["hypotheses"].size());
      for (const auto& [index, sequence] : outcome.sequences) {
        const json& hypothesis = one["hypotheses"][static_cast<size_t>(index)];
        EXPECT_EQ(std::vector<int32_t>(sequence.token_ids().begin(),
                                       sequence.token_ids().end()),
                  hypothesis["ids"].get<std::vector<int32_t>>())
            << (split ? "split" : "local") << ", a prompt of " << prompt.size()
            << ", hypothesis " << index;
        EXPECT_EQ(sequence.finished().finish_reason(),
                  hypothesis["stopped"].get<bool>() ? v1::FINISH_REASON_STOP
                                                    : v1::FINISH_REASON_LENGTH);
      }
    }
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(Cluster, BeamsTest,
                         testing::Values("llama_biases_f32", "qwen3_f32",
                                         "gpt2_f32", "qwen2_bf16",
                                         "qwen2_window_f32", "gemma2_f32",
                                         "gemma3_f32", "gemma4_few_f32",
                                         "phi3_short_f32", "mixtral_f32",
                                         "mistral_window_f32", "gpt_oss_f32",
                                         "deepseek_v3_f32", "falcon_f32"),
                         [](const auto& test) { return test.param; });

// A bias lifts the first candidates above what a log probability can be.
TEST(BiasedBeamsTest, AreHandedOverAndFindTheSame) {
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start().ok());
  v1::GenerateRequest request = TextRequest("Mia found a red ball.", 5);
  (*request.mutable_sampling()->mutable_logit_bias())[19] = 20;
  request.mutable_sampling()->set_n(2);
  request.mutable_beam()->set_width(2);
  request.set_placement(v1::PLACEMENT_LOCAL);
  const Outcome local = cluster.Generate(request);
  ASSERT_TRUE(local.status.ok()) << local.status;
  request.set_placement(v1::PLACEMENT_SPLIT);
  const Outcome split = cluster.Generate(request);
  ASSERT_TRUE(split.status.ok()) << split.status;
  EXPECT_EQ(split.token_ids, local.token_ids);
  EXPECT_EQ(split.done.workers().prefill(), "prefill-0");
  EXPECT_EQ(split.done.timings().retries(), 0);
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

// Blocks that decode workers let go behind a window; told once a second.
double WindowBlocks(Cluster& cluster) {
  double blocks = 0;
  for (const char* worker : {"decode-0", "decode-1"}) {
    for (const auto& [series, value] : cluster.Metrics(worker)) {
      if (series.starts_with("tandem_kv_window_blocks_total")) blocks += value;
    }
  }
  return blocks;
}

bool WindowBlocksRise(Cluster& cluster) {
  for (int tries = 0; tries < 40; ++tries) {
    if (WindowBlocks(cluster) > 0) return true;
    std::this_thread::sleep_for(milliseconds(50));
  }
  return false;
}

// Kills the decode worker that has the only request in flight; "" if there is
// none. Both stand still meanwhile, so that the request does not end before.
std::string KillTheDecodeWorker(Cluster& cluster) {
  for (const char* worker : {"decode-0", "decode-1"}) {
    cluster.Signal(worker, SIGSTOP);
  }
  const auto state = cluster.State();
  std::string victim;
  if (state.ok() && state->in_flight_size() == 1 &&
      state->in_flight(0).phase() == "decoding") {
    victim = state->in_flight(0).decode_worker_id();
    cluster.Kill(victim);
  }
  for (const char* worker : {"decode-0", "decode-1"}) {
    cluster.Signal(worker, SIGCONT);
  }
  return victim;
}

class LostWorkerTest : public testing::TestWithParam<std::string> {};

TEST_P(LostWorkerTest, ItsTokensAreThoseOfAnUndisturbedRun) {
  const json spec = engine::LoadCases()[GetParam()];
  engine::TempDir model;
  engine::WriteCheckpoint(spec, model);
  ClusterOptions options = Workers(model, 512);
  options.decode = 2;
  Cluster cluster(options);
  absl::Status status = cluster.Start();
  ASSERT_TRUE(status.ok()) << status;
  constexpr int kTokens = 400;
  v1::GenerateRequest request =
      Request(engine::PromptIds(spec, 66), kTokens, true);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_cache()->set_bypass_prefix_cache(true);
  const Outcome undisturbed = cluster.Generate(request);
  ASSERT_TRUE(undisturbed.status.ok()) << undisturbed.status;
  ASSERT_EQ(undisturbed.token_ids.size(), size_t{kTokens});
  const bool windowed = spec["config"].contains("sliding_window");
  if (windowed) {
    EXPECT_TRUE(WindowBlocksRise(cluster));
  } else {
    EXPECT_EQ(WindowBlocks(cluster), 0);
  }

  grpc::ClientContext context;
  Cluster::SetDeadline(&context);
  const auto reader = cluster.Client()->Generate(&context, request);
  v1::GenerateResponse event;
  v1::GenerateDone done;
  std::vector<int32_t> tokens;
  std::string victim;
  while (reader->Read(&event)) {
    tokens.insert(tokens.end(), event.delta().token_ids().begin(),
                  event.delta().token_ids().end());
    if (victim.empty() && tokens.size() >= 20) {
      victim = KillTheDecodeWorker(cluster);
      ASSERT_NE(victim, "");
    }
    if (event.has_done()) done = event.done();
  }
  const grpc::Status ended = reader->Finish();
  ASSERT_TRUE(ended.ok()) << ended.error_message();
  EXPECT_EQ(tokens, undisturbed.token_ids);
  EXPECT_GE(done.timings().retries(), 1);
  EXPECT_NE(done.workers().decode(), victim);
  EXPECT_EQ(done.workers().prefill(), "prefill-0");
  ASSERT_TRUE(cluster.Restart(victim).ok());
  status = cluster.WaitUntilReady(1, 2, seconds(30));
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(Cluster, LostWorkerTest,
                         testing::Values("mistral_window_f32", "mixtral_f32",
                                         "gemma3_f32", "gemma4_few_f32"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tandem::integration
