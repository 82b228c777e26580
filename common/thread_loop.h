// SPDX-License-Identifier: Apache-2.0
// The real Loop: one named thread that runs what others post to it, in order,
// and its timers. Everything that a role's core owns is touched on it alone.
//
//   ThreadLoop loop("decode");
//   loop.Post([&] { core.Start(); });
//   ...
//   loop.Stop();  // joins; what was not run is destroyed
//
// Post, RunSync and Stop are thread-safe. RunSync and Stop must not be called
// on the loop itself.

#ifndef TANDEM_COMMON_THREAD_LOOP_H_
#define TANDEM_COMMON_THREAD_LOOP_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "common/loop.h"
#include "common/mutex.h"

namespace tandem {

// What ThreadLoop::Now tells, for threads that have no loop: steps of the wall
// clock do not touch it. Thread-safe.
absl::Time MonotonicNow();

class ThreadLoop final : public Loop {
 public:
  // `name` is what `top -H` shows (15 bytes of it).
  explicit ThreadLoop(std::string name);
  ~ThreadLoop() override;
  ThreadLoop(const ThreadLoop&) = delete;
  ThreadLoop& operator=(const ThreadLoop&) = delete;

  absl::Time Now() const override;
  void Post(Task task) override;
  TimerId After(absl::Duration delay, Task task) override;
  void Cancel(TimerId timer) override;

  // Lets the running task end and joins. Tasks and timers not yet run are
  // destroyed unrun, on the loop's thread or the calling one; a Post from one
  // of their destructors is destroyed too. Idempotent.
  void Stop();

  // Runs `task` on the loop and waits for it: for tests and start-up. False
  // if the loop was stopped before it ran.
  bool RunSync(absl::FunctionRef<void()> task);

  // False from the moment that Stop was called.
  bool running() const { return !stopping_.load(); }

  bool on_loop() const {
    return std::this_thread::get_id() == thread_id_.load();
  }

 private:
  struct Deadline {
    absl::Time when;
    TimerId id;
    // A min-heap by time; equal times fire in the order they were set.
    bool operator<(const Deadline& other) const {
      return when != other.when ? when > other.when : id > other.id;
    }
  };

  void Run();
  // Waits for tasks or the next timer; fills `batch`. False: stopped.
  bool NextBatch(std::vector<Task>* batch);
  void RunDueTimers();
  absl::Duration UntilNextTimer();

  const std::string name_;
  Mutex mutex_;
  CondVar wake_;
  CondVar joined_;
  std::vector<Task> mailbox_ ABSL_GUARDED_BY(mutex_);
  bool sleeping_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_done_ ABSL_GUARDED_BY(mutex_) = false;
  // Read between the tasks of one batch, so that Stop need not wait for all.
  std::atomic<bool> stopping_ = false;

  // Of the loop's thread only. Cancelled timers leave `tasks_` at once and
  // `deadlines_` when they come to the top, or when they outnumber the live.
  std::vector<Deadline> deadlines_;
  absl::flat_hash_map<TimerId, Task> tasks_;
  TimerId next_timer_ = 1;

  std::atomic<std::thread::id> thread_id_;
  std::thread thread_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_THREAD_LOOP_H_
