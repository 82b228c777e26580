// SPDX-License-Identifier: Apache-2.0
// Which steps the device executor refuses: those that are larger than what it
// has memory for, and those that name what is not there.

#include <algorithm>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "engine/device/device_executor.h"

namespace tandem::engine {
namespace {

absl::Status OutOfRange(std::string_view what, int64_t value, int64_t min,
                        int64_t max) {
  return absl::InvalidArgumentError(absl::StrCat("step: ", std::string(what),
                                                 " ", value, " is outside ",
                                                 min, " to ", max));
}

}  // namespace

absl::Status DeviceExecutor::Check(const Step& step) const {
  int64_t rows = 0;
  int64_t draws = 0;
  for (const StepEntry& entry : step.entries) {
    absl::Status status = CheckEntry(entry);
    if (status.ok()) status = CheckDraws(entry);
    if (status.ok()) status = CheckAttention(entry);
    if (!status.ok()) return status;
    rows += static_cast<int64_t>(entry.tokens.size());
    draws += static_cast<int64_t>(entry.draws.size());
  }
  for (const BlockCopy& copy : step.copies) {
    for (const int32_t block : {copy.from, copy.to}) {
      if (block >= 0 && block < NumBlockIds()) continue;
      return OutOfRange("a copy's block", block, 0, NumBlockIds() - 1);
    }
  }
  if (rows < 1 || rows > options_.max_rows) {
    return OutOfRange("rows", rows, 1, options_.max_rows);
  }
  const auto entries = static_cast<int64_t>(step.entries.size());
  if (entries > options_.max_sequences) {
    return OutOfRange("entries", entries, 1, options_.max_sequences);
  }
  if (draws > options_.draws()) {
    return OutOfRange("draws", draws, 0, options_.draws());
  }
  return absl::OkStatus();
}

absl::Status DeviceExecutor::CheckEntry(const StepEntry& entry) const {
  const auto count = static_cast<int64_t>(entry.tokens.size());
  if (count < 1) return OutOfRange("an entry's tokens", count, 1, INT32_MAX);
  if (entry.fed >= 0) {
    if (newest_ == nullptr || newest_->step == nullptr) {
      return absl::FailedPreconditionError(
          "step: an entry is fed by the step before, which has ended");
    }
    const int drawn = newest_->plan.drawn();
    if (count != 1) return OutOfRange("a fed entry's tokens", count, 1, 1);
    if (entry.fed >= drawn) return OutOfRange("fed", entry.fed, 0, drawn - 1);
  }
  if (entry.position < 0 || entry.position + count > model_->max_positions()) {
    return OutOfRange("an entry's last position", entry.position + count - 1,
                      count - 1, model_->max_positions() - 1);
  }
  const int block_size = options_.block_size;
  const int adapters = options_.loras == nullptr ? 0 : options_.loras->count();
  if (entry.adapter < -1 || entry.adapter >= adapters) {
    return OutOfRange("adapter", entry.adapter, -1, adapters - 1);
  }
  const int64_t needed = (entry.position + count + block_size - 1) / block_size;
  const int64_t most = MaxBlocksPerEntry();
  const auto blocks = static_cast<int64_t>(entry.block_table.size());
  if (blocks < needed || blocks > most) {
    return OutOfRange("an entry's blocks", blocks, needed, most);
  }
  const int window = model_->spec().common_window();
  const int seen = window == 0 ? 0 : std::max(0, entry.position - window + 1);
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t block = entry.block_table[static_cast<size_t>(b)];
    const bool behind = block == -1 && b < seen / block_size;
    if (!behind && (block < 0 || block >= NumBlockIds())) {
      return OutOfRange("block", block, 0, NumBlockIds() - 1);
    }
    for (int part = 0; !behind && part < blocks_.parts(); ++part) {
      if (b < blocks_.First(part, entry.position)) continue;
      if (blocks_.CellOf(block, part) < 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            "step: block ", block, " has let go what its rows see"));
      }
    }
  }
  const int vocab = model_->spec().vocab_size;
  for (const int32_t token : entry.tokens) {
    if (token < 0 || token >= vocab) {
      return OutOfRange("token id", token, 0, vocab - 1);
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceExecutor::CheckDraws(const StepEntry& entry) const {
  const auto rows = static_cast<int64_t>(entry.tokens.size());
  const auto draws = static_cast<int64_t>(entry.draws.size());
  if (draws > rows) return OutOfRange("an entry's draws", draws, 0, rows);
  const int vocab = model_->spec().vocab_size;
  for (const RowDraw& draw : entry.draws) {
    const auto edits = static_cast<int64_t>(draw.edits.size());
    if (edits > vocab) return OutOfRange("a draw's edits", edits, 0, vocab);
    for (const kernels::LogitEdit& edit : draw.edits) {
      if (edit.token_id < 0 || edit.token_id >= vocab) {
        return OutOfRange("an edit's token id", edit.token_id, 0, vocab - 1);
      }
    }
    if (draw.given >= vocab) {
      return OutOfRange("a given token id", draw.given, -1, vocab - 1);
    }
    if (draw.constrained && entry.constraint == nullptr) {
      return absl::InvalidArgumentError(
          "step: a draw is constrained, and its entry has no constraint");
    }
    if (draw.given_logprobs > kernels::kMaxTopLogprobs) {
      return OutOfRange("given_logprobs", draw.given_logprobs, -1,
                        kernels::kMaxTopLogprobs);
    }
  }
  if (entry.sampling.logprobs > kernels::kMaxTopLogprobs) {
    return OutOfRange("logprobs", entry.sampling.logprobs, -1,
                      kernels::kMaxTopLogprobs);
  }
  return absl::OkStatus();
}

absl::Status DeviceExecutor::CheckAttention(const StepEntry& entry) const {
  if (entry.attention == nullptr) return absl::OkStatus();
  if (entry.draws.empty()) {
    return absl::InvalidArgumentError(
        "step: an entry asks for attention weights and draws no token");
  }
  int32_t least = 0;
  const int32_t last = model_->spec().layers - 1;
  for (const int32_t layer : entry.attention->layers) {
    if (layer < least || layer > last) {
      return OutOfRange("a layer of attention weights", layer, least, last);
    }
    least = layer + 1;
  }
  const int64_t positions =
      entry.position + static_cast<int64_t>(entry.tokens.size());
  const int64_t count = entry.attention->rows() * positions;
  if (count < 1 || count > kMaxAttentionWeights) {
    return OutOfRange("attention weights", count, 1, kMaxAttentionWeights);
  }
  return absl::OkStatus();
}

}  // namespace tandem::engine
