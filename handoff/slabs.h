// SPDX-License-Identifier: Apache-2.0
// Who has which slab. Slabs are drawn from one arena by pairs (links), each
// up to a cap; requests wait in order within a pair and take turns across
// pairs. The last free slabs are kept for pairs that hold none, so a pair
// that never gives back what it holds cannot stop another.
//
// A slab is in exactly one state. `generation` is new at every grant and
// never repeats in an arena, so a name from an earlier grant fits nothing.
//
//   free -> granted -> in flight -> free
//              `-> quarantined -> free | in flight
//
// In flight comes before quarantined where a way's transport broke under it.

#ifndef TANDEM_HANDOFF_SLABS_H_
#define TANDEM_HANDOFF_SLABS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "handoff/handoff.h"

namespace tandem::handoff {

class SlabArena {
 public:
  using Pair = uint64_t;
  enum class State : uint8_t { kFree, kGranted, kInFlight, kQuarantined };

  // What a request became.
  struct Loan {
    Pair pair = 0;
    uint64_t token = 0;       // the request's
    int id = 0;               // in the arena: [0, total)
    int slot = 0;             // in the pair: [0, per_pair)
    uint64_t generation = 0;  // never 0
  };

  SlabArena(int total, int per_pair, uint64_t first_generation = 1);

  Pair AddPair();
  // Drops its requests and keeps no slab back for it. It is forgotten with
  // the last slab that it holds.
  void RemovePair(Pair pair);

  // Queues a request. REQUIRES: the pair was not removed.
  void Request(Pair pair, uint64_t token);
  // Forgets the pair's request with `token`; false if it does not wait.
  bool CancelRequest(Pair pair, uint64_t token);
  size_t waiting(Pair pair) const;

  // The next request whose turn it is, with a slab granted to it; nothing if
  // none can be served now. Called until it returns nothing, after every
  // Request, Free and RemovePair.
  std::optional<Loan> Next();

  // The loan of a slot, if it is not free.
  const Loan* Find(Pair pair, uint32_t slot) const;
  State state(int id) const { return slabs_[id].state; }

  // granted or quarantined -> in flight.
  void Fill(int id);
  // granted or in flight -> quarantined.
  void Quarantine(int id);
  // Any but free -> free.
  void Free(int id);
  // Ids of the pair's slabs in `state`, ascending.
  std::vector<int> Held(Pair pair, State state) const;
  const Loan& loan(int id) const { return slabs_[id].loan; }

  SlabCounts counts() const { return counts_; }
  int held(Pair pair) const;
  absl::Status CheckInvariants() const;

 private:
  struct Slab {
    State state = State::kFree;
    Loan loan;
  };
  struct PairState {
    std::deque<uint64_t> requests;
    std::vector<int> slots;  // [per_pair] slab id, or -1
    int held = 0;
    bool removed = false;
  };

  int* Count(State state);
  void Set(int id, State state);
  bool MayTake(const PairState& pair) const;

  const int per_pair_;
  std::vector<Slab> slabs_;
  std::vector<int> free_;
  std::map<Pair, PairState> pairs_;  // in order: turns are taken along it
  Pair next_pair_ = 1;
  Pair last_served_ = 0;
  int pairs_without_ = 0;  // not removed and holding none
  uint64_t next_generation_;
  SlabCounts counts_;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_SLABS_H_
