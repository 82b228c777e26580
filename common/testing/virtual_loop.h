// SPDX-License-Identifier: Apache-2.0
// Virtual time: the loops that tests and simulations run on. One VirtualLoop
// is the world's clock and its queue; nothing happens but in its Run methods,
// in one order for one seed: by time, and among equals in the order of
// posting. A VirtualProcess is the loop of one process in that world, which
// can be stopped (its tasks are gone, as in a crash) or frozen (they wait).

#ifndef TANDEM_COMMON_TESTING_VIRTUAL_LOOP_H_
#define TANDEM_COMMON_TESTING_VIRTUAL_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "common/loop.h"

namespace tandem {

// Single-threaded: Post, too, is called by the one thread that runs it.
class VirtualLoop final : public Loop {
 public:
  // Far from zero, so that nobody takes an unset time for the beginning.
  explicit VirtualLoop(absl::Time start = absl::FromUnixSeconds(1'000'000))
      : now_(start) {}

  absl::Time Now() const override { return now_; }
  void Post(Task task) override {
    After(absl::ZeroDuration(), std::move(task));
  }
  TimerId After(absl::Duration delay, Task task) override;
  void Cancel(TimerId timer) override;

  // Runs the next task, at its time. False if there is none.
  bool RunNext();
  // Runs until nothing is left, or `max_tasks` ran (a guard against timers
  // that start themselves again for ever). Returns how many ran.
  int64_t RunUntilIdle(int64_t max_tasks = 10'000'000);
  // Runs all that is due within `duration`; that much later is then now.
  void RunFor(absl::Duration duration);

  size_t pending() const { return tasks_.size(); }

 private:
  using Key = std::pair<absl::Time, TimerId>;

  absl::Time now_;
  TimerId last_id_ = 0;
  std::map<Key, Task> tasks_;  // in the order in which they will run
  absl::flat_hash_map<TimerId, absl::Time> due_;
};

// The loop of one process. Its clock differs from the world's by `offset`.
class VirtualProcess final : public Loop {
 public:
  explicit VirtualProcess(VirtualLoop* world,
                          absl::Duration offset = absl::ZeroDuration())
      : world_(world), offset_(offset) {}
  ~VirtualProcess() override { Stop(); }
  VirtualProcess(const VirtualProcess&) = delete;
  VirtualProcess& operator=(const VirtualProcess&) = delete;

  absl::Time Now() const override { return world_->Now() + offset_; }
  void Post(Task task) override {
    After(absl::ZeroDuration(), std::move(task));
  }
  TimerId After(absl::Duration delay, Task task) override;
  void Cancel(TimerId timer) override;

  // All tasks are destroyed unrun, now and from now on.
  void Stop();
  // Frozen, tasks that come due wait; thawed, they run in their order.
  void Freeze() { frozen_ = true; }
  void Thaw();

  bool stopped() const { return stopped_; }
  size_t pending() const { return pending_.size() + late_.size(); }

 private:
  void Run(TimerId id);

  VirtualLoop* const world_;
  const absl::Duration offset_;
  bool stopped_ = false;
  bool frozen_ = false;
  TimerId last_id_ = 0;
  struct Pending {
    TimerId timer;  // of the world
    Task task;
  };
  std::map<TimerId, Pending> pending_;
  // Came due while frozen, in that order.
  std::vector<std::pair<TimerId, Task>> late_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TESTING_VIRTUAL_LOOP_H_
