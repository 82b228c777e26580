// SPDX-License-Identifier: Apache-2.0
// What was used longest ago goes first, but first of all that of an owner who
// has more than an owner's quota: who floods a cache drives out himself. KvPool
// does the same over arrays, for blocks that come and go on every step.

#ifndef TANDEM_ENGINE_KV_OWNED_LRU_H_
#define TANDEM_ENGINE_KV_OWNED_LRU_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace tandem::engine {

template <typename Entry>
class OwnedLru {
 public:
  using List = std::list<Entry*>;  // the one used longest ago first
  struct Place {
    uint64_t owner = 0;
    typename List::iterator in_all = {};
    typename List::iterator in_owned = {};
  };

  // `quota`: entries of one owner before his go first.
  explicit OwnedLru(int quota) : quota_(static_cast<size_t>(quota)) {}

  // As the one used last.
  Place Insert(uint64_t owner, Entry* entry) {
    List& owned = owned_[owner];
    const Place place{owner, all_.insert(all_.end(), entry),
                      owned.insert(owned.end(), entry)};
    if (owned.size() == quota_ + 1) over_.push_back(owner);
    return place;
  }
  void Touch(const Place& place) {
    List& owned = owned_.at(place.owner);
    all_.splice(all_.end(), all_, place.in_all);
    owned.splice(owned.end(), owned, place.in_owned);
  }
  void Erase(const Place& place) {
    const auto owned = owned_.find(place.owner);
    all_.erase(place.in_all);
    owned->second.erase(place.in_owned);
    if (owned->second.size() == quota_) {
      over_.erase(std::find(over_.begin(), over_.end(), place.owner));
    }
    if (owned->second.empty()) owned_.erase(owned);
  }

  // Of those that `may_go`; null: none may.
  template <typename MayGo>
  Entry* First(const MayGo& may_go) const {
    for (const uint64_t owner : over_) {
      if (Entry* const entry = First(owned_.at(owner), may_go)) return entry;
    }
    return First(all_, may_go);
  }

  const List& all() const { return all_; }
  // Whether both lists that it is in have it there.
  bool Has(const Place& place, const Entry* entry) const {
    return *place.in_all == entry && *place.in_owned == entry;
  }
  // Whether owners' lists have what all have, and who is beyond his quota is
  // known. For tests.
  bool Adds() const {
    size_t sum = 0, over = 0;
    for (const auto& [owner, owned] : owned_) {
      sum += owned.size();
      over += owned.size() > quota_ ? 1 : 0;
      if (owned.empty()) return false;
    }
    return sum == all_.size() && over == over_.size();
  }

 private:
  template <typename MayGo>
  static Entry* First(const List& list, const MayGo& may_go) {
    const auto it = std::find_if(list.begin(), list.end(), may_go);
    return it == list.end() ? nullptr : *it;
  }

  const size_t quota_;
  List all_;
  absl::flat_hash_map<uint64_t, List> owned_;  // none is empty
  std::vector<uint64_t> over_;                 // the quota: a few
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_OWNED_LRU_H_
