// SPDX-License-Identifier: Apache-2.0
// Which tokens one sequence may draw, token by token: a grammar that its output
// follows. Unlike logit rules, which are lists of ids, this is a mask over the
// whole vocabulary, so it is made beside the step that needs it and not on the
// loop.

#ifndef TANDEM_ENGINE_TOKEN_CONSTRAINT_H_
#define TANDEM_ENGINE_TOKEN_CONSTRAINT_H_

#include <cstdint>

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

  // What may follow the tokens so far, then each of `guesses` behind those
  // before it: masks as kernels/sampling.h has them, [guesses + 1, words], all
  // of them 0 at first. A mask behind a guess that may not come is of no
  // matter. After an error, so are all; status() tells.
  virtual void FillMasks(absl::Span<const int32_t> guesses,
                         absl::Span<uint32_t> masks) = 0;

  // The sequence drew `token`. True: no more may come, the output is whole.
  virtual bool Append(int32_t token) = 0;

  // Not OK: what was drawn last is worth nothing, and the sequence is over.
  virtual absl::Status status() const = 0;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TOKEN_CONSTRAINT_H_
