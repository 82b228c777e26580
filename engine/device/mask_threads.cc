// SPDX-License-Identifier: Apache-2.0
#include "engine/device/mask_threads.h"

#include <algorithm>

namespace tandem::engine {

int MaskThreads::HelpersFor(int cores) {
  return std::clamp(cores / 2 - 1, 0, 7);
}

MaskThreads::MaskThreads(int helpers) {
  for (int i = 0; i < helpers; ++i) {
    helpers_.emplace_back([this] { Help(); });
  }
}

MaskThreads::~MaskThreads() {
  {
    const MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  for (std::thread& helper : helpers_) helper.join();
}

void MaskThreads::Run(int count, absl::FunctionRef<void(int)> make) {
  if (count == 1 || helpers_.empty()) {
    for (int i = 0; i < count; ++i) make(i);
    return;
  }
  const MutexLock lock(&mutex_);
  make_ = &make;
  next_ = 0;
  count_ = unfinished_ = count;
  wake_.NotifyAll();
  for (int index = Claim(); index >= 0; index = Claim()) MakeOne(index);
  while (unfinished_ > 0) done_.Wait(&mutex_);
}

int MaskThreads::Claim() { return next_ < count_ ? next_++ : -1; }

void MaskThreads::MakeOne(int index) {
  const Make make = *make_;
  mutex_.Unlock();
  make(index);
  mutex_.Lock();
  if (--unfinished_ == 0) done_.NotifyAll();
}

void MaskThreads::Help() {
  const MutexLock lock(&mutex_);
  while (true) {
    while (next_ >= count_ && !stopping_) wake_.Wait(&mutex_);
    if (stopping_) return;
    MakeOne(Claim());
  }
}

}  // namespace tandem::engine
