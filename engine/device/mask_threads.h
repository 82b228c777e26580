// SPDX-License-Identifier: Apache-2.0
// Who makes a step's masks: the thread that was asked, and some more beside it
// where there are cores. A mask takes from microseconds to some milliseconds,
// and the step's draws wait for all of them.

#ifndef TANDEM_ENGINE_DEVICE_MASK_THREADS_H_
#define TANDEM_ENGINE_DEVICE_MASK_THREADS_H_

#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "common/mutex.h"

namespace tandem::engine {

class MaskThreads {
 public:
  // A few where there are many cores, none of two, which compute the step.
  static int HelpersFor(int cores);

  explicit MaskThreads(int helpers);
  ~MaskThreads();
  MaskThreads(const MaskThreads&) = delete;
  MaskThreads& operator=(const MaskThreads&) = delete;

  // make(i) for each i of [0, count), on any of the threads; returns when all
  // are done. By one thread at a time.
  void Run(int count, absl::FunctionRef<void(int)> make);

 private:
  using Make = absl::FunctionRef<void(int)>;

  void Help();
  // The next one's number, or -1.
  int Claim() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes one. With the lock, which is open meanwhile.
  void MakeOne(int index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar wake_;
  CondVar done_;
  const Make* make_ ABSL_GUARDED_BY(mutex_) = nullptr;
  int next_ ABSL_GUARDED_BY(mutex_) = 0;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
  int unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> helpers_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_DEVICE_MASK_THREADS_H_
