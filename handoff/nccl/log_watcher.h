// SPDX-License-Identifier: Apache-2.0
// Says in the log what pairs do, and ends a process that must end.

#ifndef TANDEM_HANDOFF_NCCL_LOG_WATCHER_H_
#define TANDEM_HANDOFF_NCCL_LOG_WATCHER_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
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
  void OnRefused(const std::string& pair, const absl::Status& cause) override {
    LogWarning("handoff pair goes without NCCL",
               {{"pair", pair}, {"cause", cause}});
  }
  // As any failure of the GPU: what is stuck there may write where it likes,
  // and every destructor that frees memory of the device would wait for it.
  void OnFatal(const absl::Status& cause) override {
    std::fprintf(stderr, "fatal: GPU: %s; this process ends\n",
                 std::string(cause.message()).c_str());
    std::_Exit(70);  // EX_SOFTWARE, as kernels/cuda
  }
};

}  // namespace tandem::handoff::nccl

#endif  // TANDEM_HANDOFF_NCCL_LOG_WATCHER_H_
