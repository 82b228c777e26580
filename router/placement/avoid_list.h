// SPDX-License-Identifier: Apache-2.0
// Things that failed lately (a worker's calls, a way of a pair) and are not
// used for a while. After its time-out an entry lets one user through
// as a probe: success forgets it, another failure doubles the time-out, and
// silence (the probe's user went away) lets the next one try.

#ifndef TANDEM_ROUTER_PLACEMENT_AVOID_LIST_H_
#define TANDEM_ROUTER_PLACEMENT_AVOID_LIST_H_

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"

namespace tandem::router {

class AvoidList {
 public:
  struct Entry {
    std::string reason;
    absl::Time until;
    absl::Duration timeout;
    bool probing = false;  // somebody uses it since its time-out
  };

  AvoidList(absl::Duration first, absl::Duration longest)
      : first_(first), longest_(longest) {}

  // For how long it is avoided from now on; zero: it was already.
  absl::Duration Failed(const std::string& key, absl::Time now,
                        std::string reason) {
    auto [it, fresh] = entries_.try_emplace(key);
    Entry& entry = it->second;
    // Many users fail together: that is one failure, not many.
    const bool probed = std::exchange(entry.probing, false);
    if (!fresh && !probed && now < entry.until) return absl::ZeroDuration();
    entry.timeout = fresh ? first_ : std::min(longest_, 2 * entry.timeout);
    entry.until = now + entry.timeout;
    entry.reason = std::move(reason);
    return entry.timeout;
  }
  void Succeeded(const std::string& key) { entries_.erase(key); }
  template <typename Predicate>
  void Forget(Predicate matches) {
    absl::erase_if(entries_,
                   [&](const auto& item) { return matches(item.first); });
  }

  bool Avoided(const std::string& key, absl::Time now) const {
    auto it = entries_.find(key);
    return it != entries_.end() && now < it->second.until;
  }
  // `key` is about to be used. If its time-out has passed this is the probe,
  // and others stay away for as long again.
  void Using(const std::string& key, absl::Time now) {
    auto it = entries_.find(key);
    if (it == entries_.end() || now < it->second.until) return;
    it->second.until = now + it->second.timeout;
    it->second.probing = true;
  }
  // Forgets what nobody used for long after its time-out, so that the list is
  // bounded by what failed lately.
  void Sweep(absl::Time now) {
    absl::erase_if(entries_, [&](const auto& item) {
      return now > item.second.until + 2 * longest_;
    });
  }
  // The first moment after `now` at which an entry's time-out ends.
  absl::Time NextRetry(absl::Time now) const {
    absl::Time next = absl::InfiniteFuture();
    for (const auto& [key, entry] : entries_) {
      if (entry.until > now) next = std::min(next, entry.until);
    }
    return next;
  }

  const absl::flat_hash_map<std::string, Entry>& entries() const {
    return entries_;
  }

 private:
  const absl::Duration first_;
  const absl::Duration longest_;
  absl::flat_hash_map<std::string, Entry> entries_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PLACEMENT_AVOID_LIST_H_
