// SPDX-License-Identifier: Apache-2.0
// The router's core between scripted clients and workers: the way of a
// request, and what every loss does to it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <deque>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr int kPrompt = 40;  // World::Ask's length

// One prefill and one decode worker unless a test adds more.
struct CoreTest : ::testing::Test {
  CoreTest() {
    prefill_lease = w.Prefill("p0");
    decode_lease = w.Decode("d0");
  }
  // A split request whose prefill worker has given token 1.
  ClientPipe* HandingOver() {
    ClientPipe* client = w.Submit(World::Ask());
    w.decodes.back().Say(World::Opened(1, "ticket"));
    w.prefills.back().Say(World::Computing());
    w.prefills.back().Say(World::First(kPrompt, 1));
    return client;
  }
  ClientPipe* Decoding() {
    ClientPipe* client = w.Submit(World::Ask());
    w.PrefillAndCommit(1, kPrompt, 1);
    w.decodes.back().Say(World::Tokens(kPrompt, {1, 2, 3}));
    return client;
  }
  void Crash(LeasePipe* lease) {
    lease->Break(absl::UnavailableError("reset"));
  }
  static absl::Status Gone() { return absl::UnavailableError("reset"); }
  // A request over which a decode worker and then p0 break off, call and lease.
  ClientPipe* LosingTwo() {
    w.Decode("d1");
    AdmittedRequest ask = World::Ask();
    ask.effective.placement = v1::PLACEMENT_LOCAL;
    ClientPipe* client = w.Submit(std::move(ask));
    w.decodes[0].Say(World::Opened(1, ""));
    Crash(w.decode_ids[0] == "d0" ? decode_lease : &w.leases.back());
    w.decodes[0].Break(Gone());
    EXPECT_FALSE(client->dropped);
    w.Settle();
    // On a prefill worker, so that a poison takes no batch along.
    EXPECT_TRUE(w.decodes[1].sent[0].open().has_prefill_worker());
    w.decodes[1].Say(World::Opened(1, "t"));
    w.prefills.back().Say(World::Computing());
    Crash(prefill_lease);
    w.prefills.back().Break(Gone());
    return client;
  }
  // d0 finishes what `Decoding` began, on the newest decode call.
  void FinishTo8(int from, std::vector<int32_t> rest) {
    w.decodes.back().Say(World::Tokens(from, std::move(rest)));
    w.decodes.back().Say(World::Finished(v1::FINISH_REASON_LENGTH));
  }

  World w;
  LeasePipe* prefill_lease;
  LeasePipe* decode_lease;
};

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

// What an autoscaler of prefill workers goes by.
TEST(QueuedTokensTest, ThoseOfPromptsThatWaitForAWorker) {
  World w;
  w.Submit(World::Ask());
  w.Submit(World::Ask({1, 2, 3}));
  EXPECT_EQ(w.core->Counts().queued(), 2);
  EXPECT_EQ(w.core->Counts().queued_tokens(), kPrompt + 3);
  w.Decode("d");
  w.Settle();
  EXPECT_EQ(w.core->Counts().queued(), 0);
  EXPECT_EQ(w.core->Counts().queued_tokens(), 0);
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
  Crash(prefill_lease);
  w.prefills[0].Break(Gone());
  w.decodes[0].Say(World::Started(1));
  FinishTo8(kPrompt, {1, 2});
  EXPECT_EQ(World::Text(*client), "ab");
  EXPECT_EQ(w.decodes.size(), 1u);
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

TEST(CoreLimits, WhoIsPreemptedTooOftenMayComeAgain) {
  RouterOptions options;
  options.max_preemptions = 0;
  World w(options);
  w.Decode("d0");
  ClientPipe* const client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.decodes[0].Say(World::Dead(1, /*preempted=*/true));
  EXPECT_EQ(ErrorReason(client->status), "QUEUE_FULL");
  EXPECT_EQ(RetryAfter(client->status), absl::Seconds(2));
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

TEST_F(CoreTest, TwoCrashesWithoutATokenEndASuspect) {
  ClientPipe* client = LosingTwo();
  EXPECT_FALSE(client->dropped);  // both may still come back
  w.RunFor(absl::Seconds(11));
  EXPECT_EQ(client->status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ErrorReason(client->status), "SUSPECT");
  // Its client's next try would take two more along; other prompts go on.
  const size_t calls = w.decodes.size();
  ClientPipe* again = w.Submit(World::Ask());
  EXPECT_EQ(ErrorReason(again->status), "SUSPECT");
  EXPECT_EQ(w.decodes.size(), calls);
  EXPECT_TRUE(w.Submit(World::Ask({1, 2, 3}))->open);
  w.loop.RunFor(absl::Minutes(10));
  EXPECT_TRUE(w.Submit(World::Ask())->open);
}

// Resets on the way break calls and leases as crashes do.
TEST_F(CoreTest, AWorkerThatComesBackAsItWasDidNotCrash) {
  ClientPipe* client = LosingTwo();
  w.Prefill("p0");
  w.RunFor(absl::Seconds(1));
  const auto& sent = w.decodes[1].sent;
  EXPECT_TRUE(std::any_of(sent.begin(), sent.end(), [](const auto& message) {
    return message.has_retry();
  }));
  EXPECT_TRUE(client->open);
  EXPECT_EQ(ErrorReason(client->status), "");
  EXPECT_TRUE(w.Submit(World::Ask())->open);
}

TEST_F(CoreTest, ASuspectIsAcquittedByAWorkerThatComesBackLate) {
  ClientPipe* client = LosingTwo();
  w.RunFor(absl::Seconds(11));
  EXPECT_EQ(ErrorReason(client->status), "SUSPECT");
  w.Register(World::Hello("p0", v1::WORKER_ROLE_PREFILL, '2'));
  EXPECT_EQ(ErrorReason(w.Submit(World::Ask())->status), "SUSPECT");
  w.Register(World::Hello("p0", v1::WORKER_ROLE_PREFILL));
  EXPECT_TRUE(w.Submit(World::Ask())->open);
}

TEST_F(CoreTest, TwoNewIncarnationsProveTheCrashes) {
  ClientPipe* client = LosingTwo();
  w.Register(World::Hello("p0", v1::WORKER_ROLE_PREFILL, '2'));
  w.RunFor(absl::Seconds(1));
  EXPECT_TRUE(client->open);
  w.Register(World::Hello(w.decode_ids[0], v1::WORKER_ROLE_DECODE, '2'));
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(ErrorReason(client->status), "SUSPECT");
}

// Where everything fails at once, attempts come to a fifth more than requests,
// beside a number that one worker's loss may need; nobody is given up for it.
TEST(CoreLimits, RetriesAreAShareOfTheRequests) {
  RouterOptions options;
  options.max_requests = 300;
  for (const auto& [budget, earned] :
       {std::pair(options.retry_budget, 500u / 5), {0.0, 0u}}) {
    options.retry_budget = budget;
    World w(options);
    w.Decode("d0");
    std::vector<ClientPipe*> clients;
    size_t calls = 0;
    for (int i = 0; i < 500; ++i) {
      clients.push_back(w.Submit(World::Ask()));
      w.Settle();
      while (calls < w.decodes.size()) {
        w.decodes[calls++].Break(absl::InternalError("lost"));
        w.Settle();
      }
    }
    EXPECT_EQ(calls, 500u + 600u + earned);
    EXPECT_GE(w.core->in_flight(), 150);  // the others have had three attempts
    w.RunFor(absl::Seconds(2));
    EXPECT_NEAR(w.decodes.size() - calls, 20, 1);
    EXPECT_TRUE(clients.back()->open);
  }
}

TEST(CoreLimits, WhetherThereIsRoomIsKnownBeforehand) {
  RouterOptions options;
  options.max_requests = 3;
  options.max_queued = 1;
  World w(options);
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  ClientPipe* const waits = w.Submit(World::Ask());  // there is no worker
  EXPECT_EQ(ErrorReason(w.core->HasRoom(0)), "QUEUE_FULL");
  waits->Break(absl::CancelledError("gone"));
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  w.Decode("d0");
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(w.core->HasRoom(0).ok()) << i;
    w.Submit(World::Ask());
  }
  EXPECT_EQ(ErrorReason(w.core->HasRoom(0)), "QUEUE_FULL");
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  w.RunFor(absl::Seconds(1));
  EXPECT_TRUE(w.core->HasRoom(0).ok());
}

// Who asks one question after the other is never one too many.
TEST(CoreLimits, APlaceIsFreeBeforeItsClientLearnsOfTheEnd) {
  RouterOptions options;
  options.max_requests = 2;
  World w(options);
  w.Decode("d0");
  const auto watch = [&w](ClientPipe* client, int* times) {
    client->seen = [&w, times](const v1::GenerateResponse* message) {
      if (message != nullptr && !message->has_done()) return;
      EXPECT_TRUE(w.core->HasRoom(0).ok());
      EXPECT_EQ(w.core->in_flight(), 0);
      ++*times;
    };
  };
  const auto finish = [&w](DecodePipe* decode) {
    decode->Say(World::Opened(1, ""));
    decode->Say(World::Started(1));
    decode->Say(World::Tokens(40, {1}));
    decode->Say(World::Finished(v1::FINISH_REASON_LENGTH));
    w.Settle();
  };
  int one = 0;
  watch(w.Submit(World::Ask()), &one);
  finish(&w.decodes.back());
  EXPECT_EQ(one, 2);

  int failed = 0;
  ClientPipe* const poor = w.Submit(World::Ask());
  watch(poor, &failed);
  w.decodes.back().Break(absl::InvalidArgumentError("no"));
  w.RunFor(absl::Seconds(100));
  EXPECT_FALSE(poor->status.ok());
  EXPECT_EQ(failed, 1);

  int group = 0;
  AdmittedRequest two = World::Ask();
  two.effective.sampling.set_n(2);
  two.effective.sampling.set_best_of(2);
  const size_t before = w.decodes.size();
  watch(w.Submit(std::move(two)), &group);
  finish(&w.decodes[before]);
  ASSERT_EQ(w.decodes.size(), before + 2);
  finish(&w.decodes[before + 1]);
  EXPECT_EQ(group, 2);
}

// Retries that keep the decode worker are of the same share.
TEST(CoreLimits, RetriesOfThePrefillAreAShareOfTheRequests) {
  RouterOptions options;
  options.max_requests = 300;
  World w(options);
  w.Prefill("p0");
  w.Decode("d0");
  std::deque<size_t> retries;  // sent, of each decode call
  const auto lose_all = [&] {
    for (size_t i = 0; i < w.decodes.size(); ++i) {
      DecodePipe& decode = w.decodes[i];
      if (i == retries.size()) {
        retries.push_back(0);
        decode.Say(World::Opened(1, "t"));
      }
      if (decode.sent.size() == 1) decode.Say(World::Dead(1, false));
      w.Settle();
      retries[i] = static_cast<size_t>(
          std::count_if(decode.sent.begin(), decode.sent.end(),
                        [](const auto& m) { return m.has_retry(); }));
    }
  };
  const auto sent = [&] {
    return std::accumulate(retries.begin(), retries.end(), size_t{0});
  };
  for (int i = 0; i < 900; ++i) {
    ClientPipe* const client = w.Submit(World::Ask());
    w.Settle();
    lose_all();
    // Those that got their retry go.
    if (retries.back() == 1) client->Break(absl::CancelledError("gone"));
    if (w.core->in_flight() == 300) break;
  }
  EXPECT_NEAR(static_cast<double>(sent()), 600 + 900 / 5, 2);
  const size_t before = sent();
  w.RunFor(absl::Seconds(2));
  lose_all();
  EXPECT_NEAR(static_cast<double>(sent() - before), 20, 2);
}

// ------------------------------------------------------------ expected wait

// A request that a decode worker is to compute, and has begun with.
ClientPipe* Begin(World* w, int priority = 0) {
  AdmittedRequest ask = World::Ask();
  ask.effective.priority = priority;
  const size_t calls = w->decodes.size();
  ClientPipe* const client = w->Submit(std::move(ask));
  if (w->decodes.size() > calls) w->decodes.back().Say(World::Opened(1, ""));
  return client;
}
void Answer(World* w, size_t call) {
  w->decodes[call].Say(World::Started(1));
  w->decodes[call].Say(World::Tokens(kPrompt, {1}));
}

TEST(ExpectedWaitTest, IsThoseThatWaitByTheRateWhileTheyWaited) {
  absl::Time now = absl::UnixEpoch();
  ExpectedWait wait(now);
  wait.SetWaiting(1000, now);
  EXPECT_EQ(wait.Behind(100), absl::ZeroDuration());  // nothing is known
  EXPECT_EQ(wait.MostWithin(absl::Seconds(1)), INT_MAX);
  for (int left = 999; left >= 0; --left) {  // 10 a second
    now += absl::Milliseconds(100);
    wait.OnServed(now);
    wait.SetWaiting(left, now);
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(wait.Behind(20)), 2, 0.05);
  EXPECT_NEAR(wait.MostWithin(absl::Seconds(3)), 30, 1);
  EXPECT_EQ(wait.Behind(0), absl::ZeroDuration());
  EXPECT_EQ(wait.MostWithin(absl::InfiniteDuration()), INT_MAX);
  // Hours without requests change nothing.
  now += absl::Hours(5);
  wait.SetWaiting(1, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(wait.Behind(20)), 2, 0.05);
  // Time in which none is served does: in 5 s, a half-life, the rate halves.
  now += absl::Seconds(5);
  wait.SetWaiting(1, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(wait.Behind(20)), 4, 0.2);
  wait.Forget();
  EXPECT_EQ(wait.Behind(20), absl::ZeroDuration());
}

TEST(ExpectedWaitTest, FollowsTheRateUpAndDown) {
  absl::Time now = absl::UnixEpoch();
  ExpectedWait wait(now);
  wait.SetWaiting(1, now);
  const auto serve = [&](int count, absl::Duration apart) {
    for (int i = 0; i < count; ++i) {
      now += apart;
      wait.OnServed(now);
    }
    return absl::ToDoubleSeconds(wait.Behind(100));
  };
  EXPECT_NEAR(serve(1000, absl::Milliseconds(20)), 2, 0.1);
  EXPECT_NEAR(serve(250, absl::Milliseconds(200)), 20, 1);
  EXPECT_NEAR(serve(1000, absl::Milliseconds(20)), 2, 0.2);
}

TEST(CoreLimits, WhoWouldWaitTooLongIsRefusedAtOnce) {
  RouterOptions options;
  options.max_expected_wait = absl::Seconds(2);
  World w(options);
  w.Decode("d0");
  size_t served = 0;
  const auto serve = [&] {  // 10 a second
    w.RunFor(absl::Milliseconds(100));
    Answer(&w, served++);
  };
  for (int i = 0; i < 60; ++i) Begin(&w);  // nothing is known
  EXPECT_EQ(w.core->in_flight(), 60);
  for (int i = 0; i < 40; ++i) serve();
  // 20 wait: exactly what may be ahead.
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  EXPECT_FALSE(Begin(&w)->dropped);
  const absl::Status room = w.core->HasRoom(0);
  ClientPipe* const refused = Begin(&w);
  EXPECT_EQ(refused->status, room);
  EXPECT_EQ(ErrorReason(room), "QUEUE_FULL");
  EXPECT_EQ(room.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(RetryAfter(room), absl::Seconds(1));
  serve();
  EXPECT_FALSE(Begin(&w)->dropped);
  EXPECT_FALSE(w.core->HasRoom(0).ok());
  // One that goes makes room, too.
  w.clients[59].Break(absl::CancelledError("gone"));
  EXPECT_TRUE(w.core->HasRoom(0).ok());
  // Where none is served the wait is longer by the second.
  w.RunFor(absl::Seconds(3));
  EXPECT_FALSE(w.core->HasRoom(0).ok());
  // A further worker is measured anew.
  w.Decode("d1");
  EXPECT_FALSE(Begin(&w)->dropped);
}

// Only those before it in the queue are in a request's way.
TEST(CoreLimits, TheUrgentAreLetInWhereOthersWouldWaitTooLong) {
  RouterOptions options;
  options.max_expected_wait = absl::Seconds(2);
  World w(options);
  LeasePipe* const lease = w.Decode("d0");
  for (int i = 0; i < 40; ++i) Begin(&w);
  for (size_t i = 0; i < 30; ++i) {
    w.RunFor(absl::Milliseconds(100));
    Answer(&w, i);
  }
  w.Load(lease, v1::WORKER_STATE_DRAINING);  // the others wait in the queue
  for (int i = 0; i < 10; ++i) Begin(&w, i % 2 == 0 ? 1 : 2);
  EXPECT_TRUE(Begin(&w, 2)->dropped == false);
  EXPECT_TRUE(Begin(&w, 2)->dropped);  // behind 21
  EXPECT_FALSE(w.core->HasRoom(2).ok());
  EXPECT_TRUE(w.core->HasRoom(1).ok());
  for (int i = 0; i < 6; ++i) EXPECT_FALSE(Begin(&w, 1)->dropped) << i;
  EXPECT_TRUE(Begin(&w, 1)->dropped);
  EXPECT_FALSE(Begin(&w, 0)->dropped);
}

// Else nobody would be let in who could show that it goes on.
TEST(CoreLimits, AfterAStandstillRequestsAreServedAgain) {
  RouterOptions options;
  options.max_expected_wait = absl::Seconds(2);
  World w(options);
  w.Decode("d0");
  for (int i = 0; i < 40; ++i) Begin(&w);
  for (size_t i = 0; i < 20; ++i) {
    w.RunFor(absl::Milliseconds(10));
    Answer(&w, i);
  }
  w.RunFor(absl::Minutes(1));
  EXPECT_FALSE(w.core->HasRoom(0).ok());
  for (size_t i = 20; i < 40; ++i) {
    w.clients[i].Break(absl::CancelledError("gone"));
  }
  int refused = 0;
  for (int i = 0; i < 200; ++i) {
    refused += Begin(&w)->dropped;
    Begin(&w);
    w.RunFor(absl::Milliseconds(10));
    for (size_t call = 40; call < w.decodes.size(); ++call) {
      if (w.decodes[call].open) {
        Answer(&w, call);
        w.decodes[call].Say(World::Finished(v1::FINISH_REASON_LENGTH));
      }
    }
  }
  EXPECT_EQ(refused, 0);
  EXPECT_TRUE(w.core->HasRoom(0).ok());
}

// Only crashes without a new token in between are held against a request.
TEST_F(CoreTest, ATokenBetweenTwoCrashesClearsTheSuspicion) {
  ClientPipe* client = Decoding();
  LeasePipe* lease = decode_lease;
  for (int crash = 0; crash < 2; ++crash) {
    LeasePipe* spare = w.Decode(absl::StrCat("spare", crash));
    Crash(lease);
    lease = spare;
    w.decodes.back().Break(Gone());
    w.Settle();
    ASSERT_EQ(w.decodes.size(), crash + 2u);
    EXPECT_TRUE(w.decodes.back().sent[0].open().suspect());
    const int known = 3 + 2 * crash;
    w.PrefillAndCommit(1, kPrompt + known, known + 1);
    w.decodes.back().Say(World::Tokens(kPrompt + known + 1, {known + 2}));
    EXPECT_FALSE(client->dropped);
  }
  FinishTo8(kPrompt + 7, {8});
  EXPECT_THAT(World::Ids(*client), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

// Else what crashes decode workers would take one along for each first token.
TEST_F(CoreTest, AFirstTokenClearsNoDecodeWorkersCrash) {
  ClientPipe* client = Decoding();
  LeasePipe* spare = w.Decode("d1");
  w.Decode("d2");
  Crash(decode_lease);
  w.decodes[0].Break(Gone());
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  w.PrefillAndCommit(1, kPrompt + 3, 4);
  Crash(w.decode_ids[1] == "d1" ? spare : &w.leases.back());
  w.decodes[1].Break(Gone());
  w.Settle();
  w.RunFor(absl::Seconds(11));  // nobody comes back as it was
  EXPECT_EQ(ErrorReason(client->status), "SUSPECT");
  EXPECT_EQ(w.decodes.size(), 2u);
}

TEST_F(CoreTest, AWorkerThatDrainedAndLeftDidNotCrash) {
  Decoding();
  w.Decode("d1");
  w.Load(decode_lease, v1::WORKER_STATE_DRAINING);
  Crash(decode_lease);
  w.decodes[0].Break(absl::UnavailableError("drain's time is over"));
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_FALSE(w.decodes[1].sent[0].open().suspect());
}

TEST_F(CoreTest, NewIncarnationVoidsTheOldOnesCalls) {
  ClientPipe* client = Decoding();
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

// ---- Adapters

v1::WorkerHello Having(const std::string& id, v1::WorkerRole role,
                       const std::string& adapter, char content) {
  v1::WorkerHello hello = World::Hello(id, role);
  v1::AdapterRef* const ref = hello.add_adapters();
  ref->set_name(adapter);
  ref->set_digest(std::string(64, content));
  return hello;
}

AdmittedRequest AskFor(const std::string& adapter) {
  AdmittedRequest admitted = World::Ask();
  admitted.effective.adapter = adapter;
  admitted.effective.placement = v1::PLACEMENT_SPLIT;
  return admitted;
}

// p0 and d0 have none.
TEST_F(CoreTest, AnAdapterIsServedWhereItIsWithTheSameContent) {
  w.Register(Having("p1", v1::WORKER_ROLE_PREFILL, "verse", 'b'));
  w.Register(Having("d1", v1::WORKER_ROLE_DECODE, "verse", 'a'));
  ClientPipe* const client = w.Submit(AskFor("verse"));
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decode_ids[0], "d1");
  const v1::DecodeOpen& open = w.decodes[0].sent[0].open();
  EXPECT_EQ(open.adapter().name(), "verse");
  EXPECT_EQ(open.adapter().digest(), std::string(64, 'a'));
  EXPECT_FALSE(open.has_prefill_worker());  // p1's is another one
  EXPECT_EQ(w.core->adapters(), std::vector<std::string>{"verse"});
  client->Break(absl::CancelledError("gone"));

  w.Register(Having("p2", v1::WORKER_ROLE_PREFILL, "verse", 'a'));
  w.Submit(AskFor("verse"));
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decodes[1].sent[0].open().prefill_worker().worker_id(), "p2");
  w.decodes[1].Say(World::Opened(1, "ticket"));
  ASSERT_EQ(w.prefills.size(), 1u);
  EXPECT_EQ(w.prefills[0].sent[0].open().adapter().digest(),
            std::string(64, 'a'));
}

TEST_F(CoreTest, ASequenceGoesOnWithTheSameContentAlone) {
  w.Register(Having("p1", v1::WORKER_ROLE_PREFILL, "verse", 'a'));
  LeasePipe* const lease =
      w.Register(Having("d1", v1::WORKER_ROLE_DECODE, "verse", 'a'));
  w.Submit(AskFor("verse"));
  w.PrefillAndCommit(1, kPrompt, 1);
  w.decodes.back().Say(World::Tokens(kPrompt, {1, 2, 3}));
  w.Register(Having("d2", v1::WORKER_ROLE_DECODE, "verse", 'b'));
  Crash(lease);
  w.decodes[0].Break(Gone());
  w.RunFor(absl::Seconds(2));
  EXPECT_EQ(w.decodes.size(), 1u);  // waits
  w.Register(Having("d3", v1::WORKER_ROLE_DECODE, "verse", 'a'));
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decode_ids[1], "d3");
  EXPECT_EQ(w.decodes[1].sent[0].open().adapter().name(), "verse");
}

TEST_F(CoreTest, AnAdapterThatIsNowhereIsWaitedForABoundedTime) {
  ClientPipe* const client = w.Submit(AskFor("verse"));
  w.RunFor(absl::Seconds(12));
  EXPECT_EQ(ErrorReason(client->status), "NO_WORKERS");
  EXPECT_THAT(std::string(client->status.message()),
              ::testing::HasSubstr("no decode worker with adapter verse"));
}

TEST_F(CoreTest, AWorkerSaysWhichAdaptersItHasNow) {
  v1::RegisterRequest message;
  v1::AdapterRef* const ref = message.mutable_adapters()->add_adapters();
  ref->set_name("verse");
  ref->set_digest(std::string(64, 'a'));
  w.Submit(AskFor("verse"));
  EXPECT_TRUE(w.decodes.empty());
  decode_lease->Say(message);
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(w.decode_ids[0], "d0");
  ref->set_digest("short");
  decode_lease->Say(message);
  EXPECT_EQ(w.core->adapters(), std::vector<std::string>{});  // lease ended
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
  EXPECT_EQ(client->sent.back().done().timings().retries(), 0);
  EXPECT_EQ(w.core->counters().refusals(), 2);
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

// Who limits its time gets what there is by then, also beyond the deadline of
// those that say nothing.
TEST(CoreLimits, ALimitOfTimeIsNoDeadline) {
  RouterOptions options;
  options.default_deadline = absl::Seconds(3);
  World w(options);
  AdmittedRequest ask = World::Ask();
  ClientPipe* const silent = w.Submit(ask);
  ask.effective.max_time = absl::Seconds(5);
  ClientPipe* const limited = w.Submit(std::move(ask));
  w.Decode("d0");
  for (DecodePipe& pipe : w.decodes) pipe.Say(World::Opened(1, "t"));
  w.RunFor(absl::Seconds(4));
  EXPECT_EQ(ErrorReason(silent->status), "DEADLINE");
  EXPECT_FALSE(limited->dropped);
  w.RunFor(absl::Seconds(3));
  EXPECT_TRUE(limited->status.ok()) << limited->status;
  EXPECT_EQ(World::Reason(*limited), v1::FINISH_REASON_TIME_LIMIT);
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

// -------------------------------------------------------------------- limits

TEST(CoreLimits, RequestsBeyondTheLimitAreRefusedAtOnce) {
  RouterOptions options;
  options.max_requests = 3;
  options.max_queued = 2;
  World w(options);
  ClientPipe* a = w.Submit(World::Ask());
  ClientPipe* b = w.Submit(World::Ask());
  ClientPipe* c = w.Submit(World::Ask());  // the queue holds 2
  EXPECT_FALSE(a->dropped || b->dropped);
  EXPECT_EQ(ErrorReason(c->status), "QUEUE_FULL");
  EXPECT_TRUE(RetryAfter(c->status).has_value());
  w.Decode("d0");
  EXPECT_EQ(w.decodes.size(), 2u);
  EXPECT_FALSE(w.Submit(World::Ask())->dropped);
  EXPECT_EQ(ErrorReason(w.Submit(World::Ask())->status), "QUEUE_FULL");
}

TEST(CoreLimits, WithoutDecodeWorkersARequestWaitsABoundedTime) {
  World w;
  ClientPipe* client = w.Submit(World::Ask());
  w.RunFor(absl::Seconds(9));
  EXPECT_FALSE(client->dropped);
  w.RunFor(absl::Seconds(3));
  EXPECT_EQ(ErrorReason(client->status), "NO_WORKERS");
  EXPECT_EQ(client->status.code(), absl::StatusCode::kUnavailable);
}

TEST(CoreLimits, EndlessRefusalsEndAtTheQueueWait) {
  World w;
  w.Decode("d0");
  ClientPipe* client = w.Submit(World::Ask());
  for (int i = 0; i < 120 && !client->dropped; ++i) {
    if (!w.decodes.empty()) {
      w.decodes.back().Break(absl::ResourceExhaustedError("no blocks"));
    }
    w.RunFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(ErrorReason(client->status), "QUEUE_FULL");
}

// All that wait would get the same answer.
TEST(CoreLimits, AFullWorkerIsOfferedAsManyAsItSeemsToTake) {
  World w;
  w.Decode("d0");
  std::vector<ClientPipe*> clients;
  for (int i = 0; i < 20; ++i) clients.push_back(w.Submit(World::Ask()));
  EXPECT_EQ(w.decodes.size(), 20u);
  for (DecodePipe& pipe : w.decodes) {
    pipe.Break(absl::ResourceExhaustedError("no blocks"));
  }
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 20u);
  w.RunFor(absl::Milliseconds(60));
  ASSERT_EQ(w.decodes.size(), 21u);
  // Silence is no answer; a little later it is asked again.
  w.RunFor(absl::Milliseconds(20));
  EXPECT_EQ(w.decodes.size(), 21u);
  w.RunFor(absl::Milliseconds(40));
  EXPECT_EQ(w.decodes.size(), 22u);
  // Two more for each that it takes.
  for (const auto& [answer, calls] : {std::pair(20, 24u), std::pair(21, 26u)}) {
    w.decodes[answer].Say(World::Opened(1, "t"));
    w.Settle();
    EXPECT_EQ(w.decodes.size(), calls);
  }
  for (int i = 22; i < 26; ++i) {
    w.decodes[i].Break(absl::ResourceExhaustedError("no blocks"));
  }
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 26u);
  // One that ends makes room at once, for one.
  clients[0]->Break(absl::CancelledError("gone"));
  w.Settle();
  EXPECT_EQ(w.decodes.size(), 27u);
  // Who takes many is no longer full, and is offered all there are.
  for (size_t i = 26; i < w.decodes.size() && i < 60; ++i) {
    w.decodes[i].Say(World::Opened(1, "t"));
    w.Settle();
  }
  EXPECT_EQ(w.core->State(false).requests().queued(), 0);
}

TEST(CoreLimits, RequestIdsInFlightAreUnique) {
  World w;
  AdmittedRequest ask = World::Ask();
  ask.effective.request_id = "one";
  AdmittedRequest again = ask;
  ClientPipe* first = w.Submit(std::move(ask));
  EXPECT_EQ(w.Submit(again)->status.code(), absl::StatusCode::kAlreadyExists);
  first->Break(absl::CancelledError(""));
  EXPECT_FALSE(w.Submit(again)->dropped);
}

// A header of that name may come with several calls of one trace.
TEST(CoreLimits, AHeadersIdInUseMakesRoomForAFreshOne) {
  World w;
  w.Decode("d0");
  AdmittedRequest ask = World::Ask();
  ask.effective.request_id = "trace";
  ask.id_from_header = true;
  std::vector<std::string> ids;
  for (int i = 0; i < 3; ++i) {
    ASSERT_FALSE(w.Submit(ask)->dropped) << i;
  }
  const v1::GetClusterStateResponse state = w.core->State(true);
  for (const v1::RequestStatus& status : state.in_flight()) {
    ids.push_back(status.request_id());
  }
  ASSERT_EQ(ids.size(), 3u);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), "trace"), 1);
  EXPECT_EQ(std::set<std::string>(ids.begin(), ids.end()).size(), 3u);
  // Named by its own field, it is refused as ever.
  ask.id_from_header = false;
  EXPECT_EQ(ErrorReason(w.Submit(ask)->status), "REQUEST_ID_IN_USE");
}

TEST(CoreLimits, TheLowerPriorityIsPlacedFirstAndOfEqualsTheOlder) {
  World w;
  for (const int priority : {0, 5, -1, 0, 5, -1}) {
    AdmittedRequest ask = World::Ask();
    ask.prompt.back() = static_cast<int32_t>(w.clients.size());
    ask.effective.priority = priority;
    w.Submit(std::move(ask));
  }
  w.Decode("d0");
  std::vector<int> order;
  for (const DecodePipe& pipe : w.decodes) {
    order.push_back(*pipe.sent[0].open().prompt_token_ids().rbegin());
  }
  EXPECT_THAT(order, testing::ElementsAre(2, 5, 0, 3, 1, 4));
}

// Slow as it was said to be it would get nothing for ever.
TEST(CoreLimits, AWorkerThatWasSlowOnceIsTriedAgainLater) {
  World w;
  w.Decode("d0");
  LeasePipe* const slow = w.Prefill("slow");
  LeasePipe* const quick = w.Prefill("quick");
  const auto say = [&](LeasePipe* lease, double rate, int steps, int queued) {
    v1::RegisterRequest message;
    message.mutable_load()->set_state(v1::WORKER_STATE_READY);
    message.mutable_load()->set_blocks_free(100);
    message.mutable_load()->set_prefill_tokens_per_second(rate);
    message.mutable_load()->set_steps(steps);
    message.mutable_load()->set_queued_tokens(queued);
    lease->Say(message);
  };
  for (int i = 0; i < 50; ++i) {
    w.loop.RunFor(absl::Milliseconds(250));
    w.Load(&w.leases.front());
    say(slow, 10, /*steps=*/7, /*queued=*/0);
    say(quick, 1000, /*steps=*/i, /*queued=*/5);
    // As near to its tenth second as the reports come.
    const bool tried = i >= 41;
    if (i != 1 && i != 38 && !tried) continue;
    ClientPipe* const client = w.Submit(World::Ask());
    w.Settle();
    ASSERT_EQ(w.decodes.back().sent[0].open().prefill_worker().worker_id(),
              tried ? "slow" : "quick")
        << i;
    client->Break(absl::CancelledError("gone"));
    w.Settle();
    if (tried) break;
  }
}

TEST(CoreLimits, APromptIsOutOfTheQueueWhenItIsComputed) {
  World w;
  w.Decode("d0");
  LeasePipe* const lease = w.Prefill("p0");
  const auto say = [&] {
    v1::RegisterRequest message;
    message.mutable_load()->set_state(v1::WORKER_STATE_READY);
    message.mutable_load()->set_blocks_free(100);
    message.mutable_load()->set_prefill_tokens_per_second(1000);
    lease->Say(message);
  };
  const auto goes_to_prefill = [&] {
    w.Submit(World::Ask());
    return w.decodes.back().sent[0].open().has_prefill_worker();
  };
  const auto compute = [&](DecodePipe* decode) {
    decode->Say(World::Opened(1, "ticket"));
    w.prefills.back().Say(World::Computing());
    w.prefills.back().Say(World::First(kPrompt, 1));
  };
  say();
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(goes_to_prefill()) << i;
    compute(&w.decodes.back());
  }
  // What ended after a report takes nothing from those given since.
  ASSERT_TRUE(goes_to_prefill());
  DecodePipe* const before = &w.decodes.back();
  w.loop.RunFor(absl::Milliseconds(1));
  say();
  ASSERT_TRUE(goes_to_prefill());
  ASSERT_TRUE(goes_to_prefill());
  compute(before);
  EXPECT_FALSE(goes_to_prefill());
}

TEST(CoreLimits, ACordonedWorkerKeepsWhatItHasAndGetsNothingNew) {
  World w;
  LeasePipe* const lease = w.Decode("d0");
  ClientPipe* const running = w.Submit(World::Ask());
  ASSERT_EQ(w.decodes.size(), 1u);
  EXPECT_EQ(ErrorReason(w.core->Cordon("d1", true).status()),
            "WORKER_NOT_FOUND");
  EXPECT_EQ(ErrorReason(w.core->Cordon("d1", false).status()),
            "WORKER_NOT_FOUND");
  EXPECT_EQ(*w.core->Cordon("d0", true), 1);
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 0);
  EXPECT_EQ(w.core->State(false).workers(0).reason(), "cordoned");
  EXPECT_FALSE(w.core->State(false).workers(0).placeable());
  w.Submit(World::Ask());
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(w.decodes.size(), 1u);
  EXPECT_FALSE(running->dropped || w.decodes[0].dropped);
  // A restart does not undo what an operator decided.
  lease->Break(absl::UnavailableError("gone"));
  EXPECT_TRUE(w.core->Cordon("d0", true).status().code() ==
              absl::StatusCode::kNotFound);
  w.Register(World::Hello("d0", v1::WORKER_ROLE_DECODE, '2'));
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 0);
  EXPECT_TRUE(w.core->Cordon("d0", false).ok());
  EXPECT_EQ(w.core->ready_workers(v1::WORKER_ROLE_DECODE), 1);
  EXPECT_GE(w.decodes.size(), 2u);
}

TEST(CoreLimits, DrainRefusesNewRequestsAndFinishesOld) {
  World w;
  w.Decode("d0");
  ClientPipe* old = w.Submit(World::Ask(std::vector<int32_t>(4, 7)));
  w.core->Drain();
  EXPECT_EQ(ErrorReason(w.Submit(World::Ask())->status), "DRAINING");
  EXPECT_FALSE(old->dropped);
  EXPECT_FALSE(w.core->idle());
  w.core->CloseAll(absl::UnavailableError("over"));
  EXPECT_TRUE(w.core->idle());
  EXPECT_TRUE(w.decodes[0].dropped);
}

}  // namespace
}  // namespace tandem::router
