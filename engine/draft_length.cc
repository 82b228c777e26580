// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_length.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace tandem::engine {
namespace {

constexpr double kNewestStepWeight = 0.2;  // of the newest step
// Of a row that was not measured yet: little, so that it is tried.
constexpr double kUnseenRow = 0.02;
// A step without drafts drives what was measured so far towards that: one slow
// step is forgotten in some hundred, and trying again costs a percent or so.
constexpr double kForget = 0.002;
// What is then measured counts as it is: mixed with what was forgotten it would
// seem worth another try at once.
constexpr int kStaleAfter = 16;
// Drafts must promise so much: what was measured is noisy.
constexpr double kLeastGain = 1.1;
// After so many steps with drafts one without is measured again.
constexpr int kPlainEvery = 64;

// By which guesses are taken, the likeliest first.
constexpr double kLeastChances[] = {0.9, 0.8, 0.7,  0.6, 0.5,  0.4,
                                    0.3, 0.2, 0.15, 0.1, 0.05, 0.02};

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

double DraftCosts::Assumed(int sequences, int drafts) const {
  return kUnseenRow * drafts + draft_step_ * drafts / sequences;
}

void DraftCosts::Saw(int sequences, int drafts, double seconds) {
  Batch& batch = batches_[static_cast<size_t>(BatchOf(sequences))];
  if (drafts == 0) {
    batch.since_plain = 0;
    batch.plain = batch.plain == 0 ? seconds
                                   : (1 - kNewestStepWeight) * batch.plain +
                                         kNewestStepWeight * seconds;
    for (int size = 0; size < kSizes; ++size) {
      double& cost = batch.cost[static_cast<size_t>(size)];
      ++batch.since[static_cast<size_t>(size)];
      if (cost == 0) continue;
      cost += kForget * (1 + Assumed(sequences, DraftsOf(size)) - cost);
    }
    return;
  }
  ++batch.since_plain;
  if (batch.plain == 0) return;
  const auto size = static_cast<size_t>(SizeOf(drafts));
  double& cost = batch.cost[size];
  const bool stale = std::exchange(batch.since[size], 0) >= kStaleAfter;
  // Not below 1: what was measured without drafts was disturbed then.
  // Above what guesses can give nothing differs.
  const double seen = std::clamp(seconds / batch.plain, 1.0, 2.0 + drafts);
  const double weight = cost == 0 || stale ? 1 : kNewestStepWeight;
  cost = (1 - weight) * cost + weight * seen;
}

double DraftCosts::Cost(int sequences, int drafts) const {
  const Batch& batch = batches_[static_cast<size_t>(BatchOf(sequences))];
  // From the nearest one below that was seen; fewer cost no more.
  int size = SizeOf(drafts);
  while (size >= 0 && batch.cost[static_cast<size_t>(size)] == 0) --size;
  if (size == SizeOf(drafts)) return batch.cost[static_cast<size_t>(size)];
  if (size < 0) return 1 + Assumed(sequences, drafts);
  return batch.cost[static_cast<size_t>(size)] +
         Assumed(sequences, drafts - DraftsOf(size));
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

// What is measured needs a measure.
bool DraftCosts::NeedsMeasure(int sequences) const {
  const Batch& batch = batches_[static_cast<size_t>(BatchOf(sequences))];
  return batch.plain == 0 || batch.since_plain >= kPlainEvery;
}

// A row costs the same whosever it is, so of all ways to spend so many the best
// takes the likeliest.
bool DraftCosts::Lengths(absl::Span<const double> chances, int sequences,
                         int room, absl::Span<int> lengths) const {
  if (NeedsMeasure(sequences)) return false;
  double best = kLeastGain * sequences;
  double least = 2;  // no guess is so likely
  for (const double limit : kLeastChances) {
    int drafts = 0;
    double tokens = sequences;
    for (size_t i = 0; i < chances.size(); ++i) {
      double all_right = chances[i];
      for (int l = 0; l < lengths[i] && drafts < room && all_right >= limit;
           ++l) {
        ++drafts;
        tokens += all_right;
        all_right *= chances[i];
      }
    }
    if (drafts == 0) continue;
    const double rate = tokens / Cost(sequences, drafts);
    if (rate <= best) continue;
    best = rate;
    least = limit;
  }
  for (size_t i = 0; i < chances.size(); ++i) {
    double all_right = chances[i];
    int length = 0;
    for (; length < lengths[i] && length < room && all_right >= least;
         ++length) {
      all_right *= chances[i];
    }
    lengths[i] = length;
    room -= length;
  }
  return true;
}

int DraftCosts::Length(int sequences, double tokens, int drafts, double chance,
                       int most) const {
  if (NeedsMeasure(sequences)) return 0;
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
