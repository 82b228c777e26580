// SPDX-License-Identifier: Apache-2.0
// Sends spans to an OpenTelemetry collector over OTLP/gRPC
// (https://opentelemetry.io/docs/specs/otlp), in batches, beside all else: a
// collector that is slow or away costs spans, never requests.

#ifndef TANDEM_ROUTER_TELEMETRY_OTLP_EXPORTER_H_
#define TANDEM_ROUTER_TELEMETRY_OTLP_EXPORTER_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/log.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "common/rpc/credentials.h"
#include "opentelemetry/trace.grpc.pb.h"
#include "router/telemetry/request_trace.h"

namespace tandem::router {

struct OtlpOptions {
  std::string address;  // host:port; empty: nothing is exported
  rpc::Credentials tls = {};
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string service_name = "tandem-router";
  size_t max_batch = 512;    // spans of one message
  size_t max_queued = 8192;  // beyond them new ones are dropped, and counted
  absl::Duration interval = absl::Seconds(1);
  absl::Duration timeout = absl::Seconds(10);
};

// `endpoint`: http://host:port, https://host:port or host:port. What it leaves
// open comes from the environment, as OpenTelemetry names it:
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT,
// OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE (default: the
// system's), OTEL_SERVICE_NAME, OTEL_TRACES_EXPORTER (none) and
// OTEL_SDK_DISABLED. INVALID_ARGUMENT names what is wrong, but of an endpoint
// from the environment a warning does: it may be meant for others.
absl::StatusOr<OtlpOptions> ReadOtlpOptions(const std::string& endpoint);

// What a collector may take later is kept for it, up to
// OtlpOptions::max_queued. All methods but Stop are called on the loop, which
// outlives it.
class OtlpExporter final : public SpanSink {
 public:
  OtlpExporter(const OtlpOptions& options, Loop* loop, Metrics* metrics);
  ~OtlpExporter() override;

  void Export(std::vector<otlp::Span> spans) override;

  // From another thread, when nothing is exported any more: sends what is
  // left, waits for it no longer than `grace`, and ends.
  void Stop(absl::Duration grace);

 private:
  struct Call;

  void Send();
  void OnSent(const absl::Status& status, size_t spans);
  void TakeBack();

  const OtlpOptions options_;
  Loop* const loop_;
  CounterSet& counts_;
  std::unique_ptr<otlp::TraceService::Stub> stub_;
  std::vector<otlp::Span> queue_;
  std::shared_ptr<Call> call_;  // the one under way
  size_t in_flight_ = 0;        // its spans
  int failures_ = 0;            // of calls, one after the other
  bool stopping_ = false;       // nothing is tried twice any more
  Timer timer_;
  LogLimiter limiter_{absl::Seconds(60)};
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TELEMETRY_OTLP_EXPORTER_H_
