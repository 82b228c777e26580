// SPDX-License-Identifier: Apache-2.0
#include "handoff/slabs.h"

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "common/random.h"
#include "gtest/gtest.h"
#include "handoff/slices.h"

namespace tandem::handoff {
namespace {

using State = SlabArena::State;

std::vector<SlabArena::Pair> Serve(SlabArena* arena) {
  std::vector<SlabArena::Pair> served;
  while (auto loan = arena->Next()) served.push_back(loan->pair);
  return served;
}

TEST(Slabs, PairsTakeTurnsUpToTheirCap) {
  SlabArena arena(8, 3);
  const auto a = arena.AddPair();
  const auto b = arena.AddPair();
  for (uint64_t i = 0; i < 5; ++i) arena.Request(a, i);
  for (uint64_t i = 0; i < 2; ++i) arena.Request(b, i);
  EXPECT_EQ(Serve(&arena), (std::vector<SlabArena::Pair>{a, b, a, b, a}));
  EXPECT_EQ(arena.counts().granted, 5);
  EXPECT_EQ(arena.waiting(a), 2u);
}

TEST(Slabs, TheLastSlabsAreKeptForPairsThatHoldNone) {
  SlabArena arena(4, 4);
  const auto greedy = arena.AddPair();
  const auto late = arena.AddPair();
  const auto later = arena.AddPair();
  for (uint64_t i = 0; i < 4; ++i) arena.Request(greedy, i);
  EXPECT_EQ(Serve(&arena).size(), 2u);
  arena.Request(late, 0);
  arena.Request(later, 0);
  EXPECT_EQ(Serve(&arena), (std::vector<SlabArena::Pair>{late, later}));
  EXPECT_EQ(arena.counts().free, 0);
  // What is kept for a pair goes to others when it leaves.
  arena.Free(arena.Held(late, State::kGranted)[0]);
  EXPECT_TRUE(Serve(&arena).empty());
  arena.RemovePair(late);
  EXPECT_EQ(Serve(&arena), (std::vector<SlabArena::Pair>{greedy}));
}

TEST(Slabs, AGenerationFitsOneGrantOnly) {
  SlabArena arena(1, 1);
  const auto pair = arena.AddPair();
  std::set<uint64_t> generations;
  for (uint64_t i = 0; i < 100; ++i) {
    arena.Request(pair, i);
    const auto loan = arena.Next();
    ASSERT_TRUE(loan.has_value());
    EXPECT_TRUE(generations.insert(loan->generation).second);
    EXPECT_NE(loan->generation, 0u);
    arena.Free(loan->id);
    EXPECT_EQ(arena.Find(pair, 0), nullptr);
  }
}

TEST(Slabs, ARemovedPairIsForgottenWithItsLastSlab) {
  SlabArena arena(2, 2);
  const auto pair = arena.AddPair();
  arena.Request(pair, 1);
  arena.Request(pair, 2);
  ASSERT_EQ(Serve(&arena).size(), 2u);
  arena.Quarantine(0);
  arena.RemovePair(pair);
  EXPECT_EQ(arena.held(pair), 2);
  EXPECT_EQ(arena.counts().quarantined, 1);
  arena.Free(0);
  arena.Free(1);
  EXPECT_EQ(arena.held(pair), 0);
  EXPECT_EQ(arena.counts().free, 2);
  EXPECT_TRUE(arena.CheckInvariants().ok());
}

TEST(Slabs, RandomHistoriesKeepTheSums) {
  SeededRandom random(11);
  for (int round = 0; round < 20; ++round) {
    const int total = 1 + static_cast<int>(random.Below(12));
    SlabArena arena(total, 1 + static_cast<int>(random.Below(4)));
    std::vector<SlabArena::Pair> pairs;
    for (int step = 0; step < 5'000; ++step) {
      const int id = static_cast<int>(random.Below(total));
      const State state = arena.state(id);
      switch (random.Below(7)) {
        case 0:
          if (pairs.size() < 6) pairs.push_back(arena.AddPair());
          break;
        case 1:
          if (!pairs.empty() && random.Below(8) == 0) {
            const size_t i = random.Below(pairs.size());
            arena.RemovePair(pairs[i]);
            pairs.erase(pairs.begin() + static_cast<int>(i));
          }
          break;
        case 2:
        case 3:
          if (!pairs.empty()) {
            arena.Request(pairs[random.Below(pairs.size())], random.Next());
          }
          Serve(&arena);
          break;
        case 4:
          if (state == State::kGranted) arena.Quarantine(id);
          break;
        case 5:
          if (state == State::kGranted || state == State::kQuarantined) {
            arena.Fill(id);
          }
          break;
        default:
          if (state != State::kFree) arena.Free(id);
          Serve(&arena);
      }
      const SlabCounts c = arena.counts();
      ASSERT_EQ(c.free + c.granted + c.in_flight + c.quarantined, c.total);
      ASSERT_TRUE(arena.CheckInvariants().ok())
          << arena.CheckInvariants() << " at step " << step;
    }
  }
}

TEST(Slices, CutsCoverTheRangeOnceAndFit) {
  for (int layers = 1; layers <= 5; ++layers) {
    for (int positions = 1; positions <= 9; ++positions) {
      for (int64_t max_rows = 1; max_rows <= 12; ++max_rows) {
        Coverage coverage;
        for (const SliceRange& slice :
             Cut({2, 2 + layers, 10, 10 + positions}, max_rows)) {
          EXPECT_LE(Rows(slice), max_rows);
          EXPECT_TRUE(coverage.Add(slice));
          EXPECT_FALSE(coverage.Add(slice));
        }
        EXPECT_EQ(coverage.rows(), int64_t{layers} * positions);
        EXPECT_FALSE(coverage.Add({2, 2 + layers, 10, 10 + positions}));
      }
    }
  }
}

// Row by row: each that is wanted is in one piece, and no other in any.
TEST(Slices, PiecesOfARangeAreWhatAGrantWantsOfIt) {
  SeededRandom random(7);
  const auto below = [&](int end) {
    return static_cast<int>(random.Below(static_cast<uint64_t>(end)));
  };
  for (int round = 0; round < 2000; ++round) {
    WireLayers layers{.count = 1 + below(6)};
    for (int l = 0; round % 4 != 0 && l < layers.count; ++l) {
      layers.windowed.push_back(below(2) == 0);
    }
    const int end = 1 + below(12);
    Grant grant{.position_begin = below(end), .position_end = end};
    grant.windowed_begin =
        grant.position_begin + below(end - grant.position_begin + 1);
    const SliceRange range{below(layers.count), layers.count, below(end), end};
    Coverage coverage;
    for (const SliceRange& piece : Clip(range, grant, layers)) {
      EXPECT_GT(Rows(piece), 0);
      EXPECT_TRUE(coverage.Add(piece));
      EXPECT_TRUE(Wants(grant, layers, piece));
    }
    int64_t all = 0;
    int64_t of_range = 0;
    for (int l = 0; l < layers.count; ++l) {
      for (int p = 0; p < end; ++p) {
        const bool windowed =
            !layers.windowed.empty() && layers.windowed[static_cast<size_t>(l)];
        const bool wanted =
            p >= (windowed ? grant.windowed_begin : grant.position_begin);
        const bool inside = l >= range.layer_begin && p >= range.position_begin;
        all += wanted;
        of_range += wanted && inside;
        // What is in a piece cannot be added again.
        EXPECT_EQ(Coverage(coverage).Add({l, l + 1, p, p + 1}),
                  !(wanted && inside));
      }
    }
    EXPECT_EQ(coverage.rows(), of_range);
    EXPECT_EQ(WantedRows(grant, layers), all);
    EXPECT_EQ(Wants(grant, layers, range), of_range == Rows(range));
  }
}

TEST(Slices, CoverageRefusesEveryOverlap) {
  Coverage coverage;
  EXPECT_TRUE(coverage.Add({0, 2, 4, 8}));
  for (const auto& [begin, end, overlaps] :
       std::vector<std::tuple<int, int, bool>>{{0, 4, false},
                                               {8, 9, false},
                                               {0, 5, true},
                                               {7, 9, true},
                                               {5, 6, true},
                                               {3, 10, true}}) {
    Coverage copy = coverage;
    EXPECT_EQ(copy.Add({1, 2, begin, end}), !overlaps) << begin << ".." << end;
    EXPECT_EQ(copy.rows(), overlaps ? 8 : 8 + end - begin);
  }
  EXPECT_TRUE(coverage.Add({2, 3, 4, 8}));
}

}  // namespace
}  // namespace tandem::handoff
