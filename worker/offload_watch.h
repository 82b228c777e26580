// SPDX-License-Identifier: Apache-2.0
// Says of the file behind KV offloading once that it no longer grows, and once
// that it does again: the engine itself logs nothing, and a full disk refuses
// block after block.

#ifndef TANDEM_WORKER_OFFLOAD_WATCH_H_
#define TANDEM_WORKER_OFFLOAD_WATCH_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "common/log.h"

namespace tandem::worker {

class OffloadWatch {
 public:
  // --kv-offload-path, for the log.
  explicit OffloadWatch(std::string directory)
      : directory_(std::move(directory)) {}

  // Each second, with KvOffload's.
  void Update(const absl::Status& file_status) {
    if (file_status.ok() == grows_) return;
    grows_ = !grows_;
    if (grows_) {
      LogInfo("the KV offload file takes new blocks again",
              {{"directory", directory_}});
    } else {
      LogWarning(
          "the KV offload file cannot grow: new blocks replace those in it "
          "that were used longest ago, and it is tried again each minute",
          {{"directory", directory_}, {"reason", file_status}});
    }
  }

 private:
  const std::string directory_;
  bool grows_ = true;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_OFFLOAD_WATCH_H_
