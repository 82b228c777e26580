// SPDX-License-Identifier: Apache-2.0
// Sequences of a model whose layers have a window, all or some of them: what is
// wholly behind it is let go, nothing else is, and no token changes.

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

constexpr int kWindow = 10;

// Blocks of 4, chunks of 8: at most (10 + 8) / 4 + 1 -> 6 blocks at once.
HarnessOptions Windowed(int num_blocks) {
  HarnessOptions options;
  options.num_blocks = num_blocks;
  options.engine.max_model_len = 160;
  options.engine.max_num_batched_tokens = 8;
  options.engine.window = kWindow;
  options.model.window = kWindow;
  return options;
}

// Runs until nothing is left to do; the most blocks that were live at once.
int MostLive(Harness& harness) {
  int most = 0;
  while (harness.loop.RunNext()) {
    most = std::max(most, harness.pool.counts().live);
    harness.CheckInvariants();
  }
  return most;
}

TEST(EngineWindowTest, ALongSequenceFitsIntoAPoolOfItsWindow) {
  Harness harness(Windowed(6));
  harness.Add(1, 70, 80);
  const int most = MostLive(harness);
  harness.ExpectAllFinishedRight();
  EXPECT_LE(most, 6);
  EXPECT_GE(harness.engine->stats().window_blocks, (150 - kWindow) / 4 - 1);
  EXPECT_GE(harness.blocks_freed, (150 - kWindow) / 8) << "others may wait";
  EXPECT_EQ(harness.told[1].preempted, 0);
  harness.ExpectNothingLeft();
}

TEST(EngineWindowTest, GivesTheTokensOfAnEngineThatLetsNothingGo) {
  HarnessOptions whole = Windowed(40);
  whole.engine.window = 0;
  Harness keeps(whole);
  Harness frees(Windowed(40));
  for (Harness* harness : {&keeps, &frees}) {
    for (SequenceId id = 1; id <= 3; ++id) {
      harness->Add(id, 20 + 7 * static_cast<int>(id), 12);
    }
    harness->RunUntilIdle();
    harness->ExpectAllFinishedRight();
  }
  EXPECT_EQ(keeps.engine->stats().window_blocks, 0);
  EXPECT_GT(frees.engine->stats().window_blocks, 0);
  for (SequenceId id = 1; id <= 3; ++id) {
    EXPECT_EQ(keeps.told[id].tokens, frees.told[id].tokens);
  }
}

TEST(EngineWindowTest, WhatIsKeptForAHandoffStays) {
  Harness harness(Windowed(40));
  SequenceSpec spec = harness.Spec(1, 70, 5);
  spec.first_token_only = true;
  spec.keep_from = 0;  // not granted yet
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  EXPECT_EQ(harness.engine->ShareBlocks(1, 0, 70).size(), 18u);
  // The grant begins at position 60: 15 blocks go.
  harness.engine->KeepFrom(1, 60);
  EXPECT_EQ(harness.engine->stats().window_blocks, 15);
  const auto shared = harness.engine->ShareBlocks(1, 60, 70);
  EXPECT_FALSE(shared[14]);
  EXPECT_TRUE(shared[15]);
  harness.CheckInvariants();
}

TEST(EngineWindowTest, APrefixIsFoundByItsLastWindow) {
  HarnessOptions options = Windowed(12);
  Harness harness(options);
  harness.Add(1, 41, 2);
  harness.RunUntilIdle();
  harness.Retire(1);
  // Others take what was let go first.
  harness.Add(2, 17, 2);
  harness.RunUntilIdle();
  harness.Retire(2);
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, 40), 4);
  EXPECT_EQ(harness.pool.Lookup(hashes), 0);  // its head is gone
  {
    const CachedPrefix found = harness.cache.Find(hashes);
    EXPECT_EQ(found.size(), 10);
    EXPECT_EQ(found.first, (40 - kWindow + 1) / 4);
    EXPECT_FALSE(found.blocks[0]);
    EXPECT_TRUE(found.blocks[9]);
    // Who must hand over all of it finds nothing.
    EXPECT_EQ(harness.cache.Find(hashes, 0).size(), 0);
  }
  const int64_t rows = harness.device.rows();
  SequenceSpec again = harness.Spec(3, 41, 2);
  again.history = Harness::Prompt(1, 41);
  harness.Add(3, std::move(again), /*match_cache=*/true);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_EQ(harness.device.rows() - rows, 2);
}

TEST(EngineWindowTest, WithoutACacheAllIsKeptToBeComputedAgain) {
  Harness harness(Windowed(40));
  SequenceSpec spec = harness.Spec(1, 41, 6);
  spec.kv_cache = false;
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_EQ(harness.engine->stats().window_blocks, 0);
}

TEST(EngineWindowTest, AMissingBlockThatIsSeenIsRefused) {
  Harness harness(Windowed(40));
  SequenceSpec spec = harness.Spec(1, 41, 2);
  std::vector<BlockRef> blocks(10);
  blocks[9] = std::move(harness.pool.Allocate(1)[0]);
  EXPECT_TRUE(absl::IsInvalidArgument(
      harness.engine->Add(1, std::move(spec), std::move(blocks), 40)));
}

// ---- Where one of three layers sees all

HarnessOptions Mixed(int num_blocks) {
  HarnessOptions options = Windowed(num_blocks);
  options.model.num_layers = 3;
  options.model.full_layers = 1;
  options.engine.window.parts = {.full = 1, .windowed = 2};
  return options;
}

// 38 blocks of which six are whole: 38 + 6 * 2 of 3 cells each.
TEST(EngineWindowTest, ALongSequenceFitsWithoutItsWindowedParts) {
  Harness harness(Mixed(18));
  EXPECT_EQ(harness.engine->BlocksAtOnce(160), 18);
  harness.Add(1, 70, 80);
  const int most = MostLive(harness);
  harness.ExpectAllFinishedRight();
  EXPECT_LE(most, 18);
  EXPECT_EQ(harness.told[1].preempted, 0);
  harness.ExpectNothingLeft();
}

TEST(EngineWindowTest, MoreSequencesRunWherePartsAreLetGo) {
  // At the end eight sequences have 38 blocks each, of 18 whole ones' cells.
  HarnessOptions options = Mixed(144);
  Harness frees(options);
  options.engine.window = 0;
  Harness keeps(options);
  for (Harness* harness : {&keeps, &frees}) {
    for (SequenceId id = 1; id <= 8; ++id) harness->Add(id, 70, 80);
    harness->RunUntilIdle();
  }
  EXPECT_GT(keeps.engine->stats().preemptions, 0);
  EXPECT_EQ(frees.engine->stats().preemptions, 0);
  frees.ExpectAllFinishedRight();
  frees.ExpectNothingLeft();
}

TEST(EngineWindowTest, APrefixThatLacksWhatIsSeenIsComputedAgain) {
  Harness harness(Mixed(40));
  harness.Add(1, 120, 8);
  harness.RunUntilIdle();
  // All of it is there still: parts go when others need the cells.
  harness.Retire(1);
  SequenceSpec same = harness.Spec(2, 120, 8);
  same.history = harness.told[1].prompt;
  harness.Add(2, same, /*match_cache=*/true);
  EXPECT_EQ(harness.engine->computed(2), 116);
  harness.RunUntilIdle();
  // A short beginning of it lacks its own last window then.
  const std::vector<BlockRef> others =
      harness.pool.Allocate(harness.pool.available());
  harness.CheckInvariants();
  SequenceSpec shorter = harness.Spec(3, 40, 8);
  shorter.history = {harness.told[1].prompt.begin(),
                     harness.told[1].prompt.begin() + 40};
  harness.Retire(2);
  EXPECT_EQ(harness.cache.Lookup(HashBlocks(shorter.root, shorter.history,
                                            harness.options.block_size)),
            0);
}

TEST(EngineWindowTest, OptionsNameThePoolsParts) {
  const EngineOptions options = Mixed(40).engine;
  EXPECT_TRUE(
      Engine::Validate(options, KvPool(40, 4, 1, options.window.parts)).ok());
  EXPECT_FALSE(Engine::Validate(options, KvPool(40, 4)).ok());
}

}  // namespace
}  // namespace tandem::engine
