// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_length.h"

#include <algorithm>
#include <bit>

namespace tandem::engine {
namespace {

constexpr double kWeight = 0.2;  // of the newest step
// Of a row that was not measured yet: little, so that it is tried.
constexpr double kUnseenRow = 0.02;
// A step without drafts drives what was measured so far towards that: one slow
// step is forgotten in a few hundred, and trying again costs a few in a
// thousand.
constexpr double kForget = 0.005;
// Drafts must promise so much: what was measured is noisy.
constexpr double kLeastGain = 1.1;
// After so many steps with drafts one without is measured again.
constexpr int kPlainEvery = 64;

double Unseen(int drafts) { return 1 + kUnseenRow * drafts; }

// The largest number of drafts of a size.
int DraftsOf(int size) {
  return size < 8 ? size + 1 : 8 << std::clamp(size - 7, 1, 8);
}

}  // namespace

int DraftCosts::SizeOf(int drafts) {
  if (drafts <= 8) return drafts - 1;
  const int width = std::bit_width(static_cast<unsigned>(drafts - 1));
  return std::min(kSizes - 1, width + 4);
}

int DraftCosts::BatchOf(int sequences) {
  const int width = std::bit_width(static_cast<unsigned>(sequences));
  return std::min(kBatches, width) - 1;
}

void DraftCosts::Saw(int sequences, int drafts, double seconds) {
  Batch& batch = batches_[static_cast<size_t>(BatchOf(sequences))];
  if (drafts == 0) {
    batch.since_plain = 0;
    batch.plain = batch.plain == 0
                      ? seconds
                      : (1 - kWeight) * batch.plain + kWeight * seconds;
    for (int size = 0; size < kSizes; ++size) {
      double& cost = batch.cost[static_cast<size_t>(size)];
      if (cost > 0) cost += kForget * (Unseen(DraftsOf(size)) - cost);
    }
    return;
  }
  ++batch.since_plain;
  if (batch.plain == 0) return;
  double& cost = batch.cost[static_cast<size_t>(SizeOf(drafts))];
  // Not below 1: what was measured without drafts was disturbed then.
  const double seen = std::max(1.0, seconds / batch.plain);
  cost = cost == 0 ? seen : (1 - kWeight) * cost + kWeight * seen;
}

double DraftCosts::Cost(int sequences, int drafts) const {
  const Batch& batch = batches_[static_cast<size_t>(BatchOf(sequences))];
  // From the nearest one below that was seen; fewer cost no more.
  int size = SizeOf(drafts);
  while (size >= 0 && batch.cost[static_cast<size_t>(size)] == 0) --size;
  if (size == SizeOf(drafts)) return batch.cost[static_cast<size_t>(size)];
  if (size < 0) return Unseen(drafts);
  return batch.cost[static_cast<size_t>(size)] +
         kUnseenRow * (drafts - DraftsOf(size));
}

double DraftCosts::Expected(int drafts, double chance) {
  double tokens = 1;
  double all_right = 1;
  for (int i = 0; i < drafts; ++i) {
    all_right *= chance;
    tokens += all_right;
  }
  return tokens;
}

int DraftCosts::Length(int sequences, double tokens, int drafts, double chance,
                       int most) const {
  const Batch& batch = batches_[static_cast<size_t>(BatchOf(sequences))];
  // What is measured needs a measure.
  if (batch.plain == 0 || batch.since_plain >= kPlainEvery) return 0;
  const double now = drafts == 0 ? 1 : Cost(sequences, drafts);
  double best = kLeastGain * tokens / now;
  int length = 0;
  double gained = 0;
  double all_right = 1;
  for (int i = 1; i <= most; ++i) {
    all_right *= chance;
    gained += all_right;
    const double rate = (tokens + gained) / Cost(sequences, drafts + i);
    if (rate > best) {
      best = rate;
      length = i;
    }
  }
  return length;
}

}  // namespace tandem::engine
