// SPDX-License-Identifier: Apache-2.0
#include "common/trace_context.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

constexpr size_t kMaxState = 512;
constexpr size_t kLength = 55;  // "00-" 32 "-" 16 "-" 2

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
}

bool IsZero(std::string_view hex) {
  return hex.find_first_not_of('0') == std::string_view::npos;
}

}  // namespace

std::string TraceContext::Traceparent() const {
  if (trace_id.empty() || span_id.empty()) return "";
  return absl::StrCat("00-", absl::BytesToHexString(trace_id), "-",
                      absl::BytesToHexString(span_id), sampled ? "-01" : "-00");
}

std::optional<TraceContext> ParseTraceContext(std::string_view traceparent,
                                              std::string_view tracestate) {
  const std::string_view& text = traceparent;
  if (text.size() < kLength || text[2] != '-' || text[35] != '-' ||
      text[52] != '-') {
    return std::nullopt;
  }
  const std::string_view version = text.substr(0, 2);
  const std::string_view trace = text.substr(3, 32);
  const std::string_view span = text.substr(36, 16);
  const std::string_view flags = text.substr(53, 2);
  if (!IsHex(version) || !IsHex(trace) || !IsHex(span) || !IsHex(flags) ||
      version == "ff" || IsZero(trace) || IsZero(span)) {
    return std::nullopt;
  }
  // Later versions may add fields.
  if (text.size() > kLength && (version == "00" || text[kLength] != '-')) {
    return std::nullopt;
  }
  TraceContext context;
  context.trace_id = absl::HexStringToBytes(std::string(trace));
  context.span_id = absl::HexStringToBytes(std::string(span));
  context.sampled = (absl::HexStringToBytes(std::string(flags))[0] & 1) != 0;
  const bool printable =
      std::all_of(tracestate.begin(), tracestate.end(),
                  [](char c) { return c >= ' ' && c <= '~'; });
  if (printable && tracestate.size() <= kMaxState) {
    context.state = std::string(tracestate);
  }
  return context;
}

}  // namespace tandem
