// SPDX-License-Identifier: Apache-2.0
// A step's plan says what the step says, and never outgrows its memory.

#include "engine/model/step_layout.h"

#include <cstring>
#include <vector>

#include "common/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;
using testing::Field;

template <typename T>
std::vector<T> FirstOf(const T* data, int count) {
  return std::vector<T>(data, data + count);
}

auto IsSpan(int first_row, int rows, int position, int64_t table) {
  return testing::AllOf(Field(&kernels::RowSpan::first_row, first_row),
                        Field(&kernels::RowSpan::num_rows, rows),
                        Field(&kernels::RowSpan::first_position, position),
                        Field(&kernels::RowSpan::block_table, table));
}

StepEntry Entry(int position, absl::Span<const int32_t> tokens,
                absl::Span<const int32_t> blocks,
                absl::Span<const RowDraw> draws) {
  StepEntry entry;
  entry.position = position;
  entry.tokens = tokens;
  entry.block_table = blocks;
  entry.draws = draws;
  return entry;
}

TEST(StepPlan, LaysOutRowsSpansAndDraws) {
  const std::vector<int32_t> chunk = {11, 12, 13};
  const std::vector<int32_t> one = {21};
  const std::vector<int32_t> two = {31, 32};
  const std::vector<int32_t> far = {7, 3};
  const std::vector<int32_t> near = {5};
  const std::vector<kernels::LogitEdit> two_edits = {{.token_id = 2},
                                                     {.token_id = 9}};
  const std::vector<kernels::LogitEdit> one_edit = {{.token_id = 4}};
  const RowDraw last_two[] = {{.edits = two_edits}, {.given = 77}};
  const RowDraw edited[] = {{.edits = one_edit}};
  const Step step{
      .id = 1,
      .entries = {Entry(7, chunk, far, last_two), Entry(0, one, near, kOneDraw),
                  Entry(3, two, near, {}), Entry(4, one, near, edited)}};
  StepPlan plan;
  plan.Reserve({.rows = 16, .entries = 4, .draws = 4, .blocks_per_entry = 4},
               {.size = 8});
  plan.Fill(step);
  const std::byte* at = plan.data();
  const kernels::Rows rows = plan.DeviceRows(at);
  EXPECT_EQ(rows.num_rows, 7);
  EXPECT_EQ(rows.num_spans, 4);
  EXPECT_THAT(FirstOf(rows.token_ids, 7),
              ElementsAre(11, 12, 13, 21, 31, 32, 21));
  EXPECT_THAT(FirstOf(rows.positions, 7), ElementsAre(7, 8, 9, 0, 3, 4, 4));
  EXPECT_THAT(FirstOf(rows.slots, 7),
              ElementsAre(7 * 8 + 7, 3 * 8, 3 * 8 + 1, 40, 43, 44, 44));
  EXPECT_THAT(FirstOf(rows.block_tables, 5), ElementsAre(7, 3, 5, 5, 5));
  const kernels::RowSpan& last = rows.host_spans[3];
  EXPECT_EQ(last.first_row, 6);
  EXPECT_EQ(last.num_rows, 1);
  EXPECT_EQ(last.first_position, 4);
  EXPECT_EQ(last.block_table, 4);
  ASSERT_EQ(plan.drawn(), 4);
  EXPECT_THAT(FirstOf(plan.DeviceRowIds(at), 4), ElementsAre(1, 2, 3, 6));
  const kernels::Rows drawn = plan.DeviceDrawnRows(at);
  EXPECT_EQ(drawn.num_rows, 4);
  EXPECT_THAT(FirstOf(drawn.positions, 4), ElementsAre(8, 9, 0, 4));
  ASSERT_EQ(drawn.num_spans, 3);
  EXPECT_THAT(
      FirstOf(drawn.host_spans, 3),
      ElementsAre(IsSpan(0, 2, 8, 0), IsSpan(2, 1, 0, 2), IsSpan(3, 1, 4, 4)));
  EXPECT_EQ(memcmp(drawn.spans, drawn.host_spans, 3 * sizeof(*drawn.spans)), 0);
  EXPECT_EQ(drawn.block_tables, rows.block_tables);
  const auto params = FirstOf(plan.DeviceParams(at), 4);
  EXPECT_EQ(params[0].position, 9);
  EXPECT_EQ(params[1].position, 10);
  EXPECT_EQ(params[2].position, 1);
  EXPECT_EQ(params[3].position, 5);
  EXPECT_EQ(params[0].given, -1);
  EXPECT_EQ(params[1].given, 77);
  const auto edits_of = [&](int row) {
    return std::pair(params[row].first_edit, params[row].num_edits);
  };
  EXPECT_EQ(edits_of(0), std::pair(0, 2));
  EXPECT_EQ(edits_of(1), std::pair(2, 0));
  EXPECT_EQ(edits_of(2), std::pair(2, 0));
  EXPECT_EQ(edits_of(3), std::pair(2, 1));
  ASSERT_EQ(plan.num_edits(), 3);
  std::vector<kernels::LogitEdit> edits(3);
  StepPlan::CopyEdits(step, edits.data());
  EXPECT_EQ(edits[0].token_id, 2);
  EXPECT_EQ(edits[1].token_id, 9);
  EXPECT_EQ(edits[2].token_id, 4);
}

TEST(StepPlan, FedRowsNameDrawsOfTheStepBefore) {
  const std::vector<int32_t> one = {21};
  const std::vector<int32_t> blocks = {5};
  StepPlan plan;
  plan.Reserve({.rows = 4, .entries = 4, .draws = 4, .blocks_per_entry = 4},
               {.size = 8});
  Step step{.id = 2,
            .entries = {Entry(0, one, blocks, kOneDraw),
                        Entry(1, one, blocks, kOneDraw),
                        Entry(2, one, blocks, kOneDraw)}};
  step.entries[0].fed = 2;
  step.entries[2].fed = 1;
  plan.Fill(step, 4);
  const kernels::Rows rows = plan.DeviceRows(plan.data());
  EXPECT_THAT(FirstOf(rows.fed, 4), ElementsAre(2, -1, 1, -1));
}

// Each part has slots, spans and tables of its own, and one with a window no
// blocks that are wholly behind it.
TEST(StepPlan, PartsOfBlocksHaveTheirOwnTables) {
  const KvParts parts{.full = 1, .windowed = 2};
  BlockCells cells(4, parts);
  for (const int32_t block : {3, 1, 0}) cells.Take(block, /*whole=*/true);
  const auto cell = [&](int32_t block, int part) {
    return cells.at(block, part);
  };
  const std::vector<int32_t> two = {11, 12};
  const std::vector<int32_t> one = {21};
  const std::vector<int32_t> far = {3, 1};
  const std::vector<int32_t> near = {0};
  cells.DropWindowed(3);
  const Step step{.id = 1,
                  .entries = {Entry(13, two, far, kOneDraw),
                              Entry(2, one, near, kOneDraw)}};
  StepPlan plan;
  plan.Reserve({.rows = 8, .entries = 4, .draws = 4, .blocks_per_entry = 4},
               {.size = 8, .cells = &cells, .window = {5, parts}});
  plan.Fill(step, 0);
  for (int part = 0; part < 3; ++part) {
    SCOPED_TRACE(part);
    const kernels::Rows rows = plan.DeviceRows(plan.data(), part);
    EXPECT_THAT(FirstOf(rows.positions, 3), ElementsAre(13, 14, 2));
    EXPECT_THAT(FirstOf(rows.slots, 3),
                ElementsAre(cell(1, part) * 8 + 5, cell(1, part) * 8 + 6,
                            cell(0, part) * 8 + 2));
    const kernels::RowSpan& first = rows.host_spans[0];
    const kernels::RowSpan& second = rows.host_spans[1];
    EXPECT_EQ(first.first_row, 0);
    EXPECT_EQ(first.num_rows, 2);
    EXPECT_EQ(second.first_row, 2);
    EXPECT_GE(first.block_table, 0);
    const int32_t* const table = rows.block_tables + first.block_table;
    if (part == 0) {
      EXPECT_EQ(table[0], cell(3, 0));
    }
    EXPECT_EQ(table[1], cell(1, part));
    EXPECT_EQ(rows.block_tables[second.block_table], cell(0, part));
    const kernels::Rows drawn = plan.DeviceDrawnRows(plan.data(), part);
    EXPECT_THAT(FirstOf(drawn.positions, 2), ElementsAre(14, 2));
    EXPECT_THAT(FirstOf(drawn.host_spans, 2),
                ElementsAre(IsSpan(0, 1, 14, first.block_table),
                            IsSpan(1, 1, 2, second.block_table)));
  }
  // Filled up with nobody's.
  const Step decode{.id = 2, .entries = {Entry(2, one, near, kOneDraw)}};
  plan.Fill(decode, 2);
  for (int part = 0; part < 3; ++part) {
    const kernels::Rows rows = plan.DeviceRows(plan.data(), part);
    EXPECT_THAT(FirstOf(rows.slots, 2), ElementsAre(cell(0, part) * 8 + 2, -1));
    EXPECT_EQ(rows.host_spans[1].num_rows, 0);
  }
}

TEST(StepPlan, TheLargestStepsFitWhatWasReserved) {
  SeededRandom random(1);
  for (int round = 0; round < 500; ++round) {
    const StepLimits limits{
        .rows = 1 + static_cast<int>(random.Below(70)),
        .entries = 1 + static_cast<int>(random.Below(40)),
        .draws = 40,
        .blocks_per_entry = 1 + static_cast<int>(random.Below(20))};
    const int entries = std::min(limits.entries, limits.rows);
    const std::vector<int32_t> tokens(limits.rows, 1);
    const std::vector<int32_t> blocks(limits.blocks_per_entry, 0);
    const int positions = 8 * limits.blocks_per_entry;
    Step step;
    for (int i = 0; i < entries; ++i) {
      const int count =
          i == 0 ? std::min(limits.rows - entries + 1, positions) : 1;
      step.entries.push_back(Entry(
          positions - count, absl::MakeConstSpan(tokens).subspan(0, count),
          blocks, kOneDraw));
    }
    const KvParts parts{.full = 1, .windowed = 2};
    BlockCells cells(1, parts);
    cells.Take(0, /*whole=*/true);
    for (const StepBlocks& lie :
         {StepBlocks{.size = 8},
          StepBlocks{.size = 8, .cells = &cells, .window = {11, parts}}}) {
      StepPlan plan;
      plan.Reserve(limits, lie);
      plan.Fill(step);
      EXPECT_LE(plan.size(), StepPlan::MaxBytes(limits, lie));
      EXPECT_EQ(plan.drawn(), entries);
    }
  }
}

}  // namespace
}  // namespace tandem::engine
