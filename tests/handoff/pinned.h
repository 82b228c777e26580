// SPDX-License-Identifier: Apache-2.0
// Host memory as a GPU sees it: gathers and scatters reach what was
// registered, until it was taken back, which is before it is unmapped.

#ifndef TANDEM_TESTS_HANDOFF_PINNED_H_
#define TANDEM_TESTS_HANDOFF_PINNED_H_

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>

#include "common/mutex.h"
#include "gtest/gtest.h"
#include "handoff/host_memory.h"

namespace tandem::handoff::testing {

class Pinned final : public HostMemory {
 public:
  ~Pinned() override { EXPECT_TRUE(ranges_.empty()) << "still registered"; }

  absl::Status Register(std::byte* data, size_t bytes) override {
    const auto page = static_cast<uintptr_t>(getpagesize());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % page, 0);
    MutexLock lock(&mutex_);
    EXPECT_TRUE(ranges_.emplace(data, bytes).second);
    ++registered_;
    return absl::OkStatus();
  }
  void Unregister(std::byte* data) override {
    MutexLock lock(&mutex_);
    auto found = ranges_.find(data);
    ASSERT_NE(found, ranges_.end());
    // A fault here: it was unmapped first.
    volatile std::byte* const last = data + found->second - 1;
    static_cast<void>(*last);
    ranges_.erase(found);
  }

  bool Reaches(const std::byte* data) const {
    MutexLock lock(&mutex_);
    auto after = ranges_.upper_bound(data);
    if (after == ranges_.begin()) return false;
    --after;
    return data < after->first + after->second;
  }
  int registered() const {
    MutexLock lock(&mutex_);
    return registered_;
  }

 private:
  mutable Mutex mutex_;
  std::map<const std::byte*, size_t> ranges_ ABSL_GUARDED_BY(mutex_);
  int registered_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tandem::handoff::testing

#endif  // TANDEM_TESTS_HANDOFF_PINNED_H_
