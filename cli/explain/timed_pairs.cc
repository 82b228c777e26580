// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/timed_pairs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem::explain {
namespace {

double Seconds(const Timing& timing) {
  return timing.with_total() + timing.without_total();
}

}  // namespace

double PredictSeconds(const engine::ModelSpec& spec, const Formats& formats,
                      const Timing& known, Lengths lengths) {
  const Work work = GenerationWork(spec, formats, lengths, /*cached=*/false);
  const Work before =
      GenerationWork(spec, formats, known.lengths, /*cached=*/false);
  return known.without_total() * work.flops() / before.flops() +
         known.prefill_per_token() * static_cast<double>(lengths.prompt) +
         known.decode_per_token() * static_cast<double>(lengths.output - 1);
}

engine::ModelSpec WithPositionsForPairs(engine::ModelSpec spec) {
  using Kind = engine::RopeSpec::Kind;
  if (spec.rope.kind == Kind::kNone || spec.rope.kind == Kind::kDynamic ||
      spec.rope.kind == Kind::kLongRope) {
    return spec;
  }
  for (const Lengths lengths : kQuotedLengths) {
    spec.max_positions = std::max(
        spec.max_positions, static_cast<int>(lengths.prompt + lengths.output));
  }
  return spec;
}

absl::StatusOr<std::vector<TimedPair>> TimePairs(
    const engine::ModelSpec& spec, const Formats& formats,
    const Timing& request, double seconds,
    absl::FunctionRef<absl::StatusOr<Timing>(Lengths)> time) {
  std::vector<TimedPair> pairs;
  Timing known = request;  // the longest one
  double left = seconds;
  for (const Lengths lengths : kQuotedLengths) {
    TimedPair& pair = pairs.emplace_back(TimedPair{.lengths = lengths});
    const int64_t positions = lengths.prompt + lengths.output;
    if (lengths == request.lengths) {
      pair.timing = request;
      continue;
    }
    if (positions > spec.max_positions) {
      pair.left_out = absl::StrCat(positions, " positions, the model has ",
                                   spec.max_positions);
      continue;
    }
    const double predicted = PredictSeconds(spec, formats, known, lengths);
    if (predicted > left) {
      pair.left_out =
          absl::StrFormat("about %.*f s, of --pairs-seconds are %.1f left",
                          predicted < 10 ? 1 : 0, predicted, left);
      continue;
    }
    absl::StatusOr<Timing> timed = time(lengths);
    if (!timed.ok()) return timed.status();
    left = std::max(0.0, left - Seconds(*timed));
    if (Seconds(*timed) > Seconds(known)) known = *timed;
    pair.timing = *std::move(timed);
  }
  return pairs;
}

}  // namespace tandem::explain
