// SPDX-License-Identifier: Apache-2.0
// Requests over which workers crashed: when the second ends them, and what
// clears them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "tests/router/core/core_fixture.h"
#include "tests/router/world.h"

namespace tandem::router {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;
using ::testing::StartsWith;
using SuspectsTest = CoreTest;

TEST_F(SuspectsTest, TwoCrashesWithoutATokenEndASuspect) {
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
TEST_F(SuspectsTest, AWorkerThatComesBackAsItWasDidNotCrash) {
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

TEST_F(SuspectsTest, ASuspectIsAcquittedByAWorkerThatComesBackLate) {
  ClientPipe* client = LosingTwo();
  w.RunFor(absl::Seconds(11));
  EXPECT_EQ(ErrorReason(client->status), "SUSPECT");
  LeasePipe* const other =
      w.Register(World::Hello("p0", v1::WORKER_ROLE_PREFILL, '2'));
  EXPECT_EQ(ErrorReason(w.Submit(World::Ask())->status), "SUSPECT");
  Crash(other);
  w.Register(World::Hello("p0", v1::WORKER_ROLE_PREFILL));
  EXPECT_TRUE(w.Submit(World::Ask())->open);
}

// d0 is lost, is there again as it was, and is lost for good before it gave a
// token: that is one crash.
void ExpectRetryOfTwoLosses(CoreTest& test, bool registers_before_break) {
  World& w = test.w;
  ClientPipe* client = test.Decoding();
  LeasePipe* again = nullptr;
  test.Crash(test.decode_lease);
  if (registers_before_break) again = w.Decode("d0");
  w.decodes[0].Break(CoreTest::Gone());
  w.Settle();
  if (!registers_before_break) again = w.Decode("d0");
  w.RunFor(absl::Seconds(3));
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_EQ(w.decodes[1].sent[0].open().suspect(), registers_before_break);
  w.PrefillAndCommit(1, kPrompt + 3, 4);
  test.Crash(again);
  w.decodes[1].Break(CoreTest::Gone());
  w.Decode("d1");
  w.RunFor(absl::Seconds(1));
  ASSERT_EQ(w.decodes.size(), 3u);
  EXPECT_THAT(w.told, Not(Contains(StartsWith("suspect"))));
  w.PrefillAndCommit(1, kPrompt + 4, 5);
  test.FinishTo8(kPrompt + 5, {6, 7, 8});
  EXPECT_THAT(World::Ids(*client), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
}

TEST_F(SuspectsTest, ACrashBehindAProofOfLifeIsTheFirst) {
  ExpectRetryOfTwoLosses(*this, /*registers_before_break=*/false);
}

TEST_F(SuspectsTest, OneProcessCrashesOnce) {
  ExpectRetryOfTwoLosses(*this, /*registers_before_break=*/true);
}

// The first of two comes back, and is lost again, before the second's verdict.
TEST_F(SuspectsTest, WhoComesBackAndIsLostAgainIsNotHeldAgainstTheSecond) {
  ClientPipe* client = LosingTwo();
  Crash(w.Decode(w.decode_ids[0]));
  w.RunFor(absl::Seconds(11));
  EXPECT_TRUE(client->open);
  EXPECT_THAT(w.told, Not(Contains(StartsWith("suspect"))));
}

// Each takes over from the other where that one is not heard for a while, and
// voids its calls.
TEST_F(SuspectsTest, TwoProcessesOfOneNameDidNotCrash) {
  v1::WorkerHello other = World::Hello("d0", v1::WORKER_ROLE_DECODE, '2');
  other.set_max_model_len(8);  // the request goes to the first alone
  AdmittedRequest ask = World::Ask();
  ask.effective.placement = v1::PLACEMENT_LOCAL;
  ClientPipe* client = w.Submit(std::move(ask));
  LeasePipe* lease = decode_lease;
  for (size_t calls = 1; calls <= 2; ++calls) {
    ASSERT_EQ(w.decodes.size(), calls);
    if (w.decodes.back().sent[0].open().has_prefill_worker()) {
      w.PrefillAndCommit(1, kPrompt, 1);  // it is held to be a suspect
    } else {
      w.decodes.back().Say(World::Opened(1, ""));
    }
    for (const v1::WorkerHello& next :
         {other, World::Hello("d0", v1::WORKER_ROLE_DECODE)}) {
      w.frozen.insert(lease);
      w.RunFor(absl::Seconds(1));
      lease = w.Register(next);
    }
    w.Settle();
  }
  EXPECT_TRUE(client->open);
  EXPECT_THAT(w.told, Not(Contains(StartsWith("suspect"))));
}

TEST_F(SuspectsTest, TwoNewIncarnationsProveTheCrashes) {
  ClientPipe* client = LosingTwo();
  w.Register(World::Hello("p0", v1::WORKER_ROLE_PREFILL, '2'));
  w.RunFor(absl::Seconds(1));
  EXPECT_TRUE(client->open);
  w.Register(World::Hello(w.decode_ids[0], v1::WORKER_ROLE_DECODE, '2'));
  w.RunFor(absl::Seconds(1));
  EXPECT_EQ(ErrorReason(client->status), "SUSPECT");
}

// Only crashes without a new token in between are held against a request.
TEST_F(SuspectsTest, ATokenBetweenTwoCrashesClearsTheSuspicion) {
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
TEST_F(SuspectsTest, AFirstTokenClearsNoDecodeWorkersCrash) {
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

TEST_F(SuspectsTest, AWorkerThatDrainedAndLeftDidNotCrash) {
  Decoding();
  w.Decode("d1");
  w.Load(decode_lease, v1::WORKER_STATE_DRAINING);
  Crash(decode_lease);
  w.decodes[0].Break(absl::UnavailableError("drain's time is over"));
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_FALSE(w.decodes[1].sent[0].open().suspect());
}

// As one does whose grace is over.
TEST_F(SuspectsTest, AWorkerThatDrainsAndEndsItsCallsDidNotCrash) {
  Decoding();
  w.Decode("d1");
  w.Load(decode_lease, v1::WORKER_STATE_DRAINING);
  w.decodes[0].Break(absl::UnavailableError("drain's time is over"));
  Crash(decode_lease);
  w.Settle();
  ASSERT_EQ(w.decodes.size(), 2u);
  EXPECT_FALSE(w.decodes[1].sent[0].open().suspect());
}

}  // namespace
}  // namespace tandem::router
