// SPDX-License-Identifier: Apache-2.0
// How far a worker's start has come, for probes meanwhile.

#ifndef TANDEM_WORKER_STARTUP_PROGRESS_H_
#define TANDEM_WORKER_STARTUP_PROGRESS_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem::worker {

// Thread-safe.
class StartupProgress {
 public:
  // `what` is under way: `done` of `total` bytes; 0: nobody knows how many.
  void Update(std::string_view what, uint64_t done = 0, uint64_t total = 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    what_ = what;
    done_ = done;
    total_ = total;
  }

  // UNAVAILABLE, as "starting: loading weights, 43 %".
  absl::Status Status() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string text = "starting";
    if (!what_.empty()) absl::StrAppend(&text, ": ", what_);
    if (total_ > 0) {
      const double share =
          100.0 * static_cast<double>(done_) / static_cast<double>(total_);
      absl::StrAppend(&text, ", ", static_cast<int>(share), " %");
    }
    return absl::UnavailableError(text);
  }

 private:
  mutable std::mutex mutex_;  // of all below
  std::string what_;
  uint64_t done_ = 0;
  uint64_t total_ = 0;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_STARTUP_PROGRESS_H_
