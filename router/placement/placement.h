// SPDX-License-Identifier: Apache-2.0
// Who serves a request: pure functions over one Snapshot, one per policy. Each
// chooses a decode worker that has an allowed prefill worker where any has
// one, and that prefill worker; equal choices are decided at random, so that
// routers with the same picture do not all rush to one worker.

#ifndef TANDEM_ROUTER_PLACEMENT_PLACEMENT_H_
#define TANDEM_ROUTER_PLACEMENT_PLACEMENT_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "common/random.h"
#include "router/placement/snapshot.h"

namespace tandem::router {

enum class Policy { kRoundRobin, kLeastLoaded, kPrefixAware };

// "round_robin", "least_loaded", "prefix_aware".
absl::StatusOr<Policy> ParsePolicy(std::string_view name);
std::string_view PolicyName(Policy policy);

// In turn, whatever the load.
Pair RoundRobin(const Snapshot& snapshot, Random* random);
// Prefill: fewest queued tokens. Decode: smallest share of its sequences and
// blocks in use.
Pair LeastLoaded(const Snapshot& snapshot, Random* random);
// As LeastLoaded, but a cached prefix counts as work not to be done: prefill
// by the time until this prompt would be computed, decode by load less the
// share of the history that it holds.
Pair PrefixAware(const Snapshot& snapshot, Random* random);

// A prefill worker's old rate counts for no less than the mean of the others,
// of the decode workers where it is the only one: one that was slow once would
// get no work, which alone could show that it is slow no longer.
void MendOldRates(Snapshot* snapshot);

Pair Place(Policy policy, const Snapshot& snapshot, Random* random);

// Only the prefill side, for a decode worker already chosen (index into
// snapshot.decode): what a new attempt of an admitted sequence needs.
int PlacePrefill(Policy policy, const Snapshot& snapshot, int decode,
                 Random* random);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PLACEMENT_PLACEMENT_H_
