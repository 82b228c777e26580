// SPDX-License-Identifier: Apache-2.0
// W3C Trace Context (https://www.w3.org/TR/trace-context): which trace a call
// belongs to, from its `traceparent` and `tracestate` headers and into those of
// the calls that it makes.

#ifndef TANDEM_COMMON_TRACE_CONTEXT_H_
#define TANDEM_COMMON_TRACE_CONTEXT_H_

#include <optional>
#include <string>
#include <string_view>

namespace tandem {

struct TraceContext {
  std::string trace_id;  // 16 bytes; empty: no trace
  std::string span_id;   // 8 bytes, of the caller; empty: there is none
  bool sampled = false;
  std::string state;  // `tracestate` as it came

  // For a call whose caller is the span `span_id`; "" where there is none.
  std::string Traceparent() const;
};

// None where `traceparent` is missing or wrong: a trace then begins here, and
// `tracestate` is dropped with it, as the standard wants. A `tracestate` of
// more than 512 characters, or other than printable ones, is dropped alone.
std::optional<TraceContext> ParseTraceContext(std::string_view traceparent,
                                              std::string_view tracestate);

}  // namespace tandem

#endif  // TANDEM_COMMON_TRACE_CONTEXT_H_
