// SPDX-License-Identifier: Apache-2.0
// Beats and leases of many calls with one timer. A call that heard nothing
// from its router for the lease is lost; one that said nothing for a beat
// says so. A process that was itself stopped (its timer fires late) first
// reads what arrived meanwhile before it judges anybody.

#ifndef TANDEM_WORKER_CALL_CLOCK_H_
#define TANDEM_WORKER_CALL_CLOCK_H_

#include "absl/time/time.h"
#include "common/loop.h"

namespace tandem::worker {

inline constexpr absl::Duration kBeat = absl::Seconds(1);

// From a call's begin to the message that opens it.
inline constexpr absl::Duration kOpenPatience = absl::Seconds(5);

// Per call.
struct CallTimes {
  absl::Time heard;
  absl::Time said;
  absl::Time deadline;
};

class CallClock {
 public:
  // `tick(judge)` runs every beat; `judge` is false when silence proves
  // nothing, because this process itself was not running.
  CallClock(Loop* loop, absl::AnyInvocable<void(bool judge)> tick)
      : loop_(loop), timer_(loop), tick_(std::move(tick)) {
    Arm();
  }

 private:
  void Arm() {
    const absl::Time due = loop_->Now() + kBeat;
    timer_.Start(kBeat, [this, due] {
      const bool was_stopped = loop_->Now() - due > kBeat;
      Arm();
      tick_(!was_stopped);
    });
  }

  Loop* const loop_;
  Timer timer_;
  absl::AnyInvocable<void(bool)> tick_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_CALL_CLOCK_H_
