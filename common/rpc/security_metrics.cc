// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/security_metrics.h"

#include "common/rpc/certificate.h"
#include "common/rpc/refusals.h"

namespace tandem::rpc {
CertificateMetrics::CertificateMetrics(Metrics* metrics,
                                       const std::string& which)
    : expiry_(metrics->AddGauge("tandem_tls_certificate_expiry_timestamp_"
                                "seconds",
                                "When the certificate in use ends, in Unix "
                                "time",
                                {{"certificate", which}})),
      reloads_(metrics->AddCounters("tandem_tls_certificate_reloads_total",
                                    "Times that its files had changed",
                                    "outcome", 2, {{"certificate", which}})) {
  reloads_["ok"].Add(0);
  reloads_["failed"].Add(0);
}

void CertificateMetrics::Uses(const std::string& pem) {
  const auto validity = ValidityOf(pem);
  if (!validity.ok()) return;
  expiry_.Set(absl::ToDoubleSeconds(validity->end - absl::UnixEpoch()));
}

SecurityMetrics::SecurityMetrics(Metrics* metrics,
                                 const ClusterCredentials* cluster)
    : cluster_(cluster),
      handshakes_(metrics->AddCounter("tandem_tls_handshakes_failed_total",
                                      "TLS handshakes of gRPC, by either "
                                      "end, that failed")),
      refused_(metrics->AddCounters("tandem_rpc_calls_refused_total",
                                    "Calls that the role in the caller's "
                                    "certificate may not make",
                                    "reason", 4)) {
  if (cluster->first().cert.empty()) return;
  certificate_ = std::make_unique<CertificateMetrics>(metrics, "cluster");
  certificate_->Uses(cluster->first().cert);
}

void SecurityMetrics::Update() {
  handshakes_.GrowTo(FailedHandshakes());
  for (const auto& [reason, total] : RefusedCalls()) {
    refused_[reason].GrowTo(total);
  }
  if (certificate_ == nullptr) return;
  const ClusterCredentials::Reloads now = cluster_->reloads();
  for (; told_.ok < now.ok; ++told_.ok) certificate_->Reloaded(true);
  for (; told_.failed < now.failed; ++told_.failed) {
    certificate_->Reloaded(false);
  }
  if (now.cert != told_.cert) certificate_->Uses(now.cert);
  told_.cert = now.cert;
}

}  // namespace tandem::rpc
