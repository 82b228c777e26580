// SPDX-License-Identifier: Apache-2.0
// Where the parts of a block lie. In a model of which some layers have a window
// and others see all, layers are grouped (layer_parts.h); a block has a part
// for each group, and each part is in a cell of the cache. What layers with a
// window keep of a block is let go by itself once it is behind the window, and
// its cells become parts of other blocks. In any other model a block is one
// part, and its own cell.

#ifndef TANDEM_ENGINE_KV_BLOCK_CELLS_H_
#define TANDEM_ENGINE_KV_BLOCK_CELLS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace tandem::engine {

// Parts of a block: first those of layers that see all positions.
struct KvParts {
  int full = 1;
  int windowed = 0;

  int count() const { return full + windowed; }
  bool operator==(const KvParts&) const = default;
};

// How far layers look back, and so what is let go of a sequence's blocks while
// it runs: of those wholly behind the window, all where every layer has it, and
// else the windowed parts.
struct KvWindow {
  // NOLINTNEXTLINE(google-explicit-constructor): most are a number
  KvWindow(int seen = 0, KvParts block_parts = {})
      : positions(seen), parts(block_parts) {}

  int positions = 0;  // that are seen, a row's own included; 0: all
  KvParts parts;

  bool frees_blocks() const { return positions > 0 && parts.windowed == 0; }
  bool frees_parts() const { return positions > 0 && parts.windowed > 0; }
  // The first position that layers with a window see from `position`.
  int FirstSeen(int position) const {
    return positions == 0 ? 0 : std::max(0, position - positions + 1);
  }
};

class BlockCells {
 public:
  // Cells for `whole` blocks with all their parts.
  BlockCells(int whole, KvParts parts);

  const KvParts& parts() const { return parts_; }
  int num_cells() const { return num_cells_; }
  // As many blocks as there may be when all have let go what is windowed.
  int num_blocks() const { return num_cells_ / parts_.full; }
  int free() const { return free_; }

  // The cell of a part, -1 of one that was let go.
  int32_t at(int32_t block, int part) const {
    return cells_.empty() ? block : cells_[Index(block, part)];
  }
  // Whether a block that has cells has those of its windowed parts.
  bool whole(int32_t block) const {
    return parts_.windowed == 0 || at(block, parts_.full) >= 0;
  }
  // How many it has, if it has any.
  int held(int32_t block) const {
    return whole(block) ? parts_.count() : parts_.full;
  }

  // Cells that a block needs, with its windowed parts or without.
  int Needed(bool whole) const { return whole ? parts_.count() : parts_.full; }
  // Gives a block that has no cells those. REQUIRES: so many are free.
  void Take(int32_t block, bool whole);
  void DropWindowed(int32_t block);
  void DropAll(int32_t block);

  // Every cell free or of one block: INTERNAL with the first contradiction.
  absl::Status CheckInvariants() const;

 private:
  size_t Index(int32_t block, int part) const {
    return static_cast<size_t>(block) * static_cast<size_t>(parts_.count()) +
           static_cast<size_t>(part);
  }
  void Drop(int32_t block, int begin, int end);

  const KvParts parts_;
  const int num_cells_;
  int free_;
  std::vector<int32_t> cells_;  // [num_blocks][parts]; empty: one part each
  std::vector<int32_t> free_cells_;  // a stack, where there are cells_
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_BLOCK_CELLS_H_
