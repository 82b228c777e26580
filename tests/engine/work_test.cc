// SPDX-License-Identifier: Apache-2.0
// What the engine counts while it runs against the formulas of DESIGN.md
// section 1, for the four pairs of lengths that the literature quotes: with a
// cache and without; and shorter ones in chunks, in batches, resumed.

#include "engine/work.h"

#include <algorithm>
#include <map>
#include <vector>

#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

// 3 layers, the last with a window of 6, 4 heads and 2 KV heads of 8; a row
// takes 100 multiplications before and 1000 behind attention, a draw 70.
WorkShape Shape(int windowed = 0) {
  return {.full = {3 - windowed, 0, 2, 8, 16},
          .windowed = {windowed, 6, 2, 8, 16},
          .last_windowed = windowed > 0,
          .heads = 4,
          .qkv = 3 * 100,
          .after_attention = 2 * 1000,
          .drawn = 1000,
          .head = 70,
          .qkv_bytes = 3 * 401,
          .after_attention_bytes = 2 * 4003,
          .drawn_bytes = 4003,
          .head_bytes = 283};
}

struct Lengths {
  int prompt, output;
};
constexpr Lengths kPairs[] = {{10, 5}, {50, 20}};
constexpr struct {
  Lengths lengths;
  int64_t without_cache, with_cache;  // as quoted, of one layer and head
} kQuoted[] = {{{100, 50}, 6225, 150},
               {{500, 200}, 119'900, 700},
               {{1000, 500}, 624'750, 1500},
               {{2000, 1000}, 2'499'500, 3000}};

int64_t Sum(int64_t terms, int64_t first) {
  int64_t sum = 0;
  for (int64_t i = 0; i < terms; ++i) sum += first + i;
  return sum;
}

HarnessOptions Counting(int budget, bool prefix_caching = false) {
  HarnessOptions options;
  options.num_blocks = 800;
  options.engine.max_num_batched_tokens = budget;
  options.engine.max_model_len = 3000;
  options.engine.prefix_caching = prefix_caching;
  options.engine.work = Shape();
  return options;
}

SequenceSpec SpecOfLengths(const Harness& harness, SequenceId id,
                           Lengths lengths, bool kv_cache) {
  SequenceSpec spec = harness.Spec(id, lengths.prompt, lengths.output);
  spec.kv_cache = kv_cache;
  return spec;
}

// DESIGN's formulas, times layers and heads.
void ExpectCounted(const Work& work, Lengths lengths, bool kv_cache) {
  const int64_t p = lengths.prompt, g = lengths.output;
  const int64_t rows = kv_cache ? p + g - 1 : g * p + g * (g - 1) / 2;
  EXPECT_EQ(work.positions_computed, rows);
  EXPECT_EQ(work.kv_rows, rows * 3 * 2);
  EXPECT_EQ(work.kv_bytes_written, rows * 3 * 2 * 2 * 16);
  // Of T tokens after P positions, where the first is drawn from the prompt:
  // T P + T (T - 1) / 2.
  EXPECT_EQ(work.positions_attended, (g * p + g * (g - 1) / 2) * 3 * 4);
}

TEST(WorkTest, OneSequenceIsWhatTheFormulasSay) {
  for (const auto& [lengths, without_cache, with_cache] : kQuoted) {
    for (const bool kv_cache : {true, false}) {
      Harness harness(Counting(/*budget=*/3000));
      harness.Add(1, SpecOfLengths(harness, 1, lengths, kv_cache));
      harness.RunUntilIdle();
      harness.ExpectAllFinishedRight();
      const Work& work = harness.told[1].work;
      SCOPED_TRACE(absl::StrCat(lengths.prompt, " + ", lengths.output));
      ExpectCounted(work, lengths, kv_cache);
      // The last token is not fed back.
      EXPECT_EQ(work.positions_computed,
                kv_cache ? with_cache - 1 : without_cache);
      const int64_t p = lengths.prompt, g = lengths.output;
      EXPECT_EQ(work.steps, g);
      // The prompt's triangle, then a row a step; or a triangle each step.
      int64_t pairs = Sum(p, 1), matrices = 0;
      for (int64_t i = 1; i < g; ++i) {
        pairs += kv_cache ? p + i : Sum(p + i, 1);
      }
      matrices =
          work.positions_computed * (3 * 100 + 2 * 1000) + g * (1000 + 70);
      // Of the last layer those of the row that draws.
      pairs = 2 * pairs + Sum(g, p);
      EXPECT_EQ(work.query_key_pairs, pairs * 4);
      EXPECT_EQ(work.attention_flops, 4 * 8 * pairs * 4);
      EXPECT_EQ(work.matrix_flops, 2 * matrices);
      // Read once a step, with a cache as without.
      EXPECT_EQ(work.kv_bytes_read, Sum(g, p) * 3 * 2 * 2 * 16);
      EXPECT_EQ(work.weight_bytes, g * (3 * 401 + 3 * 4003 + 283));
      harness.ExpectNothingLeft();
    }
  }
}

TEST(WorkTest, ChunksAndBatchesChangeNoCount) {
  for (const int budget : {7, 64}) {
    for (const bool kv_cache : {true, false}) {
      Harness harness(Counting(budget));
      SequenceId id = 0;
      for (const Lengths lengths : {kPairs[0], kPairs[1]}) {
        ++id;
        harness.Add(id, SpecOfLengths(harness, id, lengths, kv_cache));
      }
      // Half and half: neither kind changes the other.
      harness.Add(3, SpecOfLengths(harness, 3, kPairs[0], !kv_cache));
      harness.RunUntilIdle();
      harness.ExpectAllFinishedRight();
      SCOPED_TRACE(absl::StrCat("budget ", budget, " cache ", kv_cache));
      ExpectCounted(harness.told[1].work, kPairs[0], kv_cache);
      ExpectCounted(harness.told[2].work, kPairs[1], kv_cache);
      ExpectCounted(harness.told[3].work, kPairs[0], !kv_cache);
      harness.ExpectNothingLeft();
    }
  }
}

TEST(WorkTest, WhatAPartOfAPromptNeedsDependsOnTheCutAlone) {
  // 10 positions in 4 + 4 + 2: two parts end with the last layer's K and V.
  Harness harness(Counting(/*budget=*/4));
  harness.Add(1, SpecOfLengths(harness, 1, {10, 1}, true));
  harness.RunUntilIdle();
  const Work& work = harness.told[1].work;
  EXPECT_EQ(work.steps, 3);
  EXPECT_EQ(work.query_key_pairs,
            (2 * (Sum(4, 1) + Sum(4, 5) + 9 + 10) + 10) * 4);
  EXPECT_EQ(work.kv_bytes_read, (2 * (4 + 8) + 3 * 10) * 2 * 2 * 16);
  EXPECT_EQ(work.weight_bytes, 3 * (3 * 401 + 2 * 4003) + 4003 + 283);
}

TEST(WorkTest, SharesOfAStepMakeAWhole) {
  Harness harness(Counting(/*budget=*/400));
  for (SequenceId id = 1; id <= 3; ++id) {
    harness.Add(id, SpecOfLengths(harness, id, {4, 5}, true));
  }
  harness.RunUntilIdle();
  int64_t sum = 0;
  for (const auto& [id, told] : harness.told) sum += told.work.weight_bytes;
  EXPECT_EQ(sum, 5 * (3 * 401 + 3 * 4003 + 283));
  EXPECT_LT(
      harness.told[1].work.weight_bytes - harness.told[3].work.weight_bytes, 6);
}

TEST(WorkTest, AResumedSequenceCountsWhatItComputedAgain) {
  for (const bool match_cache : {false, true}) {
    Harness harness(Counting(/*budget=*/400, /*prefix_caching=*/true));
    harness.Add(1, SpecOfLengths(harness, 1, {50, 20}, true));
    harness.RunSteps(8);
    harness.Retire(1);
    harness.RunUntilIdle();
    const int64_t before = harness.told[1].work.positions_computed;
    EXPECT_EQ(before, 50 + 8 - 1);
    harness.Resume(1, match_cache);
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    // 58 tokens; 14 blocks of 4 were full and found again.
    EXPECT_EQ(harness.told[1].work.positions_computed - before,
              (match_cache ? 2 : 58) + 20 - 8 - 1);
    EXPECT_EQ(harness.told[1].work.positions_attended, Sum(20, 50) * 3 * 4);
    harness.ExpectNothingLeft();
  }
}

TEST(WorkTest, WithoutACacheNoBlockIsKeptOrTakenFromTheCache) {
  Harness harness(Counting(/*budget=*/400, /*prefix_caching=*/true));
  harness.Add(1, SpecOfLengths(harness, 1, {50, 5}, false));
  harness.RunUntilIdle();
  harness.Retire(1);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.pool.counts().cached, 0);
  harness.ExpectNothingLeft();
}

TEST(WorkTest, RunningAheadWaitsForASequenceWithoutACache) {
  HarnessOptions options = Counting(/*budget=*/400);
  options.engine.run_ahead = true;
  Harness harness(options);
  harness.Add(1, SpecOfLengths(harness, 1, {10, 5}, false));
  harness.Add(2, SpecOfLengths(harness, 2, {10, 5}, true));
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_EQ(harness.executor.fed, 0);
  ExpectCounted(harness.told[1].work, {10, 5}, false);
  ExpectCounted(harness.told[2].work, {10, 5}, true);
  harness.ExpectNothingLeft();
}

TEST(WorkTest, WithoutACacheNothingIsGuessedAndNoBeamsAreSearched) {
  HarnessOptions options = Counting(/*budget=*/400);
  options.engine.speculation = {
      .num_tokens = 4, .lookup_min = 1, .lookup_max = 2, .adapt = false};
  options.engine.max_draws = 64;
  Harness harness(options);
  harness.Add(1, SpecOfLengths(harness, 1, {10, 20}, false));
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  ExpectCounted(harness.told[1].work, {10, 20}, false);
  SequenceSpec beams = SpecOfLengths(harness, 2, {10, 5}, false);
  beams.beams.width = 2;
  EXPECT_EQ(harness.engine->Add(2, std::move(beams), {}, 0).code(),
            absl::StatusCode::kInvalidArgument);
  harness.ExpectNothingLeft();
}

TEST(WorkTest, WindowedLayersAttendTheirWindow) {
  const WorkShape shape = Shape(/*windowed=*/1);
  // Queries 9 and 10: two layers see all, the last 6, of the one that draws.
  Work work = shape.EntryWork(9, 2, /*draws=*/1);
  EXPECT_EQ(work.query_key_pairs, (2 * (10 + 11) + 6) * 4);
  EXPECT_EQ(work.positions_attended, (2 * 11 + 6) * 4);
  EXPECT_EQ(work.kv_bytes_read, (2 * 11 + 6) * 2 * 2 * 16);
  work = shape.EntryWork(9, 2, /*draws=*/0);
  EXPECT_EQ(work.query_key_pairs, 2 * (10 + 11) * 4);
  EXPECT_EQ(work.positions_attended, 0);
  // Two draws, as of drafts that are verified: queries 9 and 10.
  work = shape.EntryWork(8, 3, /*draws=*/2);
  EXPECT_EQ(work.positions_attended, (2 * (10 + 11) + 6 + 6) * 4);
  EXPECT_EQ(work.matrix_flops, 2 * (3 * (3 * 100 + 2 * 1000) + 2 * 1070));
}

}  // namespace
}  // namespace tandem::engine
