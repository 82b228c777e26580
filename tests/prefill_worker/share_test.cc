// SPDX-License-Identifier: Apache-2.0
// Prompts whose KV waits for one decode worker, and those that its share of the
// pool keeps waiting: none of them waits for ever.

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tandem::worker
