// SPDX-License-Identifier: Apache-2.0
// For tests on real threads and processes.

#ifndef TANDEM_TESTS_HANDOFF_REAL_TIME_H_
#define TANDEM_TESTS_HANDOFF_REAL_TIME_H_

#include <chrono>
#include <filesystem>
#include <functional>
#include <thread>

namespace tandem::handoff::testing {

// Waits, without asserting how long, for something on another thread.
inline bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 12'000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

// Of "/proc/self/fd" or "/proc/self/task": what this process holds.
inline int Entries(const char* folder) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(folder)) {
    ++count;
  }
  return count;
}

}  // namespace tandem::handoff::testing

#endif  // TANDEM_TESTS_HANDOFF_REAL_TIME_H_
