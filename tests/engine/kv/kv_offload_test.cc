// SPDX-License-Identifier: Apache-2.0
// Prompts that come again after the pool has evicted them: their blocks come
// back from memory or disk, with the same tokens, or are computed again.

#include "engine/kv/kv_offload.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

// Room for two prompts of 32 positions at once, in blocks of 4.
HarnessOptions Offloading(int memory_blocks, int file_blocks = 0) {
  HarnessOptions options;
  options.num_blocks = 18;
  options.engine.max_model_len = 48;
  options.offload = {.memory_blocks = memory_blocks,
                     .file_blocks = file_blocks};
  return options;
}

constexpr int kPromptTokens = 33;  // 8 full blocks, and one position more

// Runs prompt `prompt` as sequence `id` to its end, right tokens and all.
// How many rows the device had to compute for it.
int64_t RunPrompt(Harness& harness, SequenceId id, uint64_t prompt,
                  std::string_view salt = "", uint64_t owner = 0) {
  const int64_t before = harness.device.rows();
  SequenceSpec spec = harness.Spec(id, kPromptTokens, 2);
  spec.history = Harness::Prompt(prompt, kPromptTokens);
  spec.root = RootHash(salt, harness.options.block_size, "");
  spec.cache_owner = owner;
  harness.Add(id, std::move(spec), /*match_cache=*/true);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.Retire(id);
  harness.CheckInvariants();
  return harness.device.rows() - before;
}

TEST(KvOffloadTest, WhatThePoolEvictedComesBackFromMemory) {
  Harness harness(Offloading(64));
  EXPECT_EQ(RunPrompt(harness, 1, 1), kPromptTokens + 1);
  for (uint64_t other = 2; other < 6; ++other) {
    RunPrompt(harness, other, other);
  }
  EXPECT_GT(harness.offload->counters().saved, 8);
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPromptTokens + 1 - 32);
  EXPECT_EQ(harness.offload->counters().restored, 8);
  harness.ExpectNothingLeft();
}

TEST(KvOffloadTest, WithoutMemoryItIsComputedAgain) {
  Harness harness(Offloading(0));
  for (uint64_t prompt = 1; prompt < 6; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPromptTokens + 1);
}

TEST(KvOffloadTest, AnotherTenantFindsNothing) {
  Harness harness(Offloading(64));
  for (uint64_t prompt = 1; prompt < 6; ++prompt) {
    RunPrompt(harness, prompt, prompt, "tenant-a");
  }
  EXPECT_EQ(RunPrompt(harness, 10, 1, "tenant-b"), kPromptTokens + 1);
  EXPECT_EQ(harness.offload->counters().restored, 0);
}

TEST(KvOffloadTest, KeepsNoMoreThanItsMemoryAndTheNewestOfThat) {
  Harness harness(Offloading(10));
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
    EXPECT_LE(harness.offload->memory_blocks_used(), 10);
  }
  EXPECT_GT(harness.offload->counters().dropped, 0);
  EXPECT_EQ(RunPrompt(harness, 20, 1), kPromptTokens + 1);  // long gone
}

// Each tenant's prompt takes 8 blocks; half of 24 is a tenant's share.
TEST(KvOffloadTest, WhoFloodsMemoryOrFileDrivesOutHimself) {
  for (const bool file : {false, true}) {
    for (const double share : {0.5, 1.0}) {
      HarnessOptions options = Offloading(file ? 8 : 24, file ? 24 : 0);
      options.offload.owner_share = share;
      Harness harness(options);
      RunPrompt(harness, 1, 1, "quiet", /*owner=*/7);
      for (uint64_t flood = 2; flood < 12; ++flood) {
        RunPrompt(harness, flood, flood, "loud", /*owner=*/8);
      }
      const auto hashes = HashBlocks(RootHash("quiet", 4, ""),
                                     Harness::Prompt(1, kPromptTokens - 1), 4);
      EXPECT_EQ(harness.cache.Lookup(hashes), share < 1 ? 8 : 0)
          << (file ? "file" : "memory") << " " << share;
      harness.ExpectNothingLeft();
    }
  }
}

TEST(KvOffloadTest, WhatFellOutOfMemoryComesBackFromTheFile) {
  HarnessOptions options = Offloading(16, 100);
  Harness harness(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  EXPECT_GT(harness.offload->counters().written, 8);
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPromptTokens - 1), 4);
  EXPECT_EQ(harness.cache.Lookup(hashes), 8);
  EXPECT_EQ(harness.cache.Find(hashes).size(), 0);  // not at once
  harness.cache.Prefetch(hashes);
  EXPECT_TRUE(harness.cache.Prefetching(hashes));
  harness.RunUntilIdle();
  EXPECT_FALSE(harness.cache.Prefetching(hashes));
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPromptTokens + 1 - 32);
  EXPECT_EQ(harness.offload->counters().read, 8);
}

TEST(KvOffloadTest, NobodyWaitsLongForADisk) {
  HarnessOptions options = Offloading(16, 100);
  options.file.latency = absl::Seconds(1);
  Harness late(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(late, prompt, prompt);
  }
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPromptTokens - 1), 4);
  int told = 0;
  late.offload->set_on_change([&] { ++told; });
  late.cache.Prefetch(hashes);
  ASSERT_TRUE(late.cache.Prefetching(hashes));
  const absl::Time start = late.loop.Now();
  while (told == 0 && late.loop.RunNext()) {
  }
  EXPECT_LE(late.loop.Now() - start, late.options.offload.read_timeout);
  EXPECT_FALSE(late.cache.Prefetching(hashes));
  EXPECT_EQ(RunPrompt(late, 10, 1), kPromptTokens + 1);  // computed meanwhile
  late.offload->set_on_change(nullptr);
  late.RunUntilIdle();
  late.CheckInvariants();
}

TEST(KvOffloadTest, ACorruptBlockIsAMissAndForgotten) {
  HarnessOptions options = Offloading(16, 100);
  options.file.corrupt = 1;
  Harness harness(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPromptTokens - 1), 4);
  harness.cache.Prefetch(hashes);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.offload->counters().read_errors, 8);
  EXPECT_EQ(harness.cache.Lookup(hashes), 0);
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPromptTokens + 1);
}

TEST(KvOffloadTest, AFullDiskLosesBlocksAndNothingElse) {
  HarnessOptions options = Offloading(16, 100);
  options.file.full = 1;
  Harness harness(options);
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  EXPECT_GT(harness.offload->counters().write_errors, 0);
  EXPECT_EQ(harness.offload->file_blocks_used(), 0);
  EXPECT_EQ(RunPrompt(harness, 10, 1), kPromptTokens + 1);
}

// A prompt has 8 blocks. The disk takes 40 of the file's 100, then all: 16 of
// those are in memory too, and two more prompts are in the pool.
TEST(KvOffloadTest, AFullDiskKeepsTheNewestOfWhatItHasRoomFor) {
  Harness harness(Offloading(16, 100));
  const KvOffload& offload = *harness.offload;
  harness.file.set_room(40);
  uint64_t prompt = 0;
  const auto run = [&](int prompts) {
    for (; prompts > 0; --prompts) {
      ++prompt;
      RunPrompt(harness, prompt, prompt);
    }
  };
  const auto cached = [&](uint64_t of) {
    return harness.cache.Lookup(HashBlocks(
        RootHash("", 4, ""), Harness::Prompt(of, kPromptTokens - 1), 4));
  };
  run(5);
  EXPECT_TRUE(offload.file_status().ok()) << offload.file_status();
  run(7);
  EXPECT_EQ(offload.file_status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(offload.file_blocks_used(), 40);
  EXPECT_EQ(cached(prompt - 5), 8);
  EXPECT_EQ(cached(1), 0);
  // Those that were in flight when it first refused one, and none since.
  const int64_t errors = offload.counters().write_errors;
  EXPECT_LE(errors, 4);
  // It is asked again after a while, with one block.
  harness.loop.RunFor(harness.options.offload.file_retry);
  run(3);
  EXPECT_EQ(offload.counters().write_errors, errors + 1);
  EXPECT_EQ(offload.file_blocks_used(), 40);
  harness.file.set_room(100);
  run(3);
  EXPECT_FALSE(offload.file_status().ok());
  harness.loop.RunFor(harness.options.offload.file_retry);
  run(8);
  EXPECT_TRUE(offload.file_status().ok()) << offload.file_status();
  EXPECT_EQ(offload.counters().write_errors, errors + 1);
  EXPECT_GT(offload.file_blocks_used(), 60);
  EXPECT_EQ(cached(prompt - 8), 8);
  harness.ExpectNothingLeft();
}

TEST(KvOffloadTest, RoutersHearOfABlockUntilItIsGoneEverywhere) {
  Harness harness(Offloading(10));
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

TEST(KvOffloadTest, WhatIsInPoolAndMemoryIsToldOnceAndStaysInOne) {
  Harness harness(Offloading(16));
  for (uint64_t prompt = 1; prompt < 4; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  harness.pool.TakeChanges();
  const auto hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPromptTokens - 1), 4);
  const auto changed = [&](const std::vector<uint64_t>& changes) {
    return std::any_of(hashes.begin(), hashes.end(), [&](const BlockHash& h) {
      return std::binary_search(changes.begin(), changes.end(), h.Short());
    });
  };
  EXPECT_EQ(RunPrompt(harness, 11, 1), kPromptTokens + 1 - 32);
  ASSERT_TRUE(harness.offload->InMemory(hashes[7]));
  CacheChanges changes = harness.pool.TakeChanges();
  EXPECT_FALSE(changed(changes.added));
  EXPECT_FALSE(changed(changes.removed));
  const std::vector<uint64_t> told = harness.pool.CachedHashes();
  EXPECT_TRUE(std::adjacent_find(told.begin(), told.end()) == told.end());
  // Others drive it out of memory, but not out of the pool.
  RunPrompt(harness, 12, 4);
  ASSERT_FALSE(harness.offload->Holds(hashes[0]));
  ASSERT_EQ(harness.pool.Lookup(hashes), 8);
  EXPECT_FALSE(changed(harness.pool.TakeChanges().removed));
}

// Saves that end when they are told to. A block's content is its number.
class ManualMover final : public BlockMover {
 public:
  int64_t block_bytes() const override { return sizeof(int32_t); }
  void SaveBlock(int32_t block, std::byte* to,
                 absl::AnyInvocable<void()> done) override {
    saves_.push_back([block, to, done = std::move(done)]() mutable {
      std::memcpy(to, &block, sizeof(block));
      done();
    });
  }
  void RestoreBlock(int32_t, const std::byte*,
                    absl::AnyInvocable<void()> done) override {
    done();
  }
  void EndSaves() {
    for (; !saves_.empty(); saves_.pop_front()) saves_.front()();
  }

 private:
  std::deque<absl::AnyInvocable<void()>> saves_;
};

// Takes the data at once, and ends a write or a read when it is told to.
class ManualFile final : public BlockFile {
 public:
  void Write(int, const BlockHash& hash, absl::Span<const std::byte> data,
             Done done) override {
    int32_t block = -1;
    std::memcpy(&block, data.data(), sizeof(block));
    written[hash].push_back(block);
    writes_.push_back(std::move(done));
  }
  void Read(int, const BlockHash&, absl::Span<std::byte>, Done done) override {
    reads_.push_back(std::move(done));
  }
  void EndWrite() { End(&writes_); }
  void EndRead() { End(&reads_); }

  absl::flat_hash_map<BlockHash, std::vector<int32_t>> written;

 private:
  static void End(std::deque<Done>* operations) {
    ASSERT_FALSE(operations->empty());
    Done done = std::move(operations->front());
    operations->pop_front();
    done(absl::OkStatus());
  }

  std::deque<Done> writes_;
  std::deque<Done> reads_;
};

TEST(KvOffloadTest, WhatIsKeptAnewIsWrittenWhenItIsSaved) {
  VirtualLoop loop;
  ManualMover mover;
  ManualFile file;
  KvPool pool(8, 4);
  std::vector<std::byte> memory(5 * sizeof(int32_t));
  KvOffload offload({.memory_blocks = 5, .file_blocks = 20}, &loop, &mover,
                    &pool, memory.data(), &file);
  const std::vector<BlockHash> hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, 6 * 4), 4);
  // Four are being written, one waits for its turn.
  for (int32_t block = 0; block < 5; ++block) {
    ASSERT_TRUE(offload.Keep(block, hashes[static_cast<size_t>(block)], 0));
    mover.EndSaves();
  }
  ASSERT_EQ(file.written.size(), 4u);
  // It gives way to another, which gives way to it: its slot holds the other.
  ASSERT_TRUE(offload.Keep(5, hashes[5], 0));
  mover.EndSaves();
  ASSERT_TRUE(offload.Keep(4, hashes[4], 0));
  file.EndWrite();
  EXPECT_FALSE(file.written.contains(hashes[4]));
  mover.EndSaves();
  while (offload.counters().written < 5) file.EndWrite();
  for (int32_t block = 0; block < 5; ++block) {
    EXPECT_THAT(file.written[hashes[static_cast<size_t>(block)]],
                ::testing::ElementsAre(block));
  }
  EXPECT_TRUE(offload.CheckInvariants().ok()) << offload.CheckInvariants();
}

TEST(KvOffloadTest, WhatIsBeingReadKeepsItsPlaceInTheFile) {
  VirtualLoop loop;
  ManualMover mover;
  ManualFile file;
  KvPool pool(8, 4);
  std::vector<std::byte> memory(2 * sizeof(int32_t));
  KvOffload offload({.memory_blocks = 2, .file_blocks = 2}, &loop, &mover,
                    &pool, memory.data(), &file);
  const std::vector<BlockHash> hashes =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, 3 * 4), 4);
  for (const int32_t block : {0, 1}) {
    ASSERT_TRUE(offload.Keep(block, hashes[static_cast<size_t>(block)], 0));
    mover.EndSaves();
  }
  for (int i = 0; i < 2; ++i) file.EndWrite();
  // The first falls out of memory and is read again: the oldest of the file.
  ASSERT_TRUE(offload.Keep(2, hashes[2], 0));
  offload.Prefetch(absl::MakeConstSpan(hashes).first(1));
  ASSERT_TRUE(offload.Prefetching(absl::MakeConstSpan(hashes).first(1)));
  ASSERT_TRUE(offload.Keep(1, hashes[1], 0));
  mover.EndSaves();  // the third goes to the file
  EXPECT_TRUE(offload.CheckInvariants().ok()) << offload.CheckInvariants();
  EXPECT_FALSE(offload.Holds(hashes[1]));
  file.EndWrite();
  file.EndRead();
  EXPECT_TRUE(offload.InMemory(hashes[0]));
  EXPECT_EQ(offload.file_blocks_used(), 2);
}

// Three blocks of one tenant and two that come back for him are more than his
// half of eight: his goes for a newcomer, not another's, which is older.
TEST(KvOffloadTest, WhatComesBackIsItsTenantsAgain) {
  for (const double share : {0.5, 1.0}) {
    VirtualLoop loop;
    ManualMover mover;
    KvPool pool(8, 4, share);
    std::vector<std::byte> memory(5 * sizeof(int32_t));
    KvOffload offload({.memory_blocks = 5}, &loop, &mover, &pool, memory.data(),
                      nullptr);
    const std::vector<BlockHash> hashes =
        HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, 7 * 4), 4);
    const auto cache = [&](size_t at, uint64_t owner) {
      const std::vector<BlockRef> block = pool.Allocate(1);
      pool.Publish(block.front(), hashes[at], owner);
    };
    for (const size_t at : {0, 1}) cache(at, /*owner=*/7);
    for (const size_t at : {2, 3, 4}) cache(at, /*owner=*/8);
    for (const size_t at : {5, 6}) offload.Keep(0, hashes[at], /*owner=*/8);
    mover.EndSaves();
    {
      std::vector<BlockRef> back(2);
      offload.Restore(absl::MakeConstSpan(hashes).subspan(5),
                      absl::MakeSpan(back), /*owner=*/8);
    }
    const std::vector<BlockRef> taken = pool.Allocate(2);  // one is free
    EXPECT_EQ(pool.Lookup(hashes), share < 1 ? 2 : 0) << share;
    mover.EndSaves();
  }
}

TEST(KvOffloadTest, RoutersHearOfTheNewestWhereAllIsTooMuch) {
  Harness harness(Offloading(16, 100));
  for (uint64_t prompt = 1; prompt < 8; ++prompt) {
    RunPrompt(harness, prompt, prompt);
  }
  const std::vector<BlockHash> kept = harness.offload->Hashes();
  const size_t pool = static_cast<size_t>(harness.pool.counts().cached);
  std::set<uint64_t> expected;
  for (const uint64_t hash : harness.pool.CachedHashes()) expected.insert(hash);
  ASSERT_EQ(expected.size(), pool + kept.size());
  EXPECT_EQ(harness.pool.CachedHashes(pool).size(), pool);
  EXPECT_EQ(harness.pool.CachedHashes(3).size(), 3u);
  // All but the oldest of the file.
  expected.erase(kept.back().Short());
  const auto told = harness.pool.CachedHashes(expected.size());
  EXPECT_TRUE(
      std::equal(told.begin(), told.end(), expected.begin(), expected.end()));
  const auto first =
      HashBlocks(RootHash("", 4, ""), Harness::Prompt(1, kPromptTokens - 1), 4);
  EXPECT_TRUE(std::find(first.begin(), first.end(), kept.back()) !=
              first.end());
}

}  // namespace
}  // namespace tandem::engine
