// SPDX-License-Identifier: Apache-2.0
// The cluster as a placement policy sees it, for one request at one moment.
// Only workers that may take the request are in it.

#ifndef TANDEM_ROUTER_PLACEMENT_SNAPSHOT_H_
#define TANDEM_ROUTER_PLACEMENT_SNAPSHOT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tandem::router {

struct WorkerView {
  std::string worker_id;
  // As the worker said last, plus what this router gave it since.
  int running = 0;        // sequences in its steps
  int waiting = 0;        // sequences before their first step
  int queued_tokens = 0;  // prompt tokens not yet computed
  int max_num_seqs = 1;   // sequences per step at most
  int num_blocks = 1;
  int blocks_available = 0;      // free or evictable
  int cached_tokens = 0;         // of this request's history, by its cache
  double tokens_per_second = 0;  // measured prefill rate; 0: not known
  bool rate_is_old = false;      // it has taken no step for a while
};

struct Snapshot {
  std::vector<WorkerView> prefill;
  std::vector<WorkerView> decode;
  // [prefill.size() * decode.size()]: whether p and d may work together, at
  // p * decode.size() + d.
  std::vector<bool> pair_allowed;
  int history_tokens = 0;  // prompt and output so far
  uint64_t turn = 0;       // placements so far, for round robin

  bool Allowed(size_t p, size_t d) const {
    return pair_allowed[p * decode.size() + d];
  }
};

// Indices into a Snapshot; -1 is none. Without a decode worker there is no
// placement; without a prefill worker the decode worker prefills.
struct Pair {
  int prefill = -1;
  int decode = -1;
  bool operator==(const Pair&) const = default;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PLACEMENT_SNAPSHOT_H_
