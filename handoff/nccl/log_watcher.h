// SPDX-License-Identifier: Apache-2.0
// Says in the log what pairs do, and keeps what a worker must end with.

#ifndef TANDEM_HANDOFF_NCCL_LOG_WATCHER_H_
#define TANDEM_HANDOFF_NCCL_LOG_WATCHER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/log.h"
#include "handoff/nccl/station.h"

namespace tandem::handoff::nccl {

class LogWatcher final : public Watcher {
 public:
  void OnUp(const std::string& pair, uint64_t life,
            int64_t memory_bytes) override {
    LogInfo("handoff pair is up",
            {{"pair", pair}, {"life", life}, {"memory_bytes", memory_bytes}});
  }
  void OnBroken(const std::string& pair, uint64_t life,
                const std::string& stage, int64_t bytes,
                const absl::Status& cause) override {
    LogWarning("handoff pair broke", {{"pair", pair},
                                      {"life", life},
                                      {"stage", stage},
                                      {"bytes", bytes},
                                      {"cause", cause}});
  }
  void OnFatal(const absl::Status& cause) override {
    LogError("a communicator stays behind, so this process ends",
             {{"cause", cause}});
    fatal_ = cause;
  }

  // Not OK: the process must end with it.
  const absl::Status& fatal() const { return fatal_; }

 private:
  absl::Status fatal_;
};

}  // namespace tandem::handoff::nccl

#endif  // TANDEM_HANDOFF_NCCL_LOG_WATCHER_H_
