// SPDX-License-Identifier: Apache-2.0
#include "router/short_way.h"

namespace tandem::router {

Way ChooseWay(const ShortWayInput& input) {
  // Slower, never down.
  if (!input.prefill_available) return Way::kLocal;
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
  const int uncached = input.history_tokens - input.decode_cached_tokens;
  return uncached <= input.max_local_tokens ? Way::kLocal : Way::kSplit;
}

}  // namespace tandem::router
