// SPDX-License-Identifier: Apache-2.0
// How long a new request would wait for its first token: those that wait now,
// by the rate at which such got theirs of late. Time in which nobody waits
// tells nothing of that rate and is left out; time in which they wait and none
// is served lowers it, so a cluster that stands still is seen, too.

#ifndef TANDEM_ROUTER_PLACEMENT_EXPECTED_WAIT_H_
#define TANDEM_ROUTER_PLACEMENT_EXPECTED_WAIT_H_

#include "absl/time/time.h"

namespace tandem::router {

// Not thread-safe.
class ExpectedWait {
 public:
  explicit ExpectedWait(absl::Time now) : at_(now) {}

  // So many wait from here on.
  void SetWaiting(int waiting, absl::Time now);
  int waiting() const { return waiting_; }
  // One that waited does not any more, for it has what it waited for. Of no
  // account while nobody waits, like the time.
  void OnServed(absl::Time now);
  // Workers were added: they are measured anew, and all are let in meanwhile.
  void Forget();

  // Behind so many others; zero while too few were served to tell.
  absl::Duration Behind(int others) const;
  // The most others behind whom it is within `limit`.
  int MostWithin(absl::Duration limit) const;

 private:
  void Advance(absl::Time now);
  bool Known() const;

  absl::Time at_;
  int waiting_ = 0;
  int observed_ = 0;
  // Decayed over time in which somebody waited.
  double served_ = 0;
  double seconds_ = 0;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PLACEMENT_EXPECTED_WAIT_H_
