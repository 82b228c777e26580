// SPDX-License-Identifier: Apache-2.0
#include "engine/drafter.h"

#include <algorithm>
#include <bit>

namespace tandem::engine {
namespace {

constexpr int kMaxVisits = 32;  // places looked at in one chain
constexpr size_t kFewHeads = 1024;

}  // namespace

// Of the `min_` tokens before `end`.
int32_t& NgramDrafter::Head(absl::Span<const int32_t> history, int end) {
  uint64_t hash = 0;
  for (int i = end - min_; i < end; ++i) {
    hash = (hash ^ static_cast<uint32_t>(history[static_cast<size_t>(i)])) *
           0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return heads_[hash & (heads_.size() - 1)];
}

void NgramDrafter::Insert(absl::Span<const int32_t> history, int end) {
  int32_t previous = -1;
  if (end >= min_) {
    int32_t& head = Head(history, end);
    previous = head;
    head = end;
  }
  previous_[static_cast<size_t>(end)] = previous;
}

void NgramDrafter::Grow(absl::Span<const int32_t> history) {
  heads_.assign(std::max(kFewHeads, std::bit_ceil(2 * history.size())), -1);
  previous_.reserve(heads_.size());
  for (int end = 0; end < static_cast<int>(previous_.size()); ++end) {
    Insert(history, end);
  }
}

// All places that a token follows.
void NgramDrafter::Index(absl::Span<const int32_t> history) {
  if (history.size() > heads_.size()) Grow(history);
  while (previous_.size() < history.size()) {
    previous_.push_back(-1);
    Insert(history, static_cast<int>(previous_.size()) - 1);
  }
}

int NgramDrafter::MatchedBefore(absl::Span<const int32_t> history,
                                int end) const {
  const int most = std::min(max_, end);
  int matched = 0;
  while (matched < most &&
         history[static_cast<size_t>(end - 1 - matched)] ==
             history[history.size() - 1 - static_cast<size_t>(matched)]) {
    ++matched;
  }
  return matched;
}

int NgramDrafter::Propose(absl::Span<const int32_t> history,
                          absl::Span<int32_t> out) {
  Index(history);
  const int length = static_cast<int>(history.size());
  if (length < min_ || out.empty()) return 0;
  int best = min_ - 1;
  int place = -1;
  int end = Head(history, length);
  for (int i = 0; i < kMaxVisits && end >= 0 && best < max_; ++i) {
    const int matched = MatchedBefore(history, end);
    if (matched > best) {
      best = matched;
      place = end;
    }
    end = previous_[static_cast<size_t>(end)];
  }
  if (place < 0) return 0;
  for (int i = 0; i < static_cast<int>(out.size()); ++i) {
    const int from = place + i;
    out[static_cast<size_t>(i)] = from < length
                                      ? history[static_cast<size_t>(from)]
                                      : out[static_cast<size_t>(from - length)];
  }
  return static_cast<int>(out.size());
}

}  // namespace tandem::engine
