// SPDX-License-Identifier: Apache-2.0
// Sends a plan's requests when they are due and notes what comes back. One
// loop drives any number of streams, so that thousands cost no thread each.
//
// An open loop never waits for answers: a slow server finds more and more
// requests in flight. Where a limit on concurrency holds one back all the
// same, its latency still counts from its scheduled arrival (no coordinated
// omission). In a closed loop a request is scheduled when a place is free.

#ifndef TANDEM_CLI_BENCH_RUNNER_H_
#define TANDEM_CLI_BENCH_RUNNER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cli/bench/record.h"
#include "cli/bench/workload.h"
#include "common/loop.h"
#include "common/stream.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::bench {

struct RunOptions {
  bool closed_loop = false;
  int max_concurrency = 0;  // requests in flight; 0: no limit
};

struct RunProgress {
  double elapsed_s = 0;
  int planned = 0;
  int sent = 0;
  int completed = 0;
  int failed = 0;
  int64_t output_tokens = 0;

  int ended() const { return completed + failed; }
};

// All of it on the loop, destruction included.
class Runner {
 public:
  using GenerateStream = Stream<v1::GenerateRequest, v1::GenerateResponse>;
  struct Hooks {
    std::function<std::unique_ptr<GenerateStream>()> open;
    // The message for request `index` of the plan.
    std::function<v1::GenerateRequest(size_t index)> compose;
    // Once, when all have ended. Must not destroy the runner.
    std::function<void()> finished;
  };

  // `plan` is in the order of its times and outlives this.
  Runner(Loop* loop, const RunOptions& options,
         const std::vector<PlannedRequest>* plan, Hooks hooks);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  void Start();
  // Sends no more and cancels what is in flight, which counts as failed.
  void Stop();

  RunProgress progress() const;
  // One for each of the plan, in its order; those never sent say so.
  const std::vector<RequestRecord>& records() const { return records_; }

 private:
  struct InFlight;

  double Elapsed() const;
  void SendDue();
  void Send(size_t index);
  void OnMessage(InFlight* request, const v1::GenerateResponse& message);
  void OnClosed(InFlight* request, absl::Status status);
  void FinishIfDone();

  Loop* const loop_;
  const RunOptions options_;
  const std::vector<PlannedRequest>& plan_;
  const Hooks hooks_;
  absl::Time start_;
  Timer next_due_;
  size_t next_ = 0;          // of the plan
  double place_free_s_ = 0;  // when the last request ended
  bool held_back_ = false;   // the next one waits for a place
  bool finished_ = false;
  RunProgress counts_;
  std::vector<RequestRecord> records_;
  std::vector<std::unique_ptr<InFlight>> in_flight_;  // by index
  int running_ = 0;
};

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_RUNNER_H_
