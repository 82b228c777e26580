// SPDX-License-Identifier: Apache-2.0
#include "engine/step_layout.h"

#include <algorithm>
#include <cstring>

namespace tandem::engine {
namespace {

using kernels::RowSpan;
using kernels::SampleParams;

constexpr size_t kAlignment = 64;
constexpr int kSections = 10;

size_t Aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

size_t StepPlan::MaxBytes(const StepLimits& limits) {
  const auto entries = static_cast<size_t>(limits.entries);
  const size_t ints =
      5 * static_cast<size_t>(limits.rows) + entries * limits.blocks_per_entry;
  return ints * sizeof(int32_t) + entries * sizeof(RowSpan) +
         static_cast<size_t>(limits.draws) *
             (2 * sizeof(int32_t) + sizeof(SampleParams)) +
         kSections * kAlignment;
}

void StepPlan::Reserve(const StepLimits& limits) {
  own_.resize(MaxBytes(limits));
  Reserve(own_.data());
}

void StepPlan::Reserve(std::byte* memory) { bytes_ = memory; }

template <typename T>
T* StepPlan::Place(size_t count, size_t* offset) {
  *offset = size_;
  size_ += Aligned(count * sizeof(T));
  return reinterpret_cast<T*>(bytes_ + *offset);
}

void StepPlan::Fill(const Step& step, int block_size, int least) {
  size_ = 0;
  FillRows(step, block_size, least);
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

void StepPlan::FillRows(const Step& step, int block_size, int least) {
  size_t rows = 0;
  for (const StepEntry& entry : step.entries) rows += entry.tokens.size();
  rows = std::max(rows, static_cast<size_t>(least));
  rows_ = static_cast<int>(rows);
  entries_ = std::max(static_cast<int>(step.entries.size()), least);
  auto* token_ids = Place<int32_t>(rows, &token_ids_);
  auto* fed = Place<int32_t>(rows, &fed_);
  auto* positions = Place<int32_t>(rows, &positions_);
  auto* slots = Place<int32_t>(rows, &slots_);
  auto* spans = Place<RowSpan>(static_cast<size_t>(entries_), &spans_);
  int row = 0;
  int table = 0;
  for (const StepEntry& entry : step.entries) {
    const int count = static_cast<int>(entry.tokens.size());
    *spans++ = {row, count, entry.position, table};
    table += static_cast<int>(entry.block_table.size());
    for (int i = 0; i < count; ++i, ++row) {
      const int position = entry.position + i;
      token_ids[row] = entry.tokens[i];
      fed[row] = entry.fed;
      positions[row] = position;
      slots[row] = entry.block_table[position / block_size] * block_size +
                   position % block_size;
    }
  }
  for (; row < least; ++row) {
    *spans++ = {row, 0, 0, 0};
    token_ids[row] = 0;
    fed[row] = -1;
    positions[row] = 0;
    slots[row] = -1;
  }
}

void StepPlan::FillTables(const Step& step) {
  size_t blocks = 0;
  for (const StepEntry& entry : step.entries) {
    blocks += entry.block_table.size();
  }
  auto* table = Place<int32_t>(blocks, &tables_);
  for (const StepEntry& entry : step.entries) {
    table =
        std::copy(entry.block_table.begin(), entry.block_table.end(), table);
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

kernels::Rows StepPlan::DeviceRows(const std::byte* device) const {
  const auto ints = [&](size_t offset) {
    return reinterpret_cast<const int32_t*>(device + offset);
  };
  return {.num_rows = rows_,
          .num_spans = entries_,
          .token_ids = ints(token_ids_),
          .fed = ints(fed_),
          .positions = ints(positions_),
          .slots = ints(slots_),
          .spans = reinterpret_cast<const RowSpan*>(device + spans_),
          .block_tables = ints(tables_),
          .host_spans = reinterpret_cast<const RowSpan*>(bytes_ + spans_)};
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
