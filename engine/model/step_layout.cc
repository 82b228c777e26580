// SPDX-License-Identifier: Apache-2.0
#include "engine/model/step_layout.h"

#include <algorithm>
#include <cstring>

namespace tandem::engine {
namespace {

using kernels::RowSpan;
using kernels::SampleParams;

constexpr size_t kAlignment = 64;
constexpr int kSections = 12;

size_t Aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

size_t StepPlan::MaxBytes(const StepLimits& limits, const StepBlocks& blocks) {
  const auto entries = static_cast<size_t>(limits.entries);
  const auto parts = static_cast<size_t>(blocks.parts());
  size_t tables = 0;  // of an entry
  for (int part = 0; part < blocks.parts(); ++part) {
    const int seen = blocks.window.positions + limits.rows;
    tables += blocks.windowed(part)
                  ? std::min(limits.blocks_per_entry, seen / blocks.size + 2)
                  : limits.blocks_per_entry;
  }
  const size_t ints =
      (4 + parts) * static_cast<size_t>(limits.rows) + entries * tables;
  return ints * sizeof(int32_t) + 2 * parts * entries * sizeof(RowSpan) +
         static_cast<size_t>(limits.draws) *
             (3 * sizeof(int32_t) + sizeof(SampleParams)) +
         kSections * kAlignment;
}

void StepPlan::Reserve(const StepLimits& limits, const StepBlocks& blocks) {
  own_.resize(MaxBytes(limits, blocks));
  Reserve(own_.data(), blocks);
}

void StepPlan::Reserve(std::byte* memory, const StepBlocks& blocks) {
  bytes_ = memory;
  blocks_ = blocks;
}

template <typename T>
T* StepPlan::Place(size_t count, size_t* offset) {
  *offset = size_;
  size_ += Aligned(count * sizeof(T));
  return reinterpret_cast<T*>(bytes_ + *offset);
}

void StepPlan::Fill(const Step& step, int least) {
  size_ = 0;
  FillRows(step, least);
  FillDraws(step, least);
  FillTables(step);
  has_adapters_ =
      std::any_of(step.entries.begin(), step.entries.end(),
                  [](const StepEntry& entry) { return entry.adapter >= 0; });
  if (has_adapters_) FillAdapters(step);
}

void StepPlan::FillAdapters(const Step& step) {
  auto* rows = Place<int32_t>(static_cast<size_t>(rows_), &adapters_);
  auto* draws = Place<int32_t>(static_cast<size_t>(drawn_), &drawn_adapters_);
  for (const StepEntry& entry : step.entries) {
    rows = std::fill_n(rows, entry.tokens.size(), entry.adapter);
    draws = std::fill_n(draws, entry.draws.size(), entry.adapter);
  }
}

void StepPlan::FillRows(const Step& step, int least) {
  size_t rows = 0;
  for (const StepEntry& entry : step.entries) rows += entry.tokens.size();
  rows = std::max(rows, static_cast<size_t>(least));
  rows_ = static_cast<int>(rows);
  entries_ = std::max(static_cast<int>(step.entries.size()), least);
  const auto parts = static_cast<size_t>(blocks_.parts());
  auto* token_ids = Place<int32_t>(rows, &token_ids_);
  auto* fed = Place<int32_t>(rows, &fed_);
  auto* positions = Place<int32_t>(rows, &positions_);
  Place<int32_t>(parts * rows, &slots_);
  Place<RowSpan>(parts * static_cast<size_t>(entries_), &spans_);
  int row = 0;
  for (const StepEntry& entry : step.entries) {
    const int count = static_cast<int>(entry.tokens.size());
    for (int i = 0; i < count; ++i, ++row) {
      token_ids[row] = entry.tokens[i];
      fed[row] = entry.fed;
      positions[row] = entry.position + i;
    }
  }
  for (; row < least; ++row) {
    token_ids[row] = 0;
    fed[row] = -1;
    positions[row] = 0;
  }
}

// Of an entry one table after another. That of a windowed part has the blocks
// that its rows see, and is counted from where block 0 would be: within the
// tables of full parts, which are longer.
void StepPlan::FillTables(const Step& step) {
  auto* const slots = reinterpret_cast<int32_t*>(bytes_ + slots_);
  auto* const spans = reinterpret_cast<RowSpan*>(bytes_ + spans_);
  auto* const drawn_spans = reinterpret_cast<RowSpan*>(bytes_ + drawn_spans_);
  auto* const tables = Place<int32_t>(0, &tables_);
  const int block_size = blocks_.size;
  int row = 0;
  int drawn = 0;
  int drawing = 0;
  int filled = 0;
  for (size_t e = 0; e < step.entries.size(); ++e) {
    const StepEntry& entry = step.entries[e];
    const int count = static_cast<int>(entry.tokens.size());
    const int blocks = static_cast<int>(entry.block_table.size());
    const int draws = drawing_ == 0 ? 0 : static_cast<int>(entry.draws.size());
    for (int part = 0; part < blocks_.parts(); ++part) {
      const int first = blocks_.First(part, entry.position);
      const int end =
          blocks_.windowed(part)
              ? (entry.position + count + block_size - 1) / block_size
              : blocks;
      spans[part * entries_ + static_cast<int>(e)] = {
          row, count, entry.position, filled - first};
      if (draws > 0) {
        drawn_spans[part * drawing_ + drawing] = {
            drawn, draws, entry.position + count - draws, filled - first};
      }
      for (int b = first; b < end; ++b) {
        tables[filled++] = blocks_.CellOf(entry.block_table[b], part);
      }
      for (int i = 0; i < count; ++i) {
        const int position = entry.position + i;
        slots[part * rows_ + row + i] =
            blocks_.CellOf(entry.block_table[position / block_size], part) *
                block_size +
            position % block_size;
      }
    }
    row += count;
    drawn += draws;
    if (draws > 0) ++drawing;
  }
  size_ += Aligned(static_cast<size_t>(filled) * sizeof(int32_t));
  for (; row < rows_; ++row) {  // nobody's, of an entry each
    for (int part = 0; part < blocks_.parts(); ++part) {
      spans[part * entries_ + row] = {row, 0, 0, 0};
      slots[part * rows_ + row] = -1;
    }
  }
}

void StepPlan::FillDraws(const Step& step, int least) {
  drawn_ = 0;
  for (const StepEntry& entry : step.entries) {
    drawn_ += static_cast<int>(entry.draws.size());
  }
  num_edits_ = 0;
  num_masks_ = 0;
  const auto draws = static_cast<size_t>(std::max(drawn_, least));
  auto* row_ids = Place<int32_t>(draws, &row_ids_);
  auto* params = Place<SampleParams>(draws, &params_);
  int32_t* positions = nullptr;
  drawing_ = 0;
  if (least == 0) {
    for (const StepEntry& entry : step.entries) {
      if (!entry.draws.empty()) ++drawing_;
    }
    positions = Place<int32_t>(draws, &drawn_positions_);
    Place<RowSpan>(
        static_cast<size_t>(blocks_.parts()) * static_cast<size_t>(drawing_),
        &drawn_spans_);
  }
  size_t draw = 0;
  int end = 0;  // of the entry's rows
  for (const StepEntry& entry : step.entries) {
    const int count = static_cast<int>(entry.tokens.size());
    const Sampling& s = entry.sampling;
    end += count;
    int left = static_cast<int>(entry.draws.size());
    for (const RowDraw& row : entry.draws) {
      const size_t at = draw++;
      const int num_edits = static_cast<int>(row.edits.size());
      --left;
      row_ids[at] = end - 1 - left;
      if (positions != nullptr) {
        positions[at] = entry.position + count - 1 - left;
      }
      params[at] = {
          .temperature = s.temperature,
          .top_p = s.top_p,
          .min_p = s.min_p,
          .typical_p = s.typical_p,
          .top_k = s.top_k,
          .seed = s.seed,
          .sequence_index = s.sequence_index,
          .position = entry.position + count - left,
          .logprobs = row.given >= 0 ? row.given_logprobs : s.logprobs,
          .first_edit = num_edits_,
          .num_edits = num_edits,
          .only_edited = entry.only_edited ? 1 : 0,
          .given = row.given,
          .edited_logprobs = s.edited_logprobs ? 1 : 0,
          .mask = row.constrained ? num_masks_++ : -1};
      num_edits_ += num_edits;
    }
  }
  for (; draw < draws; ++draw) {
    row_ids[draw] = 0;
    params[draw] = {.temperature = 0, .top_p = 1, .logprobs = -1};
  }
}

void StepPlan::CopyEdits(const Step& step, kernels::LogitEdit* out) {
  for (const StepEntry& entry : step.entries) {
    for (const RowDraw& draw : entry.draws) {
      out = std::copy(draw.edits.begin(), draw.edits.end(), out);
    }
  }
}

kernels::Rows StepPlan::DeviceRows(const std::byte* device, int part) const {
  const auto ints = [&](size_t offset) {
    return reinterpret_cast<const int32_t*>(device + offset);
  };
  const int64_t first_row = int64_t{part} * rows_;
  const int64_t first_span = int64_t{part} * entries_;
  return {
      .num_rows = rows_,
      .num_spans = entries_,
      .token_ids = ints(token_ids_),
      .fed = ints(fed_),
      .positions = ints(positions_),
      .slots = ints(slots_) + first_row,
      .spans = reinterpret_cast<const RowSpan*>(device + spans_) + first_span,
      .block_tables = ints(tables_),
      .host_spans =
          reinterpret_cast<const RowSpan*>(bytes_ + spans_) + first_span};
}

kernels::Rows StepPlan::DeviceDrawnRows(const std::byte* device,
                                        int part) const {
  const size_t spans = drawn_spans_ + static_cast<size_t>(part) *
                                          static_cast<size_t>(drawing_) *
                                          sizeof(RowSpan);
  return {
      .num_rows = drawn_,
      .num_spans = drawing_,
      .positions = reinterpret_cast<const int32_t*>(device + drawn_positions_),
      .spans = reinterpret_cast<const RowSpan*>(device + spans),
      .block_tables = reinterpret_cast<const int32_t*>(device + tables_),
      .host_spans = reinterpret_cast<const RowSpan*>(bytes_ + spans)};
}

const int32_t* StepPlan::DeviceRowIds(const std::byte* device) const {
  return reinterpret_cast<const int32_t*>(device + row_ids_);
}

const int32_t* StepPlan::DeviceAdapters(const std::byte* device) const {
  return reinterpret_cast<const int32_t*>(device + adapters_);
}

const int32_t* StepPlan::DeviceDrawnAdapters(const std::byte* device) const {
  return reinterpret_cast<const int32_t*>(device + drawn_adapters_);
}

const SampleParams* StepPlan::DeviceParams(const std::byte* device) const {
  return reinterpret_cast<const SampleParams*>(device + params_);
}

}  // namespace tandem::engine
