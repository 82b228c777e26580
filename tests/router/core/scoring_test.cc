// SPDX-License-Identifier: Apache-2.0
// Log probabilities of a prompt's tokens on their way through the router: each
// once and in order, all before the first output token, whatever is lost.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

std::vector<int32_t> Prompt() {
  std::vector<int32_t> prompt;
  for (int i = 0; i < kPrompt; ++i) prompt.push_back(1 + i % 20);
  return prompt;
}

// As a worker would score positions [begin, end), with one alternative.
v1::ScoredTokens Scores(int begin, int end) {
  v1::ScoredTokens scores;
  scores.set_position(begin);
  for (int i = begin; i < end; ++i) {
    v1::Token* const token = scores.add_tokens();
    token->set_token_id(Prompt()[static_cast<size_t>(i)]);
    token->set_logprob(-static_cast<float>(i));
    token->set_rank(i);
    token->add_top()->set_token_id(9);
  }
  return scores;
}
v1::PrefillResponse FromPrefill(int begin, int end) {
  v1::PrefillResponse response;
  *response.mutable_scores() = Scores(begin, end);
  return response;
}
v1::DecodeResponse FromDecode(int begin, int end) {
  v1::DecodeResponse response;
  *response.mutable_scores() = Scores(begin, end);
  return response;
}

// All messages in order: "started 0+1 1+9 text done".
std::string Story(const ClientPipe& client) {
  std::string story;
  for (const v1::GenerateResponse& r : client.sent) {
    if (!story.empty()) story += " ";
    if (r.has_started()) story += "started";
    if (r.has_prompt_logprobs()) {
      absl::StrAppend(&story, r.prompt_logprobs().position(), "+",
                      r.prompt_logprobs().tokens_size());
    }
    if (r.has_delta()) story += r.delta().text();
    if (r.has_finished()) story += "finished";
    if (r.has_done()) story += "done";
  }
  return story;
}

// One prefill and one decode worker unless a test adds more.
struct ScoringTest : ::testing::Test {
  ScoringTest() {
    prefill_lease = w.Prefill("p0");
    decode_lease = w.Decode("d0");
  }
  static AdmittedRequest Ask(int max_tokens, std::vector<int32_t> prompt) {
    AdmittedRequest admitted = World::Ask(std::move(prompt), max_tokens);
    admitted.effective.output.set_prompt_logprobs(1);
    admitted.effective.features = {kFeaturePromptLogprobs};
    return admitted;
  }
  ClientPipe* Submit(int max_tokens = 8) {
    return w.Submit(Ask(max_tokens, Prompt()));
  }
  static absl::Status Gone() { return absl::UnavailableError("reset"); }
  // The newest decode call's attempt commits, and gives one token and its end.
  void DecodeOne(uint32_t attempt) {
    w.decodes.back().Say(World::Started(attempt));
    w.decodes.back().Say(World::Tokens(kPrompt, {1}));
    w.decodes.back().Say(World::Finished(v1::FINISH_REASON_STOP));
  }

  World w;
  LeasePipe* prefill_lease;
  LeasePipe* decode_lease;
};

TEST_F(ScoringTest, ScoresOfAPrefillWorkerComeBeforeItsToken) {
  ClientPipe* const client = Submit();
  EXPECT_EQ(w.decodes[0].sent[0].open().scoring().position(), 1);
  w.decodes[0].Say(World::Opened(1, "t"));
  const v1::PrefillOpen& open = w.prefills[0].sent[0].open();
  EXPECT_EQ(open.scoring().position(), 1);
  EXPECT_EQ(open.scoring().alternatives(), 1);
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, 10));
  w.prefills[0].Say(FromPrefill(10, kPrompt));
  w.prefills[0].Say(World::First(kPrompt, 1));
  EXPECT_EQ(Story(*client), "started 0+1 1+9 10+30 a");
  const v1::PromptLogprobs& first = client->sent[1].prompt_logprobs();
  EXPECT_EQ(first.tokens(0).token_id(), 1u);
  EXPECT_EQ(first.tokens(0).token(), "a");
  EXPECT_EQ(first.tokens(0).rank(), 0);
  const v1::TokenLogprob& second = client->sent[2].prompt_logprobs().tokens(0);
  EXPECT_EQ(second.token_id(), 2u);
  EXPECT_EQ(second.token(), "b");
  EXPECT_EQ(second.logprob(), -1);
  EXPECT_EQ(second.rank(), 1);
  ASSERT_EQ(second.top_size(), 1);
  EXPECT_EQ(second.top(0).token(), "i");
}

TEST_F(ScoringTest, TokensOfTheDecodeWorkerWaitForScoresOnTheirWay) {
  ClientPipe* const client = Submit();
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, 10));
  w.decodes[0].Say(World::Started(1));
  EXPECT_TRUE(w.decodes[0].paused);
  // Not to be heard is no silence.
  w.frozen.insert(&w.decodes[0]);
  w.RunFor(2 * w.options.silence);
  EXPECT_TRUE(w.decodes[0].open);
  w.prefills[0].Say(FromPrefill(10, kPrompt));
  EXPECT_FALSE(w.decodes[0].paused);
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2}));
  w.prefills[0].Say(World::First(kPrompt, 1));
  EXPECT_EQ(Story(*client), "started 0+1 1+9 10+30 ab");
}

TEST_F(ScoringTest, ADecodeWorkerLostBehindTheScoresBringsNoneAgain) {
  ClientPipe* const client = Submit();
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, kPrompt));
  w.prefills[0].Say(World::First(kPrompt, 1));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2}));
  w.Decode("d1");
  w.decodes[0].Break(Gone());
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_FALSE(w.decodes[1].sent[0].open().has_scoring());
  w.decodes[1].Say(World::Opened(7, "t"));
  ASSERT_EQ(w.prefills.size(), 2u);
  EXPECT_FALSE(w.prefills[1].sent[0].open().has_scoring());
  w.decodes[1].Say(World::Started(7));
  w.decodes[1].Say(World::Tokens(kPrompt + 2, {3}));
  w.decodes[1].Say(World::Finished(v1::FINISH_REASON_STOP));
  w.prefills[1].Say(World::Done());
  EXPECT_EQ(Story(*client), "started 0+1 1+39 a b c finished done");
}

TEST_F(ScoringTest, AnAttemptThatBeginsAnewAsksForWhatIsMissing) {
  ClientPipe* const client = Submit();
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, 12));
  w.Prefill("p1");
  w.prefills[0].Break(Gone());
  w.Settle();
  const v1::DecodeRetry& retry = w.decodes[0].sent.back().retry();
  EXPECT_EQ(retry.scoring().position(), 12);
  w.decodes[0].Say(World::Opened(2, "t"));
  ASSERT_EQ(w.prefills.size(), 2u);
  EXPECT_EQ(w.prefills[1].sent[0].open().scoring().position(), 12);
  w.prefills[1].Say(World::Computing());
  // What is there already is not passed on again, whoever says it.
  w.prefills[1].Say(FromPrefill(10, 20));
  w.prefills[1].Say(FromPrefill(20, kPrompt));
  w.prefills[1].Say(World::First(kPrompt, 1));
  EXPECT_EQ(Story(*client), "started 0+1 1+11 12+8 20+20 a");
  EXPECT_EQ(w.core->counters().dropped_tokens(), 2);
}

TEST_F(ScoringTest, ScoresLostBehindACommitBeginTheRequestAgain) {
  for (const bool heard_first : {true, false}) {
    SCOPED_TRACE(heard_first);
    World world;
    world.Prefill("p0");
    world.Decode("d0");
    ClientPipe* const client = world.Submit(Ask(8, Prompt()));
    world.decodes[0].Say(World::Opened(1, "t"));
    world.prefills[0].Say(World::Computing());
    world.prefills[0].Say(FromPrefill(1, 12));
    if (heard_first) {
      world.decodes[0].Say(World::Started(1));
      world.prefills[0].Break(Gone());
    } else {  // the retry crosses the commit
      world.prefills[0].Break(Gone());
      world.decodes[0].Say(World::Started(1));
    }
    world.Settle();
    EXPECT_TRUE(world.decodes[0].dropped);
    world.RunFor(absl::Seconds(3));
    ASSERT_EQ(world.decodes.size(), 2u);
    EXPECT_EQ(world.decodes[1].sent[0].open().scoring().position(), 12);
    world.decodes[1].Say(World::Opened(5, ""));
    if (!world.prefills.back().open || world.prefills.size() == 1) {
      world.decodes[1].Say(FromDecode(12, kPrompt));
    } else {
      world.prefills.back().Say(FromPrefill(12, kPrompt));
    }
    world.decodes[1].Say(World::Started(5));
    world.decodes[1].Say(World::Tokens(kPrompt, {1}));
    EXPECT_EQ(Story(*client), "started 0+1 1+11 12+28 a");
    EXPECT_EQ(client->sent.size(), 5u);
  }
}

TEST_F(ScoringTest, AWorkerThatLeavesScoresOutIsNotBelieved) {
  const struct {
    const char* why;
    std::vector<v1::PrefillResponse> says;
  } kCases[] = {
      {"a gap", {FromPrefill(2, 5)}},
      {"too many",
       {FromPrefill(1, kPrompt),
        [] {
          v1::PrefillResponse r;
          *r.mutable_scores() = Scores(kPrompt - 1, kPrompt);
          r.mutable_scores()->set_position(kPrompt);
          return r;
        }()}},
      {"another token", {[] {
         v1::PrefillResponse r = FromPrefill(1, 3);
         r.mutable_scores()->mutable_tokens(1)->set_token_id(17);
         return r;
       }()}},
      {"a token too early", {FromPrefill(1, 10), World::First(kPrompt, 1)}},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.why);
    World world;
    world.Prefill("p0");
    world.Decode("d0");
    world.Submit(Ask(8, Prompt()));
    world.decodes[0].Say(World::Opened(1, "t"));
    world.prefills[0].Say(World::Computing());
    for (const auto& message : c.says) world.prefills[0].Say(message);
    EXPECT_TRUE(world.prefills[0].dropped);
    EXPECT_EQ(world.core->counters().prefill_retries(), 1);
  }
}

TEST_F(ScoringTest, WhatWasRightBeforeAWrongScoreIsPassedOnOnce) {
  ClientPipe* const client = Submit();
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  v1::PrefillResponse scores = FromPrefill(1, 5);
  scores.mutable_scores()->mutable_tokens(2)->set_token_id(17);
  w.Prefill("p1");
  w.prefills[0].Say(scores);
  w.Settle();
  EXPECT_EQ(Story(*client), "started 0+1 1+2");
  EXPECT_EQ(w.decodes[0].sent.back().retry().scoring().position(), 3);
}

TEST_F(ScoringTest, ALocalPromptIsScoredByTheDecodeWorker) {
  prefill_lease->Break(Gone());
  ClientPipe* const client = Submit();
  ASSERT_EQ(w.decodes.size(), 1u);
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(FromDecode(1, kPrompt));
  DecodeOne(1);
  EXPECT_EQ(Story(*client), "started 0+1 1+39 a finished done");
}

TEST_F(ScoringTest, OnlyScoresNeedNoDecodeWorker) {
  decode_lease->Break(Gone());
  ClientPipe* const client = Submit(0);
  EXPECT_THAT(w.decodes, IsEmpty());
  ASSERT_THAT(w.prefills, SizeIs(1));
  const v1::PrefillOpen& open = w.prefills[0].sent[0].open();
  EXPECT_FALSE(open.has_decode_worker());
  EXPECT_EQ(open.ticket(), "");
  EXPECT_EQ(open.stopping().max_tokens(), 0);
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, kPrompt));
  v1::PrefillResponse done;
  done.mutable_done()->set_prefill_us(10);
  done.mutable_done()->mutable_work()->set_steps(3);
  w.prefills[0].Say(done);
  EXPECT_EQ(Story(*client), "started 0+1 1+39 finished done");
  EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_LENGTH);
  const v1::GenerateDone& end = client->sent.back().done();
  EXPECT_EQ(end.usage().prompt_tokens(), kPrompt);
  EXPECT_EQ(end.usage().completion_tokens(), 0);
  EXPECT_EQ(end.workers().prefill(), "p0");
  EXPECT_EQ(end.workers().decode(), "");
  EXPECT_EQ(end.work().steps(), 3);
  EXPECT_TRUE(client->status.ok());
  EXPECT_TRUE(w.core->idle());
}

TEST_F(ScoringTest, OnlyScoresSayWhatTheyWereComputedWith) {
  const auto fingerprint = [](const ClientPipe& client) {
    return client.sent[0].started().system_fingerprint();
  };
  ClientPipe* const scored = Submit(0);
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, kPrompt));
  ClientPipe* const drawn = Submit();
  w.decodes[0].Say(FromDecode(1, kPrompt));
  DecodeOne(1);
  EXPECT_NE(fingerprint(*scored), "");
  EXPECT_EQ(fingerprint(*scored), fingerprint(*drawn));
}

TEST_F(ScoringTest, OnlyScoresMoveToAnotherPrefillWorker) {
  w.Prefill("p1");
  ClientPipe* const client = Submit(0);
  const std::string first = w.prefill_ids[0];
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, 12));
  w.prefills[0].Break(Gone());
  w.Settle();
  ASSERT_THAT(w.prefills, SizeIs(2));
  EXPECT_NE(w.prefill_ids[1], first);
  const v1::PrefillOpen& open = w.prefills[1].sent[0].open();
  EXPECT_EQ(open.scoring().position(), 12);
  EXPECT_NE(open.attempt(), w.prefills[0].sent[0].open().attempt());
  w.prefills[1].Say(World::Computing());
  w.prefills[1].Say(FromPrefill(12, kPrompt));
  // All is there: what is left of the call does not matter.
  w.prefills[1].Break(Gone());
  w.Settle();
  EXPECT_EQ(Story(*client), "started 0+1 1+11 12+28 finished done");
  EXPECT_THAT(w.decodes, IsEmpty());
}

TEST_F(ScoringTest, OnlyScoresGoToADecodeWorkerWherePrefillWorkersRefuse) {
  ClientPipe* const client = Submit(0);
  w.prefills[0].Break(absl::ResourceExhaustedError("full"));
  w.RunFor(absl::Milliseconds(10));
  ASSERT_THAT(w.decodes, SizeIs(1));
  EXPECT_FALSE(w.decodes[0].sent[0].open().has_prefill_worker());
  EXPECT_EQ(w.decodes[0].sent[0].open().stopping().max_tokens(), 0);
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(FromDecode(1, kPrompt));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  EXPECT_EQ(Story(*client), "started 0+1 1+39 finished done");
}

TEST_F(ScoringTest, OnePromptTokenAloneNeedsNobody) {
  ClientPipe* const client = w.Submit(Ask(0, {5}));
  w.Settle();
  EXPECT_EQ(Story(*client), "started 0+1 finished done");
  EXPECT_THAT(w.prefills, IsEmpty());
  EXPECT_THAT(w.decodes, IsEmpty());
  // With output it is a request like others.
  w.Submit(Ask(4, {5}));
  ASSERT_THAT(w.decodes, SizeIs(1));
  EXPECT_FALSE(w.decodes[0].sent[0].open().has_scoring());
}

TEST_F(ScoringTest, ASlowClientPausesThePrefillWorker) {
  ClientPipe* const client = Submit(0);
  w.prefills[0].Say(World::Computing());
  client->unsent = w.options.max_unsent + 1;
  w.prefills[0].Say(FromPrefill(1, 10));
  EXPECT_TRUE(w.prefills[0].paused);
  w.frozen.insert(&w.prefills[0]);
  w.RunFor(2 * w.options.silence);
  EXPECT_TRUE(w.prefills[0].open);
  client->unsent = 0;
  client->handler->OnDrained();
  EXPECT_FALSE(w.prefills[0].paused);
  client->unsent = w.options.max_unsent + 1;
  w.prefills[0].Say(FromPrefill(10, 20));
  w.RunFor(w.options.stall_limit + absl::Seconds(2));
  EXPECT_EQ(client->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(w.prefills[0].dropped);
}

TEST_F(ScoringTest, ASlowClientPausesTheNextPrefillWorkerToo) {
  ClientPipe* const client = Submit(0);
  w.prefills[0].Say(World::Computing());
  client->unsent = w.options.max_unsent + 1;
  w.prefills[0].Say(FromPrefill(1, 10));
  w.Prefill("p1");
  w.prefills[0].Break(Gone());
  w.Settle();
  ASSERT_THAT(w.prefills, SizeIs(2));
  EXPECT_TRUE(w.prefills[1].paused);
  client->unsent = 0;
  client->handler->OnDrained();
  EXPECT_FALSE(w.prefills[1].paused);
}

TEST_F(ScoringTest, BeatsTellWhoseStreamIsNotRead) {
  ClientPipe* const client = Submit(8);
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, 10));
  const auto beats = [&] {
    w.RunFor(absl::Seconds(2));
    EXPECT_TRUE(w.decodes[0].sent.back().has_beat());
    EXPECT_TRUE(w.prefills[0].sent.back().has_beat());
    return std::pair(w.decodes[0].sent.back().beat().not_reading(),
                     w.prefills[0].sent.back().beat().not_reading());
  };
  EXPECT_EQ(beats(), std::pair(false, false));
  w.decodes[0].Say(World::Started(1));  // whose tokens come behind the scores
  EXPECT_EQ(beats(), std::pair(true, false));
  client->unsent = w.options.max_unsent + 1;
  w.prefills[0].Say(FromPrefill(10, 20));
  EXPECT_EQ(beats(), std::pair(true, true));
  client->unsent = 0;
  client->handler->OnDrained();
  EXPECT_EQ(beats(), std::pair(true, false));
  w.prefills[0].Say(FromPrefill(20, kPrompt));
  EXPECT_EQ(beats(), std::pair(false, false));
}

TEST_F(ScoringTest, ASlowClientIsNoDecodeWorkerThatOpensNothing) {
  ClientPipe* const client = Submit(8);
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  client->unsent = w.options.max_unsent + 1;
  w.prefills[0].Say(FromPrefill(1, 10));
  w.prefills[0].Break(Gone());
  ASSERT_TRUE(w.decodes[0].sent.back().has_retry());
  EXPECT_TRUE(w.decodes[0].paused);
  // Whatever it answers is not read.
  w.frozen.insert(&w.decodes[0]);
  w.RunFor(2 * w.options.open_limit);
  EXPECT_TRUE(w.decodes[0].open);
  client->unsent = 0;
  client->handler->OnDrained();
  w.RunFor(w.options.open_limit - absl::Seconds(1));
  EXPECT_TRUE(w.decodes[0].open);
  w.RunFor(absl::Seconds(3));
  EXPECT_FALSE(w.decodes[0].open);
}

TEST_F(ScoringTest, WorkersOfAnOlderVersionAreNotAsked) {
  World world;
  for (const v1::WorkerRole role :
       {v1::WORKER_ROLE_PREFILL, v1::WORKER_ROLE_DECODE}) {
    v1::WorkerHello hello =
        World::Hello(role == v1::WORKER_ROLE_PREFILL ? "p0" : "d0", role);
    hello.clear_features();
    world.Register(hello);
  }
  for (const int max_tokens : {0, 8}) {
    ClientPipe* const client = world.Submit(Ask(max_tokens, Prompt()));
    world.Settle();
    EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_THAT(world.prefills, IsEmpty());
  EXPECT_THAT(world.decodes, IsEmpty());
}

TEST_F(ScoringTest, OneSequenceOfSeveralIsScored) {
  AdmittedRequest admitted = Ask(8, Prompt());
  admitted.effective.sampling.set_n(2);
  admitted.effective.sampling.set_best_of(2);
  admitted.effective.bypass_prefix_cache = true;
  ClientPipe* const client = w.Submit(std::move(admitted));
  ASSERT_THAT(w.decodes, SizeIs(1));
  EXPECT_TRUE(w.decodes[0].sent[0].open().has_scoring());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, kPrompt));
  EXPECT_EQ(Story(*client), "started 0+1 1+39");
  // No other token comes before the last score.
  w.prefills[0].Say(World::First(kPrompt, 1));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2}));
  w.Settle();
  ASSERT_THAT(w.decodes, SizeIs(2));
  EXPECT_FALSE(w.decodes[1].sent[0].open().has_scoring());
}

// As while workers are brought to new weights one by one.
TEST_F(ScoringTest, ScoresOfOnePromptAreOfTheSameWeights) {
  const auto with_weights = [](const std::string& id, const std::string& hash) {
    v1::WorkerHello hello = World::Hello(id, v1::WORKER_ROLE_PREFILL);
    (*hello.mutable_fingerprint())["weights"] = hash;
    return hello;
  };
  for (const int max_tokens : {0, 8}) {
    World world;
    world.Decode("d0");
    world.Register(with_weights("p0", "w"));
    ClientPipe* const client = world.Submit(Ask(max_tokens, Prompt()));
    if (max_tokens > 0) world.decodes[0].Say(World::Opened(1, "t"));
    ASSERT_THAT(world.prefills, SizeIs(1));
    world.prefills[0].Say(World::Computing());
    world.prefills[0].Say(FromPrefill(1, 10));
    world.Register(with_weights("p1", "x"));
    world.prefills[0].Break(Gone());
    world.Settle();
    EXPECT_THAT(world.prefill_ids, Not(Contains("p1"))) << max_tokens;
    EXPECT_THAT(Story(*client), StartsWith("started 0+1 1+9"));
  }
}

// A pair may differ in number formats; the scores of one prompt may not.
TEST_F(ScoringTest, ARetryOfAMixedPairScoresInTheSameFormats) {
  const auto mixed = [](const std::string& id, v1::WorkerRole role,
                        const std::string& numerics) {
    v1::WorkerHello hello = World::Hello(id, role);
    hello.set_mixed_numerics(true);
    (*hello.mutable_fingerprint())["numerics"] = numerics;
    return hello;
  };
  for (const std::string numerics : {"fp8", "int8"}) {
    World world;
    world.Register(mixed("d0", v1::WORKER_ROLE_DECODE, "f32"));
    world.Register(mixed("p0", v1::WORKER_ROLE_PREFILL, "fp8"));
    world.Submit(Ask(8, Prompt()));
    world.decodes[0].Say(World::Opened(1, "t"));
    ASSERT_THAT(world.prefills, SizeIs(1));
    world.prefills[0].Say(World::Computing());
    world.prefills[0].Say(FromPrefill(1, 10));
    world.Register(mixed("p1", v1::WORKER_ROLE_PREFILL, numerics));
    world.prefills[0].Break(Gone());
    world.Settle();
    const v1::DecodeRetry& retry = world.decodes[0].sent.back().retry();
    EXPECT_EQ(retry.scoring().position(), 10);
    EXPECT_EQ(retry.prefill_worker().worker_id(),
              numerics == "fp8" ? "p1" : "");
  }
}

TEST_F(ScoringTest, TokensBehindScoresAreOfTheSameWeights) {
  Submit();
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.prefills[0].Say(FromPrefill(1, kPrompt));
  for (const auto& [id, role] : {std::pair{"d1", v1::WORKER_ROLE_DECODE},
                                 std::pair{"p1", v1::WORKER_ROLE_PREFILL}}) {
    v1::WorkerHello other = World::Hello(id, role);
    (*other.mutable_fingerprint())["weights"] = "other";
    w.Register(other);
  }
  decode_lease->Break(Gone());
  w.decodes[0].Break(Gone());
  w.RunFor(absl::Seconds(2));
  EXPECT_THAT(w.decodes, SizeIs(1));  // waits
  w.Decode("d2");
  EXPECT_THAT(w.decode_ids, ElementsAre("d0", "d2"));
}

}  // namespace
}  // namespace tandem::router
