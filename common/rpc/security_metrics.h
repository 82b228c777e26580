// SPDX-License-Identifier: Apache-2.0
// For /metrics: who was turned away by TLS or by role, whether new certificates
// were taken, and until when those in use are valid.

#ifndef TANDEM_COMMON_RPC_SECURITY_METRICS_H_
#define TANDEM_COMMON_RPC_SECURITY_METRICS_H_

#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "common/metrics.h"
#include "common/rpc/cluster_credentials.h"

namespace tandem::rpc {

// Of one certificate, which the label says. Thread-safe.
class CertificateMetrics {
 public:
  CertificateMetrics(Metrics* metrics, const std::string& which);

  // `pem` is in use from now on.
  void Uses(const std::string& pem);
  void Reloaded(bool ok) { reloads_[ok ? "ok" : "failed"].Add(); }

 private:
  Gauge& expiry_;
  CounterSet& reloads_;
};

class SecurityMetrics {
 public:
  // `cluster` outlives this.
  SecurityMetrics(Metrics* metrics, const ClusterCredentials* cluster);
  // About once a second, on one thread.
  void Update();

 private:
  const ClusterCredentials* const cluster_;
  Counter& handshakes_;
  CounterSet& refused_;
  std::unique_ptr<CertificateMetrics> certificate_;  // null: plain text
  ClusterCredentials::Reloads told_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SECURITY_METRICS_H_
