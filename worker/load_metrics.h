// SPDX-License-Identifier: Apache-2.0
// The metrics that both workers export from their load and counters.

#ifndef TANDEM_WORKER_LOAD_METRICS_H_
#define TANDEM_WORKER_LOAD_METRICS_H_

#include <cstdint>
#include <map>
#include <string>

#include "common/metrics.h"
#include "engine/engine.h"
#include "handoff/handoff.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::worker {

// A counter of ours, kept as a plain integer, told to Prometheus: adds what it
// grew by since the last time.
class GrowingCounter {
 public:
  explicit GrowingCounter(Counter counter) : counter_(counter) {}
  void Set(int64_t total) {
    if (total > told_) counter_.Add(static_cast<double>(total - told_));
    told_ = total;
  }

 private:
  Counter counter_;
  int64_t told_ = 0;
};

// One line, some at most where much fails at once: the pair (with the worker
// whose log it is), the stage and the cause.
void LogHandoffFault(const handoff::HandoffFault& fault);

class LoadMetrics {
 public:
  LoadMetrics(Metrics* metrics, const v1::WorkerHello& hello);

  void Update(const v1::WorkerLoad& load, const engine::EngineStats& stats,
              const handoff::HandoffCounters& handoffs,
              int64_t history_positions, int64_t cached_positions);

 private:
  void UpdateHandoffs(const handoff::HandoffCounters& handoffs);
  void Told(const std::string& way, const char* outcome, int64_t total);

  Metrics* const metrics_;
  const char* const direction_;  // of handed-over bytes, from here
  Gauge& running_;
  Gauge& waiting_;
  Gauge& waiting_tokens_;
  Gauge& usage_;
  GaugeSet& blocks_;
  GaugeSet& slabs_;
  Gauge& tickets_;
  GrowingCounter prefill_tokens_;
  GrowingCounter cached_tokens_;
  GrowingCounter generated_tokens_;
  GrowingCounter queries_;
  GrowingCounter hits_;
  GrowingCounter preemptions_;
  GrowingCounter window_blocks_;
  GrowingCounter drafts_;
  GrowingCounter draft_tokens_;
  GrowingCounter accepted_tokens_;
  GrowingCounter late_;
  GrowingCounter refused_;
  GrowingCounter offers_refused_;
  GrowingCounter ways_failed_;
  GrowingCounter quarantines_;
  GrowingCounter arenas_dropped_;
  GrowingCounter links_made_, links_lost_, links_refused_;
  std::map<std::string, GrowingCounter> failures_;  // by way and stage
  std::map<std::string, GrowingCounter> handoffs_;  // by way and outcome
  std::map<std::string, GrowingCounter> bytes_;     // by way
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_LOAD_METRICS_H_
