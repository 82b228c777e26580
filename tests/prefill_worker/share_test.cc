// SPDX-License-Identifier: Apache-2.0
// Prompts whose KV waits for one decode worker, and those that its share of the
// pool keeps waiting: none of them waits for ever.

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/simulation/parts.h"
#include "tests/worker/rig.h"

namespace tandem::worker {
namespace {

TEST(PrefillShareTest, ALargePromptIsNotOvertakenForEver) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode("decode", {.num_blocks = 512});
  // 14 are the share: the large one has 15, and needs it empty.
  PrefillMachine* const prefill = rig.AddPrefill("prefill", {.num_blocks = 28});
  int served = 0;
  const auto ask_small = [&] {
    return rig.Split({.prompt = Prompt(60, 100 + served), .max_tokens = 2},
                     decode, prefill);
  };
  Request* small = ask_small();
  rig.Run(absl::Milliseconds(5));
  Request* const large =
      rig.Split({.prompt = Prompt(240, 1), .max_tokens = 2}, decode, prefill);
  // The next small one comes as soon as the one before computes.
  for (int ms = 0; ms < 2000 && !large->prefill_started; ++ms) {
    if (small->prefill_started) {
      ++served;
      small = ask_small();
    }
    rig.Run(absl::Milliseconds(1));
  }
  EXPECT_TRUE(large->prefill_started.has_value());
  EXPECT_LE(served, 3);
  rig.RunUntilEnded();
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

// The decode worker has granted its blocks to the older one, for which there is
// no room here before the younger one, that waits for blocks there, has left.
TEST(PrefillShareTest, AGrantAndAShareDoNotWaitForEachOther) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 20, .step = absl::Milliseconds(30)},
      AdmitByBlocks);
  PrefillMachine* const prefill = rig.AddPrefill("prefill", {.num_blocks = 28});
  Request* const running =
      rig.Local({.prompt = Prompt(200, 1), .max_tokens = 40}, decode);
  rig.RunUntil([&] { return running->tokens.size() >= 3; });
  Request* const young =
      rig.Split({.prompt = Prompt(150, 2), .max_tokens = 4}, decode, prefill);
  young->retries = true;
  rig.RunUntil([&] { return young->first.has_value(); });
  ASSERT_FALSE(running->decode_ended.has_value()) << "what both wait for";
  Request* const old = rig.Split(
      {.prompt = Prompt(200, 3), .max_tokens = 4, .age = absl::Seconds(60)},
      decode, prefill);
  rig.RunUntilEnded(absl::Seconds(10));
  for (const auto& request : rig.requests) request->ExpectAllRight();
  EXPECT_EQ(old->opened.size(), 1u) << "the older one stays";
  EXPECT_EQ(young->opened.size(), 2u);
  rig.ExpectNothingLeft();
}

// Each decode worker has granted its blocks to the older one, for which its
// prefill worker has no room: that is full of what waits for the blocks of the
// other decode worker's grant.
TEST(PrefillShareTest, GrantsOfTwoPairsDoNotWaitForEachOther) {
  Rig rig;
  DecodeMachine* decodes[2];
  PrefillMachine* prefills[2];
  Request* running[2];
  for (int i = 0; i < 2; ++i) {
    decodes[i] = rig.AddDecode(
        absl::StrCat("decode", i),
        {.num_blocks = 20, .step = absl::Milliseconds(30)}, AdmitByBlocks);
    prefills[i] =
        rig.AddPrefill(absl::StrCat("prefill", i), {.num_blocks = 20});
    running[i] =
        rig.Local({.prompt = Prompt(200, i), .max_tokens = 40}, decodes[i]);
  }
  rig.RunUntil([&] {
    return running[0]->tokens.size() >= 3 && running[1]->tokens.size() >= 3;
  });
  Request* young[2];
  for (int i = 0; i < 2; ++i) {
    young[i] = rig.Split({.prompt = Prompt(150, 2 + i), .max_tokens = 4},
                         decodes[1 - i], prefills[i]);
    young[i]->retries = true;
  }
  rig.RunUntil([&] { return young[0]->first && young[1]->first; });
  Request* old[2];
  for (int i = 0; i < 2; ++i) {
    ASSERT_FALSE(running[i]->decode_ended) << "what all wait for";
    old[i] = rig.Split({.prompt = Prompt(200, 4 + i),
                        .max_tokens = 4,
                        .age = absl::Seconds(60)},
                       decodes[i], prefills[i]);
  }
  rig.RunUntilEnded(absl::Seconds(10));
  for (const auto& request : rig.requests) request->ExpectAllRight();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(old[i]->opened.size(), 1u) << "the older one stays";
  }
  EXPECT_GT(young[0]->opened.size() + young[1]->opened.size(), 2u);
  rig.ExpectNothingLeft();
}

// Each preempts another by and by, and comes back by a handoff.
TEST(PrefillShareTest, WhatOutgrowsTheDecodeWorkerComesToItsEnd) {
  Rig rig;
  DecodeMachine* const decode = rig.AddDecode(
      "decode", {.num_blocks = 20, .step = absl::Milliseconds(100)});
  PrefillMachine* const prefill = rig.AddPrefill("prefill", {.num_blocks = 20});
  const struct {
    int prompt, max_tokens;
  } jobs[] = {{20, 135}, {60, 150}, {120, 100}};
  for (const auto& job : jobs) {
    rig.Split({.prompt = Prompt(job.prompt, job.prompt),
               .max_tokens = job.max_tokens},
              decode, prefill)
        ->retries = true;
    rig.Run(absl::Milliseconds(3));
  }
  rig.RunUntilEnded(absl::Minutes(2));
  for (const auto& request : rig.requests) request->ExpectAllRight();
  rig.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::worker
