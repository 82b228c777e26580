// SPDX-License-Identifier: Apache-2.0
// The router's Prometheus metrics, and its one log line per request.

#ifndef TANDEM_ROUTER_TELEMETRY_METRICS_H_
#define TANDEM_ROUTER_TELEMETRY_METRICS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "common/log.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "router/placement/placement.h"
#include "router/telemetry/observer.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::router {

class RouterMetrics final : public RouterObserver {
 public:
  // Of lines of one kind, when much fails at once.
  static constexpr absl::Duration kLogInterval = absl::Milliseconds(100);

  RouterMetrics(Metrics* metrics, Policy policy);

  void OnPlaced(bool split) override;
  void OnStage(Stage stage, absl::Duration took) override;
  void OnFirstToken(int tokens, absl::Duration since_admission) override;
  void OnTokens(int tokens, absl::Duration gap) override;
  void OnRetry(const AttemptLoss& loss) override;
  void OnClusterEvent(const ClusterEvent& event) override;
  void OnSuspect(std::string_view internal_id, const std::string& first,
                 const std::string& second) override;
  void OnEnded(const RequestSummary& summary) override;
  void OnAdapter(const std::string& name, std::string_view what,
                 const absl::Status& status) override;

  void OnTenantRefused(const std::string& tenant,
                       std::string_view limit) override;
  void OnTenantTokens(const std::string& tenant, int64_t prompt,
                      int64_t generated) override;

  // A request that validation refused; it never reached the core.
  void OnInvalid(Api api, const absl::Status& status);
  // Gauges; about once a second.
  void Update(const v1::GetClusterStateResponse& state);
  // Of a public port, "grpc" or "http"; likewise.
  void UpdateConnections(const std::string& port, int64_t open,
                         int64_t refused);

 private:
  struct TenantCounters {
    CounterSet* refused;  // by reason
    CounterSet* tokens;   // by kind
  };
  // By the stage at which attempts were lost.
  CounterSet& RetriesIn(std::string_view stage);
  TenantCounters& Of(const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(tenants_mutex_);

  Metrics* const metrics_;
  Mutex tenants_mutex_;
  std::map<std::string, TenantCounters> tenants_
      ABSL_GUARDED_BY(tenants_mutex_);
  CounterSet* requests_[3];  // by Api
  CounterSet& finished_;
  CounterSet& placements_;
  Histogram* stages_[5];                                     // by Stage
  std::map<std::string, CounterSet*, std::less<>> retries_;  // by stage
  CounterSet* lost_[2];  // workers, decode workers second
  CounterSet& registrations_;
  CounterSet& pairs_avoided_;
  GaugeSet& avoided_pairs_;
  Gauge& avoided_workers_;
  Counter& suspects_;
  Counter& refusals_;
  LogLimiter losses_log_{kLogInterval};
  LogLimiter refusals_log_{kLogInterval};
  LogLimiter cluster_log_[5] = {
      LogLimiter(kLogInterval), LogLimiter(kLogInterval),
      LogLimiter(kLogInterval), LogLimiter(kLogInterval),
      LogLimiter(kLogInterval)};  // by ClusterEvent::Kind
  CounterSet& resumed_;
  CounterSet& prompt_tokens_;
  Counter& generation_tokens_;
  Counter& disconnects_;
  GaugeSet& connections_;  // by port
  CounterSet& refused_connections_;
  Gauge& running_;
  Gauge& waiting_;
  Gauge& waiting_tokens_;
  GaugeSet& prefill_workers_;
  GaugeSet& decode_workers_;
  Histogram& queue_time_;
  Histogram& prefill_time_;
  Histogram& handoff_time_;
  Histogram& decode_time_;
  Histogram& first_token_time_;
  Histogram& inter_token_time_;
  Histogram& output_token_time_;
  Histogram& total_time_;
  Histogram& prompt_size_;
  Histogram& generation_size_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TELEMETRY_METRICS_H_
