// SPDX-License-Identifier: Apache-2.0
// How threads of the backend wait for one another: spin for a while, because
// the next operation is usually microseconds away, then sleep.
//
// Protocol: the waker changes an atomic with sequential consistency and calls
// Wake(); the waiter's condition reads it the same way. Either the waker sees
// the sleeper, or the sleeper sees the change.

#ifndef TANDEM_KERNELS_CPU_PARKING_H_
#define TANDEM_KERNELS_CPU_PARKING_H_

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <cstdint>

#include "common/mutex.h"

namespace tandem::kernels::cpu {

class Parking {
 public:
  // Returns when ready() is true. spin of zero sleeps at once.
  template <typename Ready>
  void Await(std::chrono::nanoseconds spin, const Ready& ready) {
    if (ready()) return;
    if (spin.count() > 0) {
      const auto deadline = std::chrono::steady_clock::now() + spin;
      do {
        for (int i = 0; i < 32; ++i) {
          _mm_pause();
          if (ready()) return;
        }
      } while (std::chrono::steady_clock::now() < deadline);
    }
    MutexLock lock(&mutex_);
    sleepers_.fetch_add(1);
    while (!ready()) changed_.Wait(&mutex_);
    sleepers_.fetch_sub(1);
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
