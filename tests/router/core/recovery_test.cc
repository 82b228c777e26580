// SPDX-License-Identifier: Apache-2.0
// What counts as a failure, what as a crash, and which workers a retry may go
// to.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "common/error.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::ElementsAre;

AdmittedRequest LocalAsk() {
  AdmittedRequest ask = World::Ask();
  ask.effective.placement = v1::PLACEMENT_LOCAL;
  return ask;
}

// Else a request could be given up for want of blocks again and again.
TEST(RecoveryTest, ADecodeWorkerThatGivesUpWhatItOpenedCounts) {
  World w;
  w.Decode("d0");
  ClientPipe* client = w.Submit(LocalAsk());
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(w.decodes.size(), i + 1);
    w.decodes[i].Say(World::Opened(1, ""));
    w.decodes[i].Break(absl::ResourceExhaustedError("preempted too often"));
    w.RunFor(absl::Seconds(1));
  }
  EXPECT_EQ(ErrorReason(client->status), "WORKER_LOST");
  EXPECT_EQ(w.core->counters().refusals(), 0);
}

TEST(RecoveryTest, APrefillWorkerThatGivesUpWhatItBeganCounts) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  w.Submit(World::Ask());
  for (const uint32_t attempt : {1, 2}) {
    w.decodes[0].Say(World::Opened(attempt, "t"));
    w.prefills.back().Say(World::Computing());
    w.prefills.back().Break(MakeError(absl::StatusCode::kResourceExhausted,
                                      "PREEMPTED", "the pool is full"));
    // The last attempt needs no prefill worker.
    ASSERT_TRUE(w.decodes[0].sent.back().has_retry());
    EXPECT_EQ(w.decodes[0].sent.back().retry().has_prefill_worker(),
              attempt == 1);
  }
  EXPECT_EQ(w.lost.size(), 2u);
  EXPECT_EQ(w.core->counters().refusals(), 0);
}

TEST(RecoveryTest, ABrokenCallToALivingWorkerAndACrashAreNotTwoCrashes) {
  World w;
  LeasePipe* const d0 = w.Decode("d0");
  LeasePipe* const d1 = w.Decode("d1");
  ClientPipe* client = w.Submit(LocalAsk());
  w.decodes[0].Say(World::Opened(1, ""));
  w.decodes[0].Break(absl::UnavailableError("reset"));
  w.RunFor(absl::Milliseconds(250));
  ASSERT_EQ(w.decodes.size(), 2u);
  ASSERT_NE(w.decode_ids[0], w.decode_ids[1]);
  w.decodes[1].Say(World::Opened(1, ""));
  (w.decode_ids[1] == "d0" ? d0 : d1)->Break(absl::UnavailableError("reset"));
  w.decodes[1].Break(absl::UnavailableError("reset"));
  w.RunFor(absl::Seconds(3));
  ASSERT_EQ(w.decodes.size(), 3u);
  EXPECT_EQ(w.decode_ids[2], w.decode_ids[0]);
  w.decodes[2].Say(World::Opened(1, ""));
  w.decodes[2].Say(World::Started(1));
  w.decodes[2].Say(World::Tokens(kPrompt, {1}));
  w.decodes[2].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  EXPECT_THAT(World::Ids(*client), ElementsAre(1));
}

TEST(RecoveryTest, WhatFailsBehindAnotherAttemptCountsAnew) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  w.Decode("d1");
  ClientPipe* client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.decodes[0].Say(World::Dead(1, /*preempted=*/false));
  w.decodes[0].Say(World::Opened(2, "t"));
  w.decodes[0].Break(absl::InternalError("lost"));
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  w.decodes[1].Say(World::Opened(1, ""));
  w.decodes[1].Say(World::Started(1));
  w.decodes[1].Say(World::Tokens(kPrompt, {1}));
  w.decodes[1].Say(World::Finished(v1::FINISH_REASON_LENGTH));
  EXPECT_EQ(client->sent.back().done().timings().retries(), 2);
}

TEST(RecoveryTest, WordsOfAnAttemptThatIsHistoryAreNothing) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  ClientPipe* client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.decodes[0].Say(World::Dead(1, /*preempted=*/false));
  w.decodes[0].Say(World::Opened(2, "t"));
  const size_t said = w.decodes[0].sent.size();
  w.decodes[0].Say(World::Dead(1, /*preempted=*/false));
  w.decodes[0].Say(World::Started(1));
  w.decodes[0].Say(World::Tokens(kPrompt, {1}));
  EXPECT_EQ(w.decodes[0].sent.size(), said);
  EXPECT_TRUE(w.prefills.back().open);
  EXPECT_THAT(World::Ids(*client), ElementsAre());
  w.decodes[0].Say(World::Started(2));
  w.decodes[0].Say(World::Tokens(kPrompt, {2}));
  EXPECT_THAT(World::Ids(*client), ElementsAre(2));
}

// ---- What the prefill worker let go of

v1::DecodeResponse LetGo(uint32_t attempt) {
  v1::DecodeResponse dead = World::Dead(attempt, /*preempted=*/false);
  dead.mutable_dead()->set_code(static_cast<int>(absl::StatusCode::kCancelled));
  return dead;
}

// Two connections: what the prefill worker said before may come behind it.
TEST(RecoveryTest, ALastFirstTokenMayComeBehindItsWithdrawal) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  ClientPipe* client = w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.decodes[0].Say(LetGo(1));
  w.prefills[0].Say(World::First(kPrompt, 26, v1::FINISH_REASON_STOP));
  w.prefills[0].Say(World::Done());
  w.prefills[0].Break(absl::OkStatus());
  EXPECT_EQ(w.prefills.size(), 1u);
  EXPECT_EQ(World::Reason(*client), v1::FINISH_REASON_STOP);
  EXPECT_EQ(client->sent.back().done().timings().retries(), 0);
  EXPECT_EQ(w.core->counters().prefill_retries(), 0);
}

TEST(RecoveryTest, WhyAnAttemptWasWithdrawnIsSaidByThePrefillCall) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.prefills[0].Say(World::Computing());
  w.decodes[0].Say(LetGo(1));
  EXPECT_FALSE(w.decodes[0].sent.back().has_retry());
  w.prefills[0].Break(absl::InternalError("a step failed"));
  ASSERT_TRUE(w.decodes[0].sent.back().has_retry());
  EXPECT_EQ(w.core->counters().prefill_retries(), 1);
  w.decodes[0].Say(World::Opened(2, "t"));
  ASSERT_EQ(w.prefills.size(), 2u);
  // Nobody else says what became of one whose call has ended.
  w.prefills[1].Say(World::Done());
  w.prefills[1].Break(absl::OkStatus());
  w.decodes[0].Say(LetGo(2));
  EXPECT_EQ(w.core->counters().prefill_retries(), 2);
}

// ---- Who may prefill it

TEST(RecoveryTest, WhereTheFallbackFailedThePairIsNotTriedAgain) {
  World w;
  w.Prefill("p0");
  w.Decode("d0");
  w.Submit(World::Ask());
  w.decodes[0].Say(World::Opened(1, "t"));
  w.decodes[0].Say(World::Dead(1, /*preempted=*/false, "grpc"));
  ASSERT_TRUE(w.decodes[0].sent.back().has_retry());
  EXPECT_FALSE(w.decodes[0].sent.back().retry().has_prefill_worker());
  w.Submit(World::Ask());
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_FALSE(w.decodes[1].sent[0].open().has_prefill_worker());
}

TEST(RecoveryTest, APrefillWorkerHoldsTheHistoryAndHeedsTheRequest) {
  for (const bool old : {false, true}) {
    for (const bool fits : {false, true}) {
      World w;
      LeasePipe* const p0 = w.Prefill("p0");
      w.Decode("d0");
      AdmittedRequest ask = World::Ask();
      ask.effective.features = {kFeatureTypicalP};
      w.Submit(ask);
      w.decodes[0].Say(World::Opened(1, "t"));
      ASSERT_EQ(w.prefill_ids.size(), 1u);
      v1::WorkerHello other = World::Hello("p1", v1::WORKER_ROLE_PREFILL);
      // It computes the history, and has room for the token behind it.
      other.set_max_model_len(fits ? kPrompt + 1 : kPrompt);
      if (old) other.clear_features();
      w.Register(other);
      p0->Break(absl::UnavailableError("reset"));
      w.prefills[0].Break(absl::UnavailableError("reset"));
      ASSERT_TRUE(w.decodes[0].sent.back().has_retry());
      const bool may = fits && !old;
      EXPECT_EQ(w.decodes[0].sent.back().retry().has_prefill_worker(), may);
      w.Submit(ask);
      ASSERT_EQ(w.decodes.size(), 2u);
      EXPECT_EQ(w.decodes[1].sent[0].open().has_prefill_worker(), may);
    }
  }
}

}  // namespace
}  // namespace tandem::router
