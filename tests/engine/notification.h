// SPDX-License-Identifier: Apache-2.0
// One event that a test waits for. Not absl::Notification: ThreadSanitizer
// cannot see into a distribution's abseil.

#ifndef TANDEM_TESTS_ENGINE_NOTIFICATION_H_
#define TANDEM_TESTS_ENGINE_NOTIFICATION_H_

#include "common/mutex.h"

namespace tandem::engine {

class Notification {
 public:
  void Notify() {
    MutexLock lock(&mutex_);
    notified_ = true;
    changed_.NotifyAll();
  }
  void WaitForNotification() {
    MutexLock lock(&mutex_);
    while (!notified_) changed_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_NOTIFICATION_H_
