// SPDX-License-Identifier: Apache-2.0
// How many tokens to draft, so that drafts gain more than they cost: by how
// often a sequence's guesses were right lately, and by what steps with drafts
// took beside steps without.

#ifndef TANDEM_ENGINE_DRAFT_LENGTH_H_
#define TANDEM_ENGINE_DRAFT_LENGTH_H_

#include <array>

#include "absl/types/span.h"

namespace tandem::engine {

// The chance that a sequence's next guess is right, smoothed over what was
// seen. Guesses are compared with what is drawn whether or not a step
// verified them, so that a sequence without drafts is still known.
class DraftAcceptance {
 public:
  // `chance`: what is expected before anything was seen; `weight`: of the
  // newest guess.
  explicit DraftAcceptance(double chance = 0.5, double weight = 0.125)
      : weight_(weight), chance_(chance) {}
  void Saw(bool right) { chance_ += weight_ * ((right ? 1 : 0) - chance_); }
  double chance() const { return chance_; }

 private:
  double weight_;
  double chance_;
};

// What a step costs, measured: seconds of a step with so many drafts beside
// those of one without, by the number of its sequences.
class DraftCosts {
 public:
  // `draft_step`: of a step of the model that makes the guesses, in units of
  // one without drafts: what is assumed until it is measured. 0: they cost
  // nothing. What it takes is part of the seconds of a step with drafts.
  explicit DraftCosts(double draft_step = 0) : draft_step_(draft_step) {}

  // A step of `sequences` decodes, with `drafts` guesses in all.
  void Saw(int sequences, int drafts, double seconds);
  // Of such a step, in units of one without drafts.
  double Cost(int sequences, int drafts) const;

  // How many guesses, at most `most`, to verify of a sequence that is right by
  // `chance`: those with which the step gives most tokens by its cost. It has
  // `sequences`, gives `tokens` so far and holds `drafts` of others.
  int Length(int sequences, double tokens, int drafts, double chance,
             int most) const;
  // The same for all sequences of a step at once, where guesses of all are made
  // side by side. `lengths`: what each may have at most, and then what it gets;
  // at most `room` in all. False, and `lengths` untouched, where a step without
  // drafts is to be measured.
  bool Lengths(absl::Span<const double> chances, int sequences, int room,
               absl::Span<int> lengths) const;
  // Seconds of a step without drafts; 0: not measured.
  double PlainSeconds(int sequences) const {
    return batches_[static_cast<size_t>(BatchOf(sequences))].plain;
  }
  // Tokens that `drafts` guesses give: the accepted ones and the draw behind
  // them.
  static double Expected(int drafts, double chance);

 private:
  // Drafts 1 to 8 by themselves, then by powers of two.
  static constexpr int kSizes = 16;
  static constexpr int kBatches = 12;  // sequences by powers of two
  static int SizeOf(int drafts);
  static int BatchOf(int sequences);
  // What is assumed that so many drafts add.
  double Assumed(int sequences, int drafts) const;
  bool NeedsMeasure(int sequences) const;

  struct Batch {
    double plain = 0;  // seconds without drafts, smoothed; 0: not seen
    int since_plain = 0;
    std::array<double, kSizes> cost = {};  // 0: not seen
    std::array<int, kSizes> since = {};    // steps without drafts since then
  };
  const double draft_step_;
  std::array<Batch, kBatches> batches_ = {};
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_DRAFT_LENGTH_H_
