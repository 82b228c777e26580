// SPDX-License-Identifier: Apache-2.0
// The thread that a role's decisions run on, and its clock. All state of a
// router, prefill or decode core belongs to one Loop; everything else (gRPC,
// the device, handoff ways) sends it tasks. ThreadLoop (common/thread_loop.h)
// is the real one; the simulation runs the same cores on virtual time.

#ifndef TANDEM_COMMON_LOOP_H_
#define TANDEM_COMMON_LOOP_H_

#include <cstdint>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"

namespace tandem {

class Loop {
 public:
  using Task = absl::AnyInvocable<void()>;
  using TimerId = uint64_t;  // 0 is no timer

  virtual ~Loop() = default;

  // Monotonic: only differences mean anything, and none crosses a process.
  virtual absl::Time Now() const = 0;

  // Runs `task` on the loop, after everything posted before. Thread-safe.
  // Tasks posted after the loop stopped are destroyed unrun.
  virtual void Post(Task task) = 0;

  // Runs `task` once, `delay` from now. REQUIRES: called on the loop.
  virtual TimerId After(absl::Duration delay, Task task) = 0;

  // No-op for a timer that fired or was cancelled. REQUIRES: on the loop.
  virtual void Cancel(TimerId timer) = 0;
};

// A timer that is cancelled with its owner. Lives on the loop.
class Timer {
 public:
  explicit Timer(Loop* loop) : loop_(loop) {}
  ~Timer() { Stop(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Replaces a running countdown.
  void Start(absl::Duration delay, Loop::Task task) {
    Stop();
    id_ = loop_->After(delay, [this, task = std::move(task)]() mutable {
      id_ = 0;
      // The task may destroy this timer: run it from the stack.
      Loop::Task run = std::move(task);
      run();
    });
  }
  void Stop() {
    if (id_ != 0) loop_->Cancel(std::exchange(id_, 0));
  }
  bool running() const { return id_ != 0; }

 private:
  Loop* const loop_;
  Loop::TimerId id_ = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_LOOP_H_
