// SPDX-License-Identifier: Apache-2.0
// Workers that die or stop under load, in every phase of a request: nothing is
// lost, repeated or changed, and nothing is left behind. TANDEM_FAULT_SEEDS
// says how many kills per role and phase (default 20).

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "tests/integration/cluster.h"
#include "tests/integration/load.h"

namespace tandem::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

int Seeds() {
  int seeds = 20;
  const char* const text = std::getenv("TANDEM_FAULT_SEEDS");
  if (text != nullptr && !absl::SimpleAtoi(text, &seeds)) std::abort();
  return seeds;
}

// Slow enough to be hit: small chunks, few sequences per prefill step, small
// slabs. Three workers of each role, so that there is a spare while one starts
// anew.
ClusterOptions SlowCluster() {
  return {
      .prefill = 2,
      .decode = 2,
      .router_arguments = {"--enable-attention-output", "--enable-no-kv-cache"},
      .worker_arguments = {"--max-num-batched-tokens", "16",
                           "--handoff-slab-bytes", "4KiB", "--shutdown-timeout",
                           "5s", "--enable-attention-output"},
      .prefill_arguments = {"--max-num-seqs", "2"}};
}

// What depends on the tokens before must find them again after a loss.
void SetRules(uint64_t i, v1::SamplingOptions* sampling) {
  sampling->set_repetition_penalty(1.3f);
  sampling->set_frequency_penalty(0.4f);
  sampling->set_presence_penalty(-0.2f);
  sampling->set_typical_p(0.9f);
  (*sampling->mutable_logit_bias())[static_cast<uint32_t>(i)] = 3;
  for (const char* word : {"was", "the little", "and he said"}) {
    sampling->add_bad_words(word);
  }
}

constexpr uint32_t kComma = 17;
constexpr uint32_t kFullStop = 19;

// What a request may ask for beside, each in turn with what it goes with. What
// may end one does so once it can have been hit.
void SetOptions(uint64_t i, v1::GenerateRequest* request) {
  v1::SamplingOptions* const sampling = request->mutable_sampling();
  v1::StoppingOptions* const stopping = request->mutable_stopping();
  v1::OutputOptions* const output = request->mutable_output();
  output->set_logprobs(static_cast<int32_t>(i % 4));
  switch (i % 8) {
    case 1:  // each token costs the whole sequence
      request->mutable_cache()->set_no_kv_cache(true);
      stopping->set_max_tokens(8);
      output->set_prompt_logprobs(2);
      output->set_echo(true);
      break;
    case 2:
      sampling->set_top_p(0.9f);
      sampling->set_top_k(40);
      sampling->set_min_p(0.02f);
      output->clear_logprobs();
      break;
    case 3:
      output->mutable_attention()->add_layers(0);
      output->mutable_attention()->add_layers(5);
      output->set_prompt_logprobs(0);
      break;
    case 4:
      sampling->set_best_of(3);
      output->set_prompt_logprobs(1);
      break;
    case 5:
      stopping->set_min_tokens(20);
      stopping->add_stop(", and");
      stopping->add_stop(". ");
      stopping->set_include_stop_str_in_output(i > 8);
      output->set_echo(true);
      break;
    case 6:
      for (uint32_t id = 6; id < 700; ++id) {
        sampling->add_allowed_token_ids(id);
        if (id % 5 == 0) sampling->add_banned_token_ids(id);
      }
      stopping->set_min_tokens(20);
      stopping->add_stop_token_ids(kComma);
      stopping->add_stop_token_ids(kFullStop);
      break;
    case 7:
      output->mutable_attention()->set_mean(true);
      output->set_prompt_logprobs(20);
      break;
    default:
      break;
  }
}

std::vector<v1::GenerateRequest> Requests() {
  std::vector<v1::GenerateRequest> requests;
  uint64_t i = 0;
  for (const std::string& prompt : SomePrompts(24, 33)) {
    v1::GenerateRequest request = TextRequest(prompt, 40);
    request.set_placement(v1::PLACEMENT_SPLIT);
    request.mutable_stopping()->set_ignore_eos(true);
    if (++i % 2 == 0) {
      request.mutable_sampling()->set_temperature(0.8f);
      request.mutable_sampling()->set_seed(i);
    }
    request.mutable_cache()->set_bypass_prefix_cache(i % 3 == 0);
    if (i % 4 >= 2) SetRules(i, request.mutable_sampling());
    if (i % 8 == 0) {  // begins again, wherever it was
      request.mutable_sampling()->Clear();
      request.mutable_sampling()->set_n(2);
      request.mutable_beam()->set_width(3);
      request.mutable_stopping()->set_max_tokens(20);
    }
    if (i % 8 == 4) {
      request.mutable_sampling()->set_n(2);
      request.mutable_stopping()->set_max_tokens(20);
    }
    SetOptions(i, &request);
    requests.push_back(request);
  }
  return requests;
}

// What a request asked for is there, and all ways of ending are.
void CheckUndisturbed(const std::vector<Expectation>& expectations) {
  std::map<v1::GenerateFinished::StopMatchCase, int> ends;
  for (const Expectation& e : expectations) {
    const v1::OutputOptions& asked = e.request.output();
    EXPECT_GE(e.token_ids.size(), 8u) << "too short to be hit";
    EXPECT_EQ(e.prompt_logprobs.tokens().empty(), !asked.has_prompt_logprobs());
    EXPECT_EQ(asked.echo(), e.text.starts_with(e.request.text()));
    for (const auto& [index, sequence] : e.sequences) {
      const int tokens = sequence.token_ids_size();
      EXPECT_EQ(sequence.logprobs_size(), asked.has_logprobs() ? tokens : 0);
      EXPECT_EQ(sequence.attention_size(), asked.has_attention() ? tokens : 0);
      ++ends[sequence.finished().stop_match_case()];
    }
  }
  EXPECT_GT(ends[v1::GenerateFinished::kStopString], 0);
  EXPECT_GT(ends[v1::GenerateFinished::kStopTokenId], 0);
  EXPECT_GT(ends[v1::GenerateFinished::STOP_MATCH_NOT_SET], 0);
}

// The phases in which a worker is killed, as the router sees its requests.
enum class Phase {
  kQueued,        // waits in the prefill worker's queue
  kMidChunk,      // being prefilled
  kBeforeCommit,  // first token out, KV on its way
  kAfterFirst,    // the decode worker has just started
  kMidDecode,
  kDraining,  // after SIGTERM
};
constexpr Phase kPhases[] = {Phase::kQueued,       Phase::kMidChunk,
                             Phase::kBeforeCommit, Phase::kAfterFirst,
                             Phase::kMidDecode,    Phase::kDraining};
const char* Name(Phase phase) {
  switch (phase) {
    case Phase::kQueued:
      return "queued";
    case Phase::kMidChunk:
      return "mid-chunk";
    case Phase::kBeforeCommit:
      return "before commit";
    case Phase::kAfterFirst:
      return "after the first token";
    case Phase::kMidDecode:
      return "mid-decode";
    case Phase::kDraining:
      return "draining";
  }
  return "";
}

// Whether some request on worker `name` is in the phase now.
bool InPhase(const v1::GetClusterStateResponse& state, const std::string& name,
             Phase phase) {
  for (const v1::RequestStatus& request : state.in_flight()) {
    if (request.prefill_worker_id() != name &&
        request.decode_worker_id() != name) {
      continue;
    }
    const std::string& at = request.phase();
    switch (phase) {
      case Phase::kQueued:
        if (at == "opening" ||
            (at == "prefilling" && request.output_tokens() == 0)) {
          return true;
        }
        break;
      case Phase::kMidChunk:
        if (at == "prefilling") return true;
        break;
      case Phase::kBeforeCommit:
        if (at == "handing_over") return true;
        break;
      case Phase::kAfterFirst:
        if (at == "decoding" && request.output_tokens() <= 3) return true;
        break;
      case Phase::kMidDecode:
        if (at == "decoding" && request.output_tokens() > 10) return true;
        break;
      case Phase::kDraining:
        return true;
    }
  }
  return false;
}

class FaultTest : public testing::TestWithParam<const char*> {
 protected:
  void Begin(ClusterOptions options) {
    cluster_ = std::make_unique<Cluster>(std::move(options));
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
    expectations_ = RunAlone(cluster_.get(), Requests());
    CheckUndisturbed(expectations_);
    ASSERT_FALSE(HasFailure());
    ASSERT_EQ(cluster_->WhatIsLeft(), "");
  }

  // Waits until a request on `name` is in `phase`; false if none came.
  bool WaitForPhase(const std::string& name, Phase phase) {
    const auto end = Clock::now() + seconds(10);
    while (Clock::now() < end) {
      const auto state = cluster_->State();
      if (state.ok() && InPhase(*state, name, phase)) return true;
    }
    return false;
  }

  std::unique_ptr<Cluster> cluster_;
  std::vector<Expectation> expectations_;
};

// Any id that stood there before has a guess of what follows it.
constexpr char kGuessMuch[] =
    R"({"method": "ngram", "num_speculative_tokens": 4,
        "prompt_lookup_min": 1, "prompt_lookup_max": 4})";
// The model itself: nearly all is right; rounded to int4, not so much.
std::string GuessWithModel(const char* quantization = "none") {
  return absl::StrCat(R"({"model": ")", EmbeddedModel(),
                      R"(", "quantization": ")", quantization,
                      R"(", "num_speculative_tokens": 3, "adaptive": false})");
}
// In flight while workers are killed.
constexpr int kStreams = 12;

TEST_P(FaultTest, SigkillInEveryPhaseLosesNothing) {
  const std::string role = GetParam();
  ClusterOptions options = SlowCluster();
  if (role == "decode") {  // with guesses in flight
    options.decode_arguments.insert(options.decode_arguments.end(),
                                    {"--speculative-config", kGuessMuch});
  } else {  // whose caches begin anew behind each handoff
    options.decode_arguments.insert(
        options.decode_arguments.end(),
        {"--speculative-config", GuessWithModel("int4")});
  }
  Begin(options);
  SeededRandom random(role == "prefill" ? 1 : 2);
  std::map<std::string, int> hits;
  Load load(cluster_.get(), &expectations_, kStreams);
  for (int seed = 0; seed < Seeds(); ++seed) {
    for (const Phase phase : kPhases) {
      const std::string victim = role + "-" + std::to_string(random.Below(2));
      if (phase == Phase::kDraining) cluster_->Signal(victim, SIGTERM);
      if (WaitForPhase(victim, phase)) {
        ++hits[Name(phase)];
        std::this_thread::sleep_for(
            std::chrono::microseconds(random.Below(3000)));
        cluster_->Kill(victim);
      }
      ASSERT_TRUE(cluster_->Restart(victim).ok());
      const absl::Status ready = cluster_->WaitUntilReady(2, 2, seconds(30));
      ASSERT_TRUE(ready.ok()) << ready;
      // A request may fail at its second crash without a new token, so every
      // stream gets on before the next kill.
      load.WaitForEveryStream();
      ASSERT_EQ(load.faults(), "") << "after " << victim << " was killed "
                                   << Name(phase) << ", seed " << seed;
    }
  }
  EXPECT_TRUE(load.Finish()) << "a stream hangs";
  EXPECT_EQ(load.faults(), "");
  EXPECT_GT(load.retries(), 0);
  for (const Phase phase : kPhases) {
    // A draining worker may have nothing left by the time it is looked at.
    const int least = phase == Phase::kDraining ? Seeds() / 4 : Seeds() / 2;
    EXPECT_GE(hits[Name(phase)], least) << Name(phase);
    std::printf("%s killed %s: %d times\n", role.c_str(), Name(phase),
                hits[Name(phase)]);
  }
  EXPECT_EQ(cluster_->WhatIsLeft("Story"), "");
}

TEST_P(FaultTest, AShortStopMovesNothingAndALongOneLosesNothing) {
  const std::string role = GetParam();
  Begin(SlowCluster());
  Load load(cluster_.get(), &expectations_, 16);
  const std::string victim = role + "-0";
  std::this_thread::sleep_for(milliseconds(500));
  for (const auto stopped : {milliseconds(1000), milliseconds(7000)}) {
    cluster_->Signal(victim, SIGSTOP);
    std::this_thread::sleep_for(stopped);
    cluster_->Signal(victim, SIGCONT);
    std::this_thread::sleep_for(milliseconds(1500));
    ASSERT_EQ(load.faults(), "") << stopped.count() << " ms";
    if (stopped == milliseconds(1000)) {
      EXPECT_EQ(load.retries(), 0);
    }
  }
  const absl::Status ready = cluster_->WaitUntilReady(2, 2, seconds(30));
  EXPECT_TRUE(ready.ok()) << ready;
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  EXPECT_EQ(cluster_->WhatIsLeft(), "");
}

TEST_P(FaultTest, WithoutASpareStreamsWaitForTheRestart) {
  const std::string role = GetParam();
  ClusterOptions options = SlowCluster();
  options.prefill = options.decode = 1;
  if (role == "decode") {  // quantised KV is handed over and made anew alike
    options.worker_arguments.insert(options.worker_arguments.end(),
                                    {"--kv-cache-dtype", "fp8"});
    options.decode_arguments.insert(options.decode_arguments.end(),
                                    {"--speculative-config", GuessWithModel()});
  }
  Begin(options);
  Load load(cluster_.get(), &expectations_, 8);
  std::this_thread::sleep_for(milliseconds(500));
  for (int i = 0; i < 3; ++i) {
    cluster_->Kill(role + "-0");
    std::this_thread::sleep_for(milliseconds(700));
    ASSERT_TRUE(cluster_->Restart(role + "-0").ok());
    ASSERT_TRUE(cluster_->WaitUntilReady(1, 1, seconds(30)).ok());
    // A request that meets two crashes without a token in between, as a beam
    // search does, would be a suspect.
    load.WaitForEveryStream();
  }
  EXPECT_TRUE(load.Finish());
  EXPECT_EQ(load.faults(), "");
  EXPECT_EQ(cluster_->WhatIsLeft(), "");
}

INSTANTIATE_TEST_SUITE_P(Roles, FaultTest, testing::Values("prefill", "decode"),
                         [](const auto& role) { return role.param; });

TEST(RouterFaultTest, ARouterThatDiesLeavesNothingOnItsWorkers) {
  ClusterOptions options = SlowCluster();
  Cluster cluster(options);
  ASSERT_TRUE(cluster.Start().ok());
  std::vector<std::thread> clients;
  std::atomic<int> unavailable = 0, other = 0;
  (void)cluster.Client();
  for (const v1::GenerateRequest& request : Requests()) {
    clients.emplace_back([&cluster, &unavailable, &other, request] {
      v1::GenerateRequest longer = request;
      longer.mutable_stopping()->set_max_tokens(800);
      longer.mutable_stopping()->clear_stop();
      longer.mutable_stopping()->clear_stop_token_ids();
      const Outcome outcome = cluster.Generate(longer);
      ++(outcome.status.code() == absl::StatusCode::kUnavailable ? unavailable
                                                                 : other);
    });
  }
  std::this_thread::sleep_for(milliseconds(400));
  cluster.Kill("router");
  const auto killed = Clock::now();
  for (std::thread& client : clients) client.join();
  EXPECT_LT(Clock::now() - killed, seconds(5)) << "clients were not told";
  EXPECT_GT(unavailable, 0);
  EXPECT_EQ(other, 0);
  ASSERT_TRUE(cluster.Restart("router").ok());
  const absl::Status ready = cluster.WaitUntilReady(2, 2, seconds(30));
  ASSERT_TRUE(ready.ok()) << ready;
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
