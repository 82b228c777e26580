// SPDX-License-Identifier: Apache-2.0
#include "engine/step_layout.h"

#include <algorithm>
#include <cstring>

namespace tandem::engine {
namespace {

using kernels::RowSpan;
using kernels::SampleParams;

constexpr size_t kAlignment = 64;
constexpr int kSections = 8;

size_t Aligned(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

size_t StepPlan::MaxBytes(const StepLimits& limits) {
  const auto entries = static_cast<size_t>(limits.entries);
  const size_t ints = 3 * static_cast<size_t>(limits.rows) +
                      entries * limits.blocks_per_entry + entries +
                      entries * limits.banned_per_entry;
  // Every list of banned ids is a section of its own.
  return ints * sizeof(int32_t) +
         entries * (sizeof(RowSpan) + sizeof(SampleParams)) +
         (kSections + entries) * kAlignment;
}

void StepPlan::Reserve(const StepLimits& limits) {
  own_.resize(MaxBytes(limits));
  Reserve(limits, own_.data());
}

void StepPlan::Reserve(const StepLimits& limits, std::byte* memory) {
  bytes_ = memory;
  groups_.reserve(limits.entries);
  group_of_.reserve(limits.entries);
  draw_order_.reserve(limits.entries);
}

template <typename T>
T* StepPlan::Place(size_t count, size_t* offset) {
  *offset = size_;
  size_ += Aligned(count * sizeof(T));
  return reinterpret_cast<T*>(bytes_ + *offset);
}

void StepPlan::Fill(const Step& step, int block_size, int least) {
  size_ = 0;
  FillRows(step, block_size, least);
  GroupDraws(step);
  FillDraws(step, least);
  FillTables(step);
}

void StepPlan::FillRows(const Step& step, int block_size, int least) {
  size_t rows = 0;
  for (const StepEntry& entry : step.entries) rows += entry.tokens.size();
  rows = std::max(rows, static_cast<size_t>(least));
  rows_ = static_cast<int>(rows);
  entries_ = std::max(static_cast<int>(step.entries.size()), least);
  auto* token_ids = Place<int32_t>(rows, &token_ids_);
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
      positions[row] = position;
      slots[row] = entry.block_table[position / block_size] * block_size +
                   position % block_size;
    }
  }
  for (; row < least; ++row) {
    *spans++ = {row, 0, 0, 0};
    token_ids[row] = 0;
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
  for (DrawGroup& group : groups_) {
    auto* banned = Place<int32_t>(group.banned.size(), &group.banned_offset);
    std::copy(group.banned.begin(), group.banned.end(), banned);
  }
}

// Finds each drawing entry's group; there are rarely more than two.
void StepPlan::GroupDraws(const Step& step) {
  groups_.clear();
  group_of_.clear();
  draw_order_.clear();
  for (const StepEntry& entry : step.entries) {
    if (!entry.sample) continue;
    size_t group = 0;
    while (group < groups_.size() &&
           groups_[group].banned != entry.banned_ids) {
      ++group;
    }
    if (group == groups_.size()) groups_.push_back({entry.banned_ids});
    ++groups_[group].count;
    group_of_.push_back(static_cast<int>(group));
  }
  int first = 0;
  for (DrawGroup& group : groups_) {
    group.first = first;
    first += std::exchange(group.count, 0);
  }
  for (const int group : group_of_) {
    draw_order_.push_back(groups_[group].first + groups_[group].count++);
  }
}

void StepPlan::FillDraws(const Step& step, int least) {
  const size_t draws = std::max(draw_order_.size(), static_cast<size_t>(least));
  auto* row_ids = Place<int32_t>(draws, &row_ids_);
  auto* params = Place<SampleParams>(draws, &params_);
  size_t draw = 0;
  int row = -1;  // last one of the entry
  for (const StepEntry& entry : step.entries) {
    const int count = static_cast<int>(entry.tokens.size());
    row += count;
    if (!entry.sample) continue;
    const int at = draw_order_[draw++];
    const Sampling& s = entry.sampling;
    row_ids[at] = row;
    params[at] = {.temperature = s.temperature,
                  .top_p = s.top_p,
                  .min_p = s.min_p,
                  .top_k = s.top_k,
                  .seed = s.seed,
                  .sequence_index = s.sequence_index,
                  .position = entry.position + count,
                  .logprobs = s.logprobs,
                  .min_tokens_left = entry.banned_ids.empty() ? 0 : 1};
  }
  for (; draw < draws; ++draw) {
    row_ids[draw] = 0;
    params[draw] = {.temperature = 0, .top_p = 1, .logprobs = -1};
  }
}

kernels::Rows StepPlan::DeviceRows(const std::byte* device) const {
  const auto ints = [&](size_t offset) {
    return reinterpret_cast<const int32_t*>(device + offset);
  };
  return {.num_rows = rows_,
          .num_spans = entries_,
          .token_ids = ints(token_ids_),
          .positions = ints(positions_),
          .slots = ints(slots_),
          .spans = reinterpret_cast<const RowSpan*>(device + spans_),
          .block_tables = ints(tables_),
          .host_spans = reinterpret_cast<const RowSpan*>(bytes_ + spans_)};
}

const int32_t* StepPlan::DeviceRowIds(const std::byte* device) const {
  return reinterpret_cast<const int32_t*>(device + row_ids_);
}

const SampleParams* StepPlan::DeviceParams(const std::byte* device) const {
  return reinterpret_cast<const SampleParams*>(device + params_);
}

}  // namespace tandem::engine
