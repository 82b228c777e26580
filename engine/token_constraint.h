// SPDX-License-Identifier: Apache-2.0
// Which tokens one sequence may draw, token by token: a grammar that its output
// follows. Unlike logit rules, which are lists of ids, this is a mask over the
// whole vocabulary, so it is made beside the step that needs it and not on the
// loop.

#ifndef TANDEM_ENGINE_TOKEN_CONSTRAINT_H_
#define TANDEM_ENGINE_TOKEN_CONSTRAINT_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace tandem::engine {

// A function of what it was made of and of the tokens appended: nothing else
// changes a mask. FillMasks is called by the executor, on any thread, between
// the submission of a step and its end; everything else on the loop, and never
// meanwhile.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  // False while it is still on its way behind the tokens that it was made
  // with: nothing else may be asked of it, and its sequence is in no step.
  virtual bool ready() const { return true; }
  // To be called on the loop, once, when it has become so.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): who is late keeps it
  virtual void OnReady(std::function<void()> ready) {}

  // What may follow the tokens so far, then each of `guesses` behind those
  // before it: masks as kernels/sampling.h has them, [guesses + 1, words], all
  // of them 0 at first. It may stop behind any guess; guessed() tells. After an
  // error at the first mask all are of no matter; status() tells.
  virtual void FillMasks(absl::Span<const int32_t> guesses,
                         absl::Span<uint32_t> masks) = 0;

  // Behind how many of its guesses the last FillMasks said what may be drawn:
  // what was drawn behind more is worth nothing. That of a sequence alone
  // would have said it all, so that guesses never change a token.
  virtual int guessed() const = 0;

  // The sequence drew `token`. True: no more may come, the output is whole.
  virtual bool Append(int32_t token) = 0;

  // Not OK: what was drawn last is worth nothing, and the sequence is over.
  virtual absl::Status status() const = 0;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TOKEN_CONSTRAINT_H_
