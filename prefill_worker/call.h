// SPDX-License-Identifier: Apache-2.0
// One router's call of the prefill worker: one attempt, from the queue to the
// acknowledged commit. Private to prefill_worker/.

#ifndef TANDEM_PREFILL_WORKER_CALL_H_
#define TANDEM_PREFILL_WORKER_CALL_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "prefill_worker/core.h"

namespace tandem::prefill_worker {

struct PrefillCore::Call final : StreamHandler<v1::PrefillRequest>,
                                 worker::TimedCall {
  Call(PrefillCore* core_in, CallId id_in, std::unique_ptr<PrefillStream> s)
      : core(core_in), id(id_in), stream(std::move(s)) {}

  void OnMessage(v1::PrefillRequest message) override {
    core->OnMessage(this, std::move(message));
  }
  void OnDrained() override;
  void OnClosed(absl::Status status) override { core->Retire(id, status); }

  PrefillCore* const core;
  const CallId id;
  std::unique_ptr<PrefillStream> stream;
  Phase phase = Phase::kNew;

  v1::PrefillOpen open;
  worker::AdapterUse adapter_use;
  std::unique_ptr<worker::CallGrammar> grammar;  // null: none
  std::vector<int32_t> history;
  engine::Stopping stopping;
  // Positions of the history that the prefix cache did not hold on arrival, or,
  // once offered, then: the work that is left, whatever the prompt's length.
  int uncached = 0;
  // When its prompt would be computed had it never waited: the smallest goes
  // first. Who has little left overtakes who came a little earlier with more,
  // and nobody waits for what came later than by the time of its own work.
  absl::Time due;

  absl::Time queued;
  absl::Time started;  // computing
  absl::Time first_token;
  bool may_compute = false;  // granted, or told to start
  std::optional<absl::Time> granted;
  // Nothing is drawn, and nothing handed over: no decode worker knows of it.
  bool only_scores() const { return !open.has_decode_worker(); }
  const std::string& decode_worker_id() const {
    return open.decode_worker().worker_id();
  }

  // Positions from here on may be wanted by the decode worker, of layers that
  // let them go: all of them, until the grant says.
  int keep_from = 0;
  int promised_blocks = 0;  // that the engine has not taken yet
  int computed_layers = 0;  // of the chunk in the running step
  engine::Work work;
};

}  // namespace tandem::prefill_worker

#endif  // TANDEM_PREFILL_WORKER_CALL_H_
