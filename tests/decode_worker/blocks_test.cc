// SPDX-License-Identifier: Apache-2.0
// Who gets a decode worker's free blocks, and who gives some back: grants,
// local prefills and sequences that grow.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/worker/rig.h"

namespace tandem::worker {
namespace {

using testing::IsEmpty;

// ---- Waiting for blocks

// A decode worker whose 20 blocks one long sequence nearly fills.
struct Crowded {
  explicit Crowded(absl::Duration step) {
    decode = rig.AddDecode("decode", {.num_blocks = 20, .step = step},
                           AdmitByBlocks);
    prefill = rig.AddPrefill();
    large = rig.Local({.prompt = Prompt(200, 1), .max_tokens = 40}, decode);
    rig.RunUntil([&] { return large->tokens.size() >= 3; });
  }
  Rig rig;
  DecodeMachine* decode;
  PrefillMachine* prefill;
  Request* large;
};

TEST(DecodeBlocksTest, AnOfferWithoutRoomWaitsAndComputesNothing) {
  Crowded crowded(absl::Milliseconds(300));
  Rig& rig = crowded.rig;
  Request* const waits =
      rig.Split({.prompt = Prompt(150, 2)}, crowded.decode, crowded.prefill);
  rig.Run(absl::Seconds(2));
  EXPECT_FALSE(waits->prefill_started.has_value()) << "told to wait";
  EXPECT_EQ(crowded.decode->Load().blocks_reserved(), 0);
  EXPECT_EQ(crowded.prefill->Load().waiting(), 1);
  rig.RunUntilEnded();
  EXPECT_LT(crowded.large->token_times.back(), waits->token_times.back());
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeBlocksTest, WhereRoomIsExpectedThePrefillStartsWithoutAGrant) {
  Crowded crowded(absl::Milliseconds(30));
  Rig& rig = crowded.rig;
  Request* const starts =
      rig.Split({.prompt = Prompt(150, 2)}, crowded.decode, crowded.prefill);
  rig.RunUntil([&] { return starts->prefill_started.has_value(); });
  // The large one ends within a beat, but has not yet.
  EXPECT_FALSE(crowded.large->finished.has_value());
  EXPECT_EQ(crowded.decode->Load().blocks_reserved(), 0);
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_EQ(starts->done->handoff_bytes(), 150 * 4 * 8);  // a word per layer
  rig.ExpectNothingLeft();
}

TEST(DecodeBlocksTest, TheOldestWaitingHistoryGetsBlocksFirst) {
  Crowded crowded(absl::Milliseconds(100));
  Rig& rig = crowded.rig;
  Request* const young =
      rig.Split({.prompt = Prompt(200, 2)}, crowded.decode, crowded.prefill);
  rig.Run(absl::Milliseconds(200));
  Request* const old =
      rig.Split({.prompt = Prompt(200, 3), .age = absl::Seconds(60)},
                crowded.decode, crowded.prefill);
  rig.RunUntilEnded();
  // The younger one's first token is its prefill's, and needs no grant.
  EXPECT_LT(old->token_times.back(), young->token_times[1]);
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// What it computed would only fill the prefill worker until then.
TEST(DecodeBlocksTest, NobodyStartsForRoomThatAnOlderHistoryTakes) {
  Crowded crowded(absl::Milliseconds(300));
  Rig& rig = crowded.rig;
  const auto ask = [&](int length, absl::Duration age) {
    return rig.Split({.prompt = Prompt(length, length), .age = age},
                     crowded.decode, crowded.prefill);
  };
  Request* const old = ask(190, absl::Seconds(60));
  rig.Run(absl::Milliseconds(200));
  Request* const young = ask(60, absl::ZeroDuration());
  rig.Run(absl::Seconds(2));
  EXPECT_GE(crowded.decode->pool->available(), 4) << "as many as it needs";
  EXPECT_FALSE(old->prefill_started.has_value());
  EXPECT_FALSE(young->prefill_started.has_value());
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// The next step of what runs would preempt somebody otherwise.
TEST(DecodeBlocksTest, ARunningSequenceKeepsABlockToGrow) {
  for (const bool split : {false, true}) {
    SCOPED_TRACE(split);
    Crowded crowded(absl::Milliseconds(300));
    Rig& rig = crowded.rig;
    const Job job{.prompt = Prompt(111, 2), .max_tokens = 4};
    Request* const waits = split
                               ? rig.Split(job, crowded.decode, crowded.prefill)
                               : rig.Local(job, crowded.decode);
    rig.Run(absl::Seconds(1));
    ASSERT_EQ(crowded.decode->pool->available(), 7);  // as many as it needs
    EXPECT_EQ(crowded.decode->Load().blocks_reserved(), 0);
    EXPECT_THAT(waits->started, IsEmpty());
    rig.RunUntilEnded();
    for (const auto& request : rig.requests) request->ExpectAllRight();
    EXPECT_EQ(crowded.decode->core->engine_stats().preemptions, 0);
    rig.ExpectNothingLeft();
  }
}

// What comes back from memory takes blocks as what is computed does.
TEST(DecodeBlocksTest, WhatIsBroughtBackNeedsRoomToo) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 20, .offload_blocks = 40}, AdmitByBlocks);
  for (const int prompt : {100, 240}) {
    rig.Local({.prompt = Prompt(prompt, prompt), .max_tokens = 4}, decode);
    rig.RunUntilEnded();
  }
  Request* const large =
      rig.Local({.prompt = Prompt(200, 1), .max_tokens = 40}, decode);
  rig.RunUntil([&] { return large->tokens.size() >= 3; });
  ASSERT_EQ(decode->pool->available(), 7);
  Request* const waits =
      rig.Local({.prompt = Prompt(110, 100), .max_tokens = 4}, decode);
  rig.RunUntilEnded();
  EXPECT_EQ(waits->finished->cached_tokens(), 96);
  EXPECT_GE(decode->offload->counters().restored, 6);
  EXPECT_LT(large->token_times.back(), waits->token_times.front());
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// A large one would wait for ever.
TEST(DecodeBlocksTest, NobodyOvertakesWhoWaitsForBlocks) {
  for (const bool split : {false, true}) {
    SCOPED_TRACE(split);
    Crowded crowded(absl::Milliseconds(300));
    Rig& rig = crowded.rig;
    for (const int prompt : {150, 20}) {
      const Job job{.prompt = Prompt(prompt, prompt), .max_tokens = 4};
      split ? rig.Split(job, crowded.decode, crowded.prefill)
            : rig.Local(job, crowded.decode);
      rig.Run(absl::Seconds(1));
    }
    EXPECT_EQ(crowded.decode->Load().blocks_reserved(), 0);
    EXPECT_EQ(crowded.decode->core->engine_stats().running, 1);
    rig.RunUntilEnded();
    for (const auto& request : rig.requests) request->ExpectAllRight();
    rig.ExpectNothingLeft();
  }
}

// At once, and not with the next beat.
TEST(DecodeBlocksTest, WhereTheFirstLeavesTheLineTheNextOneBegins) {
  Crowded crowded(absl::Milliseconds(300));
  Rig& rig = crowded.rig;
  Request* const first =
      rig.Local({.prompt = Prompt(150, 150), .max_tokens = 4}, crowded.decode);
  rig.RunUntil([&] { return !first->opened.empty(); });
  Request* const next =
      rig.Local({.prompt = Prompt(20, 20), .max_tokens = 4}, crowded.decode);
  rig.RunUntil([&] { return !next->opened.empty(); });
  rig.Run(absl::Milliseconds(100));
  ASSERT_EQ(crowded.decode->core->engine_stats().running, 1);
  first->DropDecode();
  rig.Run(absl::Milliseconds(10));
  EXPECT_EQ(crowded.decode->core->engine_stats().running, 2);
  rig.RunUntil([&] {
    return crowded.large->decode_ended.has_value() &&
           next->decode_ended.has_value();
  });
  crowded.large->ExpectAllRight();
  next->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// Where sequences let go of parts of blocks, a found prefix is mostly of blocks
// that lack them: it is no part of the room that its sequence has at once.
TEST(DecodeBlocksTest, APrefixThatLacksPartsIsNoRoomForTheRest) {
  Rig rig(1, /*window=*/32, /*full_layers=*/1);
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 8}, [](decode_worker::DecodeOptions* options) {
        options->engine.max_num_batched_tokens = 16;
        AdmitByBlocks(options);
      });
  Request* const old =
      rig.Local({.prompt = Prompt(170), .max_tokens = 60}, decode);
  rig.RunUntil([&] { return old->tokens.size() >= 3; });
  Request* const young =
      rig.Local({.prompt = Prompt(230), .max_tokens = 4}, decode);
  rig.RunUntilEnded();
  EXPECT_EQ(young->opened[0].cached_tokens(), 160);
  EXPECT_EQ(young->finished->preemptions(), 0) << "begun without room";
  EXPECT_LT(old->token_times.back(), young->token_times.front());
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// ---- Grants that are revoked

TEST(DecodeBlocksTest, AGrantToWhichNothingCameIsRevokedBeforeAnyPreemption) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.num_blocks = 20}, AdmitByBlocks);
  PrefillMachine* const slow =
      rig.AddPrefill("slow", {.step = absl::Seconds(2)});
  PrefillMachine* const quick = rig.AddPrefill("quick");
  Request* const granted =
      rig.Split({.prompt = Prompt(120, 1), .max_tokens = 20}, decode, slow);
  rig.RunUntil([&] { return decode->Load().blocks_reserved() == 8; });
  // 12 blocks are left; 180 + 70 positions need 16.
  Request* const grows =
      rig.Local({.prompt = Prompt(180, 2), .max_tokens = 70}, decode);
  rig.RunUntil([&] { return !granted->dead.empty(); });
  EXPECT_TRUE(granted->dead[0].preempted());
  EXPECT_EQ(decode->core->counters().grants_revoked, 1);
  EXPECT_EQ(decode->core->engine_stats().preemptions, 0);
  granted->Retry(quick);
  rig.RunUntilEnded();
  granted->ExpectAllRight();
  grows->ExpectAllRight();
  EXPECT_EQ(grows->finished->preemptions(), 0);
  rig.ExpectNothingLeft();
}

TEST(DecodeBlocksTest, TheYoungestGrantIsRevokedAndNoMoreThanAreNeeded) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.num_blocks = 20}, AdmitByBlocks);
  PrefillMachine* const slow =
      rig.AddPrefill("slow", {.step = absl::Seconds(2)});
  PrefillMachine* const quick = rig.AddPrefill("quick");
  Request* const old =
      rig.Split({.prompt = Prompt(64, 1), .max_tokens = 4}, decode, slow);
  rig.Run(absl::Milliseconds(50));
  Request* const young =
      rig.Split({.prompt = Prompt(64, 2), .max_tokens = 4}, decode, slow);
  rig.RunUntil([&] { return decode->Load().blocks_reserved() == 8; });
  rig.Local({.prompt = Prompt(180, 3), .max_tokens = 20}, decode);
  rig.RunUntil([&] { return !old->dead.empty() || !young->dead.empty(); });
  EXPECT_THAT(old->dead, IsEmpty());
  young->Retry(quick);
  rig.RunUntilEnded();
  EXPECT_EQ(decode->core->counters().grants_revoked, 1);
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

TEST(DecodeBlocksTest, AGrantToWhichSomethingCameIsKept) {
  Rig rig;
  DecodeMachine* const decode =
      rig.AddDecode("decode", {.num_blocks = 20}, AdmitByBlocks);
  // A layer a second.
  PrefillMachine* const slow =
      rig.AddPrefill("slow", {.step = absl::Seconds(4)});
  Request* const landing =
      rig.Split({.prompt = Prompt(100, 1), .max_tokens = 4}, decode, slow);
  rig.RunUntil([&] { return landing->prefill_started.has_value(); });
  rig.Run(absl::Milliseconds(1500));
  Request* const grows =
      rig.Local({.prompt = Prompt(200, 2), .max_tokens = 20}, decode);
  rig.RunUntilEnded();
  EXPECT_EQ(decode->core->counters().grants_revoked, 0);
  landing->ExpectAllRight();
  grows->ExpectAllRight();
  rig.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::worker
