// SPDX-License-Identifier: Apache-2.0
// Split or local: whether a prefill worker computes a prompt or the decode
// worker does it itself, in chunks mixed into its steps. One pure function;
// prediction of finish times will replace the length in it.

#ifndef TANDEM_ROUTER_SHORT_WAY_H_
#define TANDEM_ROUTER_SHORT_WAY_H_

#include "tandem/v1/inference.pb.h"

namespace tandem::router {

enum class Way { kSplit, kLocal };

struct ShortWayInput {
  v1::Placement placement = v1::PLACEMENT_AUTO;  // what the request asks for
  int history_tokens = 0;                        // prompt and output so far
  int decode_cached_tokens = 0;    // of those in the decode worker's cache
  bool prefill_available = false;  // one is alive, allowed, and not full
  bool suspect = false;            // was computing in a worker that crashed
  int max_local_tokens = 0;        // uncached tokens that are short
};

Way ChooseWay(const ShortWayInput& input);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_SHORT_WAY_H_
