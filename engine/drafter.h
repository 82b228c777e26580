// SPDX-License-Identifier: Apache-2.0
// What guesses the tokens that follow a sequence, to be verified in one step:
// see engine/scheduler.cc. A wrong guess costs time, never a token.

#ifndef TANDEM_ENGINE_DRAFTER_H_
#define TANDEM_ENGINE_DRAFTER_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace tandem::engine {

// Of one sequence.
class Drafter {
 public:
  virtual ~Drafter() = default;
  // Writes at most out.size() guesses of what follows `history`, the first
  // that of the next token; returns how many. `history` is that of the call
  // before, with or without further tokens.
  virtual int Propose(absl::Span<const int32_t> history,
                      absl::Span<int32_t> out) = 0;
};

// Prompt look-up (Saxena, "Prompt lookup decoding", 2023): what followed the
// longest suffix of the history, of `min` to `max` tokens, where it stood
// before; the latest of equally long ones. Guesses that run into the end of
// the history go on with the guesses themselves, so that a period repeats.
//
// An index grows with the history: chains of places with an equal hash of the
// `min` tokens before them, as in LZ77 coders. A call costs a few look-ups,
// whatever the length of the history.
class NgramDrafter final : public Drafter {
 public:
  // REQUIRES: 1 <= min <= max.
  NgramDrafter(int min, int max) : min_(min), max_(max) {}
  int Propose(absl::Span<const int32_t> history,
              absl::Span<int32_t> out) override;

 private:
  void Index(absl::Span<const int32_t> history);
  void Grow(absl::Span<const int32_t> history);
  void Insert(absl::Span<const int32_t> history, int end);
  int32_t& Head(absl::Span<const int32_t> history, int end);
  // Tokens before `end` that equal the history's last ones, at most max_.
  int MatchedBefore(absl::Span<const int32_t> history, int end) const;

  const int min_;
  const int max_;
  // By hash: the latest place, behind its tokens; -1: none. A power of two.
  std::vector<int32_t> heads_;
  // [indexed places]: the place before it in its chain, or -1.
  std::vector<int32_t> previous_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_DRAFTER_H_
