// SPDX-License-Identifier: Apache-2.0
#include "handoff/slabs.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"

namespace tandem::handoff {

SlabArena::SlabArena(int total, int per_pair, uint64_t first_generation)
    : per_pair_(per_pair),
      slabs_(static_cast<size_t>(total)),
      next_generation_(std::max<uint64_t>(first_generation, 1)) {
  // Lowest ids first: memory that was never used stays untouched.
  for (int id = total - 1; id >= 0; --id) free_.push_back(id);
  counts_.total = total;
  counts_.free = total;
}

SlabArena::Pair SlabArena::AddPair() {
  const Pair pair = next_pair_++;
  pairs_[pair].slots.assign(static_cast<size_t>(per_pair_), -1);
  ++pairs_without_;
  return pair;
}

void SlabArena::RemovePair(Pair pair) {
  auto found = pairs_.find(pair);
  if (found == pairs_.end() || found->second.removed) return;
  found->second.removed = true;
  found->second.requests.clear();
  if (found->second.held == 0) {
    --pairs_without_;
    pairs_.erase(found);
  }
}

void SlabArena::Request(Pair pair, uint64_t token) {
  auto found = pairs_.find(pair);
  assert(found != pairs_.end() && !found->second.removed);
  found->second.requests.push_back(token);
}

bool SlabArena::CancelRequest(Pair pair, uint64_t token) {
  auto found = pairs_.find(pair);
  if (found == pairs_.end()) return false;
  std::deque<uint64_t>& requests = found->second.requests;
  auto request = std::find(requests.begin(), requests.end(), token);
  if (request == requests.end()) return false;
  requests.erase(request);
  return true;
}

size_t SlabArena::waiting(Pair pair) const {
  auto found = pairs_.find(pair);
  return found == pairs_.end() ? 0 : found->second.requests.size();
}

bool SlabArena::MayTake(const PairState& pair) const {
  if (pair.requests.empty() || pair.held >= per_pair_) return false;
  if (pair.held == 0) return counts_.free > 0;
  return counts_.free > pairs_without_;
}

std::optional<SlabArena::Loan> SlabArena::Next() {
  if (counts_.free == 0 || pairs_.empty()) return std::nullopt;
  auto it = pairs_.upper_bound(last_served_);
  for (size_t i = 0; i < pairs_.size(); ++i, ++it) {
    if (it == pairs_.end()) it = pairs_.begin();
    if (!MayTake(it->second)) continue;
    PairState& pair = it->second;
    const int id = free_.back();
    free_.pop_back();
    auto slot = std::find(pair.slots.begin(), pair.slots.end(), -1);
    *slot = id;
    if (pair.held++ == 0) --pairs_without_;
    Loan& loan = slabs_[id].loan;
    loan.pair = last_served_ = it->first;
    loan.token = pair.requests.front();
    pair.requests.pop_front();
    loan.id = id;
    loan.slot = static_cast<int>(slot - pair.slots.begin());
    loan.generation = next_generation_++;
    Set(id, State::kGranted);
    return loan;
  }
  return std::nullopt;
}

const SlabArena::Loan* SlabArena::Find(Pair pair, uint32_t slot) const {
  auto found = pairs_.find(pair);
  if (found == pairs_.end() || slot >= found->second.slots.size()) {
    return nullptr;
  }
  const int id = found->second.slots[slot];
  return id < 0 ? nullptr : &slabs_[id].loan;
}

void SlabArena::Fill(int id) {
  assert(slabs_[id].state == State::kGranted ||
         slabs_[id].state == State::kQuarantined);
  Set(id, State::kInFlight);
}

void SlabArena::Quarantine(int id) {
  assert(slabs_[id].state == State::kGranted ||
         slabs_[id].state == State::kInFlight);
  Set(id, State::kQuarantined);
}

void SlabArena::Free(int id) {
  assert(slabs_[id].state != State::kFree);
  Set(id, State::kFree);
  free_.push_back(id);
  const Loan loan = slabs_[id].loan;
  auto found = pairs_.find(loan.pair);
  PairState& pair = found->second;
  pair.slots[loan.slot] = -1;
  if (--pair.held > 0) return;
  if (pair.removed) {
    pairs_.erase(found);
  } else {
    ++pairs_without_;
  }
}

std::vector<int> SlabArena::Held(Pair pair, State state) const {
  std::vector<int> ids;
  auto found = pairs_.find(pair);
  if (found == pairs_.end()) return ids;
  for (int id : found->second.slots) {
    if (id >= 0 && slabs_[id].state == state) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

int SlabArena::held(Pair pair) const {
  auto found = pairs_.find(pair);
  return found == pairs_.end() ? 0 : found->second.held;
}

int* SlabArena::Count(State state) {
  switch (state) {
    case State::kFree:
      return &counts_.free;
    case State::kGranted:
      return &counts_.granted;
    case State::kInFlight:
      return &counts_.in_flight;
    case State::kQuarantined:
      break;
  }
  return &counts_.quarantined;
}

void SlabArena::Set(int id, State state) {
  --*Count(slabs_[id].state);
  ++*Count(state);
  slabs_[id].state = state;
}

absl::Status SlabArena::CheckInvariants() const {
  SlabCounts counted;
  counted.total = static_cast<int>(slabs_.size());
  for (size_t id = 0; id < slabs_.size(); ++id) {
    const Slab& slab = slabs_[id];
    switch (slab.state) {
      case State::kFree:
        ++counted.free;
        continue;
      case State::kGranted:
        ++counted.granted;
        break;
      case State::kInFlight:
        ++counted.in_flight;
        break;
      case State::kQuarantined:
        ++counted.quarantined;
        break;
    }
    auto pair = pairs_.find(slab.loan.pair);
    if (pair == pairs_.end() ||
        pair->second.slots[slab.loan.slot] != static_cast<int>(id)) {
      return absl::InternalError(
          absl::StrCat("slab ", id, " is held by no pair"));
    }
  }
  const auto same = [](const SlabCounts& a, const SlabCounts& b) {
    return a.total == b.total && a.free == b.free && a.granted == b.granted &&
           a.in_flight == b.in_flight && a.quarantined == b.quarantined;
  };
  if (!same(counted, counts_) ||
      counted.free != static_cast<int>(free_.size())) {
    return absl::InternalError("slab counts do not match the slabs' states");
  }
  int held = 0;
  int without = 0;
  for (const auto& [id, pair] : pairs_) {
    const int slots =
        static_cast<int>(std::count_if(pair.slots.begin(), pair.slots.end(),
                                       [](int slab) { return slab >= 0; }));
    if (slots != pair.held || (pair.removed && slots == 0)) {
      return absl::InternalError(
          absl::StrCat("pair ", id, " miscounts its slabs"));
    }
    held += slots;
    if (!pair.removed && slots == 0) ++without;
  }
  if (held != counted.total - counted.free || without != pairs_without_) {
    return absl::InternalError("pairs and slabs do not add up");
  }
  return absl::OkStatus();
}

}  // namespace tandem::handoff
