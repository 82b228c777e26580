// SPDX-License-Identifier: Apache-2.0
// What became of blocks behind the KV pool, as metrics.

#ifndef TANDEM_WORKER_OFFLOAD_METRICS_H_
#define TANDEM_WORKER_OFFLOAD_METRICS_H_

#include "common/metrics.h"
#include "engine/kv/kv_offload.h"
#include "worker/load_metrics.h"

namespace tandem::worker {

class OffloadMetrics {
 public:
  explicit OffloadMetrics(Metrics* metrics)
      : bytes_(metrics->AddGauges("tandem_kv_offload_bytes",
                                  "KV kept behind the pool", "tier", 2)),
        saved_(Blocks(metrics, "saved")),
        restored_(Blocks(metrics, "restored")),
        written_(Blocks(metrics, "written")),
        read_(Blocks(metrics, "read")),
        dropped_(Blocks(metrics, "dropped")),
        declined_(Blocks(metrics, "declined")),
        write_errors_(Errors(metrics, "write")),
        read_errors_(Errors(metrics, "read")) {
    bytes_["memory"].Set(0);
    bytes_["file"].Set(0);
  }

  void Update(const engine::KvOffload& offload) {
    const auto bytes = static_cast<double>(offload.block_bytes());
    bytes_["memory"].Set(offload.memory_blocks_used() * bytes);
    bytes_["file"].Set(offload.file_blocks_used() * bytes);
    const engine::KvOffloadCounters& counters = offload.counters();
    saved_.Set(counters.saved);
    restored_.Set(counters.restored);
    written_.Set(counters.written);
    read_.Set(counters.read);
    dropped_.Set(counters.dropped);
    declined_.Set(counters.declined);
    write_errors_.Set(counters.write_errors);
    read_errors_.Set(counters.read_errors);
  }

 private:
  static GrowingCounter Blocks(Metrics* metrics, const char* event) {
    return GrowingCounter(metrics->AddCounter(
        "tandem_kv_offload_blocks_total",
        "KV blocks that left the pool, came back, or were lost",
        {{"event", event}}));
  }
  static GrowingCounter Errors(Metrics* metrics, const char* operation) {
    return GrowingCounter(
        metrics->AddCounter("tandem_kv_offload_file_errors_total",
                            "Blocks lost to a full disk or a corrupt file",
                            {{"operation", operation}}));
  }

  GaugeSet& bytes_;
  GrowingCounter saved_;
  GrowingCounter restored_;
  GrowingCounter written_;
  GrowingCounter read_;
  GrowingCounter dropped_;
  GrowingCounter declined_;
  GrowingCounter write_errors_;
  GrowingCounter read_errors_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_OFFLOAD_METRICS_H_
