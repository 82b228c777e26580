// SPDX-License-Identifier: Apache-2.0
// Blocks in parts: which cells they have, what of them is let go and found
// again. Each rule as a small scenario, then random operations, with memory
// whose cells remember what was written into them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/random.h"
#include "engine/kv/kv_pool.h"
#include "engine/kv/prefix_cache.h"

namespace tandem::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr KvParts kParts{.full = 1, .windowed = 2};

BlockHash PartsHash(int content) { return ChildHash(BlockHash(), {content}); }

// free, reserved, live and cached blocks, and what could still be had.
std::vector<int> CellCounts(const KvPool& pool) {
  EXPECT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
  const KvPoolCounts counts = pool.counts();
  EXPECT_EQ(counts.total, pool.num_blocks());
  return {counts.free, counts.reserved, counts.live, counts.cached,
          pool.available()};
}

TEST(BlockPartsTest, WhatIsLetGoIsRoomForOthers) {
  KvPool pool(4, 16, 1, kParts);
  EXPECT_EQ(pool.cells().num_blocks(), 12);
  std::vector<BlockRef> blocks = pool.Allocate(4);
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 4, 0, 0));
  EXPECT_THAT(pool.Allocate(1), IsEmpty());
  int woken = 0;
  pool.WakeWhenAvailable([&] { ++woken; });
  blocks[0].LetWindowedGo();
  blocks[0].LetWindowedGo();
  EXPECT_EQ(woken, 1);
  EXPECT_TRUE(blocks[0]);
  EXPECT_FALSE(blocks[0].whole());
  EXPECT_EQ(pool.cells().at(blocks[0].id(), 1), -1);
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 4, 0, 0));  // 2 of 3 cells
  blocks[1].LetWindowedGo();
  EXPECT_THAT(CellCounts(pool), ElementsAre(1, 0, 3, 0, 1));
  EXPECT_TRUE(pool.AllocateInto(1, &blocks));
  // Five blocks where four fit.
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 4, 0, 0));
  blocks.clear();
  EXPECT_THAT(CellCounts(pool), ElementsAre(4, 0, 0, 0, 4));
}

TEST(BlockPartsTest, APartStaysForWhoeverRefersToIt) {
  KvPool pool(2, 16, 1, kParts);
  std::vector<BlockRef> blocks = pool.Allocate(2);
  BlockRef other = blocks[0].Share();
  blocks[0].LetWindowedGo();
  EXPECT_TRUE(other.whole());
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 2, 0, 0));
  EXPECT_FALSE(blocks[0].Share().whole());
  other = BlockRef();
  blocks[1].LetWindowedGo();
  EXPECT_THAT(CellCounts(pool), ElementsAre(1, 0, 1, 0, 1));
}

TEST(BlockPartsTest, OfPublishedBlocksPartsStayUntilTheyAreNeeded) {
  KvPool pool(3, 16, 1, kParts);
  std::vector<BlockRef> blocks = pool.Allocate(3);
  for (int i = 0; i < 3; ++i) pool.Publish(blocks[i], PartsHash(i));
  blocks[0].LetWindowedGo();
  blocks[1].LetWindowedGo();
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 2, 1, 1));
  EXPECT_TRUE(pool.HasWhole(PartsHash(0)));
  // Found whole again, it is not let go for others.
  std::vector<BlockRef> again = pool.Match({PartsHash(0)});
  ASSERT_THAT(again, SizeIs(1));
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 3, 0, 0));
  again.clear();
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 2, 1, 1));
  // The one that was let go first has to go: the other came back meanwhile.
  std::vector<BlockRef> taken = pool.Allocate(1);
  ASSERT_THAT(taken, SizeIs(1));
  EXPECT_FALSE(pool.HasWhole(PartsHash(1)));
  EXPECT_THAT(pool.Match({PartsHash(1)}), IsEmpty());
  EXPECT_THAT(pool.Match({PartsHash(1)}, /*whole=*/false), SizeIs(1));
  EXPECT_EQ(pool.Lookup({PartsHash(1)}), 1);
  // What is cached keeps the parts it has, and is evicted as one.
  blocks.clear();
  taken.clear();
  EXPECT_THAT(CellCounts(pool), ElementsAre(1, 0, 0, 2, 3));
  EXPECT_THAT(pool.Allocate(3), SizeIs(3));
  EXPECT_EQ(pool.Lookup({PartsHash(2)}), 0);
}

// A system prompt's last window is used again and again; what nobody has asked
// for meanwhile goes before it.
TEST(BlockPartsTest, WhatWasUsedLastGoesLast) {
  KvPool pool(3, 16, 1, kParts);
  std::vector<BlockRef> blocks = pool.Allocate(3);
  for (int i = 0; i < 3; ++i) pool.Publish(blocks[i], PartsHash(i));
  blocks[0].LetWindowedGo();
  blocks.pop_back();  // PartsHash(2) is cached
  EXPECT_THAT(pool.Match({PartsHash(0)}), SizeIs(1));
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 2, 1, 1));
  std::vector<BlockRef> taken = pool.Allocate(1);
  EXPECT_EQ(pool.Lookup({PartsHash(2)}), 0);
  EXPECT_TRUE(pool.HasWhole(PartsHash(0)));
  // And the other way round.
  pool.Publish(taken[0], PartsHash(3));
  taken.clear();
  blocks[1].LetWindowedGo();
  taken = pool.Allocate(1);  // of both, the older ones
  EXPECT_FALSE(pool.HasWhole(PartsHash(0)));
  EXPECT_EQ(pool.Lookup({PartsHash(3)}), 0);
  EXPECT_TRUE(pool.HasWhole(PartsHash(1)));
  // Live blocks stay what they are when the cache is dropped.
  pool.ClearCache();
  EXPECT_TRUE(pool.HasWhole(PartsHash(1)));
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 2, 1, 1));
}

TEST(BlockPartsTest, AWholeBlockIsFoundInsteadOfOneThatLacksParts) {
  KvPool pool(2, 16, 1, kParts);
  std::vector<BlockRef> blocks = pool.Allocate(2);
  pool.Publish(blocks[0], PartsHash(0));
  pool.Publish(blocks[1], PartsHash(1));
  blocks[0].LetWindowedGo();
  blocks[1].LetWindowedGo();
  std::vector<BlockRef> taken = pool.Allocate(1);  // of both
  EXPECT_FALSE(pool.HasWhole(PartsHash(0)));
  pool.Publish(taken[0], PartsHash(0));
  EXPECT_TRUE(pool.HasWhole(PartsHash(0)));
  EXPECT_FALSE(pool.published(blocks[0]));
  const CacheChanges changes = pool.TakeChanges();
  EXPECT_THAT(changes.added, ElementsAre(PartsHash(0).Short()));
  EXPECT_THAT(changes.lacking, ElementsAre(PartsHash(1).Short()));
  EXPECT_THAT(changes.removed, IsEmpty());
  EXPECT_EQ(pool.Match({PartsHash(0)})[0].id(), taken[0].id());
  blocks.clear();  // the lacking one is free at once
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 1, 1, 1));
}

TEST(BlockPartsTest, AReservationIsOfWholeBlocks) {
  KvPool pool(2, 16, 1, kParts);
  std::optional<Reservation> reserved = pool.Reserve(1);
  ASSERT_TRUE(reserved.has_value());
  EXPECT_THAT(CellCounts(pool), ElementsAre(1, 1, 0, 0, 1));
  const BlockHold hold = reserved->Hold(0, 1);
  std::vector<BlockRef> landed = std::move(*reserved).Commit();
  EXPECT_TRUE(landed[0].whole());
  landed[0].LetWindowedGo();  // a scatter into it is under way
  EXPECT_GE(pool.cells().at(landed[0].id(), 2), 0);
  EXPECT_THAT(CellCounts(pool), ElementsAre(1, 0, 1, 0, 1));
}

// Four blocks where two fit whole, of which only the last one is.
TEST(BlockPartsTest, OfAReservationTheFirstBlocksMayLackParts) {
  KvPool pool(2, 16, 1, kParts);
  EXPECT_EQ(pool.InWhole(4, 3), 2);
  EXPECT_EQ(pool.InWhole(4, 2), 3);
  EXPECT_FALSE(pool.Reserve(4, 2).has_value());
  std::optional<Reservation> reserved = pool.Reserve(4, 3);
  ASSERT_TRUE(reserved.has_value());
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 2, 0, 0, 0));
  {
    const BlockHold hold = reserved->Hold(0, 4);
    EXPECT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
  }
  std::vector<BlockRef> landed = std::move(*reserved).Commit();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(landed[i].whole(), i == 3) << i;
  EXPECT_EQ(pool.cells().at(landed[0].id(), 1), -1);
  EXPECT_GE(pool.cells().at(landed[0].id(), 0), 0);
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 2, 0, 0));
  // They are found, without what they never had.
  for (int i = 0; i < 4; ++i) pool.Publish(landed[i], PartsHash(i));
  const CacheChanges changes = pool.TakeChanges();
  EXPECT_THAT(changes.added, ElementsAre(PartsHash(3).Short()));
  EXPECT_THAT(changes.lacking, SizeIs(3));
  EXPECT_EQ(changes.lacking, pool.LackingHashes());
  EXPECT_THAT(pool.TakeChanges().lacking, IsEmpty());
  landed.clear();
  EXPECT_THAT(CellCounts(pool), ElementsAre(0, 0, 0, 2, 2));
  EXPECT_FALSE(pool.HasWhole(PartsHash(0)));
  EXPECT_TRUE(pool.HasWhole(PartsHash(3)));
  EXPECT_THAT(pool.Match({PartsHash(0)}, /*whole=*/false), SizeIs(1));
  // Given back unused, and evicted for those who need whole ones.
  reserved = pool.Reserve(6, 6);
  ASSERT_TRUE(reserved.has_value());
  reserved.reset();
  EXPECT_THAT(CellCounts(pool), ElementsAre(2, 0, 0, 0, 2));
  EXPECT_THAT(pool.Allocate(2), SizeIs(2));
}

// Whoever reads all changes knows what is there, and what of it lacks parts.
TEST(BlockPartsTest, ChangesSayWhatLacksParts) {
  KvPool pool(12, 16, 1, kParts);
  SeededRandom random(11);
  std::vector<BlockRef> blocks;
  std::vector<int> contents;  // of `blocks`; -1: not published
  std::set<uint64_t> whole;
  std::set<uint64_t> lacking;
  const auto below = [&](size_t end) { return random.Below(end); };
  const auto take = [&](BlockRef block) {
    blocks.push_back(std::move(block));
    contents.push_back(-1);
  };
  int told_lacking = 0;
  for (int step = 0; step < 100'000; ++step) {
    const size_t at = blocks.empty() ? 0 : below(blocks.size());
    switch (below(8)) {
      case 0:
        for (BlockRef& block : pool.Allocate(1)) take(std::move(block));
        break;
      case 1: {
        const int count = 1 + static_cast<int>(below(4));
        auto reserved = pool.Reserve(count, static_cast<int>(below(count + 1)));
        if (!reserved.has_value() || below(4) == 0) break;
        for (BlockRef& block : std::move(*reserved).Commit()) {
          take(std::move(block));
        }
        break;
      }
      case 2:
        if (!blocks.empty() && contents[at] < 0) {
          contents[at] = static_cast<int>(below(20));
          pool.Publish(blocks[at], PartsHash(contents[at]));
        }
        break;
      case 3:
        if (!blocks.empty()) blocks[at].LetWindowedGo();
        break;
      case 4: {
        const int content = static_cast<int>(below(20));
        for (BlockRef& block :
             pool.Match({PartsHash(content)}, below(2) == 0)) {
          take(std::move(block));
          contents.back() = content;
        }
        break;
      }
      case 5: {
        const CacheChanges changes = pool.TakeChanges();
        for (const uint64_t hash : changes.removed) {
          EXPECT_EQ(whole.erase(hash) + lacking.erase(hash), 1u);
        }
        for (const uint64_t hash : changes.added) {
          lacking.erase(hash);
          whole.insert(hash);
        }
        for (const uint64_t hash : changes.lacking) {
          whole.erase(hash);
          told_lacking += lacking.insert(hash).second;
        }
        std::set<uint64_t> all = whole;
        all.insert(lacking.begin(), lacking.end());
        ASSERT_THAT(pool.CachedHashes(), ElementsAreArray(all));
        ASSERT_THAT(pool.LackingHashes(), ElementsAreArray(lacking));
        break;
      }
      default:
        if (blocks.empty()) break;
        std::swap(blocks[at], blocks.back());
        std::swap(contents[at], contents.back());
        blocks.pop_back();
        contents.pop_back();
    }
    if (step % 64 == 0) {
      const absl::Status status = pool.CheckInvariants();
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  EXPECT_GT(told_lacking, 500);
}

// What the position behind a prefix sees must be there with all parts.
TEST(BlockPartsTest, APrefixMayLackPartsBehindTheWindow) {
  KvPool pool(8, 16, 1, kParts);
  std::vector<BlockHash> hashes;
  std::vector<BlockRef> blocks = pool.Allocate(8);
  for (int i = 0; i < 8; ++i) {
    hashes.push_back(PartsHash(i));
    pool.Publish(blocks[i], hashes[i]);
  }
  for (int i = 0; i < 5; ++i) blocks[i].LetWindowedGo();
  const std::vector<BlockRef> others = pool.Allocate(2);  // six cells: of three
  ASSERT_THAT(others, SizeIs(2));
  for (int i = 0; i < 8; ++i) EXPECT_EQ(pool.HasWhole(hashes[i]), i >= 3) << i;
  PrefixCache cache(&pool, nullptr, KvWindow(20, kParts));
  const CachedPrefix all = cache.Find(hashes);
  ASSERT_EQ(all.size(), 8);
  EXPECT_EQ(all.first, 0);
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(all.blocks[i]);
    EXPECT_EQ(all.blocks[i].whole(), i >= (8 * 16 - 19) / 16) << i;
  }
  // Position 64 sees from 45 on, so block 2, and so do those before; position
  // 80 from 61 on.
  const auto first = absl::MakeConstSpan(hashes);
  EXPECT_EQ(cache.Find(first.first(4)).size(), 0);
  EXPECT_EQ(cache.Find(first.first(5)).size(), 5);
  // Somebody wants all positions.
  EXPECT_EQ(cache.Find(hashes, /*keep_from=*/0).size(), 0);
}

// Who waits for room finds his prefix again and again.
TEST(PrefixCacheTest, AFoundPrefixThatIsLetGoLosesItsEndFirst) {
  KvPool pool(6, 16);
  std::vector<BlockHash> hashes;
  std::vector<BlockRef> blocks = pool.Allocate(4);
  for (int i = 0; i < 4; ++i) {
    hashes.push_back(PartsHash(i));
    pool.Publish(blocks[static_cast<size_t>(i)], hashes.back());
  }
  ReleaseBlocks(std::move(blocks));
  const std::vector<BlockRef> rest = pool.Allocate(2);
  PrefixCache cache(&pool, nullptr);
  EXPECT_EQ(cache.Find(hashes).size(), 4);
  CachedPrefix found = cache.Find(hashes);
  found = CachedPrefix();  // nor is it by way of another
  const std::vector<BlockRef> another = pool.Allocate(1);
  EXPECT_EQ(cache.Lookup(hashes), 3);
}

TEST(BlockPartsTest, RandomOperationsKeepWhatIsReferredTo) {
  for (const KvParts parts : {KvParts{1, 1}, KvParts{1, 5}, KvParts{3, 2}}) {
    constexpr int kBlocks = 9;
    constexpr int kContents = 8;
    KvPool pool(kBlocks, 16, 1, parts);
    SeededRandom random(7);
    struct Ref {
      BlockRef block;
      int content;
    };
    std::vector<Ref> refs;
    std::vector<Reservation> reservations;
    // What was written last, of which content.
    std::vector<int> memory(static_cast<size_t>(pool.cells().num_cells()), -1);
    std::map<std::string, int> met;
    const auto check = [&](const Ref& ref) {
      for (int part = 0; part < parts.count(); ++part) {
        if (part >= parts.full && !ref.block.whole()) continue;
        const int32_t cell = pool.cells().at(ref.block.id(), part);
        ASSERT_GE(cell, 0);
        ASSERT_EQ(memory[static_cast<size_t>(cell)], ref.content);
      }
    };
    const auto add = [&](BlockRef block, int content) {
      for (int part = 0; part < parts.count(); ++part) {
        memory[static_cast<size_t>(pool.cells().at(block.id(), part))] =
            content;
      }
      refs.push_back({std::move(block), content});
    };
    for (int step = 0; step < 60'000; ++step) {
      const uint64_t operation = random.Below(100);
      const size_t at = refs.empty() ? 0 : random.Below(refs.size());
      const int content = static_cast<int>(random.Below(kContents));
      if (operation < 25) {
        const int count = 1 + static_cast<int>(random.Below(2));
        const bool fits = count <= pool.available();
        std::vector<BlockRef> got = pool.Allocate(count);
        ASSERT_EQ(!got.empty(), fits);
        ++met[fits ? "allocated" : "short"];
        for (BlockRef& block : got) add(std::move(block), content);
      } else if (operation < 30) {
        std::optional<Reservation> got = pool.Reserve(1);
        if (got.has_value()) reservations.push_back(std::move(*got));
      } else if (operation < 36 && !reservations.empty()) {
        if (operation < 33) {
          add(std::move(std::move(reservations.back()).Commit()[0]), content);
        }
        reservations.pop_back();
      } else if (operation < 50 && !refs.empty()) {
        pool.Publish(refs[at].block, PartsHash(refs[at].content));
        ++met["published"];
      } else if (operation < 65 && !refs.empty()) {
        met["let go"] += refs[at].block.whole();
        refs[at].block.LetWindowedGo();
      } else if (operation < 70 && !refs.empty() && refs.size() < 20) {
        refs.push_back({refs[at].block.Share(), refs[at].content});
      } else if (operation < 80 && refs.size() < 20) {
        const bool whole = random.Below(2) == 0;
        const bool there = whole ? pool.HasWhole(PartsHash(content))
                                 : pool.Lookup({PartsHash(content)}) > 0;
        std::vector<BlockRef> got = pool.Match({PartsHash(content)}, whole);
        ASSERT_EQ(!got.empty(), there);
        if (!there) continue;
        ++met[whole ? "matched whole" : "matched"];
        refs.push_back({std::move(got[0]), content});
        ASSERT_EQ(refs.back().block.whole(), whole);
      } else if (!refs.empty()) {
        std::swap(refs[at], refs.back());
        refs.pop_back();
      }
      for (const Ref& ref : refs) check(ref);
      // What nobody refers to could be had, and nothing else.
      std::set<int32_t> live, whole;
      for (const Ref& ref : refs) {
        live.insert(ref.block.id());
        if (ref.block.whole()) whole.insert(ref.block.id());
      }
      const int kept = static_cast<int>(live.size()) * parts.full +
                       static_cast<int>(whole.size()) * parts.windowed +
                       static_cast<int>(reservations.size()) * parts.count();
      ASSERT_EQ(pool.available(),
                (pool.cells().num_cells() - kept) / parts.count());
      ASSERT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
    }
    for (const char* what : {"allocated", "short", "published", "let go",
                             "matched whole", "matched"}) {
      EXPECT_GT(met[what], 500) << what;
    }
    refs.clear();
    reservations.clear();
    EXPECT_EQ(pool.available(), kBlocks);
  }
}

}  // namespace
}  // namespace tandem::engine
