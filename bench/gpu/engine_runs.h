// SPDX-License-Identifier: Apache-2.0
// Steps of a model through the worker's own executor, timed.

#ifndef TANDEM_BENCH_GPU_ENGINE_RUNS_H_
#define TANDEM_BENCH_GPU_ENGINE_RUNS_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_loop.h"
#include "engine/device/device_executor.h"
#include "engine/executor.h"
#include "engine/model/model.h"

namespace tandem::bench {

class EngineRuns {
 public:
  // `model` and `backend` outlive it.
  static absl::StatusOr<std::unique_ptr<EngineRuns>> Create(
      const engine::DeviceExecutorOptions& options, const engine::Model* model,
      kernels::Backend* backend);
  ~EngineRuns();

  // Gives `count` sequences blocks for `positions` each, those of before
  // being gone, and computes positions [0, context) of them.
  absl::Status Fill(int count, int context, int positions);

  // Seconds per decode step of all sequences at `context`, over `steps`.
  // `ahead`: two steps are in flight, which do not depend on one another's
  // tokens, so that the device never waits for the host. Else each step is
  // submitted when the one before has given its tokens.
  absl::StatusOr<double> Decode(int context, int steps, bool ahead);

  // Seconds to compute positions [0, tokens) of one sequence, in steps of
  // max_rows as a worker's, and draw one.
  absl::StatusOr<double> Prefill(int tokens);

  // The same with the KV gathered, group of layers by group, into `staging`
  // as it is written: until both are done.
  absl::StatusOr<double> PrefillAndGather(int tokens, std::byte* staging);

  int64_t kv_bytes(int tokens) const {
    return executor_->kv_shape().bytes_per_position() * tokens;
  }

 private:
  class Steps;
  explicit EngineRuns(int max_rows, int vocab)
      : loop_("bench"), max_rows_(max_rows), vocab_(vocab) {}
  absl::StatusOr<double> RunPrefill(int tokens, std::byte* staging);
  // Positions [begin, end) in one step; the last of them draws a token if
  // `sample`.
  absl::Status RunChunk(int begin, int end, bool sample, std::byte* staging);

  ThreadLoop loop_;
  const int max_rows_;
  const int vocab_;
  std::unique_ptr<engine::DeviceExecutor> executor_;
  std::vector<std::vector<int32_t>> blocks_;  // of each sequence
};

}  // namespace tandem::bench

#endif  // TANDEM_BENCH_GPU_ENGINE_RUNS_H_
