// SPDX-License-Identifier: Apache-2.0
// The spans of one request, for OpenTelemetry: what the router saw of it and
// what its workers told.
//
//   chat MODEL                               (GenAI attributes; retries as
//   events)
//     queue | reserve | prefill | decode     one after another
//     place                                  at the queue's end
//     handoff                                beside prefill, ends after it
//
// After a loss they begin again from `queue`. Ids, numbers and names of
// workers, never text.

#ifndef TANDEM_ROUTER_TELEMETRY_REQUEST_TRACE_H_
#define TANDEM_ROUTER_TELEMETRY_REQUEST_TRACE_H_

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/trace_context.h"
#include "opentelemetry/trace.pb.h"
#include "router/telemetry/observer.h"
#include "router/validate/validate.h"

namespace tandem::router {

namespace otlp = ::opentelemetry::proto::collector::trace::v1;

// Takes what ended. Called on the router's loop; must not block.
class SpanSink {
 public:
  virtual ~SpanSink() = default;
  virtual void Export(std::vector<otlp::Span> spans) = 0;
};

class RequestTrace {
 public:
  // `id`: 16 random bytes; the request's own span is named by their half.
  // Times are of the loop's clock.
  RequestTrace(const TraceContext& caller, std::string_view id,
               absl::Time admitted);

  // What calls to workers carry.
  const TraceContext& context() const { return context_; }

  // Ends the phase before. A phase that is under way goes on.
  void Enter(std::string_view phase, absl::Time now,
             std::string_view worker = "");
  void Leave(absl::Time now);
  // The phase under way came to nothing.
  void Lost(absl::Time now, const AttemptLoss& loss);
  // Of the request as a whole.
  void Note(std::string_view event, absl::Time now, std::string_view worker);
  // One beside the phases.
  void Add(std::string_view name, absl::Time begin, absl::Time end,
           std::string_view worker = "", std::string_view way = "");

  // All spans, the request's own first. `wall` is what a clock on the wall
  // shows at `now`.
  std::vector<otlp::Span> Finish(const RequestSummary& summary,
                                 const EffectiveRequest& request,
                                 std::string_view model, absl::Time now,
                                 absl::Time wall);

 private:
  otlp::Span NewSpan(std::string_view name, absl::Time begin, absl::Time end);

  TraceContext context_;  // our span as the caller
  otlp::Span request_;
  std::vector<otlp::Span> done_;
  std::optional<otlp::Span> phase_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TELEMETRY_REQUEST_TRACE_H_
