// SPDX-License-Identifier: Apache-2.0
// Beats and leases of many calls with one timer. A call that heard nothing
// from its router for the lease is lost; one that said nothing for a beat
// says so. A process that was itself stopped (its timer fires late) first
// reads what arrived meanwhile before it judges anybody.

#ifndef TANDEM_WORKER_CALL_CLOCK_H_
#define TANDEM_WORKER_CALL_CLOCK_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"

namespace tandem::worker {

inline constexpr absl::Duration kBeat = absl::Seconds(1);

// From a call's begin to the message that opens it.
inline constexpr absl::Duration kOpenPatience = absl::Seconds(5);

struct CallTimes {
  absl::Time heard;
  absl::Time said;
  absl::Time deadline;
};

// What the calls of both roles have of it.
struct TimedCall {
  CallTimes times;
  uint64_t compiling = 0;  // number of its grammar's order; 0: none
  absl::Time compiling_since;
  bool paused = false;       // the router reads too slowly
  absl::Time paused_since;   // or since it took something, or said why not
  size_t paused_unsent = 0;  // messages, then
  // `unsent`: of its stream.
  void Pause(size_t unsent, absl::Time now);
  // Who takes something is slow and no more. Every beat.
  void LookAtReader(size_t unsent, absl::Time now);
  // A beat of the router came. `not_reading`: it does so on purpose.
  void OnBeat(bool not_reading, absl::Time now);
};

// Why `call` ends now, by its times alone; OK: it goes on. `opened`: its first
// message was taken. `judge` as CallClock says.
absl::Status Overdue(const TimedCall& call, bool opened, absl::Time now,
                     bool judge, absl::Duration lease,
                     absl::Duration stall_limit);

// Whether it is time to say that the call is served, if nothing else is said.
bool OwesBeat(const TimedCall& call, bool opened, absl::Time now);

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
