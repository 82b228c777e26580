// SPDX-License-Identifier: Apache-2.0
// Each rule of the pool as a small scenario, then a million random operations
// against a model that is nothing but lists and maps.

#include "engine/kv/kv_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/random.h"

namespace tandem::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Nothing can be given back twice, because nothing that gives back is copied.
static_assert(!std::is_copy_constructible_v<BlockRef>);
static_assert(!std::is_copy_assignable_v<BlockRef>);
static_assert(!std::is_copy_constructible_v<BlockHold>);
static_assert(!std::is_copy_assignable_v<BlockHold>);
static_assert(!std::is_copy_constructible_v<Reservation>);
static_assert(!std::is_copy_assignable_v<Reservation>);
static_assert(std::is_nothrow_move_constructible_v<BlockRef>);

BlockHash HashOf(int content) { return ChildHash(BlockHash(), {content}); }

std::string Counts(const KvPool& pool) {
  EXPECT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
  const KvPoolCounts counts = pool.counts();
  EXPECT_EQ(counts.total, pool.num_blocks());
  return "free " + std::to_string(counts.free) + " reserved " +
         std::to_string(counts.reserved) + " live " +
         std::to_string(counts.live) + " cached " +
         std::to_string(counts.cached);
}

std::vector<int32_t> Ids(const std::vector<BlockRef>& blocks) {
  std::vector<int32_t> ids;
  for (const BlockRef& block : blocks) ids.push_back(block.id());
  return ids;
}

TEST(KvPoolTest, ReleasedBlocksReturnToTheFreeList) {
  KvPool pool(4, 16);
  std::vector<BlockRef> blocks = pool.Allocate(3);
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 3 cached 0");
  ReleaseBlocks(std::move(blocks));
  EXPECT_EQ(Counts(pool), "free 4 reserved 0 live 0 cached 0");
}

TEST(KvPoolTest, AllocatingIsAllOrNothing) {
  KvPool pool(4, 16);
  const std::vector<BlockRef> held = pool.Allocate(3);
  EXPECT_THAT(pool.Allocate(2), IsEmpty());
  EXPECT_FALSE(pool.Reserve(2).has_value());
  std::vector<BlockRef> more;
  EXPECT_FALSE(pool.AllocateInto(2, &more));
  EXPECT_THAT(more, IsEmpty());
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 3 cached 0");
  EXPECT_TRUE(pool.AllocateInto(1, &more));
  EXPECT_EQ(Counts(pool), "free 0 reserved 0 live 4 cached 0");
}

TEST(KvPoolTest, ABlockIsLiveUntilItsLastReferenceGoes) {
  KvPool pool(1, 16);
  BlockRef first = std::move(pool.Allocate(1)[0]);
  BlockRef second = first.Share();
  EXPECT_EQ(pool.references(first), 2);
  first = BlockRef();
  EXPECT_EQ(Counts(pool), "free 0 reserved 0 live 1 cached 0");
  // Moving it onto itself or away gives nothing back.
  BlockRef& alias = second;
  second = std::move(alias);
  BlockRef third = std::move(second);
  EXPECT_EQ(Counts(pool), "free 0 reserved 0 live 1 cached 0");
  third = BlockRef();
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 0 cached 0");
}

TEST(KvPoolTest, PublishedBlocksAreFoundAndKeptAfterUse) {
  KvPool pool(3, 16);
  std::vector<BlockRef> blocks = pool.Allocate(2);
  const std::vector<int32_t> ids = Ids(blocks);
  pool.Publish(blocks[0], HashOf(0));
  pool.Publish(blocks[1], HashOf(1));
  EXPECT_TRUE(pool.published(blocks[0]));
  // Live or cached, they are found.
  EXPECT_EQ(pool.Lookup({HashOf(0), HashOf(1), HashOf(2)}), 2);
  ReleaseBlocks(std::move(blocks));
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 0 cached 2");
  EXPECT_EQ(pool.available(), 3);
  EXPECT_EQ(pool.Lookup({HashOf(0), HashOf(1), HashOf(2)}), 2);
  EXPECT_EQ(pool.Lookup({HashOf(2), HashOf(0)}), 0);
  EXPECT_EQ(Ids(pool.Match({HashOf(0), HashOf(1), HashOf(2)})), ids);
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 0 cached 2");
}

TEST(KvPoolTest, TheSecondBlockOfOneHashBecomesFree) {
  KvPool pool(2, 16);
  std::vector<BlockRef> first = pool.Allocate(1);
  std::vector<BlockRef> second = pool.Allocate(1);
  pool.Publish(first[0], HashOf(7));
  pool.Publish(second[0], HashOf(7));
  pool.Publish(first[0], HashOf(7));  // again: a no-op
  EXPECT_FALSE(pool.published(second[0]));
  EXPECT_EQ(Ids(pool.Match({HashOf(7)})), Ids(first));
  first.clear();
  second.clear();
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 0 cached 1");
}

TEST(KvPoolTest, EvictsTheLeastRecentlyUsedAndOfAChainTheDeepest) {
  KvPool pool(4, 16);
  // Two chains of two: 10, 11 released before 20, 21; then 10 is used again.
  std::vector<BlockRef> old_chain = pool.Allocate(2);
  std::vector<BlockRef> new_chain = pool.Allocate(2);
  for (int i = 0; i < 2; ++i) {
    pool.Publish(old_chain[i], HashOf(10 + i));
    pool.Publish(new_chain[i], HashOf(20 + i));
  }
  ReleaseBlocks(std::move(old_chain));
  ReleaseBlocks(std::move(new_chain));
  pool.Match({HashOf(10)});
  std::vector<int> evicted_in_order;
  std::vector<BlockRef> taken;
  std::set<int> there = {10, 11, 20, 21};
  while (pool.AllocateInto(1, &taken)) {
    for (const int content : std::vector<int>(there.begin(), there.end())) {
      if (pool.Lookup({HashOf(content)}) == 1) continue;
      evicted_in_order.push_back(content);
      there.erase(content);
    }
  }
  EXPECT_THAT(evicted_in_order, ElementsAre(11, 21, 20, 10));
}

TEST(KvPoolTest, EvictsFirstFromWhoHasMoreThanAShare) {
  KvPool pool(8, 16, /*owner_share=*/0.5);
  std::vector<BlockRef> blocks = pool.Allocate(8);
  // By age; owner 1 has five of eight, one more than its share.
  const int owners[] = {2, 2, 1, 1, 3, 1, 1, 1};
  for (int i = 0; i < 8; ++i) {
    pool.Publish(blocks[i], HashOf(i), static_cast<uint64_t>(owners[i]));
    blocks[i] = BlockRef();
  }
  EXPECT_EQ(Counts(pool), "free 0 reserved 0 live 0 cached 8");
  // Its oldest; then it is within its share, and age alone counts.
  const auto taken = pool.Allocate(2);
  std::vector<int> there;
  for (int i = 0; i < 8; ++i) {
    if (pool.Lookup({HashOf(i)}) == 1) there.push_back(i);
  }
  EXPECT_THAT(there, ElementsAre(1, 3, 4, 5, 6, 7));
  EXPECT_EQ(Counts(pool), "free 0 reserved 0 live 2 cached 6");
}

TEST(KvPoolTest, OfTwoBeyondTheirSharesTheLargerIsEvictedFrom) {
  KvPool pool(8, 16, /*owner_share=*/0.25);
  std::vector<BlockRef> blocks = pool.Allocate(8);
  for (int i = 0; i < 8; ++i) {
    pool.Publish(blocks[i], HashOf(i), i < 3 ? 1 : 2);
    blocks[i] = BlockRef();
  }
  const auto taken = pool.Allocate(2);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(pool.Lookup({HashOf(i)}), i == 3 || i == 4 ? 0 : 1) << i;
  }
}

TEST(KvPoolTest, LookingUpDoesNotMakeABlockYounger) {
  KvPool pool(2, 16);
  for (int content : {1, 2}) {
    const std::vector<BlockRef> block = pool.Allocate(1);
    pool.Publish(block[0], HashOf(content));
  }
  pool.Lookup({HashOf(1)});
  const std::vector<BlockRef> taken = pool.Allocate(1);
  EXPECT_EQ(pool.Lookup({HashOf(1)}), 0);
  EXPECT_EQ(pool.Lookup({HashOf(2)}), 1);
}

TEST(KvPoolTest, AnAbandonedReservationReturnsToFreeWhenItsHoldsEnd) {
  KvPool pool(4, 16);
  std::optional<Reservation> reservation = pool.Reserve(3);
  BlockHold first = reservation->Hold(0, 2);
  BlockHold second = reservation->Hold(1, 2);
  EXPECT_EQ(Counts(pool), "free 1 reserved 3 live 0 cached 0");
  reservation.reset();
  EXPECT_EQ(Counts(pool), "free 2 reserved 2 live 0 cached 0");
  EXPECT_THAT(pool.Allocate(3), IsEmpty());
  first = BlockHold();
  EXPECT_EQ(Counts(pool), "free 3 reserved 1 live 0 cached 0");
  second = BlockHold();
  EXPECT_EQ(Counts(pool), "free 4 reserved 0 live 0 cached 0");
}

TEST(KvPoolTest, ACommittedReservationIsLiveUntilReferencesAndHoldsEnd) {
  KvPool pool(2, 16);
  std::optional<Reservation> reservation = pool.Reserve(2);
  const std::vector<int32_t> ids = reservation->ids();
  BlockHold hold = reservation->Hold(1, 2);
  std::vector<BlockRef> blocks = std::move(*reservation).Commit();
  reservation.reset();
  EXPECT_EQ(Ids(blocks), ids);
  EXPECT_EQ(Counts(pool), "free 0 reserved 0 live 2 cached 0");
  pool.Publish(blocks[1], HashOf(1));
  ReleaseBlocks(std::move(blocks));
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 1 cached 0");
  hold = BlockHold();
  EXPECT_EQ(Counts(pool), "free 1 reserved 0 live 0 cached 1");
}

TEST(KvPoolTest, MovedFromReservationsAndHoldsGiveNothingBack) {
  KvPool pool(2, 16);
  std::optional<Reservation> first = pool.Reserve(1);
  Reservation second = std::move(*first);
  BlockHold hold = second.Hold(0, 1);
  BlockHold other = std::move(hold);
  EXPECT_FALSE(hold);
  first.reset();
  hold = BlockHold();
  EXPECT_EQ(Counts(pool), "free 1 reserved 1 live 0 cached 0");
  // Replaced, the old one is abandoned.
  second = std::move(*pool.Reserve(1));
  EXPECT_EQ(Counts(pool), "free 0 reserved 2 live 0 cached 0");
  other = BlockHold();
  EXPECT_EQ(Counts(pool), "free 1 reserved 1 live 0 cached 0");
}

TEST(KvPoolTest, ClearingTheCacheLeavesWhatIsHeld) {
  KvPool pool(3, 16);
  std::vector<BlockRef> blocks = pool.Allocate(2);
  pool.Publish(blocks[0], HashOf(0));
  pool.Publish(blocks[1], HashOf(1));
  blocks.pop_back();
  pool.ClearCache();
  EXPECT_EQ(Counts(pool), "free 2 reserved 0 live 1 cached 0");
  EXPECT_EQ(pool.Lookup({HashOf(0)}), 1);
  EXPECT_EQ(pool.Lookup({HashOf(1)}), 0);
}

TEST(KvPoolTest, ChangesAreNet) {
  KvPool pool(2, 16);
  std::vector<BlockRef> blocks = pool.Allocate(2);
  pool.Publish(blocks[0], HashOf(0));
  CacheChanges changes = pool.TakeChanges();
  EXPECT_THAT(changes.added, ElementsAre(HashOf(0).Short()));
  EXPECT_THAT(changes.removed, IsEmpty());
  // 1 comes and goes: not a word. 0 goes.
  pool.Publish(blocks[1], HashOf(1));
  blocks.clear();
  pool.ClearCache();
  changes = pool.TakeChanges();
  EXPECT_THAT(changes.added, IsEmpty());
  EXPECT_THAT(changes.removed, ElementsAre(HashOf(0).Short()));
  EXPECT_THAT(pool.TakeChanges().removed, IsEmpty());
}

TEST(KvPoolTest, WakesOnceWhenABlockBecomesAvailable) {
  KvPool pool(2, 16);
  int woken = 0;
  std::vector<BlockRef> blocks = pool.Allocate(2);
  pool.WakeWhenAvailable([&] { ++woken; });
  BlockRef shared = blocks[0].Share();
  shared = BlockRef();
  EXPECT_EQ(woken, 0);
  blocks.clear();
  EXPECT_EQ(woken, 1);
  blocks = pool.Allocate(1);
  pool.WakeWhenAvailable([&] { ++woken; });
  pool.WakeWhenAvailable(nullptr);
  blocks.clear();
  EXPECT_EQ(woken, 1);
}

TEST(KvPoolDeathTest, BugsEndTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        KvPool pool(1, 16);
        const std::vector<BlockRef> block = pool.Allocate(1);
        pool.Publish(block[0], HashOf(0));
        pool.Publish(block[0], HashOf(1));
      },
      "other content");
  EXPECT_DEATH(
      {
        std::vector<BlockRef> block;
        KvPool pool(1, 16);
        block = pool.Allocate(1);
      },
      "outlives its pool");
}

// ---- A million random operations

class PoolModel {
 public:
  PoolModel(int num_blocks, int quota) : blocks_(num_blocks), quota_(quota) {}

  struct Block {
    int references = 0;
    int holds = 0;
    bool promised = false;
    bool live = false;
    int content = -1;  // published as
  };

  int free() const {
    int count = 0;
    for (const Block& block : blocks_) count += IsFree(block);
    return count;
  }
  KvPoolCounts counts() const {
    KvPoolCounts counts;
    counts.total = static_cast<int>(blocks_.size());
    counts.cached = static_cast<int>(lru_.size());
    for (const Block& block : blocks_) {
      counts.free += IsFree(block);
      counts.live += block.live;
      counts.reserved += !block.live && (block.promised || block.holds > 0);
    }
    return counts;
  }
  // Whether the next block taken is not the oldest of all that are cached.
  bool TakesAYounger() {
    return free() == 0 && !lru_.empty() && Victim() != lru_.begin();
  }
  // A block leaves the free ones, or the cache at its old end.
  void Take(int32_t id) {
    if (free() > 0) {
      ASSERT_TRUE(IsFree(blocks_[id])) << "block " << id << " was not free";
    } else {
      const auto victim = Victim();
      ASSERT_EQ(id, *victim) << "not the least recently used";
      lru_.erase(victim);
      found_.erase(blocks_[id].content);
      blocks_[id].content = -1;
    }
  }
  void Settle(int32_t id) {
    Block& block = blocks_[id];
    if (block.references > 0 || block.holds > 0 || block.promised) return;
    block.live = false;
    if (block.content >= 0) lru_.push_back(id);
  }
  // Eight contents are of one owner, each other of one of its own.
  static uint64_t OwnerOf(int content) {
    return content < 8 ? 0 : static_cast<uint64_t>(content);
  }
  // The oldest, of those of the large owner where it has more than the quota.
  std::list<int32_t>::iterator Victim() {
    const auto large = [this](int32_t id) {
      return OwnerOf(blocks_[id].content) == 0;
    };
    return std::count_if(lru_.begin(), lru_.end(), large) > quota_
               ? std::find_if(lru_.begin(), lru_.end(), large)
               : lru_.begin();
  }
  Block& operator[](int32_t id) { return blocks_[id]; }
  std::list<int32_t>& lru() { return lru_; }
  std::map<int, int32_t>& found() { return found_; }

 private:
  bool IsFree(const Block& block) const {
    return !block.live && !block.promised && block.holds == 0 &&
           block.content < 0;
  }

  std::vector<Block> blocks_;
  const int quota_;
  std::list<int32_t> lru_;
  std::map<int, int32_t> found_;
};

TEST(KvPoolTest, AMillionRandomOperationsEqualTheModel) {
  constexpr int kBlocks = 12;
  constexpr int kContents = 10;
  constexpr int kQuota = 1;
  KvPool pool(kBlocks, 16, (kQuota + 0.5) / kBlocks);
  PoolModel model(kBlocks, kQuota);
  SeededRandom random(20240607);
  std::vector<BlockHash> hash_of;
  for (int i = 0; i < kContents; ++i) hash_of.push_back(HashOf(i));
  std::vector<BlockRef> references;
  std::vector<Reservation> reservations;
  std::vector<std::pair<BlockHold, std::vector<int32_t>>> holds;
  // What must have been met often, or this test would prove little.
  std::map<std::string, int> met;
  std::set<uint64_t> told;  // what a reader of TakeChanges believes
  const auto pick = [&](const auto& from) { return random.Below(from.size()); };
  const auto available = [&] {
    return model.free() + static_cast<int>(model.lru().size());
  };

  for (int step = 0; step < 1'000'000; ++step) {
    const uint64_t operation = random.Below(100);
    if (operation < 15) {  // Allocate
      const int count = static_cast<int>(random.Below(3));
      std::vector<BlockRef> got = pool.Allocate(count);
      ASSERT_EQ(got.size(), count <= available() ? count : 0);
      ++met[got.empty() && count > 0 ? "short" : "allocated"];
      met["evicted"] += count <= available() && count > model.free();
      for (BlockRef& block : got) {
        met["evicted before older ones"] += model.TakesAYounger();
        model.Take(block.id());
        model[block.id()].live = true;
        model[block.id()].references = 1;
        references.push_back(std::move(block));
      }
    } else if (operation < 25) {  // Reserve
      const int count = 1 + static_cast<int>(random.Below(3));
      std::optional<Reservation> got = pool.Reserve(count);
      ASSERT_EQ(got.has_value(), count <= available());
      if (!got.has_value()) continue;
      for (const int32_t id : got->ids()) {
        met["evicted before older ones"] += model.TakesAYounger();
        model.Take(id);
        model[id].promised = true;
      }
      reservations.push_back(std::move(*got));
    } else if (operation < 30 && !reservations.empty()) {  // Commit
      const size_t at = pick(reservations);
      const std::vector<int32_t> ids = reservations[at].ids();
      std::vector<BlockRef> got = std::move(reservations[at]).Commit();
      reservations.erase(reservations.begin() + static_cast<int>(at));
      ASSERT_EQ(Ids(got), ids);
      ++met["committed"];
      for (BlockRef& block : got) {
        met["committed under a hold"] += model[block.id()].holds > 0;
        model[block.id()].promised = false;
        model[block.id()].live = true;
        model[block.id()].references = 1;
        references.push_back(std::move(block));
      }
    } else if (operation < 35 && !reservations.empty()) {  // abandon
      const size_t at = pick(reservations);
      const std::vector<int32_t> ids = reservations[at].ids();
      reservations.erase(reservations.begin() + static_cast<int>(at));
      for (const int32_t id : ids) {
        ++met[model[id].holds > 0 ? "abandoned under a hold" : "abandoned"];
        model[id].promised = false;
        model.Settle(id);
      }
    } else if (operation < 43 && !reservations.empty()) {  // Hold
      const Reservation& from = reservations[pick(reservations)];
      const int end = static_cast<int>(1 + pick(from.ids()));
      const int begin =
          static_cast<int>(random.Below(static_cast<uint64_t>(end)));
      const std::vector<int32_t> ids(from.ids().begin() + begin,
                                     from.ids().begin() + end);
      holds.emplace_back(from.Hold(begin, end), ids);
      for (const int32_t id : ids) ++model[id].holds;
    } else if (operation < 52 && !holds.empty()) {  // end a hold
      const size_t at = pick(holds);
      std::swap(holds[at], holds.back());
      const std::vector<int32_t> ids = holds.back().second;
      holds.pop_back();
      for (const int32_t id : ids) {
        --model[id].holds;
        model.Settle(id);
      }
    } else if (operation < 60 && !references.empty()) {  // Share
      if (references.size() > 14) continue;
      references.push_back(references[pick(references)].Share());
      ++model[references.back().id()].references;
    } else if (operation < 70 && !references.empty()) {  // Publish
      const BlockRef& block = references[pick(references)];
      const int content = model[block.id()].content >= 0
                              ? model[block.id()].content
                              : static_cast<int>(random.Below(kContents));
      pool.Publish(block, hash_of[static_cast<size_t>(content)],
                   PoolModel::OwnerOf(content));
      if (model.found().try_emplace(content, block.id()).second) {
        model[block.id()].content = content;
        ++met["published"];
      } else if (model.found()[content] != block.id()) {
        ++met["published twice"];
      }
    } else if (operation < 78) {  // Lookup, Match
      std::vector<BlockHash> hashes;
      std::vector<int32_t> expected;
      bool run = true;
      for (uint64_t i = random.Below(4); i > 0; --i) {
        const int content = static_cast<int>(random.Below(kContents));
        hashes.push_back(hash_of[static_cast<size_t>(content)]);
        run = run && model.found().contains(content);
        if (run) expected.push_back(model.found()[content]);
      }
      ASSERT_EQ(pool.Lookup(hashes), expected.size());
      if (operation < 74 || references.size() > 14) continue;
      std::vector<BlockRef> got = pool.Match(hashes);
      ASSERT_EQ(Ids(got), expected);
      for (BlockRef& block : got) {
        ++met[model[block.id()].live ? "matched live" : "matched cached"];
        model.lru().remove(block.id());
        model[block.id()].live = true;
        ++model[block.id()].references;
        references.push_back(std::move(block));
      }
    } else if (operation == 78 && random.Below(50) == 0) {  // ClearCache
      pool.ClearCache();
      for (const int32_t id : model.lru()) {
        model.found().erase(model[id].content);
        model[id].content = -1;
      }
      model.lru().clear();
    } else if (operation == 79) {  // TakeChanges
      const CacheChanges changes = pool.TakeChanges();
      for (const uint64_t hash : changes.removed) {
        ASSERT_EQ(told.erase(hash), 1);
      }
      for (const uint64_t hash : changes.added) {
        ASSERT_TRUE(told.insert(hash).second);
      }
      const std::vector<uint64_t> all = pool.CachedHashes();
      ASSERT_EQ(std::vector<uint64_t>(told.begin(), told.end()), all);
      ASSERT_EQ(all.size(), model.found().size());
    } else if (operation >= 80 && !references.empty()) {  // release
      const size_t at = pick(references);
      std::swap(references[at], references.back());
      const int32_t id = references.back().id();
      references.pop_back();
      --model[id].references;
      model.Settle(id);
    }
    const KvPoolCounts expected = model.counts();
    const KvPoolCounts counts = pool.counts();
    ASSERT_EQ(counts.free, expected.free) << "step " << step;
    ASSERT_EQ(counts.reserved, expected.reserved) << "step " << step;
    ASSERT_EQ(counts.live, expected.live) << "step " << step;
    ASSERT_EQ(counts.cached, expected.cached) << "step " << step;
    ASSERT_EQ(pool.available(), available());
    if (step % 64 == 0) {
      ASSERT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
    }
    ASSERT_FALSE(testing::Test::HasFatalFailure()) << "step " << step;
  }
  EXPECT_THAT(met, SizeIs(12));
  for (const auto& [what, times] : met) EXPECT_GT(times, 300) << what;
  references.clear();
  reservations.clear();
  holds.clear();
  EXPECT_EQ(pool.available(), kBlocks);
  EXPECT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
}

}  // namespace
}  // namespace tandem::engine
