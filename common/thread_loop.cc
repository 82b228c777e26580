// SPDX-License-Identifier: Apache-2.0
#include "common/thread_loop.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

namespace tandem {
namespace {

// Shared by RunSync and its task: the task may be destroyed, unrun, after
// RunSync's frame is asked to go on, and its destruction is what wakes it.
class Rendezvous {
 public:
  void Signal(bool ran) {
    MutexLock lock(&mutex_);
    if (done_) return;
    done_ = true;
    ran_ = ran;
    changed_.NotifyAll();
  }
  bool Wait() {
    MutexLock lock(&mutex_);
    while (!done_) changed_.Wait(&mutex_);
    return ran_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  bool ran_ ABSL_GUARDED_BY(mutex_) = false;
};

class SyncTask {
 public:
  SyncTask(Rendezvous* rendezvous, absl::FunctionRef<void()> task)
      : rendezvous_(rendezvous), task_(task) {}
  SyncTask(SyncTask&& other) noexcept
      : rendezvous_(std::exchange(other.rendezvous_, nullptr)),
        task_(other.task_) {}
  ~SyncTask() {
    if (rendezvous_ != nullptr) rendezvous_->Signal(/*ran=*/false);
  }
  void operator()() {
    task_();
    std::exchange(rendezvous_, nullptr)->Signal(/*ran=*/true);
  }

 private:
  Rendezvous* rendezvous_;
  absl::FunctionRef<void()> task_;
};

}  // namespace

ThreadLoop::ThreadLoop(std::string name) : name_(std::move(name)) {
  thread_ = std::thread([this] { Run(); });
}

ThreadLoop::~ThreadLoop() { Stop(); }

absl::Time MonotonicNow() {
  return absl::UnixEpoch() +
         absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

absl::Time ThreadLoop::Now() const { return MonotonicNow(); }

void ThreadLoop::Post(Task task) {
  MutexLock lock(&mutex_);
  // A task that is not taken is destroyed by the caller, after the lock.
  if (stopped_) return;
  mailbox_.push_back(std::move(task));
  // Under the lock: the task may be what lets another thread destroy the loop,
  // which must not happen between the push and the wake-up.
  if (std::exchange(sleeping_, false)) wake_.NotifyOne();
}

ThreadLoop::TimerId ThreadLoop::After(absl::Duration delay, Task task) {
  const TimerId id = next_timer_++;
  deadlines_.push_back({Now() + std::max(delay, absl::ZeroDuration()), id});
  std::push_heap(deadlines_.begin(), deadlines_.end());
  tasks_.emplace(id, std::move(task));
  return id;
}

void ThreadLoop::Cancel(TimerId timer) {
  auto found = tasks_.find(timer);
  if (found == tasks_.end()) return;
  // The task's destructor may set or cancel timers: erase first.
  Task dropped = std::move(found->second);
  tasks_.erase(found);
  if (deadlines_.size() > 64 && deadlines_.size() > 2 * tasks_.size()) {
    std::erase_if(deadlines_,
                  [this](const Deadline& d) { return !tasks_.contains(d.id); });
    std::make_heap(deadlines_.begin(), deadlines_.end());
  }
}

void ThreadLoop::Stop() {
  std::vector<Task> unrun;
  {
    MutexLock lock(&mutex_);
    if (stopped_) {  // another thread stops it: wait until it has
      while (!stop_done_) joined_.Wait(&mutex_);
      return;
    }
    stopped_ = true;
    stopping_ = true;
    unrun.swap(mailbox_);
  }
  wake_.NotifyOne();
  thread_.join();
  unrun.clear();
  while (!tasks_.empty()) {
    auto timers = std::exchange(tasks_, {});
    timers.clear();
  }
  deadlines_.clear();
  MutexLock lock(&mutex_);
  stop_done_ = true;
  joined_.NotifyAll();
}

bool ThreadLoop::RunSync(absl::FunctionRef<void()> task) {
  Rendezvous rendezvous;
  Post(SyncTask(&rendezvous, task));
  return rendezvous.Wait();
}

void ThreadLoop::Run() {
  thread_id_ = std::this_thread::get_id();
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  std::vector<Task> batch;
  while (NextBatch(&batch)) {
    for (Task& task : batch) {
      if (stopping_.load(std::memory_order_relaxed)) break;
      // Run from the stack: what the task holds goes when it has run, not at
      // the end of the batch.
      Task run = std::move(task);
      run();
    }
    batch.clear();
    RunDueTimers();
  }
}

bool ThreadLoop::NextBatch(std::vector<Task>* batch) {
  const absl::Duration until = UntilNextTimer();
  const absl::Time deadline = Now() + until;
  MutexLock lock(&mutex_);
  while (mailbox_.empty() && !stopped_) {
    sleeping_ = true;
    if (until == absl::InfiniteDuration()) {
      wake_.Wait(&mutex_);
      continue;
    }
    const absl::Duration left = deadline - Now();
    if (left <= absl::ZeroDuration()) break;
    wake_.WaitFor(&mutex_, absl::ToChronoNanoseconds(left));
  }
  sleeping_ = false;
  // Swapped, not copied: both vectors keep their room, so a steady flow of
  // posts allocates nothing here.
  batch->swap(mailbox_);
  return !stopped_;
}

void ThreadLoop::RunDueTimers() {
  const absl::Time now = Now();
  // A timer set by a timer waits for the next round, even with no delay, so
  // that posted tasks are never starved.
  const TimerId end = next_timer_;
  while (!deadlines_.empty() && deadlines_.front().when <= now &&
         deadlines_.front().id < end &&
         !stopping_.load(std::memory_order_relaxed)) {
    std::pop_heap(deadlines_.begin(), deadlines_.end());
    const TimerId id = deadlines_.back().id;
    deadlines_.pop_back();
    auto found = tasks_.find(id);
    if (found == tasks_.end()) continue;
    Task run = std::move(found->second);
    tasks_.erase(found);
    run();
  }
}

absl::Duration ThreadLoop::UntilNextTimer() {
  while (!deadlines_.empty() && !tasks_.contains(deadlines_.front().id)) {
    std::pop_heap(deadlines_.begin(), deadlines_.end());
    deadlines_.pop_back();
  }
  if (deadlines_.empty()) return absl::InfiniteDuration();
  return std::max(deadlines_.front().when - Now(), absl::ZeroDuration());
}

}  // namespace tandem
