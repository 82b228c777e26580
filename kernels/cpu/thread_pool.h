// SPDX-License-Identifier: Apache-2.0
// Fork and join over a fixed team of threads. The caller is member 0, so a
// team of one starts no thread. Who computes what never changes a result, so
// tasks may be claimed in any order.

#ifndef TANDEM_KERNELS_CPU_THREAD_POOL_H_
#define TANDEM_KERNELS_CPU_THREAD_POOL_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/mutex.h"
#include "kernels/cpu/allocator.h"
#include "kernels/cpu/parking.h"

namespace tandem::kernels::cpu {

class ThreadPool {
 public:
  // Scratch of each member, and of the whole team: mapped at once, touched
  // only as far as used, so that no operation ever allocates.
  static constexpr size_t kMemberScratchBytes = size_t{32} << 20;
  static constexpr size_t kTeamScratchBytes = size_t{64} << 20;

  // `spin` is how long a member waits awake for the next fork; it is ignored
  // (members sleep) where there are fewer CPUs than threads.
  ThreadPool(int threads, std::chrono::nanoseconds spin);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(scratch_.size()); }
  std::chrono::nanoseconds spin() const { return spin_; }

  // Exclusive use of the team by the calling thread while it lives.
  class ABSL_SCOPED_LOCKABLE Team {
   public:
    explicit Team(ThreadPool* pool) ABSL_EXCLUSIVE_LOCK_FUNCTION(pool->in_use_)
        : pool_(pool) {
      pool_->in_use_.Lock();
    }
    ~Team() ABSL_UNLOCK_FUNCTION() { pool_->in_use_.Unlock(); }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return pool_->threads(); }
    // Runs body(member) on every member and returns when all have finished.
    void Run(absl::FunctionRef<void(int)> body) { pool_->Fork(body); }
    // Runs body(task, member) for 0 <= task < tasks, each once.
    void ForEach(int tasks, absl::FunctionRef<void(int, int)> body);

    std::byte* member_scratch(int member) const {
      return pool_->scratch_[static_cast<size_t>(member)].data();
    }
    std::byte* team_scratch() const { return pool_->team_scratch_.data(); }

   private:
    ThreadPool* const pool_;
  };

 private:
  void Fork(absl::FunctionRef<void(int)> body);
  void Member(int index);
  uint64_t members() const { return scratch_.size() - 1; }

  const std::chrono::nanoseconds spin_;
  Mutex in_use_;
  // Raised by each fork; what members then read lies on the same line.
  alignas(64) std::atomic<uint64_t> round_{0};
  const absl::FunctionRef<void(int)>* body_ = nullptr;
  bool stop_ = false;
  // By all members together; never set back, which would cost each fork a line.
  alignas(64) std::atomic<uint64_t> finished_{0};
  Parking forked_;
  Parking joined_;
  std::vector<DeviceMemory> scratch_;
  DeviceMemory team_scratch_;
  const std::unique_ptr<Place[]> places_;  // of members
  std::vector<std::thread> members_;
};

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_THREAD_POOL_H_
