// SPDX-License-Identifier: Apache-2.0
#include "router/placement/short_way.h"

#include <algorithm>

namespace tandem::router {
namespace {

// A decode worker that has not prefilled yet is taken to be half as fast as
// the prefill worker: its chunks share steps with decodes.
constexpr double kAssumedShare = 0.5;

double Uncached(const ShortWayInput& input, const WorkerView& worker) {
  return std::max(0, input.history_tokens - worker.cached_tokens);
}

}  // namespace

double SplitDelay(const ShortWayInput& input) {
  const WorkerView& worker = *input.prefill;
  double rate = worker.tokens_per_second;
  if (rate <= 0) return 0;
  // One that idles may have been measured by short prompts, or in a busy
  // minute, and only work would show it: it is taken to be no slower.
  if (worker.queued_tokens == 0) {
    rate = std::max(rate, input.decode->tokens_per_second);
  }
  return (worker.queued_tokens + Uncached(input, worker)) / rate;
}

double LocalDelay(const ShortWayInput& input) {
  const WorkerView& worker = *input.decode;
  const double rate = worker.tokens_per_second > 0
                          ? worker.tokens_per_second
                          : kAssumedShare * input.prefill->tokens_per_second;
  if (rate <= 0) return 0;
  const double uncached = Uncached(input, worker);
  return (worker.queued_tokens + uncached * (1 + worker.running)) / rate;
}

Way ChooseWay(const ShortWayInput& input) {
  // Slower, never down.
  if (input.prefill == nullptr) return Way::kLocal;
  // A decode worker that crashes takes its whole batch along.
  if (input.suspect) return Way::kSplit;
  switch (input.placement) {
    case v1::PLACEMENT_SPLIT:
      return Way::kSplit;
    case v1::PLACEMENT_LOCAL:
      return Way::kLocal;
    default:
      break;
  }
  if (Uncached(input, *input.decode) <= input.max_local_tokens) {
    return Way::kLocal;
  }
  return LocalDelay(input) < SplitDelay(input) ? Way::kLocal : Way::kSplit;
}

}  // namespace tandem::router
