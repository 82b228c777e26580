// SPDX-License-Identifier: Apache-2.0
// The router's core between scripted clients and workers: the way of a
// request, and what every loss does to it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/fnv.h"
#include "router/core/binding.h"
#include "tests/router/core/core_fixture.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The K/V rows that each delta told of.
std::vector<int64_t> RowsTold(const ClientPipe& client) {
  std::vector<int64_t> rows;
  for (const auto& r : client.sent) {
    if (r.has_delta()) rows.push_back(r.delta().work().kv_rows());
  }
  return rows;
}

v1::DecodeResponse TokensAndWork(int position, std::vector<int32_t> ids,
                                 int64_t rows) {
  v1::DecodeResponse r = World::Tokens(position, std::move(ids));
  r.mutable_tokens()->mutable_work()->set_kv_rows(rows);
  return r;
}

TEST_F(CoreTest, WorkSoFarIsOfAllWorkersAndOnlyGrows) {
  LeasePipe* const other = w.Decode("d1");
  AdmittedRequest ask = World::Ask();
  ask.effective.output.set_work(true);
  ClientPipe* client = w.Submit(std::move(ask));
  EXPECT_TRUE(w.decodes[0].sent[0].open().sampling().report_work());
  w.decodes[0].Say(World::Opened(1, "ticket"));
  EXPECT_TRUE(w.prefills[0].sent[0].open().sampling().report_work());
  w.prefills[0].Say(World::Computing());
  v1::PrefillResponse first = World::First(kPrompt, 1);
  first.mutable_first_token()->mutable_work()->set_kv_rows(40);
  w.prefills[0].Say(first);
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(TokensAndWork(kPrompt, {1, 2}, 1));
  v1::PrefillResponse done = World::Done();
  done.mutable_done()->mutable_work()->set_kv_rows(40);
  w.prefills[0].Say(done);  // is not counted twice
  w.prefills[0].Break(absl::OkStatus());
  w.decodes[0].Say(TokensAndWork(kPrompt + 2, {3}, 2));
  EXPECT_THAT(RowsTold(*client), ElementsAre(40, 41, 42));
  // What a lost worker told of was done all the same.
  Crash(w.decode_ids[0] == "d0" ? decode_lease : other);
  w.decodes[0].Break(Gone());
  w.RunFor(absl::Seconds(1));
  ASSERT_EQ(w.decodes.size(), 2u);
  w.PrefillAndCommit(2, kPrompt + 3, 4);
  w.decodes[1].Say(TokensAndWork(kPrompt + 4, {5}, 1));
  w.decodes[1].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  EXPECT_THAT(RowsTold(*client), ElementsAre(40, 41, 42, 42, 43));
}

TEST_F(CoreTest, NobodyCountsForWhoDoesNotAsk) {
  ClientPipe* client = Decoding();
  EXPECT_FALSE(w.decodes[0].sent[0].open().sampling().report_work());
  EXPECT_FALSE(w.prefills[0].sent[0].open().sampling().report_work());
  for (const auto& r : client->sent) EXPECT_FALSE(r.delta().has_work());
}

TEST_F(CoreTest, SplitForwardsEachPositionOnceInOrder) {
  ClientPipe* client = w.Submit(World::Ask());
  ASSERT_EQ(w.decodes.size(), 1u);
  const v1::DecodeOpen& open = w.decodes[0].sent[0].open();
  EXPECT_EQ(open.prompt_token_ids_size(), kPrompt);
  EXPECT_EQ(open.prefill_worker().worker_id(), "p0");
  EXPECT_EQ(open.request_id().size(), 16u);
  EXPECT_EQ(open.stopping().max_tokens(), 8);
  EXPECT_THAT(open.stopping().stop_token_ids(), ElementsAre(26));
  w.decodes[0].Say(World::Opened(9, "ticket"));
  ASSERT_EQ(w.prefills.size(), 1u);
  EXPECT_EQ(w.prefills[0].sent[0].open().ticket(), "ticket");
  EXPECT_EQ(w.prefills[0].sent[0].open().attempt(), 9u);
  w.prefills[0].Say(World::Computing());
  EXPECT_EQ(client->sent[0].started().prompt_tokens(), kPrompt);
  EXPECT_EQ(client->sent[0].started().cached_tokens(), 16);
  w.prefills[0].Say(World::First(kPrompt, 1));
  EXPECT_EQ(World::Text(*client), "a");  // before any commit
  w.decodes[0].Say(World::Started(9));
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2}));
  w.prefills[0].Say(World::Done());
  w.prefills[0].Break(absl::OkStatus());
  w.decodes[0].Say(World::Tokens(kPrompt + 2, {3}));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  EXPECT_EQ(World::Text(*client), "abc");
  EXPECT_THAT(World::Ids(*client), ElementsAre(1, 2, 3));
  const v1::GenerateDone& done = client->sent.back().done();
  EXPECT_EQ(done.usage().completion_tokens(), 3);
  EXPECT_EQ(done.usage().cached_tokens(), 16);
  EXPECT_EQ(done.timings().kv_bytes(), 4096);
  EXPECT_EQ(done.timings().way(), "shm");
  EXPECT_EQ(done.workers().prefill(), "p0");
  EXPECT_EQ(done.workers().decode(), "d0");
  EXPECT_TRUE(client->dropped);
  EXPECT_TRUE(client->status.ok());
  EXPECT_EQ(w.core->counters().dropped_tokens(), 1);  // the repeated first
  EXPECT_TRUE(w.core->idle());
}

TEST_F(CoreTest, ShortPromptsStayOnTheDecodeWorker) {
  ClientPipe* client = w.Submit(World::Ask(std::vector<int32_t>(32, 7)));
  EXPECT_FALSE(w.decodes[0].sent[0].open().has_prefill_worker());
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(32, {4, 5}));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_STOP));
  EXPECT_EQ(World::Text(*client), "de");
  EXPECT_THAT(w.prefills, IsEmpty());
  EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_STOP);
}

TEST_F(CoreTest, NoPrefillWorkerIsSlowerNeverDown) {
  Crash(prefill_lease);
  w.Submit(World::Ask());
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_FALSE(w.decodes[0].sent[0].open().has_prefill_worker());
}

TEST_F(CoreTest, FirstTokenMayEndTheRequestWithoutACommit) {
  ClientPipe* client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::First(kPrompt, 26, v1::FINISH_REASON_STOP));
  EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_STOP);
  EXPECT_TRUE(w.decodes[0].dropped);
  w.prefills[0].Say(World::Done());
  EXPECT_TRUE(client->status.ok());
  EXPECT_TRUE(client->dropped);
  EXPECT_EQ(World::Text(*client), "");  // an end token has no text
  EXPECT_THAT(World::Ids(*client), ElementsAre(26));
  for (const auto& sent : client->sent) {
    if (sent.has_finished()) {
      EXPECT_EQ(sent.finished().eos_token_id(), 26u);
    }
  }
}

TEST_F(CoreTest, AllTokensOfAFirstMessageAreCounted) {
  AdmittedRequest ask = World::Ask();
  ask.effective.placement = v1::PLACEMENT_LOCAL;
  w.Submit(ask);
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1, 2, 3}));
  EXPECT_EQ(w.tokens_told, 3);
  w.decodes[0].Say(World::Tokens(kPrompt + 3, {4, 5}));
  EXPECT_EQ(w.tokens_told, 5);

  ask.effective.beam.emplace();
  ask.effective.beam->set_width(2);
  ask.effective.sampling.set_best_of(2);
  w.Submit(std::move(ask));
  w.decodes[1].Say(World::Opened(1, ""));
  w.decodes[1].Say(World::Started(1));
  v1::DecodeResponse best;
  best.mutable_hypothesis()->add_tokens()->set_token_id(1);
  best.mutable_hypothesis()->set_reason(v1::FINISH_REASON_LENGTH);
  w.decodes[1].Say(std::move(best));
  v1::DecodeResponse end = World::Finished(v1::FINISH_REASON_LENGTH);
  end.mutable_finished()->set_completion_tokens(7);
  w.decodes[1].Say(std::move(end));
  EXPECT_EQ(w.tokens_told, 12);
}

TEST_F(CoreTest, AHypothesisWithoutABeamSearchIsALoss) {
  w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  v1::DecodeResponse part;
  part.mutable_hypothesis()->add_tokens()->set_token_id(1);
  w.decodes[0].Say(std::move(part));
  EXPECT_TRUE(w.decodes[0].dropped);
}

TEST_F(CoreTest, TokensBeforeStartedAreDropped) {
  ClientPipe* client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.decodes[0].Say(World::Tokens(kPrompt, {5}));
  EXPECT_EQ(World::Text(*client), "");
  EXPECT_EQ(w.core->counters().dropped_tokens(), 1);
}

TEST_F(CoreTest, AContradictionEndsTheRequestWithAnError) {
  ClientPipe* client = HandingOver();
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {2}));
  EXPECT_EQ(client->status.code(), absl::StatusCode::kInternal);
  // Who reports it can say which one.
  EXPECT_THAT(std::string(client->status.message()),
              testing::EndsWith(absl::StrCat(
                  " (request ", client->sent.front().request_id(), ")")));
  EXPECT_EQ(ErrorReason(client->status), "INTERNAL");
}

// ------------------------------------------------------------- prefill lost

TEST_F(CoreTest, LostQueuedPrefillIsRetriedOnAnotherWorker) {
  w.Prefill("p1");
  ClientPipe* client = w.Submit(World::Ask());
  const std::string first =
      w.decodes[0].sent[0].open().prefill_worker().worker_id();
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Break(Gone());
  const v1::DecodeRetry& retry = w.decodes[0].sent.back().retry();
  EXPECT_EQ(retry.attempt(), 1u);
  EXPECT_NE(retry.prefill_worker().worker_id(), first);
  EXPECT_FALSE(retry.suspect());  // it had not begun computing
  w.PrefillAndCommit(2, kPrompt, 1);
  FinishTo8(kPrompt + 1, {2});
  EXPECT_EQ(World::Text(*client), "ab");
}

TEST_F(CoreTest, PrefillCrashAfterTheFirstTokenKeepsIt) {
  ClientPipe* client = HandingOver();
  Crash(prefill_lease);
  w.prefills[0].Break(Gone());
  const v1::DecodeRetry& retry = w.decodes[0].sent.back().retry();
  EXPECT_THAT(retry.output_token_ids(), ElementsAre(1));
  EXPECT_FALSE(retry.has_prefill_worker());  // none is left: local
  EXPECT_TRUE(retry.suspect());
  w.decodes[0].Say(World::Opened(2, ""));
  w.decodes[0].Say(World::Started(2));
  FinishTo8(kPrompt + 1, {2, 3});
  EXPECT_EQ(World::Text(*client), "abc");
  EXPECT_EQ(client->sent.back().done().timings().retries(), 1);
}

TEST_F(CoreTest, RetryThatCrossesTheCommitIsAnsweredByStarted) {
  ClientPipe* client = HandingOver();
  w.Prefill("p1");
  Crash(prefill_lease);
  w.prefills[0].Break(Gone());
  EXPECT_EQ(w.decodes[0].sent.back().retry().prefill_worker().worker_id(),
            "p1");
  w.decodes[0].Say(World::Started(1));
  FinishTo8(kPrompt, {1, 2});
  EXPECT_EQ(World::Text(*client), "ab");
  EXPECT_EQ(w.decodes.size(), 1u);
  // Told of is who did it.
  EXPECT_EQ(client->sent.back().done().workers().prefill(), "p0");
}

TEST_F(CoreTest, BrokenLinkToALivingPrefillWorkerIsNoCrash) {
  ClientPipe* client = HandingOver();
  w.Prefill("p1");
  w.prefills[0].Break(Gone());
  // At once, and with care until the verdict is asked for.
  ASSERT_TRUE(w.decodes[0].sent.back().has_retry());
  EXPECT_TRUE(w.decodes[0].sent.back().retry().suspect());
  w.decodes[0].Say(World::Opened(2, "t"));
  // This one really crashes: the first of two that are allowed.
  w.prefills.back().Say(World::Computing());
  Crash(&w.leases.back());
  w.prefills.back().Break(Gone());
  w.RunFor(absl::Milliseconds(500));
  EXPECT_TRUE(client->status.ok()) << client->status;
  EXPECT_FALSE(client->dropped);
}

TEST_F(CoreTest, PrefillLostAfterTheCommitChangesNothing) {
  ClientPipe* client = HandingOver();
  w.decodes[0].Say(World::Started(1));
  Crash(prefill_lease);
  w.prefills[0].Break(Gone());
  FinishTo8(kPrompt, {1, 2});
  EXPECT_EQ(World::Text(*client), "ab");
  EXPECT_EQ(client->sent.back().done().timings().retries(), 0);
}

TEST_F(CoreTest, DeadAttemptIsRetriedAndItsWayAvoided) {
  HandingOver();
  w.decodes[0].Say(World::Dead(1, false, "shm"));
  EXPECT_TRUE(w.prefills[0].dropped);
  EXPECT_THAT(w.decodes[0].sent.back().retry().output_token_ids(),
              ElementsAre(1));
  // One token is out and 41 positions are uncached: split again.
  w.decodes[0].Say(World::Opened(2, "t2"));
  ASSERT_EQ(w.prefills.size(), 2u);
  EXPECT_THAT(w.prefills[1].sent[0].open().avoid_ways(), ElementsAre("shm"));
}

TEST_F(CoreTest, AFailedHandoffIsThePairsFaultAndNotThePrefillWorkers) {
  HandingOver();
  w.prefills[0].Break(MakeError(absl::StatusCode::kUnavailable,
                                "HANDOFF_FAILED", "no receive for 5 s",
                                {{"way", "nccl"}}));
  // Its way is avoided before the decode worker has said anything of it; the
  // worker itself is not.
  const v1::GetClusterStateResponse state = w.core->State(false);
  ASSERT_EQ(state.avoided_pairs_size(), 1);
  EXPECT_EQ(state.avoided_pairs(0).way(), "nccl");
  const v1::DecodeRetry& retry = w.decodes[0].sent.back().retry();
  EXPECT_EQ(retry.prefill_worker().worker_id(), "p0");
  w.decodes[0].Say(World::Opened(2, "t2"));
  ASSERT_EQ(w.prefills.size(), 2u);
  EXPECT_THAT(w.prefills[1].sent[0].open().avoid_ways(), ElementsAre("nccl"));
}

// Heard of by two: the handoff to it failed, and its call broke.
TEST_F(CoreTest, ACrashOfADecodeWorkerIsOneFailure) {
  w.Decode("d1");
  ClientPipe* client = w.Submit(World::Ask());
  for (size_t i = 0; i < 2; ++i) {
    ASSERT_EQ(w.decodes.size(), i + 1);
    w.decodes[i].Say(World::Opened(1, "t"));
    w.prefills.back().Say(World::Computing());
    w.prefills.back().Break(MakeError(absl::StatusCode::kUnavailable,
                                      "HANDOFF_FAILED", "the link is gone",
                                      {{"way", "shm"}}));
    EXPECT_TRUE(w.decodes[i].sent.back().has_retry()) << i;
    w.decodes[i].Break(absl::UnavailableError("reset"));
    w.RunFor(absl::Seconds(1));
  }
  // A third is the last. (An attempt that was opened since counts anew.)
  ASSERT_EQ(w.decodes.size(), 3u);
  EXPECT_FALSE(client->dropped);
  w.decodes[2].Say(World::Opened(1, "t"));
  w.decodes[2].Break(absl::UnavailableError("reset"));
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(ErrorReason(client->status), "WORKER_LOST");
}

TEST_F(CoreTest, FullPrefillWorkersCostNoAttempt) {
  ClientPipe* client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Break(absl::ResourceExhaustedError("queue full"));
  EXPECT_FALSE(w.decodes[0].sent.back().retry().has_prefill_worker());
  w.decodes[0].Say(World::Opened(2, ""));
  w.decodes[0].Say(World::Started(2));
  FinishTo8(kPrompt, {1});
  EXPECT_EQ(client->sent.back().done().timings().retries(), 0);
  EXPECT_EQ(w.core->counters().refusals(), 1);
}

TEST_F(CoreTest, SplitWaitsForAFullPrefillWorker) {
  AdmittedRequest ask = World::Ask();
  ask.effective.placement = v1::PLACEMENT_SPLIT;
  w.Submit(std::move(ask));
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Break(absl::ResourceExhaustedError("queue full"));
  EXPECT_FALSE(w.decodes[0].sent.back().has_retry());
  w.RunFor(absl::Milliseconds(250));
  EXPECT_EQ(w.decodes[0].sent.back().retry().prefill_worker().worker_id(),
            "p0");
}

TEST_F(CoreTest, WhoWaitsTooLongForAFullPrefillWorkerGoesWithoutOne) {
  AdmittedRequest ask = World::Ask();
  ask.effective.placement = v1::PLACEMENT_SPLIT;
  w.Submit(std::move(ask));
  DecodePipe& decode = w.decodes[0];
  decode.Say(World::Opened(1, "t"));
  size_t refused = 0, retries = 0;
  const auto sent = [&](bool local) {
    return static_cast<size_t>(std::count_if(
        decode.sent.begin(), decode.sent.end(),
        [local](const v1::DecodeRequest& m) {
          return m.has_retry() && m.retry().has_prefill_worker() != local;
        }));
  };
  // Each attempt is opened, and each call of a prefill worker refused.
  for (int i = 0; i < 300 && sent(/*local=*/true) == 0; ++i) {
    for (; refused < w.prefills.size(); ++refused) {
      w.prefills[refused].Break(absl::ResourceExhaustedError("queue full"));
    }
    w.RunFor(absl::Milliseconds(50));
    for (; retries < sent(/*local=*/false); ++retries) {
      decode.Say(World::Opened(static_cast<uint32_t>(retries) + 2, "t"));
    }
  }
  EXPECT_GT(refused, 50u);
  EXPECT_FALSE(decode.dropped);
  EXPECT_EQ(sent(/*local=*/true), 1u);
  // That is over once it started: the next retry has its own time.
  const uint32_t attempt = static_cast<uint32_t>(retries) + 2;
  decode.Say(World::Opened(attempt, ""));
  decode.Say(World::Started(attempt));
  decode.Say(World::Tokens(kPrompt, {1}));
  w.RunFor(absl::Seconds(1));
  decode.Say(World::Dead(attempt, /*preempted=*/true));
  EXPECT_EQ(decode.sent.back().retry().prefill_worker().worker_id(), "p0");
}

TEST_F(CoreTest, ThreeFailuresWithoutATokenEndTheRequest) {
  ClientPipe* client = w.Submit(World::Ask());
  for (uint32_t attempt = 1; attempt <= 3; ++attempt) {
    EXPECT_FALSE(client->dropped) << attempt;
    w.decodes[0].Say(World::Opened(attempt, "t"));
    v1::DecodeResponse dead = World::Dead(attempt, false);
    dead.mutable_dead()->set_message("ipv4:10.0.3.7:50051 reset /models/x");
    w.decodes[0].Say(dead);
  }
  EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ErrorReason(client->status), "HANDOFF_FAILED");
  // Where things are is for the log alone.
  EXPECT_EQ(client->status.message().find("10.0.3.7"), absl::string_view::npos);
  EXPECT_EQ(client->status.message().find("/models"), absl::string_view::npos);
  EXPECT_TRUE(w.decodes[0].dropped);
  EXPECT_TRUE(w.core->idle());
}

// The last attempt goes without a handoff, on the same worker or another.
TEST_F(CoreTest, TheLastAttemptNeedsNoPrefillWorker) {
  w.Submit(World::Ask());
  for (uint32_t attempt = 1; attempt <= 2; ++attempt) {
    w.decodes[0].Say(World::Opened(attempt, "t"));
    w.decodes[0].Say(World::Dead(attempt, false));
    EXPECT_EQ(w.decodes[0].sent.back().retry().has_prefill_worker(),
              attempt == 1);
  }
  w.Submit(World::Ask());
  for (size_t call = 1; call <= 3; ++call) {
    w.Settle();
    ASSERT_EQ(w.decodes.size(), call + 1);
    EXPECT_EQ(w.decodes[call].sent[0].open().has_prefill_worker(), call < 3);
    w.decodes[call].Break(absl::InternalError("lost"));
  }
}

TEST_F(CoreTest, PreemptionIsNoFailure) {
  ClientPipe* client = Decoding();
  for (uint32_t attempt = 1; attempt <= 5; ++attempt) {
    w.decodes[0].Say(World::Dead(attempt, true));
    w.decodes[0].Say(World::Opened(attempt + 1, "t"));
    w.decodes[0].Say(World::Started(attempt + 1));
  }
  FinishTo8(kPrompt + 3, {4});
  w.RunFor(absl::Seconds(1));  // the prefill's timings never come
  EXPECT_EQ(World::Text(*client), "abcd");
  EXPECT_EQ(client->sent.back().done().timings().retries(), 0);
  EXPECT_EQ(client->sent.back().done().timings().preemptions(), 5);
}

// -------------------------------------------------------------- decode lost

TEST_F(CoreTest, LostDecodeWorkerMovesTheSequenceWithItsTokens) {
  ClientPipe* client = Decoding();
  const std::string internal = w.decodes[0].sent[0].open().request_id();
  w.Decode("d1");
  Crash(decode_lease);
  w.decodes[0].Break(Gone());
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  const v1::DecodeOpen& open = w.decodes[1].sent[0].open();
  EXPECT_EQ(w.decode_ids[1], "d1");
  EXPECT_THAT(open.output_token_ids(), ElementsAre(1, 2, 3));
  EXPECT_EQ(open.request_id(), internal);
  EXPECT_EQ(open.sampling().seed(), 5u);
  EXPECT_TRUE(open.suspect());
  EXPECT_TRUE(open.has_prefill_worker());
  w.PrefillAndCommit(1, kPrompt + 3, 4);
  FinishTo8(kPrompt + 3, {4, 5});
  EXPECT_EQ(World::Text(*client), "abcde");
  EXPECT_THAT(World::Ids(*client), ElementsAre(1, 2, 3, 4, 5));
}

TEST_F(CoreTest, LosingTheDecodeWorkerReleasesThePrefillAtOnce) {
  HandingOver();
  w.decodes[0].Break(Gone());
  EXPECT_TRUE(w.prefills[0].dropped);
}

TEST_F(CoreTest, DecodeLostBehindItsLastTokenNeedsNoOther) {
  struct Case {
    std::vector<int32_t> rest;
    v1::FinishReason reason;
  };
  for (const Case& c : {Case{{4, 26}, v1::FINISH_REASON_STOP},
                        Case{{4, 5, 6, 7, 8}, v1::FINISH_REASON_LENGTH}}) {
    ClientPipe* client = Decoding();
    w.decodes.back().Say(World::Tokens(kPrompt + 3, c.rest));
    const size_t calls = w.decodes.size();
    w.decodes.back().Break(absl::InternalError("lost"));
    w.Settle();
    EXPECT_EQ(w.decodes.size(), calls);
    EXPECT_EQ(World::Reason(*client), c.reason);
    EXPECT_TRUE(client->status.ok());
  }
}

// As the workers that follow a grammar end it.
TEST_F(CoreTest, DecodeLostBehindAnEndOfStructuredOutputNeedsNoOther) {
  struct Case {
    int min_tokens;
    int max_tokens;
    v1::FinishReason reason;
  };
  for (const Case& c : {Case{5, 8, v1::FINISH_REASON_STOP},
                        Case{3, 3, v1::FINISH_REASON_LENGTH},
                        Case{2, 3, v1::FINISH_REASON_STOP}}) {
    AdmittedRequest ask = World::Ask({}, c.max_tokens);
    ask.effective.structured.emplace().set_regex("(ab)?");
    ask.effective.model_end_ids = {26};
    ask.effective.stopping.set_min_tokens(c.min_tokens);
    ClientPipe* client = w.Submit(std::move(ask));
    w.PrefillAndCommit(1, kPrompt, 1);
    w.decodes.back().Say(World::Tokens(kPrompt, {1, 2, 26}));
    const size_t calls = w.decodes.size();
    w.decodes.back().Break(absl::InternalError("lost"));
    w.Settle();
    EXPECT_EQ(w.decodes.size(), calls);
    EXPECT_EQ(World::Reason(*client), c.reason);
    EXPECT_EQ(World::Text(*client), "ab");
  }
}

TEST_F(CoreTest, NewIncarnationVoidsTheOldOnesCalls) {
  ClientPipe* client = Decoding();
  w.frozen.insert(decode_lease);
  w.RunFor(absl::Seconds(1));
  w.Register(World::Hello("d0", v1::WORKER_ROLE_DECODE, '2'));
  w.Settle();
  EXPECT_TRUE(w.decodes[0].dropped);
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decodes[1].sent[0].open().decode_incarnation(),
            std::string(16, '2'));
  w.PrefillAndCommit(1, kPrompt + 3, 4);
  FinishTo8(kPrompt + 4, {5});
  EXPECT_EQ(World::Text(*client), "abcde");
}

TEST_F(CoreTest, SequencesMoveOnlyToWorkersOfTheSameResults) {
  Decoding();
  v1::WorkerHello other = World::Hello("d1", v1::WORKER_ROLE_DECODE);
  (*other.mutable_fingerprint())["weights"] = "other";
  w.Register(other);
  Crash(decode_lease);
  w.decodes[0].Break(Gone());
  w.RunFor(absl::Seconds(2));
  EXPECT_EQ(w.decodes.size(), 1u);  // waits
  w.Decode("d2");
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decode_ids[1], "d2");
}

TEST_F(CoreTest, TheSystemFingerprintIsOfWhatGivesTheSameResults) {
  const auto of = [&](const char* field, const char* value,
                      const char* adapter) {
    v1::WorkerHello hello = World::Hello("d", v1::WORKER_ROLE_DECODE);
    (*hello.mutable_fingerprint())[field] = value;
    hello.mutable_worker()->set_endpoint("elsewhere:1");
    v1::AdapterRef ref;
    ref.set_name(adapter);
    ref.set_digest(adapter);
    Binding binding;
    EXPECT_EQ(binding.SystemFingerprint(), "");
    binding.Enter(hello, ref);
    return binding.SystemFingerprint();
  };
  // In this order: by name.
  EXPECT_EQ(of("weights", "w", ""),
            absl::StrCat("fp_", absl::Hex(Fnv1a("numerics=n\nweights=w\n"),
                                          absl::kZeroPad16)));
  const std::set<std::string> all = {
      of("weights", "w", ""), of("weights", "other", ""),
      of("numerics", "other", ""), of("weights", "w", "verse")};
  EXPECT_EQ(all.size(), 4u);
  EXPECT_EQ(Decoding()->sent[0].started().system_fingerprint(),
            of("weights", "w", ""));
}

// It is the prefill worker's, and its client has it.
TEST_F(CoreTest, WhoHasAFirstTokenGoesOnWithTheSameWeights) {
  HandingOver();
  const auto register_other = [&](const char* id, v1::WorkerRole role) {
    v1::WorkerHello other = World::Hello(id, role);
    (*other.mutable_fingerprint())["weights"] = "other";
    w.Register(other);
  };
  register_other("d1", v1::WORKER_ROLE_DECODE);
  register_other("p1", v1::WORKER_ROLE_PREFILL);
  Crash(decode_lease);
  w.decodes[0].Break(Gone());
  w.RunFor(absl::Seconds(2));
  EXPECT_EQ(w.decodes.size(), 1u);  // waits
  w.Decode("d2");
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decode_ids[1], "d2");
}

// Nothing was drawn, but its client was told what is computed with.
TEST_F(CoreTest, WhoWasToldOfWeightsGoesOnWithThem) {
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "ticket"));
  w.prefills[0].Say(World::Computing());
  ASSERT_NE(client->sent[0].started().system_fingerprint(), "");
  v1::WorkerHello other = World::Hello("d1", v1::WORKER_ROLE_DECODE);
  (*other.mutable_fingerprint())["weights"] = "other";
  w.Register(other);
  Crash(decode_lease);
  w.decodes[0].Break(Gone());
  w.RunFor(absl::Seconds(2));
  EXPECT_EQ(w.decodes.size(), 1u);  // waits
  w.Decode("d2");
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decode_ids[1], "d2");
}

TEST_F(CoreTest, SilenceOfEitherWorkerIsALoss) {
  HandingOver();
  w.frozen = {&w.prefills[0], prefill_lease};
  w.RunFor(absl::Seconds(6));
  EXPECT_TRUE(w.prefills[0].dropped);
  EXPECT_FALSE(w.decodes[0].dropped);
  w.frozen.insert(&w.decodes[0]);
  w.RunFor(absl::Seconds(6));
  EXPECT_TRUE(w.decodes[0].dropped);
}

TEST_F(CoreTest, ADecodeWorkerThatBeatsButOpensNothingIsLost) {
  w.Decode("d1");
  w.Submit(World::Ask());
  w.RunFor(absl::Seconds(3));
  w.decodes[0].Say(World::Opened(1, "t"));
  w.Prefill("p1");
  w.prefills[0].Break(Gone());
  ASSERT_TRUE(w.decodes[0].sent.back().has_retry());
  w.RunFor(absl::Seconds(4));  // counted from the retry
  EXPECT_FALSE(w.decodes[0].dropped);
  w.RunFor(absl::Seconds(2));
  EXPECT_TRUE(w.decodes[0].dropped);
  EXPECT_EQ(w.decodes.size(), 2u);
}

TEST_F(CoreTest, ARouterThatStoodStillReadsBeforeItJudges) {
  w.Decode("d1");
  w.Submit(World::Ask());
  w.process.Freeze();
  w.RunFor(absl::Seconds(20));
  w.process.Thaw();  // its tick is the first to run
  w.Settle();
  EXPECT_FALSE(w.decodes[0].dropped);
  w.decodes[0].Say(World::Opened(1, "t"));
  w.RunFor(absl::Seconds(1));
  EXPECT_FALSE(w.decodes[0].dropped);
  EXPECT_EQ(w.decodes.size(), 1u);
}

TEST_F(CoreTest, RefusalsMoveOnAtNoCost) {
  w.Decode("d1");
  ClientPipe* client = w.Submit(World::Ask());
  w.decodes[0].Break(absl::ResourceExhaustedError("no blocks"));
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_NE(w.decode_ids[0], w.decode_ids[1]);
  w.decodes[1].Break(MakeError(absl::StatusCode::kUnavailable, "DRAINING", ""));
  w.RunFor(absl::Milliseconds(500));
  ASSERT_EQ(w.decodes.size(), 3u);
  w.PrefillAndCommit(1, kPrompt, 1);
  FinishTo8(kPrompt + 1, {2});
  const v1::Timings& timings = client->sent.back().done().timings();
  EXPECT_EQ(timings.retries(), 0);
  EXPECT_EQ(w.core->counters().refusals(), 2);
  // It waited until the third one took it, and was placed there alone.
  EXPECT_GE(timings.queue().nanos(), 25'000'000);
  EXPECT_LE(timings.queue().nanos(), 500'000'000);
  EXPECT_EQ(w.core->counters().split_placements(), 1);
  EXPECT_EQ(w.core->counters().local_placements(), 0);
}

TEST_F(CoreTest, OkWithoutAFinishReasonIsALoss) {
  ClientPipe* client = Decoding();
  w.decodes[0].Break(absl::OkStatus());
  w.Settle();
  EXPECT_FALSE(client->dropped);
  EXPECT_EQ(w.decodes.size(), 2u);
}

// ------------------------------------------------------------------- clients

TEST_F(CoreTest, AClientThatLeavesEndsBothCallsAtOnce) {
  ClientPipe* client = HandingOver();
  client->Break(absl::CancelledError("gone"));
  EXPECT_TRUE(w.prefills[0].dropped);
  EXPECT_TRUE(w.decodes[0].dropped);
  EXPECT_TRUE(w.core->idle());
  EXPECT_TRUE(w.ended.back().client_gone);
}

TEST_F(CoreTest, AbortEndsWithAllOutputSoFar) {
  AdmittedRequest ask = World::Ask();
  ask.effective.request_id = "mine";
  ClientPipe* client = w.Submit(std::move(ask));
  w.PrefillAndCommit(1, kPrompt, 1);
  EXPECT_EQ(*w.core->Abort("mine"), 1);
  EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_CANCELLED);
  EXPECT_EQ(World::Text(*client), "a");
  EXPECT_TRUE(client->status.ok());
  EXPECT_TRUE(w.decodes[0].dropped);
  EXPECT_EQ(w.core->Abort("mine").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CoreTest, StopStringsSpanTokensAndNeverLeak) {
  AdmittedRequest ask = World::Ask();
  ask.effective.stopping.add_stop("cd");
  ClientPipe* client = w.Submit(std::move(ask));
  w.PrefillAndCommit(1, kPrompt, 1);
  w.decodes[0].Say(World::Tokens(kPrompt + 1, {2, 3}));
  EXPECT_EQ(World::Text(*client), "ab");  // "c" may be the beginning
  w.decodes[0].Say(World::Tokens(kPrompt + 3, {4, 5}));
  EXPECT_EQ(World::Text(*client), "ab");
  EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_STOP);
  EXPECT_TRUE(w.decodes[0].dropped);
  EXPECT_EQ(client->sent.back().done().usage().completion_tokens(), 4);
}

TEST_F(CoreTest, DeadlineAndMaxTimeEndDifferently) {
  AdmittedRequest ask = World::Ask();
  ask.deadline = absl::Seconds(3);
  ClientPipe* hard = w.Submit(std::move(ask));
  w.PrefillAndCommit(1, kPrompt, 1);
  ask = World::Ask();
  ask.effective.max_time = absl::Seconds(2);
  ClientPipe* soft = w.Submit(std::move(ask));
  w.PrefillAndCommit(1, kPrompt, 1);
  w.RunFor(absl::Seconds(4));
  EXPECT_EQ(hard->status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(soft->status.ok());
  EXPECT_EQ(World::Reason(*soft), v1::FINISH_REASON_TIME_LIMIT);
  EXPECT_EQ(World::Text(*soft), "a");
  EXPECT_TRUE(w.core->idle());
}

TEST_F(CoreTest, ASlowClientPausesItsOwnStreamThenEnds) {
  ClientPipe* slow = Decoding();
  ClientPipe* normal = Decoding();
  slow->unsent = w.options.max_unsent + 1;
  w.decodes[0].Say(World::Tokens(kPrompt + 3, {4}));
  EXPECT_TRUE(w.decodes[0].paused);
  EXPECT_FALSE(w.decodes[1].paused);
  slow->unsent = 0;
  slow->handler->OnDrained();
  EXPECT_FALSE(w.decodes[0].paused);
  slow->unsent = w.options.max_unsent + 1;
  w.decodes[0].Say(World::Tokens(kPrompt + 4, {5}));
  w.RunFor(absl::Seconds(29));
  EXPECT_FALSE(slow->dropped);
  w.RunFor(absl::Seconds(3));
  EXPECT_EQ(ErrorReason(slow->status), "SLOW_CLIENT");
  EXPECT_FALSE(normal->dropped);
}

TEST_F(CoreTest, ASlowClientThatTakesSomethingGoesOn) {
  ClientPipe* const slow = Decoding();
  slow->unsent = w.options.max_unsent + 1;
  w.decodes[0].Say(World::Tokens(kPrompt + 3, {4}));
  for (size_t i = 0; i < w.options.max_unsent; ++i) {
    w.RunFor(absl::Seconds(2));
    --slow->unsent;
  }
  EXPECT_EQ(slow->unsent, 1u);
  EXPECT_TRUE(w.decodes[0].paused);
  EXPECT_TRUE(w.decodes[0].sent.back().beat().not_reading());
  ASSERT_FALSE(slow->dropped) << slow->status;
  // It ends once it takes nothing any more.
  w.RunFor(w.options.stall_limit - absl::Seconds(1));
  EXPECT_FALSE(slow->dropped);
  w.RunFor(absl::Seconds(4));
  EXPECT_EQ(ErrorReason(slow->status), "SLOW_CLIENT");
}

}  // namespace
}  // namespace tandem::router
