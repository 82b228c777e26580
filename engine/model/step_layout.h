// SPDX-License-Identifier: Apache-2.0
// What a step's operations know about their rows, laid out in one piece of
// memory that goes to the device in one copy:
//
//   token_ids [rows], fed [rows], positions [rows], slots [parts][rows],
//   spans [parts][entries], row_ids [draws], params [draws],
//   drawn_positions [draws], drawn_spans [parts][entries that draw],
//   block_tables [sum]
//
// (parts of a block, each with its slots and tables: block_cells.h; the rows
// that draw are rows of their own where they alone go on: none of a step that
// may be filled up)
//
// and, where an entry has an adapter, those of all rows and draws,
//
//   adapters [rows], drawn_adapters [draws]
//
// each aligned to 64 bytes. A step of decodes may be filled up with rows that
// belong to nobody, so that all but the length of the tables lies at the same
// place in every step of that size. Edits of logits and masks are most often
// none and can be very many: they have memory of their own.

#ifndef TANDEM_ENGINE_MODEL_STEP_LAYOUT_H_
#define TANDEM_ENGINE_MODEL_STEP_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/executor.h"
#include "engine/kv/block_cells.h"
#include "kernels/backend.h"

namespace tandem::engine {

// The largest step that a plan must hold.
struct StepLimits {
  int rows = 0;
  int entries = 0;
  int draws = 0;
  int blocks_per_entry = 0;
};

// How blocks lie in the cache.
struct StepBlocks {
  int size = 0;                       // positions
  const BlockCells* cells = nullptr;  // null: each is its own cell
  KvWindow window = {};               // of windowed parts

  int parts() const { return cells == nullptr ? 1 : cells->parts().count(); }
  int32_t CellOf(int32_t block, int part) const {
    return cells == nullptr ? block : cells->at(block, part);
  }
  bool windowed(int part) const {
    return cells != nullptr && part >= cells->parts().full;
  }
  // The first block of a part that a row at `position` sees.
  int First(int part, int position) const {
    return windowed(part) ? window.FirstSeen(position) / size : 0;
  }
};

class StepPlan {
 public:
  // Bytes that a step within the limits takes at most.
  static size_t MaxBytes(const StepLimits& limits, const StepBlocks& blocks);

  void Reserve(const StepLimits& limits, const StepBlocks& blocks);
  // `memory`, of MaxBytes, outlives the plan: from which a device may copy
  // while the caller goes on (Backend::AllocateHost).
  void Reserve(std::byte* memory, const StepBlocks& blocks);

  // Lays out a step within the limits. Rows, entries and draws are filled up to
  // `least` each; a filler has slot -1, an empty span, and draws greedily from
  // row 0. Allocates nothing. REQUIRES if `least` is not 0: every entry has one
  // token and one draw.
  void Fill(const Step& step, int least = 0);

  const std::byte* data() const { return bytes_; }
  size_t size() const { return size_; }

  // With pointers into a copy of the plan on the device at `device`: the rows
  // as layers of one part see them.
  kernels::Rows DeviceRows(const std::byte* device, int part = 0) const;
  // The rows that draw, as layers of one part see them that append nothing.
  // REQUIRES: Fill was not to fill up.
  kernels::Rows DeviceDrawnRows(const std::byte* device, int part = 0) const;
  const int32_t* DeviceRowIds(const std::byte* device) const;
  const kernels::SampleParams* DeviceParams(const std::byte* device) const;
  // Slots of rows, and of the rows that draw, -1 without one. REQUIRES:
  // has_adapters(), some entry has one.
  const int32_t* DeviceAdapters(const std::byte* device) const;
  const int32_t* DeviceDrawnAdapters(const std::byte* device) const;
  bool has_adapters() const { return has_adapters_; }
  // Fillers not counted.
  int drawn() const { return drawn_; }
  // Edits of all that draw, which params refer to.
  int num_edits() const { return num_edits_; }
  static void CopyEdits(const Step& step, kernels::LogitEdit* out);
  // Masks of all constrained draws, in their order.
  int num_masks() const { return num_masks_; }

 private:
  template <typename T>
  T* Place(size_t count, size_t* offset);
  void FillRows(const Step& step, int least);
  void FillDraws(const Step& step, int least);
  void FillTables(const Step& step);
  void FillAdapters(const Step& step);

  StepBlocks blocks_;
  std::vector<std::byte> own_;  // unless the memory is the caller's
  std::byte* bytes_ = nullptr;
  size_t size_ = 0;
  int rows_ = 0;
  int entries_ = 0;
  int drawn_ = 0;
  int drawing_ = 0;  // entries that draw
  int num_edits_ = 0;
  int num_masks_ = 0;
  size_t token_ids_ = 0;  // offsets
  size_t fed_ = 0;
  size_t positions_ = 0;
  size_t slots_ = 0;
  size_t spans_ = 0;
  size_t tables_ = 0;
  size_t row_ids_ = 0;
  size_t params_ = 0;
  size_t drawn_positions_ = 0;
  size_t drawn_spans_ = 0;
  bool has_adapters_ = false;
  size_t adapters_ = 0;
  size_t drawn_adapters_ = 0;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_MODEL_STEP_LAYOUT_H_
