// SPDX-License-Identifier: Apache-2.0
// The pairs of lengths that the literature quotes, timed where that is quick:
// how long the next one takes is known from the longest one before.

#ifndef TANDEM_CLI_EXPLAIN_TIMED_PAIRS_H_
#define TANDEM_CLI_EXPLAIN_TIMED_PAIRS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "cli/explain/counts.h"
#include "cli/explain/timing.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::explain {

struct TimedPair {
  Lengths lengths;
  std::optional<Timing> timing = std::nullopt;
  std::string left_out = {};  // why there is none
};

// Of both ways together. Without a cache steps wait for arithmetic, and with
// one each takes about as long as the next.
double PredictSeconds(const engine::ModelSpec& spec, const Formats& formats,
                      const Timing& known, Lengths lengths);

// `spec` with positions for all of kQuotedLengths, unless how many there are
// changes what is computed: a step beyond a model's context is the same work.
engine::ModelSpec WithPositionsForPairs(engine::ModelSpec spec);

// kQuotedLengths, shortest first. Left out is what the model has no positions
// for, and what would make all of them take more than `seconds`. `request` was
// timed before, and is not timed again if it is one of them.
absl::StatusOr<std::vector<TimedPair>> TimePairs(
    const engine::ModelSpec& spec, const Formats& formats,
    const Timing& request, double seconds,
    absl::FunctionRef<absl::StatusOr<Timing>(Lengths)> time);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_TIMED_PAIRS_H_
