// SPDX-License-Identifier: Apache-2.0
// Prompts that come again after the pool has evicted them: their blocks come
// back from memory or disk, with the same tokens, or are computed again.

#include "engine/kv_offload.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

// Room for two prompts of 32 positions at once, in blocks of 4.
HarnessOptions Small(int memory_blocks, int file_blocks = 0) {
  HarnessOptions options;
  options.num_blocks = 18;
  options.engine.max_model_len = 48;
  options.offload = {.memory_blocks = memory_blocks,
                     .file_blocks = file_blocks};
  return options;
}

constexpr int kPrompt = 33;  // 8 full blocks, and one position more

// Runs prompt `prompt` as sequence `id` to its end, right tokens and all.
// How many rows the device had to compute for it.
int64_t RunPrompt(Harness& harness, SequenceId id, uint64_t prompt,
                  std::string_view salt = "") {
  const int64_t before = harness.device.rows();
  SequenceSpec spec = harness.Spec(id, kPrompt, 2);
  spec.history = Harness::Prompt(prompt, kPrompt);
  spec.root = RootHash(salt, harness.options.block_size, "");
  harness.Add(id, std::move(spec), /*match_cache=*/true);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.Retire(id);
  harness.CheckInvariants();
  return harness.device.rows() - before;
}

TEST(KvOffloadTest, WhatThePoolEvictedComesBackFromMemory) {
  Harness harness(Small(64));
  EXPECT_EQ(RunPrompt(harness, 1, 1), kPrompt + 1);
  for (uint64_t other = 2; other < 6; ++other) {
    RunPrompt(harness, other, other);
  }
  EXPECT_GT(harness.offload->counters().saved, 8);
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPrompt + 1 - 32);
  EXPECT_EQ(harness.offload->counters().restored, 8);
  harness.ExpectNothingLeft();
}

TEST(KvOffloadTest, WithoutMemoryItIsComputedAgain) {
  Harness harness(Small(0));
  for (uint64_t prompt = 1; prompt < 6; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPrompt + 1);
}

TEST(KvOffloadTest, AnotherTenantFindsNothing) {
  Harness harness(Small(64));
  for (uint64_t prompt = 1; prompt < 6; ++prompt) {
    RunPrompt(harness, prompt, prompt, "tenant-a");
  }
  EXPECT_EQ(RunPrompt(harness, 10, 1, "tenant-b"), kPrompt + 1);
  EXPECT_EQ(harness.offload->counters().restored, 0);
}

TEST(KvOffloadTest, KeepsNoMoreThanItsMemoryAndTheNewestOfThat) {
  Harness harness(Small(10));
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
    EXPECT_LE(harness.offload->memory_blocks_used(), 10);
  }
  EXPECT_GT(harness.offload->counters().dropped, 0);
  EXPECT_EQ(RunPrompt(harness, 20, 1), kPrompt + 1);  // long gone
}

TEST(KvOffloadTest, WhatFellOutOfMemoryComesBackFromTheFile) {
  HarnessOptions options = Small(16, 100);
  Harness harness(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  EXPECT_GT(harness.offload->counters().written, 8);
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPrompt - 1), 4);
  EXPECT_EQ(harness.cache.Lookup(hashes), 8);
  EXPECT_EQ(harness.cache.Find(hashes).size(), 0);  // not at once
  harness.cache.Prefetch(hashes);
  EXPECT_TRUE(harness.cache.Prefetching(hashes));
  harness.RunUntilIdle();
  EXPECT_FALSE(harness.cache.Prefetching(hashes));
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPrompt + 1 - 32);
  EXPECT_EQ(harness.offload->counters().read, 8);
}

TEST(KvOffloadTest, NobodyWaitsLongForADisk) {
  HarnessOptions options = Small(16, 100);
  options.file.latency = absl::Seconds(1);
  Harness late(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(late, prompt, prompt);
  }
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPrompt - 1), 4);
  int told = 0;
  late.offload->set_on_change([&] { ++told; });
  late.cache.Prefetch(hashes);
  ASSERT_TRUE(late.cache.Prefetching(hashes));
  const absl::Time start = late.loop.Now();
  while (told == 0 && late.loop.RunNext()) {
  }
  EXPECT_LE(late.loop.Now() - start, late.options.offload.read_timeout);
  EXPECT_FALSE(late.cache.Prefetching(hashes));
  EXPECT_EQ(RunPrompt(late, 10, 1), kPrompt + 1);  // computed meanwhile
  late.offload->set_on_change(nullptr);
  late.RunUntilIdle();
  late.CheckInvariants();
}

TEST(KvOffloadTest, ACorruptBlockIsAMissAndForgotten) {
  HarnessOptions options = Small(16, 100);
  options.file.corrupt = 1;
  Harness harness(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPrompt - 1), 4);
  harness.cache.Prefetch(hashes);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.offload->counters().read_errors, 8);
  EXPECT_EQ(harness.cache.Lookup(hashes), 0);
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPrompt + 1);
}

TEST(KvOffloadTest, AFullDiskLosesBlocksAndNothingElse) {
  HarnessOptions options = Small(16, 100);
  options.file.full = 1;
  Harness harness(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  EXPECT_GT(harness.offload->counters().write_errors, 8);
  EXPECT_EQ(harness.offload->file_blocks_used(), 0);
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPrompt + 1);
}

TEST(KvOffloadTest, RoutersHearOfABlockUntilItIsGoneEverywhere) {
  Harness harness(Small(10));
  RunPrompt(harness, 1, 1);
  const std::vector<uint64_t> first = harness.pool.TakeChanges().added;
  EXPECT_EQ(first.size(), 8u);
  RunPrompt(harness, 2, 2);
  RunPrompt(harness, 3, 3);
  ASSERT_GT(harness.offload->counters().saved, 0);
  EXPECT_TRUE(harness.pool.TakeChanges().removed.empty());
  for (uint64_t prompt = 4; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  const std::vector<uint64_t> gone = harness.pool.TakeChanges().removed;
  for (const uint64_t hash : first) {
    EXPECT_TRUE(std::find(gone.begin(), gone.end(), hash) != gone.end());
  }
}

}  // namespace
}  // namespace tandem::engine
