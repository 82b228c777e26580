// SPDX-License-Identifier: Apache-2.0
#include "router/placement/placement.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tandem::router {
namespace {

// Lower is better; equal is equal exactly.
using Cost = std::function<double(const Snapshot&, int index)>;

// Of those of which it is known, without `except`; 0 where of none.
double MeanRate(const std::vector<WorkerView>& workers,
                const WorkerView* except = nullptr) {
  double sum = 0;
  int known = 0;
  for (const WorkerView& worker : workers) {
    if (&worker == except || worker.tokens_per_second <= 0) continue;
    sum += worker.tokens_per_second;
    ++known;
  }
  return known > 0 ? sum / known : 0;
}

// A prefill worker that reported no rate yet is taken to be an average one.
double AssumedRate(const Snapshot& snapshot) {
  const double mean = MeanRate(snapshot.prefill);
  return mean > 0 ? mean : 1;
}

double QueuedTokens(const Snapshot& snapshot, int p) {
  return snapshot.prefill[p].queued_tokens;
}

double TimeToFirstToken(const Snapshot& snapshot, int p) {
  const WorkerView& worker = snapshot.prefill[p];
  const double rate = worker.tokens_per_second > 0 ? worker.tokens_per_second
                                                   : AssumedRate(snapshot);
  const int uncached =
      std::max(1, snapshot.history_tokens - worker.cached_tokens);
  return (worker.queued_tokens + uncached) / rate;
}

double DecodeLoad(const Snapshot& snapshot, int d) {
  const WorkerView& worker = snapshot.decode[d];
  const double sequences =
      static_cast<double>(worker.running + worker.waiting) /
      std::max(1, worker.max_num_seqs);
  const double blocks = 1 - static_cast<double>(worker.blocks_available) /
                                std::max(1, worker.num_blocks);
  return std::max(sequences, blocks);
}

// A fully cached history is worth half of an idle worker's advantage over a
// full one: a handoff saved is dear, but an overloaded batch slows everyone.
double DecodeLoadLessCache(const Snapshot& snapshot, int d) {
  const double share = static_cast<double>(snapshot.decode[d].cached_tokens) /
                       std::max(1, snapshot.history_tokens);
  return DecodeLoad(snapshot, d) - 0.5 * std::min(1.0, share);
}

// The cheapest of `candidates`, ties at random; -1 of none.
int Cheapest(const Snapshot& snapshot, const std::vector<int>& candidates,
             const Cost& cost, Random* random) {
  std::vector<int> best;
  double best_cost = 0;
  for (int candidate : candidates) {
    const double its_cost = cost(snapshot, candidate);
    if (best.empty() || its_cost < best_cost) {
      best = {candidate};
      best_cost = its_cost;
    } else if (its_cost == best_cost) {
      best.push_back(candidate);
    }
  }
  if (best.empty()) return -1;
  return best.size() == 1 ? best[0] : best[random->Below(best.size())];
}

std::vector<int> AllowedPrefill(const Snapshot& snapshot, int d) {
  std::vector<int> allowed;
  for (size_t p = 0; p < snapshot.prefill.size(); ++p) {
    if (snapshot.Allowed(p, d)) allowed.push_back(static_cast<int>(p));
  }
  return allowed;
}

// Decode workers that have a prefill worker; all of them if none has.
std::vector<int> DecodeCandidates(const Snapshot& snapshot) {
  std::vector<int> paired, all;
  for (int d = 0; d < static_cast<int>(snapshot.decode.size()); ++d) {
    all.push_back(d);
    if (!AllowedPrefill(snapshot, d).empty()) paired.push_back(d);
  }
  return paired.empty() ? all : paired;
}

Pair PlaceBy(const Snapshot& snapshot, const Cost& prefill_cost,
             const Cost& decode_cost, Random* random) {
  Pair pair;
  pair.decode =
      Cheapest(snapshot, DecodeCandidates(snapshot), decode_cost, random);
  if (pair.decode < 0) return pair;
  pair.prefill = Cheapest(snapshot, AllowedPrefill(snapshot, pair.decode),
                          prefill_cost, random);
  return pair;
}

int InTurn(const std::vector<int>& candidates, uint64_t turn) {
  return candidates.empty() ? -1 : candidates[turn % candidates.size()];
}

}  // namespace

absl::StatusOr<Policy> ParsePolicy(std::string_view name) {
  for (Policy policy :
       {Policy::kRoundRobin, Policy::kLeastLoaded, Policy::kPrefixAware}) {
    if (PolicyName(policy) == name) return policy;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("policy = ", std::string(name),
                   ": round_robin, least_loaded or prefix_aware"));
}

std::string_view PolicyName(Policy policy) {
  switch (policy) {
    case Policy::kRoundRobin:
      return "round_robin";
    case Policy::kLeastLoaded:
      return "least_loaded";
    case Policy::kPrefixAware:
      return "prefix_aware";
  }
  return "";
}

Pair RoundRobin(const Snapshot& snapshot, Random* random) {
  Pair pair;
  pair.decode = InTurn(DecodeCandidates(snapshot), snapshot.turn);
  if (pair.decode < 0) return pair;
  // The prefill side turns once per round of the decode side too, or equal
  // numbers of both would always meet in the same pairs.
  const uint64_t round =
      snapshot.turn / std::max<size_t>(1, snapshot.decode.size());
  pair.prefill =
      InTurn(AllowedPrefill(snapshot, pair.decode), snapshot.turn + round);
  return pair;
}

Pair LeastLoaded(const Snapshot& snapshot, Random* random) {
  return PlaceBy(snapshot, QueuedTokens, DecodeLoad, random);
}

Pair PrefixAware(const Snapshot& snapshot, Random* random) {
  return PlaceBy(snapshot, TimeToFirstToken, DecodeLoadLessCache, random);
}

void MendOldRates(Snapshot* snapshot) {
  std::vector<double> rates;
  for (const WorkerView& worker : snapshot->prefill) {
    double rate = worker.tokens_per_second;
    if (rate > 0 && worker.rate_is_old) {
      const double others = MeanRate(snapshot->prefill, &worker);
      rate = std::max(rate, others > 0 ? others : MeanRate(snapshot->decode));
    }
    rates.push_back(rate);
  }
  for (size_t p = 0; p < rates.size(); ++p) {
    snapshot->prefill[p].tokens_per_second = rates[p];
  }
}

Pair Place(Policy policy, const Snapshot& snapshot, Random* random) {
  switch (policy) {
    case Policy::kRoundRobin:
      return RoundRobin(snapshot, random);
    case Policy::kLeastLoaded:
      return LeastLoaded(snapshot, random);
    case Policy::kPrefixAware:
      return PrefixAware(snapshot, random);
  }
  return {};
}

int PlacePrefill(Policy policy, const Snapshot& snapshot, int decode,
                 Random* random) {
  const std::vector<int> allowed = AllowedPrefill(snapshot, decode);
  switch (policy) {
    case Policy::kRoundRobin:
      return InTurn(allowed, snapshot.turn);
    case Policy::kLeastLoaded:
      return Cheapest(snapshot, allowed, QueuedTokens, random);
    case Policy::kPrefixAware:
      return Cheapest(snapshot, allowed, TimeToFirstToken, random);
  }
  return -1;
}

}  // namespace tandem::router
