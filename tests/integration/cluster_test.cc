// SPDX-License-Identifier: Apache-2.0
// What a client of a healthy cluster sees, through real processes.

#include "tests/integration/cluster.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/support/byte_buffer.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/error.h"
#include "common/random.h"
#include "common/rpc/status.h"
#include "tests/integration/load.h"
#include "tests/sanitized.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;
using std::chrono::seconds;

// As grpc.health.v1 has it: 1 is SERVING, 2 is NOT_SERVING; -1: no answer.
int Health(const std::shared_ptr<grpc::Channel>& channel,
           const std::string& service) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + seconds(5));
  const grpc::Slice name(absl::StrCat(
      "\x0a", std::string(1, static_cast<char>(service.size())), service));
  const grpc::ByteBuffer request(&name, 1);
  grpc::ByteBuffer response;
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
          channel.get(),
          grpc::internal::RpcMethod("/grpc.health.v1.Health/Check",
                                    grpc::internal::RpcMethod::NORMAL_RPC),
          &context, request, &response);
  grpc::Slice bytes;
  if (!status.ok() || !response.DumpToSingleSlice(&bytes).ok() ||
      bytes.size() != 2) {
    return -1;
  }
  return bytes.begin()[1];
}

class ClusterTest : public testing::Test {
 protected:
  void Begin(ClusterOptions options) {
    cluster_ = std::make_unique<Cluster>(std::move(options));
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
    // Connections and pollers of a first request are part of the baseline.
    ASSERT_TRUE(
        cluster_->Generate(TextRequest("Once upon a time", 4)).status.ok());
    ASSERT_EQ(cluster_->WhatIsLeft(), "");
  }
  void TearDown() override {
    if (cluster_ != nullptr && !HasFatalFailure()) {
      EXPECT_EQ(cluster_->WhatIsLeft(), "");
    }
  }

  std::unique_ptr<Cluster> cluster_;
};

TEST_F(ClusterTest, StreamsOneAnswerWithAllItsEvents) {
  Begin({});
  v1::GenerateRequest request = TextRequest("Mia found a red ball.", 24);
  request.set_placement(v1::PLACEMENT_SPLIT);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_output()->set_logprobs(2);
  grpc::ClientContext context;
  const auto stub = cluster_->Client();
  const auto reader = stub->Generate(&context, request);
  std::vector<v1::GenerateResponse> events;
  v1::GenerateResponse event;
  while (reader->Read(&event)) events.push_back(event);
  ASSERT_TRUE(reader->Finish().ok());
  ASSERT_GE(events.size(), 4u);
  ASSERT_TRUE(events.front().has_started());
  EXPECT_TRUE(events[events.size() - 2].has_finished());
  ASSERT_TRUE(events.back().has_done());
  const v1::GenerateStarted& started = events.front().started();
  EXPECT_EQ(started.sampling().temperature(), 0);
  EXPECT_EQ(started.stopping().max_tokens(), 24);
  EXPECT_EQ(started.prompt_token_ids_size(), started.prompt_tokens());
  int tokens = 0, logprobs = 0;
  for (const v1::GenerateResponse& response : events) {
    tokens += response.delta().token_ids_size();
    logprobs += response.delta().logprobs_size();
    for (const v1::TokenLogprob& token : response.delta().logprobs()) {
      EXPECT_LE(token.logprob(), 0);
      EXPECT_EQ(token.rank(), 1);  // greedy
      EXPECT_EQ(token.top_size(), 2);
      EXPECT_EQ(token.top(0).token_id(), token.token_id());
    }
  }
  EXPECT_EQ(tokens, 24);
  EXPECT_EQ(logprobs, 24);
  const v1::GenerateDone& done = events.back().done();
  EXPECT_EQ(done.usage().completion_tokens(), 24);
  EXPECT_EQ(done.usage().prompt_tokens(), started.prompt_tokens());
  EXPECT_EQ(done.workers().prefill(), "prefill-0");
  EXPECT_EQ(done.workers().decode(), "decode-0");
  EXPECT_EQ(done.timings().way(), "shm");
  // 2 (K and V) * layers * kv heads * head size * 2 bytes per position.
  EXPECT_GT(done.timings().kv_bytes(), 0);
  EXPECT_EQ(done.timings().kv_bytes() % done.usage().prompt_tokens(), 0);
}

// Dashboards and alerts hang on names and labels.
TEST_F(ClusterTest, MetricNamesAndLabelsAreFrozen) {
  Begin({.prefill = 1, .decode = 1});
  for (const v1::Placement way : {v1::PLACEMENT_SPLIT, v1::PLACEMENT_LOCAL}) {
    v1::GenerateRequest request = TextRequest("One day a fox", 4);
    request.set_placement(way);
    ASSERT_TRUE(cluster_->Generate(request).status.ok());
  }
  // A call that ended at each of them: as Kubernetes probes.
  const auto state = cluster_->State();
  ASSERT_TRUE(state.ok()) << state.status();
  for (const v1::WorkerStatus& worker : state->workers()) {
    const std::string& endpoint = worker.hello().worker().endpoint();
    EXPECT_EQ(Health(grpc::CreateChannel(endpoint,
                                         grpc::InsecureChannelCredentials()),
                     ""),
              1);
  }
  std::this_thread::sleep_for(milliseconds(1200));  // gauges follow each second
  std::set<std::string> names;
  for (const char* process : {"router", "prefill-0", "decode-0"}) {
    for (const auto& [series, value] : cluster_->Metrics(process)) {
      const size_t brace = series.find('{');
      const std::string metric = series.substr(0, brace);
      if (metric.rfind("tandem_", 0) != 0 && metric.rfind("process_", 0) != 0 &&
          metric.rfind("grpc_server_", 0) != 0) {
        continue;  // of the response's head
      }
      // A histogram's _bucket stands for its _count and _sum.
      if (metric.ends_with("_count") || metric.ends_with("_sum")) continue;
      std::string name = absl::StrCat(
          std::string(process).substr(0, std::string(process).find('-')), " ",
          metric);
      if (brace != std::string::npos) {
        const std::string labels =
            series.substr(brace + 1, series.size() - brace - 2);
        for (const auto& label : absl::StrSplit(labels, ',')) {
          absl::StrAppend(&name, " ",
                          std::string(label.substr(0, label.find('='))));
        }
      }
      names.insert(name);
    }
  }
  std::ifstream file(TANDEM_SOURCE_DIR "/tests/golden/metrics.txt");
  std::set<std::string> expected;
  for (std::string line; std::getline(file, line);) expected.insert(line);
  std::vector<std::string> missing, unknown;
  std::set_difference(expected.begin(), expected.end(), names.begin(),
                      names.end(), std::back_inserter(missing));
  std::set_difference(names.begin(), names.end(), expected.begin(),
                      expected.end(), std::back_inserter(unknown));
  EXPECT_EQ(absl::StrJoin(missing, "\n"), "");
  EXPECT_EQ(absl::StrJoin(unknown, "\n"), "") << "not in metrics.txt";
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

// Every rule through the whole system: it holds, and holds alike where the
// prompt is prefilled elsewhere.
TEST_F(ClusterTest, RulesOnLogitsHoldWhereverThePromptIsPrefilled) {
  Begin({});
  const auto run = [&](const std::function<void(v1::SamplingOptions*)>& set) {
    v1::GenerateRequest request = TextRequest("Once upon a time", 48);
    request.mutable_stopping()->set_ignore_eos(true);
    request.mutable_cache()->set_bypass_prefix_cache(true);
    set(request.mutable_sampling());
    request.set_placement(v1::PLACEMENT_SPLIT);
    const Outcome split = cluster_->Generate(request);
    EXPECT_TRUE(split.status.ok()) << split.status;
    EXPECT_EQ(split.token_ids.size(), 48u);
    EXPECT_EQ(split.done.workers().prefill(), "prefill-0");
    request.set_placement(v1::PLACEMENT_LOCAL);
    EXPECT_EQ(cluster_->Generate(request).token_ids, split.token_ids);
    return split;
  };
  const auto distinct = [](const Outcome& outcome) {
    return std::set<int32_t>(outcome.token_ids.begin(), outcome.token_ids.end())
        .size();
  };
  const Outcome free = run([](auto*) {});
  const std::set<int32_t> usual(free.token_ids.begin(), free.token_ids.end());
  ASSERT_NE(free.text.find(" was"), std::string::npos) << free.text;

  const Outcome penalised = run([](auto* s) { s->set_frequency_penalty(2); });
  EXPECT_GT(distinct(penalised), distinct(free));
  const Outcome present = run([](auto* s) { s->set_presence_penalty(2); });
  EXPECT_GT(distinct(present), distinct(free));
  const Outcome repeated = run([](auto* s) { s->set_repetition_penalty(2); });
  EXPECT_GT(distinct(repeated), distinct(free));

  const auto chosen = static_cast<uint32_t>(free.token_ids[0]);
  const Outcome biased =
      run([&](auto* s) { (*s->mutable_logit_bias())[chosen] = 100; });
  EXPECT_EQ(distinct(biased), 1u);
  EXPECT_EQ(biased.token_ids[0], free.token_ids[0]);

  const Outcome banned = run([&](auto* s) {
    for (const int32_t id : usual) {
      s->add_banned_token_ids(static_cast<uint32_t>(id));
    }
  });
  for (const int32_t id : banned.token_ids) EXPECT_FALSE(usual.contains(id));

  const std::set<int32_t> few(free.token_ids.begin() + 20,
                              free.token_ids.begin() + 40);
  const Outcome allowed = run([&](auto* s) {
    s->set_temperature(2);
    s->set_seed(4);
    for (const int32_t id : few) {
      s->add_allowed_token_ids(static_cast<uint32_t>(id));
    }
  });
  EXPECT_GT(distinct(allowed), 3u);
  for (const int32_t id : allowed.token_ids) EXPECT_TRUE(few.contains(id));

  v1::GenerateRequest none = TextRequest("Once upon a time", 4);
  none.mutable_sampling()->add_allowed_token_ids(chosen);
  none.mutable_sampling()->add_bad_words(
      free.text.substr(0, free.text.find(' ', 1)));
  EXPECT_EQ(cluster_->Generate(none).status.code(),
            absl::StatusCode::kInvalidArgument)
      << "no token is left: " << none.sampling().bad_words(0);

  const Outcome wordless = run([](auto* s) { s->add_bad_words("was"); });
  EXPECT_EQ(wordless.text.find(" was"), std::string::npos) << wordless.text;
  std::vector<int32_t> by_typical_p[2];
  for (const bool set : {false, true}) {
    by_typical_p[set] = run([set](auto* s) {
                          s->set_temperature(1);
                          s->set_seed(4);
                          if (set) s->set_typical_p(0.2f);
                        }).token_ids;
  }
  EXPECT_NE(by_typical_p[true], by_typical_p[false]);
}

TEST_F(ClusterTest, SequencesOfAPromptDifferAndTheBestOfThemIsChosen) {
  Begin({});
  v1::GenerateRequest request = TextRequest(SomePrompts(1, 3)[0], 24);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_seed(11);
  const Outcome single = cluster_->Generate(request);
  ASSERT_TRUE(single.status.ok()) << single.status;
  request.mutable_output()->set_echo(true);
  const Outcome echoed = cluster_->Generate(request);
  EXPECT_EQ(echoed.text, request.text() + single.text);
  EXPECT_EQ(echoed.token_ids, single.token_ids);
  request.mutable_output()->clear_echo();

  request.mutable_sampling()->set_n(4);
  request.mutable_output()->set_logprobs(0);
  const Outcome four = cluster_->Generate(request);
  ASSERT_TRUE(four.status.ok()) << four.status;
  ASSERT_EQ(four.sequences.size(), 4u);
  EXPECT_EQ(four.sequences.at(0).text(), single.text);
  std::set<std::string> texts;
  std::vector<std::pair<double, std::string>> ranking;
  for (const auto& [index, sequence] : four.sequences) {
    EXPECT_EQ(sequence.token_ids_size(), 24) << index;
    EXPECT_EQ(sequence.finished().finish_reason(), v1::FINISH_REASON_LENGTH);
    texts.insert(sequence.text());
    double logprob = 0;
    for (const auto& token : sequence.logprobs()) logprob += token.logprob();
    ranking.emplace_back(logprob, sequence.text());
  }
  EXPECT_EQ(texts.size(), 4u);
  EXPECT_EQ(four.done.usage().completion_tokens(), 4 * 24);
  EXPECT_EQ(four.done.usage().prompt_tokens(),
            single.done.usage().prompt_tokens());

  request.mutable_sampling()->set_n(2);
  request.mutable_sampling()->set_best_of(4);
  request.mutable_output()->clear_logprobs();
  const Outcome best = cluster_->Generate(request);
  ASSERT_TRUE(best.status.ok()) << best.status;
  ASSERT_EQ(best.sequences.size(), 2u);
  std::sort(ranking.rbegin(), ranking.rend());
  EXPECT_EQ(best.sequences.at(0).text(), ranking[0].second);
  EXPECT_EQ(best.sequences.at(1).text(), ranking[1].second);
  EXPECT_EQ(best.sequences.at(0).logprobs_size(), 0);  // not asked for
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

// Pages that a process touched for the first time since they were cleared.
int64_t PageFaults(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string stat(std::istreambuf_iterator<char>(file), {});
  // Behind the name, which may hold anything.
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(stat.rfind(')') + 2), ' ');
  int64_t faults = 0;
  EXPECT_TRUE(absl::SimpleAtoi(fields.at(7), &faults)) << stat;
  return faults;
}

// A message's buffer that went back to the system is cleared, page by page, for
// the next one.
TEST_F(ClusterTest, BuffersOfHandoffsByGrpcStayWithTheirWorkers) {
  if (kSanitized) GTEST_SKIP() << "its allocator is another one";
  Begin({.worker_arguments = {"--handoff", "grpc", "--kv-cache-dtype", "f32",
                              "--max-num-batched-tokens", "1024"}});
  v1::GenerateRequest request;
  for (uint32_t i = 0; i < 1000; ++i) {
    request.mutable_token_ids()->add_ids(100 + i % 700);
  }
  request.mutable_stopping()->set_max_tokens(2);
  request.mutable_cache()->set_bypass_prefix_cache(true);
  request.set_placement(v1::PLACEMENT_SPLIT);
  const std::string workers[] = {"prefill-0", "decode-0"};
  std::map<std::string, int64_t> before;
  int64_t bytes = 0;
  constexpr int kWarm = 10, kCounted = 20;
  for (int i = 0; i < kWarm + kCounted; ++i) {
    if (i == kWarm) {
      for (const std::string& worker : workers) {
        before[worker] = PageFaults(cluster_->pid(worker));
      }
      bytes = 0;
    }
    const Outcome outcome = cluster_->Generate(request);
    ASSERT_TRUE(outcome.status.ok()) << outcome.status;
    ASSERT_EQ(outcome.done.workers().prefill(), "prefill-0");
    bytes += outcome.done.timings().kv_bytes();
  }
  for (const std::string& worker : workers) {
    const int64_t faults = PageFaults(cluster_->pid(worker)) - before[worker];
    // As many as pages, or more, where they go back.
    EXPECT_LT(faults, bytes / 4096 / 4) << worker;
  }
}

TEST_F(ClusterTest, OneCallGivesWhatTheStreamGives) {
  Begin({});
  const v1::GenerateRequest request = TextRequest("The cat", 16);
  const Outcome streamed = cluster_->Generate(request);
  v1::GenerateOnceResponse once;
  grpc::ClientContext context;
  ASSERT_TRUE(cluster_->Client()->GenerateOnce(&context, request, &once).ok());
  ASSERT_EQ(once.sequences_size(), 1);
  EXPECT_EQ(once.sequences(0).text(), streamed.text);
  EXPECT_EQ(once.sequences(0).finished().finish_reason(), streamed.reason);
  EXPECT_TRUE(once.has_done());
}

TEST_F(ClusterTest, TextAndModelCallsAnswer) {
  Begin({});
  const auto stub = cluster_->Client();
  v1::TokenizeRequest tokenize;
  tokenize.set_text("The cat said: héllo 🐈");
  v1::TokenizeResponse tokens;
  grpc::ClientContext c1, c2, c3, c4, c5;
  ASSERT_TRUE(stub->Tokenize(&c1, tokenize, &tokens).ok());
  ASSERT_GT(tokens.token_ids_size(), 3);
  v1::DetokenizeRequest detokenize;
  *detokenize.mutable_token_ids() = tokens.token_ids();
  v1::DetokenizeResponse text;
  ASSERT_TRUE(stub->Detokenize(&c2, detokenize, &text).ok());
  EXPECT_EQ(text.text(), tokenize.text());
  v1::ListModelsResponse models;
  ASSERT_TRUE(stub->ListModels(&c3, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).model(), "tales");
  EXPECT_GT(models.models(0).context_length(), 0);
  v1::GetModelRequest get;
  v1::GetModelResponse model;
  ASSERT_TRUE(stub->GetModel(&c4, get, &model).ok());
  EXPECT_EQ(model.model().ready_decode_workers(), 1);
  get.set_model("no-such-model");
  const absl::Status missing = rpc::FromGrpc(stub->GetModel(&c5, get, &model));
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ErrorReason(missing), "MODEL_NOT_FOUND");
}

TEST_F(ClusterTest, BadRequestsAreRefusedAndTheNextGoodOneIsServed) {
  Begin({});
  struct Case {
    const char* field;
    std::function<void(v1::GenerateRequest*)> spoil;
  };
  const Case cases[] = {
      {"temperature",
       [](auto* r) { r->mutable_sampling()->set_temperature(-1); }},
      {"top_p", [](auto* r) { r->mutable_sampling()->set_top_p(0); }},
      {"max_tokens", [](auto* r) { r->mutable_stopping()->set_max_tokens(0); }},
      {"logprobs", [](auto* r) { r->mutable_output()->set_logprobs(21); }},
      {"n", [](auto* r) { r->mutable_sampling()->set_n(33); }},
      {"prompt", [](auto* r) { r->clear_prompt(); }},
  };
  for (const Case& c : cases) {
    v1::GenerateRequest request = TextRequest("Hello", 4);
    c.spoil(&request);
    const Outcome outcome = cluster_->Generate(request);
    EXPECT_EQ(outcome.status.code(), absl::StatusCode::kInvalidArgument)
        << c.field << ": " << outcome.status;
    EXPECT_NE(outcome.status.message().find(c.field), std::string::npos)
        << outcome.status;
    EXPECT_EQ(ErrorReason(outcome.status), "FIELD_INVALID") << c.field;
    EXPECT_TRUE(cluster_->Generate(TextRequest("Hello", 4)).status.ok());
  }
}

TEST_F(ClusterTest, StopStringsEndTheTextBeforeThem) {
  Begin({});
  v1::GenerateRequest request = TextRequest("Once upon a time", 64);
  request.mutable_stopping()->set_ignore_eos(true);
  const Outcome whole = cluster_->Generate(request);
  ASSERT_TRUE(whole.status.ok());
  const std::string stop = whole.text.substr(20, 6);  // spans tokens
  request.mutable_stopping()->add_stop(stop);
  const Outcome stopped = cluster_->Generate(request);
  ASSERT_TRUE(stopped.status.ok());
  EXPECT_EQ(stopped.text, whole.text.substr(0, whole.text.find(stop)));
  EXPECT_EQ(stopped.reason, v1::FINISH_REASON_STOP);
}

TEST_F(ClusterTest, CancellationInEveryPhaseLeavesNothing) {
  Begin({.worker_arguments = {"--max-num-batched-tokens", "16"}});
  std::vector<v1::GenerateRequest> requests;
  for (const std::string& prompt : SomePrompts(24, 5)) {
    requests.push_back(TextRequest(prompt, 200));
    requests.back().mutable_stopping()->set_ignore_eos(true);
  }
  std::atomic<int> cancelled = 0;
  SeededRandom random(9);
  for (int round = 0; round < 8; ++round) {
    std::vector<std::thread> threads;
    for (const v1::GenerateRequest& request : requests) {
      const auto after = std::chrono::microseconds(random.Below(60000));
      const bool by_deadline = random.Below(2) == 0;
      threads.emplace_back([&, after, by_deadline] {
        grpc::ClientContext context;
        if (by_deadline) {
          context.set_deadline(std::chrono::system_clock::now() + after);
        }
        std::thread canceller([&] {
          std::this_thread::sleep_for(after);
          if (!by_deadline) context.TryCancel();
        });
        const Outcome outcome = cluster_->Generate(request, &context);
        canceller.join();
        cancelled += !outcome.status.ok();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_GT(cancelled, 24);
  EXPECT_EQ(cluster_->WhatIsLeft("Story"), "");
}

TEST_F(ClusterTest, CancellationHitsEachPhaseAndLeavesNothing) {
  Begin({.worker_arguments = {"--max-num-batched-tokens", "16",
                              "--handoff-slab-bytes", "4KiB"},
         .prefill_arguments = {"--max-num-seqs", "2"}});
  const std::vector<std::string> prompts = SomePrompts(24, 6);
  std::mutex mutex;
  std::map<std::string, grpc::ClientContext*> open;
  std::atomic<bool> stop = false;
  std::atomic<int> cancelled = 0, wrong = 0;
  std::vector<std::thread> clients;
  (void)cluster_->Client();
  for (size_t c = 0; c < prompts.size(); ++c) {
    clients.emplace_back([&, c] {
      for (int round = 0; !stop; ++round) {
        v1::GenerateRequest request = TextRequest(prompts[c], 60);
        request.set_placement(v1::PLACEMENT_SPLIT);
        request.mutable_cache()->set_bypass_prefix_cache(true);
        const std::string id =
            "cancel-" + std::to_string(c) + "-" + std::to_string(round);
        request.set_request_id(id);
        grpc::ClientContext context;
        {
          std::lock_guard<std::mutex> lock(mutex);
          open[id] = &context;
        }
        const Outcome outcome = cluster_->Generate(request, &context);
        {
          std::lock_guard<std::mutex> lock(mutex);
          open.erase(id);
        }
        cancelled += absl::IsCancelled(outcome.status);
        wrong += !outcome.status.ok() && !absl::IsCancelled(outcome.status);
      }
    });
  }
  std::map<std::string, int> hits;
  const auto end = std::chrono::steady_clock::now() + seconds(30);
  for (const char* phase :
       {"opening", "prefilling", "handing_over", "decoding"}) {
    while (hits[phase] < 10 && std::chrono::steady_clock::now() < end) {
      const auto state = cluster_->State();
      if (!state.ok()) continue;
      for (const v1::RequestStatus& request : state->in_flight()) {
        if (request.phase() != phase) continue;
        std::lock_guard<std::mutex> lock(mutex);
        const auto it = open.find(request.request_id());
        if (it == open.end()) continue;
        it->second->TryCancel();
        ++hits[phase];
        break;
      }
    }
    EXPECT_GE(hits[phase], 10) << phase;
  }
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GE(cancelled, 20);  // some had ended when the cancellation came
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(cluster_->WhatIsLeft("Story"), "");
}

TEST_F(ClusterTest, AReaderThatStopsHoldsUpNobodyElse) {
  Begin({.router_arguments = {"--stall-limit", "2s"},
         .decode_arguments = {"--stall-limit", "2s"}});
  const auto stub = cluster_->Client();
  v1::GenerateRequest request = TextRequest("Once upon a time", 900);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_output()->set_logprobs(20);  // large messages
  grpc::ChannelArguments arguments;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>>>
      readers;
  for (int i = 0; i < 4; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    readers.push_back(stub->Generate(contexts.back().get(), request));
  }
  // Others are served meanwhile.
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(cluster_->Generate(TextRequest("The dog", 8)).status.ok());
  }
  std::this_thread::sleep_for(seconds(5));
  int exhausted = 0, ok = 0;
  for (size_t i = 0; i < readers.size(); ++i) {
    v1::GenerateResponse response;
    while (readers[i]->Read(&response)) {
    }
    const grpc::Status status = readers[i]->Finish();
    exhausted += status.error_code() == grpc::RESOURCE_EXHAUSTED;
    ok += status.ok();
  }
  // What fits into the connection's buffers may have ended well.
  EXPECT_EQ(exhausted + ok, 4);
}

TEST_F(ClusterTest, DrainingAWorkerUnderLoadFailsNobody) {
  Begin({.prefill = 2, .decode = 2});
  std::vector<v1::GenerateRequest> requests;
  for (const std::string& prompt : SomePrompts(16, 21)) {
    requests.push_back(TextRequest(prompt, 60));
  }
  const auto expectations = RunAlone(cluster_.get(), requests);
  Load load(cluster_.get(), &expectations, 16);
  for (const char* name : {"prefill-0", "decode-0"}) {
    std::this_thread::sleep_for(milliseconds(300));
    cluster_->Signal(name, SIGTERM);
    const std::optional<int> code = cluster_->WaitForExit(name, seconds(40));
    ASSERT_TRUE(code.has_value()) << name << " does not end";
    EXPECT_EQ(*code, 128 + SIGTERM) << cluster_->Log(name);
    ASSERT_TRUE(cluster_->Restart(name).ok());
    ASSERT_TRUE(cluster_->WaitUntilReady(2, 2, seconds(30)).ok());
  }
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  EXPECT_GT(load.completed(), 16);
  cluster_->Signal("router", SIGTERM);
  EXPECT_EQ(cluster_->WaitForExit("router", seconds(40)), 128 + SIGTERM);
  ASSERT_TRUE(cluster_->Restart("router").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(2, 2, seconds(30)).ok());
}

TEST_F(ClusterTest, ReadyIsWhoCanServeAndAliveWhoRuns) {
  Begin({});
  const auto channel = cluster_->Channel(cluster_->grpc_port());
  // Balancers ask for the service, and who restarts the process for "".
  const auto health_becomes = [&](int want) {
    int said = 0;
    for (int i = 0; i < 200 && said != want; ++i) {
      if (i > 0) std::this_thread::sleep_for(milliseconds(50));
      said = Health(channel, "tandem.v1.InferenceService");
    }
    EXPECT_EQ(said, want);
    EXPECT_EQ(Health(channel, ""), 1);
  };
  health_becomes(1);
  // Readiness is told once a second.
  const auto becomes = [&](const std::string& name, const std::string& want) {
    std::string said;
    for (int i = 0; i < 200 && said != want; ++i) {
      if (i > 0) std::this_thread::sleep_for(milliseconds(50));
      said = cluster_->Probe(name, "/readyz");
    }
    EXPECT_EQ(said, want) << name;
    EXPECT_EQ(cluster_->Probe(name, "/livez"), "200 ok\n") << name;
  };
  for (const char* name : {"router", "prefill-0", "decode-0"}) {
    becomes(name, "200 ok\n");
  }
  cluster_->Kill("decode-0");
  becomes("router", "503 no decode worker is ready\n");
  health_becomes(2);
  becomes("prefill-0", "200 ok\n");
  ASSERT_TRUE(cluster_->Restart("decode-0").ok());
  becomes("router", "200 ok\n");
  health_becomes(1);
  cluster_->Kill("router");
  becomes("decode-0", "503 no router knows it\n");
  ASSERT_TRUE(cluster_->Restart("router").ok());
  ASSERT_TRUE(cluster_->WaitUntilReady(1, 1, seconds(30)).ok());
  becomes("decode-0", "200 ok\n");
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
