// SPDX-License-Identifier: Apache-2.0
// Every family, and every form of quantised checkpoints, through a whole
// cluster: a router, a prefill worker and a decode worker serve a tiny
// checkpoint, and give, split and local, the tokens that `transformers` gives
// (of codes: that the engine gives in this process), beam searches and a lost
// decode worker included.

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <ostream>
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

// Workers of a checkpoint: in chunks, of the positions that it is served for,
// with KV in these formats.
ClusterOptions Workers(const engine::TempDir& model, int positions,
                       int blocks = 64, const std::string& prefill_kv = "f32",
                       const std::string& decode_kv = "f32") {
  model.Write("tokenizer.json", kTokenizer);
  return {.model_dir = model.path(),
          .worker_arguments = {"--max-num-batched-tokens", absl::StrCat(kChunk),
                               "--num-kv-blocks", absl::StrCat(blocks),
                               "--max-model-len", absl::StrCat(positions)},
          .prefill_arguments = {"--kv-cache-dtype", prefill_kv},
          .decode_arguments = {"--kv-cache-dtype", decode_kv}};
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
                                         "int8", "w8a8", "fp8", "fp8_blocks",
                                         "mxfp4"),
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

// A worker that is lost in the middle of the only request.
struct Loss {
  std::string name;
  std::string model;  // of the tiny checkpoints
  std::string role = "decode";
  int prompt = 66, tokens = 400;
  int beams = 0;  // that do not fit without what windows free
  std::string prefill_kv = "f32", decode_kv = "f32";
  bool draft = false;  // the model itself in int4 guesses: some are wrong
  std::vector<std::string> decode_arguments = {};

  bool mixed() const { return prefill_kv != decode_kv; }
  friend void PrintTo(const Loss& loss, std::ostream* out) {
    *out << loss.name;
  }
};

// Two workers of the role, so that there is a spare.
ClusterOptions WorkersFor(const Loss& loss, const engine::TempDir& model) {
  ClusterOptions options =
      Workers(model, 512, 64, loss.prefill_kv, loss.decode_kv);
  (loss.role == "decode" ? options.decode : options.prefill) = 2;
  if (loss.mixed()) options.worker_arguments.push_back("--mixed-numerics");
  std::vector<std::string>& decode = options.decode_arguments;
  decode.insert(decode.end(), loss.decode_arguments.begin(),
                loss.decode_arguments.end());
  if (loss.draft) {
    decode.insert(
        decode.end(),
        {"--speculative-config",
         absl::StrCat(R"({"model": ")", model.path(), R"(", "quantization": )",
                      R"("int4", "num_speculative_tokens": 3, )",
                      R"("adaptive": false})")});
  }
  return options;
}

// Whether a worker of the role computes for it now.
bool WorksFor(const v1::RequestStatus& request, const std::string& role) {
  const std::string& at = request.phase();
  return role == "decode" ? at == "decoding"
                          : at == "prefilling" || at == "handing_over";
}

const std::string& WorkerOf(const v1::RequestStatus& request,
                            const std::string& role) {
  return role == "decode" ? request.decode_worker_id()
                          : request.prefill_worker_id();
}

struct Victim {
  std::string name;  // empty: none was killed
  int tokens = 0;    // that had come when the router learnt of it
};

// The tokens that the router has once it knows that `victim` is gone: those
// that were on their way come first.
int TokensOnceLost(Cluster& cluster, const Loss& loss,
                   const std::string& victim) {
  int tokens = 0;
  while (true) {
    const auto state = cluster.State();
    if (!state.ok() || state->in_flight_size() != 1) return tokens;
    const v1::RequestStatus& request = state->in_flight(0);
    tokens = request.output_tokens();
    if (!WorksFor(request, loss.role)) return tokens;
    if (WorkerOf(request, loss.role) != victim) return tokens;
  }
}

// Kills the worker that computes for the only request in flight, if it has got
// so far. Its spare stands still meanwhile, so that nothing goes on before.
Victim KillIn(Cluster& cluster, const Loss& loss) {
  const int least = loss.role == "decode" && loss.beams == 0 ? 20 : 0;
  const auto doomed = [&cluster, &loss, least]() -> std::string {
    const auto state = cluster.State();
    if (!state.ok() || state->in_flight_size() != 1) return "";
    const v1::RequestStatus& request = state->in_flight(0);
    const bool is =
        WorksFor(request, loss.role) && request.output_tokens() >= least;
    return is ? WorkerOf(request, loss.role) : "";
  };
  Victim victim;
  if (doomed().empty()) return victim;
  const std::string workers[] = {loss.role + "-0", loss.role + "-1"};
  for (const std::string& worker : workers) cluster.Signal(worker, SIGSTOP);
  victim.name = doomed();
  if (!victim.name.empty()) {
    cluster.Kill(victim.name);
    victim.tokens = TokensOnceLost(cluster, loss, victim.name);
  }
  for (const std::string& worker : workers) cluster.Signal(worker, SIGCONT);
  return victim;
}

class LostWorkerTest : public testing::TestWithParam<Loss> {
 protected:
  LostWorkerTest() : spec_(engine::LoadCases()[GetParam().model]) {
    engine::WriteCheckpoint(spec_, model_);
    cluster_ = std::make_unique<Cluster>(WorkersFor(GetParam(), model_));
  }

  v1::GenerateRequest Asked(const std::vector<int32_t>& prompt,
                            int tokens) const {
    v1::GenerateRequest request = Request(prompt, tokens, true);
    request.mutable_sampling()->set_temperature(0);
    request.mutable_cache()->set_bypass_prefix_cache(true);
    if (GetParam().beams > 0) {
      request.mutable_beam()->set_width(GetParam().beams);
      request.mutable_sampling()->set_n(2);
    }
    return request;
  }

  void CheckUndisturbed(const Outcome& outcome) {
    const Loss& loss = GetParam();
    EXPECT_EQ(outcome.sequences.size(), loss.beams > 0 ? 2u : 1u);
    for (const auto& [index, sequence] : outcome.sequences) {
      EXPECT_EQ(sequence.token_ids_size(), loss.tokens);
    }
    EXPECT_EQ(outcome.done.not_reproducible(), loss.mixed());
    EXPECT_EQ(outcome.done.timings().retries(), 0);
    const v1::Usage& usage = outcome.done.usage();
    EXPECT_EQ(usage.accepted_prediction_tokens() > 0, loss.draft);
    EXPECT_EQ(usage.rejected_prediction_tokens() > 0, loss.draft);
    if (loss.role != "decode") return;
    if (spec_["config"].contains("sliding_window")) {
      EXPECT_TRUE(WindowBlocksRise(*cluster_));
    } else {
      EXPECT_EQ(WindowBlocks(*cluster_), 0);
    }
  }

  // Until a worker was lost that was not done yet: some come too late.
  Outcome RunWithALoss(const v1::GenerateRequest& request,
                       std::chrono::nanoseconds undisturbed, Victim* victim) {
    Outcome outcome;
    for (int tries = 0; tries < 20; ++tries) {
      std::atomic<bool> ended = false;
      std::thread client([this, &request, &outcome, &ended] {
        outcome = cluster_->Generate(request);
        ended = true;
      });
      // A search says nothing before its end.
      if (GetParam().beams > 0 && GetParam().role == "decode") {
        std::this_thread::sleep_for(undisturbed / 2);
      }
      *victim = {};
      while (!ended && victim->name.empty()) {
        *victim = KillIn(*cluster_, GetParam());
      }
      client.join();
      if (!victim->name.empty()) {
        EXPECT_TRUE(cluster_->Restart(victim->name).ok());
        const bool decode = GetParam().role == "decode";
        const absl::Status status = cluster_->WaitUntilReady(
            decode ? 1 : 2, decode ? 2 : 1, seconds(30));
        EXPECT_TRUE(status.ok()) << status;
      }
      if (!outcome.status.ok() || outcome.done.timings().retries() > 0) break;
    }
    return outcome;
  }

  // What another format rounded otherwise is computed again: the tokens behind
  // those that had come are the ones of a prompt that ends in them.
  void ExpectContinued(const std::vector<int32_t>& prompt,
                       const Outcome& undisturbed, const Victim& victim,
                       const Outcome& outcome) {
    const auto come = undisturbed.token_ids.begin() + victim.tokens;
    std::vector<int32_t> longer = prompt;
    longer.insert(longer.end(), undisturbed.token_ids.begin(), come);
    const Outcome rest =
        cluster_->Generate(Asked(longer, GetParam().tokens - victim.tokens));
    ASSERT_TRUE(rest.status.ok()) << rest.status;
    std::vector<int32_t> expected(undisturbed.token_ids.begin(), come);
    expected.insert(expected.end(), rest.token_ids.begin(),
                    rest.token_ids.end());
    EXPECT_EQ(outcome.token_ids, expected) << "lost behind " << victim.tokens;
  }

  const json spec_;
  engine::TempDir model_;
  std::unique_ptr<Cluster> cluster_;
};

TEST_P(LostWorkerTest, ItsTokensAreThoseOfAnUndisturbedRun) {
  const Loss& loss = GetParam();
  const absl::Status started = cluster_->Start();
  ASSERT_TRUE(started.ok()) << started;
  const std::vector<int32_t> prompt = engine::PromptIds(spec_, loss.prompt);
  const v1::GenerateRequest request = Asked(prompt, loss.tokens);
  const Outcome undisturbed = cluster_->Generate(request);
  ASSERT_TRUE(undisturbed.status.ok()) << undisturbed.status;
  CheckUndisturbed(undisturbed);
  ASSERT_FALSE(HasFailure());

  Victim victim;
  const Outcome outcome =
      RunWithALoss(request, undisturbed.ended - undisturbed.sent, &victim);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status;
  ASSERT_GE(outcome.done.timings().retries(), 1);
  EXPECT_EQ(outcome.done.not_reproducible(), loss.mixed());
  const v1::WorkersUsed& workers = outcome.done.workers();
  EXPECT_NE(loss.role == "decode" ? workers.decode() : workers.prefill(),
            victim.name);
  EXPECT_NE(workers.prefill(), "");
  if (loss.mixed()) {
    ExpectContinued(prompt, undisturbed, victim, outcome);
  } else {
    EXPECT_EQ(Compare({request, undisturbed.token_ids, undisturbed.text,
                       undisturbed.sequences, undisturbed.prompt_logprobs},
                      outcome),
              "");
  }
  EXPECT_EQ(cluster_->WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(
    Cluster, LostWorkerTest,
    testing::Values(
        Loss{.name = "window", .model = "mistral_window_f32"},
        Loss{.name = "experts", .model = "mixtral_f32"},
        Loss{.name = "some_windows", .model = "gemma3_f32"},
        Loss{.name = "shared_kv", .model = "gemma4_few_f32"},
        Loss{.name = "beams", .model = "mistral_window_f32", .beams = 4},
        Loss{.name = "beams_some_windows", .model = "gemma3_f32", .beams = 4},
        Loss{.name = "beams_prefill",
             .model = "mistral_window_f32",
             .role = "prefill",
             .prompt = 400,
             .tokens = 100,
             .beams = 3},
        Loss{.name = "formats",
             .model = "qwen3_f32",
             .prefill_kv = "bf16",
             .decode_kv = "int8"},
        Loss{.name = "formats_prefill",
             .model = "qwen3_f32",
             .role = "prefill",
             .prompt = 400,
             .tokens = 100,
             .prefill_kv = "f32",
             .decode_kv = "int8"},
        Loss{.name = "no_cache",
             .model = "qwen3_f32",
             .tokens = 100,
             .decode_arguments = {"--kv-cache", "off"}},
        Loss{.name = "no_cache_prefill",
             .model = "qwen3_f32",
             .role = "prefill",
             .prompt = 400,
             .tokens = 20,
             .decode_arguments = {"--kv-cache", "off"}},
        Loss{.name = "draft", .model = "qwen3_f32", .draft = true},
        Loss{.name = "draft_prefill",
             .model = "qwen3_f32",
             .role = "prefill",
             .prompt = 400,
             .tokens = 100,
             .draft = true}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace tandem::integration
