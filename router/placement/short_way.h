// SPDX-License-Identifier: Apache-2.0
// Split or local: whether a prefill worker computes a prompt or the decode
// worker does it itself, in chunks mixed into its steps. One pure function.
//
// What is short goes local: a handoff costs more. Beyond that both ways'
// finish is predicted from what the workers measured and have queued, and the
// streams that a local prompt holds up are counted with it: local is chosen
// where the sum of all delays is smaller, which takes a queue at the prefill
// worker, or a prefix that only the decode worker has, and few streams there.

#ifndef TANDEM_ROUTER_PLACEMENT_SHORT_WAY_H_
#define TANDEM_ROUTER_PLACEMENT_SHORT_WAY_H_

#include "router/placement/snapshot.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

enum class Way { kSplit, kLocal };

struct ShortWayInput {
  v1::Placement placement = v1::PLACEMENT_AUTO;  // what the request asks for
  int history_tokens = 0;                        // prompt and output so far
  // Alive, allowed, and not full; null: there is none.
  const WorkerView* prefill = nullptr;
  const WorkerView* decode = nullptr;
  bool suspect = false;      // was computing in a worker that crashed
  int max_local_tokens = 0;  // uncached tokens that are short
};

Way ChooseWay(const ShortWayInput& input);

// Seconds until the history is computed, and those that running streams lose.
// 0 where nothing is known. REQUIRES: a prefill worker.
double SplitDelay(const ShortWayInput& input);
double LocalDelay(const ShortWayInput& input);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PLACEMENT_SHORT_WAY_H_
