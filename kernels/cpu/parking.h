// SPDX-License-Identifier: Apache-2.0
// How threads of the backend wait for one another: spin for a while, because
// the next operation is usually microseconds away, then sleep. Where they share
// a CPU, which schedulers let them when others are busy, spinning keeps away
// who is waited for, until its turn comes in milliseconds: they sleep at once.
//
// Protocol: the waker changes an atomic with sequential consistency and calls
// Wake(); the waiter's condition reads it the same way. Either the waker sees
// the sleeper, or the sleeper sees the change.

#ifndef TANDEM_KERNELS_CPU_PARKING_H_
#define TANDEM_KERNELS_CPU_PARKING_H_

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "common/mutex.h"

namespace tandem::kernels::cpu {

// The CPU that a thread was last seen on.
class alignas(64) Place {
 public:
  void Note() { cpu_.store(sched_getcpu(), std::memory_order_relaxed); }
  bool IsHere() const {
    return cpu_.load(std::memory_order_relaxed) == sched_getcpu();
  }

 private:
  std::atomic<int> cpu_{-1};
};

class Parking {
 public:
  // Returns when ready() is true. spin of zero sleeps at once, as does whoever
  // finds shares_cpu() true: what is waited for may run here alone.
  template <typename Ready, typename SharesCpu>
  void Await(std::chrono::nanoseconds spin, const Ready& ready,
             const SharesCpu& shares_cpu) {
    if (ready()) return;
    if (spin.count() > 0) {
      const auto deadline = std::chrono::steady_clock::now() + spin;
      do {
        for (int i = 0; i < 32; ++i) {
          _mm_pause();
          if (ready()) return;
        }
      } while (!shares_cpu() && std::chrono::steady_clock::now() < deadline);
    }
    MutexLock lock(&mutex_);
    sleepers_.fetch_add(1);
    while (!ready()) changed_.Wait(&mutex_);
    sleepers_.fetch_sub(1);
  }

  template <typename Ready>
  void Await(std::chrono::nanoseconds spin, const Ready& ready) {
    Await(spin, ready, [] { return false; });
  }

  void Wake() {
    if (sleepers_.load() == 0) return;
    MutexLock lock(&mutex_);
    changed_.NotifyAll();
  }

 private:
  std::atomic<int32_t> sleepers_{0};
  Mutex mutex_;
  CondVar changed_;
};

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_PARKING_H_
