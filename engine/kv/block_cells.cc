// SPDX-License-Identifier: Apache-2.0

#include "engine/kv/block_cells.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace tandem::engine {

BlockCells::BlockCells(int whole, KvParts parts)
    : parts_(parts), num_cells_(whole * parts.count()), free_(num_cells_) {
  TANDEM_CHECK(parts.full > 0 && parts.windowed >= 0,
               "a block has a part that is never let go");
  if (parts.count() == 1) return;
  cells_.assign(Index(num_blocks(), 0), -1);
  free_cells_.reserve(static_cast<size_t>(num_cells_));
  for (int32_t cell = num_cells_; cell-- > 0;) free_cells_.push_back(cell);
}

void BlockCells::Take(int32_t block, bool whole) {
  free_ -= Needed(whole);
  if (cells_.empty()) return;
  for (int part = 0; part < Needed(whole); ++part) {
    cells_[Index(block, part)] = free_cells_.back();
    free_cells_.pop_back();
  }
}

void BlockCells::DropWindowed(int32_t block) {
  Drop(block, parts_.full, parts_.count());
}

void BlockCells::DropAll(int32_t block) {
  Drop(block, 0, whole(block) ? parts_.count() : parts_.full);
}

void BlockCells::Drop(int32_t block, int begin, int end) {
  free_ += end - begin;
  if (cells_.empty()) return;
  for (int part = begin; part < end; ++part) {
    int32_t& cell = cells_[Index(block, part)];
    free_cells_.push_back(cell);
    cell = -1;
  }
}

absl::Status BlockCells::CheckInvariants() const {
  if (cells_.empty()) return absl::OkStatus();
  std::vector<int> owners(static_cast<size_t>(num_cells_), 0);
  for (const int32_t cell : free_cells_) ++owners[static_cast<size_t>(cell)];
  for (const int32_t cell : cells_) {
    if (cell >= 0) ++owners[static_cast<size_t>(cell)];
  }
  const auto wrong = std::find_if(owners.begin(), owners.end(),
                                  [](int count) { return count != 1; });
  if (wrong != owners.end()) {
    return absl::InternalError(absl::StrCat("KV cell ", wrong - owners.begin(),
                                            " is in ", *wrong, " places"));
  }
  return free_ == static_cast<int>(free_cells_.size())
             ? absl::OkStatus()
             : absl::InternalError("free KV cells are miscounted");
}

}  // namespace tandem::engine
