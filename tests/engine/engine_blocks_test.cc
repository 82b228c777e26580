// SPDX-License-Identifier: Apache-2.0
// The engine and its blocks: when they are published, shared and given back,
// and who loses them when they run out.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

// Blocks of 4; a sequence of at most 32 positions.
HarnessOptions SmallPool(int num_blocks, int budget = 64) {
  HarnessOptions options;
  options.num_blocks = num_blocks;
  options.engine.max_num_batched_tokens = budget;
  options.engine.max_model_len = 32;
  return options;
}

std::vector<std::string> Preempted(const Harness& harness) {
  std::vector<std::string> events;
  for (const std::string& event : harness.events) {
    if (event.starts_with("preempted")) events.push_back(event);
  }
  return events;
}

// ---- Publishing and sharing

TEST(EngineBlocksTest, FullBlocksGoToTheCacheAndServeTheNextPrompt) {
  Harness harness;
  harness.Add(1, 10, 5);  // 14 positions computed: 3 full blocks
  harness.RunUntilIdle();
  const std::vector<int32_t> first = harness.told[1].tokens;
  harness.Retire(1);
  EXPECT_EQ(harness.pool.counts().cached, 3);
  EXPECT_EQ(harness.pool.counts().live, 0);
  SequenceSpec again = harness.Spec(1, 10, 5);
  harness.Add(2, std::move(again), /*match_cache=*/true);
  EXPECT_EQ(harness.pool.counts().live, 2);  // of a 10-token prompt
  harness.RunUntilIdle();
  EXPECT_EQ(harness.executor.steps[5], "2@8+2*");
  EXPECT_EQ(harness.told[2].tokens, first);
  harness.ExpectNothingLeft();
  // What it computed a second time was not kept a second time.
  EXPECT_EQ(harness.pool.counts().cached, 3);
}

TEST(EngineBlocksTest, BlocksAreFoundOnlyOnceAllTheirLayersAreComputed) {
  Harness harness;
  harness.Add(1, 9, 1);
  const std::vector<BlockHash> hashes = HashBlocks(
      RootHash("", 4, ""), Harness::Prompt(1, 9), harness.pool.block_size());
  while (harness.device.steps() == 0) {
    EXPECT_EQ(harness.pool.Lookup(hashes), 0);
    harness.loop.RunNext();
  }
  EXPECT_EQ(harness.pool.Lookup(hashes), 2);
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, NothingIsCachedWhereItShouldNotBe) {
  struct Case {
    std::string why;
    bool prefix_caching;
    bool cache_blocks;
    bool fail;
    int cached;
  };
  for (const Case& c : std::vector<Case>{
           {"cached", true, true, false, 3},
           {"no prefix cache", false, true, false, 0},
           {"not this sequence", true, false, false, 0},
           {"a failed step proves nothing", true, true, true, 0},
       }) {
    HarnessOptions options;
    options.engine.prefix_caching = c.prefix_caching;
    Harness harness(options);
    SequenceSpec spec = harness.Spec(1, 12, 1);
    spec.cache_blocks = c.cache_blocks;
    harness.Add(1, std::move(spec));
    if (c.fail) harness.device.FailNextStep(absl::InternalError("lost"));
    harness.RunUntilIdle();
    harness.ExpectNothingLeft();
    EXPECT_EQ(harness.pool.counts().cached, c.cached) << c.why;
  }
}

TEST(EngineBlocksTest, ASequenceRetiredInItsStepStillFillsTheCache) {
  Harness harness;
  harness.Add(1, 9, 5);
  harness.loop.RunNext();
  harness.Retire(1);
  EXPECT_EQ(harness.pool.counts().live, 3);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.pool.counts().cached, 2);
  EXPECT_THAT(harness.events, IsEmpty());
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, LandedBlocksArePublishedAndTheirTailIsWrittenOn) {
  // A handoff: computed on one engine, committed on another.
  Harness prefill;
  SequenceSpec spec = prefill.Spec(1, 10, 6);
  spec.first_token_only = true;
  prefill.Add(1, spec);
  prefill.RunUntilIdle();
  ASSERT_EQ(prefill.told[1].tokens.size(), 1);

  Harness decode;
  std::optional<Reservation> reservation = decode.pool.Reserve(3);
  std::vector<uint64_t> slab(2 * 10);
  std::byte* const bytes = reinterpret_cast<std::byte*>(slab.data());
  KvPart part = {.block_table = prefill.engine->block_table(1),
                 .position_begin = 0,
                 .position_end = 10,
                 .layer_begin = 0,
                 .layer_end = 2,
                 .head_begin = 0,
                 .head_end = 1};
  prefill.device.Gather(part, kernels::DType::kF32, 5, bytes,
                        [](kernels::KvDigest) {});
  prefill.RunUntilIdle();
  part.block_table = reservation->ids();
  BlockHold hold = reservation->Hold(0, 3);
  decode.device.Scatter(part, kernels::DType::kF32, bytes, [] {});
  decode.RunUntilIdle();
  spec.first_token_only = false;
  spec.history.push_back(prefill.told[1].tokens[0]);
  decode.told[1].spec = spec;
  decode.told[1].prompt = Harness::Prompt(1, 10);
  decode.told[1].tokens = prefill.told[1].tokens;
  ASSERT_TRUE(
      decode.engine->Add(1, spec, std::move(*reservation).Commit(), 10).ok());
  hold = BlockHold();
  EXPECT_EQ(decode.pool.Lookup(HashBlocks(spec.root, spec.history, 4)), 2);
  decode.RunUntilIdle();
  EXPECT_EQ(decode.executor.steps[0], "1@10+1*");
  decode.ExpectAllFinishedRight();
  decode.ExpectNothingLeft();
  prefill.ExpectNothingLeft();
}

TEST(EngineBlocksTest, SharedBlocksOutliveTheirSequence) {
  Harness harness;
  harness.Add(1, 10, 4);
  harness.RunSteps(1);
  std::vector<BlockRef> shared = harness.engine->ShareBlocks(1, 0, 9);
  ASSERT_EQ(shared.size(), 3);
  const absl::Span<const int32_t> table = harness.engine->block_table(1);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(shared[i].id(), table[i]);
  EXPECT_EQ(harness.engine->computed(1), 10);
  EXPECT_EQ(harness.engine->computed(2), -1);
  // A gather's pin on the tail does not keep the sequence from growing.
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.Retire(1);
  EXPECT_EQ(harness.pool.counts().live, 3);
  ReleaseBlocks(std::move(shared));
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksDeathTest, ATailThatOthersHaveIsNeverWritten) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  struct Case {
    std::string why;
    int computed;
    bool publish;
  };
  for (const Case& c :
       std::vector<Case>{{"shared", 6, false}, {"published", 6, true}}) {
    EXPECT_DEATH(
        {
          Harness harness;
          std::vector<BlockRef> blocks = harness.pool.Allocate(2);
          const BlockRef other = c.publish ? BlockRef() : blocks[1].Share();
          if (c.publish) harness.pool.Publish(blocks[1], BlockHash());
          harness.engine
              ->Add(1, harness.Spec(1, 10, 5), std::move(blocks), c.computed)
              .IgnoreError();
        },
        "belongs to others")
        << c.why;
  }
}

// ---- Running out

TEST(EngineBlocksTest, TheYoungestLosesItsBlocksTheOldestNever) {
  Harness harness(SmallPool(8));
  // Three of 8 + 12 positions, 5 blocks each at the end; 8 blocks.
  for (const SequenceId id : {2, 3, 1}) harness.Add(id, 8, 12);
  harness.RunUntilIdle();
  EXPECT_THAT(Preempted(harness), ElementsAre("preempted 3", "preempted 2"));
  EXPECT_TRUE(harness.told[1].finish.has_value());
  EXPECT_EQ(harness.engine->stats().preemptions, 2);
  // Their tokens so far were told before, and are right.
  for (const SequenceId id : {2, 3}) {
    EXPECT_FALSE(harness.engine->contains(id));
    const std::vector<int32_t> expected = harness.ExpectedTokens(id);
    const std::vector<int32_t>& got = harness.told[id].tokens;
    ASSERT_FALSE(got.empty());
    ASSERT_LT(got.size(), expected.size());
    EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin()));
  }
  // Resumed where they were, they finish as if nothing had been.
  harness.Retire(1);
  harness.Resume(2, true);
  harness.RunUntilIdle();
  harness.Retire(2);
  harness.Resume(3, true);
  harness.RunUntilIdle();
  EXPECT_THAT(Preempted(harness), ElementsAre("preempted 3", "preempted 2"));
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, PausedSequencesGoFirstYoungestFirst) {
  Harness harness(SmallPool(12));
  for (const SequenceId id : {1, 2, 3, 4}) harness.Add(id, 8, 12);
  harness.RunSteps(1);
  harness.engine->Pause(1, true);
  harness.engine->Pause(3, true);
  harness.RunUntilIdle();
  // 2 is the oldest that runs; then 1 and 3 are gone, 4 is the youngest.
  EXPECT_THAT(Preempted(harness), ElementsAre("preempted 3", "preempted 1"));
  EXPECT_TRUE(harness.told[2].finish.has_value());
  EXPECT_TRUE(harness.told[4].finish.has_value());
  EXPECT_EQ(harness.told[2].tokens, harness.ExpectedTokens(2));
  EXPECT_EQ(harness.told[4].tokens, harness.ExpectedTokens(4));
  harness.told.erase(1);
  harness.told.erase(3);
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, FinishedSequencesKeepTheirBlocks) {
  for (const bool paused : {false, true}) {
    SCOPED_TRACE(paused ? "paused in its last step" : "");
    Harness harness(SmallPool(8));
    SequenceSpec kept = harness.Spec(9, 12, 5);
    kept.first_token_only = true;
    harness.Add(9, std::move(kept));
    while (!harness.engine->stats().step_in_flight) harness.loop.RunNext();
    harness.engine->Pause(9, paused);
    harness.RunUntilIdle();
    harness.Add(1, 8, 12);  // 5 blocks
    harness.Add(2, 8, 12);
    harness.RunUntilIdle();
    EXPECT_TRUE(harness.engine->contains(9));
    EXPECT_EQ(harness.engine->block_table(9).size(), 3);
    EXPECT_THAT(Preempted(harness), ElementsAre("preempted 2"));
    EXPECT_TRUE(harness.told[1].finish.has_value());
    harness.told.erase(2);
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

TEST(EngineBlocksTest, APromptThatFindsNoBlockWaitsAndPreemptsNoOlderOne) {
  Harness harness(SmallPool(8));
  harness.Add(1, 24, 8);  // 8 blocks at the end
  harness.RunSteps(1);
  harness.Add(2, 20, 2);  // 2 left: it starts, and gives way
  harness.RunUntilIdle();
  EXPECT_TRUE(harness.told[1].finish.has_value());
  EXPECT_THAT(harness.executor.steps, Contains("1@25+1* 2@0+4"));
  EXPECT_THAT(Preempted(harness), ElementsAre("preempted 2"));
  harness.Resume(2, false);
  harness.RunUntilIdle();
  EXPECT_FALSE(harness.told[2].finish.has_value());  // 1 has all
  EXPECT_TRUE(harness.engine->contains(2));
  harness.Retire(1);
  harness.RunUntilIdle();
  EXPECT_TRUE(harness.told[2].finish.has_value());
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, TheYoungestTakesNoBlockOfOneThatIsNotTheOldest) {
  Harness harness(SmallPool(8));
  for (const SequenceId id : {1, 2}) harness.Add(id, 13, 3);  // 4 blocks each
  harness.RunSteps(1);
  harness.Add(3, 4, 2);
  harness.RunUntilIdle();
  EXPECT_THAT(Preempted(harness), IsEmpty());
  EXPECT_TRUE(harness.told[2].finish.has_value());
  harness.Retire(1);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, RowsOfWhoIsPreemptedInAPlanAreOthers) {
  Harness harness(SmallPool(8, /*budget=*/8));
  harness.Add(3, 12, 12);
  harness.RunSteps(3);
  std::optional<Reservation> grant = harness.pool.Reserve(4);
  harness.Add(1, 20, 2);
  harness.Add(2, 4, 2);
  harness.RunSteps(5);
  EXPECT_THAT(Preempted(harness), ElementsAre("preempted 3"));
  EXPECT_THAT(harness.executor.steps, Contains("1@0+7 2@0+1"));
  grant.reset();
  harness.told.erase(3);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, TheOwnerIsAskedBeforeAnybodyIsPreempted) {
  Harness harness(SmallPool(8));
  std::optional<Reservation> grant = harness.pool.Reserve(2);
  harness.on_blocks_short = [&](int blocks) {
    EXPECT_EQ(harness.pool.available(), 0);
    EXPECT_EQ(harness.engine->stats().preemptions, 0);
    if (!grant.has_value()) return false;
    grant.reset();
    return true;
  };
  harness.Add(1, 8, 5);  // 3 blocks each
  harness.Add(2, 8, 9);  // 4 in the end
  harness.RunUntilIdle();
  EXPECT_THAT(harness.events, Contains("short 1"));
  EXPECT_THAT(Preempted(harness), IsEmpty());
  EXPECT_FALSE(grant.has_value());
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, WhoSaysTryAgainButFreesNothingIsNotAskedAgain) {
  Harness harness(SmallPool(8));
  int asked = 0;
  harness.on_blocks_short = [&](int) {
    ++asked;
    return true;
  };
  for (const SequenceId id : {1, 2}) harness.Add(id, 8, 12);
  harness.RunUntilIdle();
  EXPECT_EQ(asked, 1);
  EXPECT_THAT(Preempted(harness), ElementsAre("preempted 2"));
  harness.told.erase(2);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, TheOwnerMayRetireAndAddWhileItIsAsked) {
  Harness harness(SmallPool(8));
  bool first = true;
  harness.on_blocks_short = [&](int) {
    if (!first) return false;
    first = false;
    harness.Retire(2);
    harness.Add(4, 4, 3);
    return true;
  };
  for (const SequenceId id : {1, 2, 3}) harness.Add(id, 8, 5);
  harness.RunUntilIdle();
  EXPECT_TRUE(harness.told[1].finish.has_value());
  EXPECT_TRUE(harness.told[3].finish.has_value());
  EXPECT_TRUE(harness.told[4].finish.has_value());
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, TheOldestWaitsForBlocksThatOthersHold) {
  Harness harness(SmallPool(8));
  std::optional<Reservation> grant = harness.pool.Reserve(6);
  BlockHold scatter = grant->Hold(5, 6);
  harness.Add(1, 20, 4);
  harness.RunUntilIdle();
  // It went as far as it could, and does not poll.
  EXPECT_THAT(harness.executor.steps, ElementsAre("1@0+8"));
  EXPECT_THAT(Preempted(harness), IsEmpty());
  EXPECT_EQ(harness.loop.pending(), 0);
  grant.reset();
  harness.RunUntilIdle();
  scatter = BlockHold();
  EXPECT_TRUE(harness.told[1].finish.has_value());
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, AChunkIsCutToTheBlocksThereAreBeforeAnybodySuffers) {
  Harness harness(SmallPool(10));
  harness.Add(2, 24, 2);
  harness.RunSteps(1);
  harness.Add(1, 20, 3);  // older, and 3 blocks are left
  harness.RunUntilIdle();
  EXPECT_EQ(harness.executor.steps[2], "1@0+12");
  EXPECT_THAT(Preempted(harness), IsEmpty());  // 2 was done just then
  harness.Retire(2);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, WhoeverIsRetiredBeforeItHearsOfItsPreemptionHearsNot) {
  Harness harness(SmallPool(8, 24));
  for (const SequenceId id : {1, 2, 3, 4}) harness.Add(id, 4, 20);
  harness.on_preempted = [&](SequenceId) {
    for (const SequenceId id : {2, 3, 4}) {
      if (!harness.engine->contains(id)) harness.Retire(id);
    }
  };
  harness.RunUntilIdle();
  EXPECT_TRUE(harness.told[1].finish.has_value());
  harness.on_preempted = nullptr;
  EXPECT_GE(harness.engine->stats().preemptions, 3);
  harness.ExpectNothingLeft();
}

TEST(EngineBlocksTest, ManySequencesInASmallPoolAllFinishRight) {
  struct Case {
    int num_blocks;
    int block_size;
    int budget;
    bool use_cache;
  };
  for (const Case& c : std::vector<Case>{{8, 4, 64, true},
                                         {8, 4, 64, false},
                                         {9, 4, 7, true},
                                         {32, 1, 3, true},
                                         {5, 8, 6, true},
                                         {16, 4, 64, true}}) {
    HarnessOptions options = SmallPool(c.num_blocks, c.budget);
    options.block_size = c.block_size;
    Harness harness(options);
    harness.on_token = [&](SequenceId id) {
      if (harness.told[id].finish.has_value()) harness.Retire(id);
    };
    // Each comes back with what it has, as a router would bring it.
    harness.on_preempted = [&](SequenceId id) {
      harness.loop.After(absl::Milliseconds(20),
                         [&, id] { harness.Resume(id, c.use_cache); });
    };
    for (SequenceId id = 1; id <= 12; ++id) {
      harness.Add(id, 3 + static_cast<int>(id), 12);
    }
    harness.RunUntilIdle();
    SCOPED_TRACE(absl::StrCat(c.num_blocks, " blocks of ", c.block_size,
                              " budget ", c.budget));
    EXPECT_GT(harness.engine->stats().preemptions, 0);
    for (auto& [id, entry] : harness.told) {
      EXPECT_TRUE(entry.finish.has_value()) << id;
    }
    harness.ExpectAllFinishedRight();
    harness.on_preempted = nullptr;
    harness.ExpectNothingLeft();
  }
}

}  // namespace
}  // namespace tandem::engine
