// SPDX-License-Identifier: Apache-2.0
// What a worker does for requests whose output must match something
// (StructuredParams): a grammar is compiled once per call, beside the loop and
// before the call is opened, and followed by a constraint of its own in every
// stay in the engine. The cores see these interfaces; a simulation has grammars
// of its own.

#ifndef TANDEM_WORKER_GRAMMARS_H_
#define TANDEM_WORKER_GRAMMARS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/token_constraint.h"
#include "tandem/v1/generation.pb.h"

namespace tandem::worker {

// Of a call that the grammar of its request ends with such an error, its
// domain's reason: no other worker would do better.
inline constexpr char kStructuredReason[] = "STRUCTURED_FAILED";

// One call's grammar. Used on the loop.
class CallGrammar {
 public:
  virtual ~CallGrammar() = default;
  // Behind the tokens of an output so far, cheaply if they begin with those of
  // the order. What cannot follow them shows as the constraint's status.
  virtual std::unique_ptr<engine::TokenConstraint> Follow(
      absl::Span<const int32_t> output) const = 0;
  // Whether nothing can follow the output of the order. Of a long one it may
  // not be known: then false, and only end tokens will be drawn if it is so.
  virtual bool IsWhole() const = 0;
};

// What one call wants compiled.
struct GrammarOrder {
  v1::StructuredParams params;
  std::vector<int32_t> output;  // what it will be followed behind first
  std::string party;            // parties take turns: see Compile
};

class Grammars {
 public:
  using Done =
      absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<CallGrammar>>)>;
  virtual ~Grammars() = default;
  // Calls `done` on the loop, later, unless the order, whose number (never 0)
  // is returned, is cancelled before. INVALID_ARGUMENT, STRUCTURED_FAILED says
  // what is wrong; RESOURCE_EXHAUSTED, QUEUE_FULL, that there is too much to
  // do. Between two orders of one party comes one of another, if any waits.
  virtual uint64_t Compile(GrammarOrder order, Done done) = 0;
  // No-op for one that was called back.
  virtual void Cancel(uint64_t number) = 0;
};

// Routers wait 5 s for a call's first answer: a worker that has not come to its
// grammar refuses it before, so that it is not taken for lost.
inline constexpr absl::Duration kGrammarLimit = absl::Milliseconds(2500);
absl::Status GrammarOverdue();

// What both workers check before: what excludes a grammar, and that there is
// one at all. `offered`: the worker has Grammars.
absl::Status CheckStructured(const v1::SamplingParams& sampling, int max_tokens,
                             bool offered);

// The constraint of a call without a grammar is none.
inline std::unique_ptr<engine::TokenConstraint> Follow(
    const CallGrammar* grammar, absl::Span<const int32_t> output) {
  return grammar == nullptr ? nullptr : grammar->Follow(output);
}

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_GRAMMARS_H_
