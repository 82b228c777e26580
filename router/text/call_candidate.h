// SPDX-License-Identifier: Apache-2.0
// What may be one call or several, read from its first byte on: how
// ToolCallParser sees the formats that calls are written in.

#ifndef TANDEM_ROUTER_TEXT_CALL_CANDIDATE_H_
#define TANDEM_ROUTER_TEXT_CALL_CANDIDATE_H_

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "router/text/tool_calls.h"

namespace tandem::router {

class CallCandidate {
 public:
  enum class Verdict { kMore, kCalls, kNone };

  virtual ~CallCandidate() = default;

  // kCalls: they end with `c`. Nothing may follow that or kNone.
  virtual Verdict Push(char c) = 0;
  // Whether what was read is calls if nothing follows. Models may end where a
  // closing tag is due.
  virtual bool CompleteAtEnd() const = 0;
  // Whether the byte read last is of a value, in which no call begins even if
  // this comes to none.
  virtual bool in_value() const { return false; }
  // Whether more calls of the same block may follow those that it came to.
  virtual bool block_goes_on() const { return false; }

  std::vector<ParsedToolCall> TakeCalls() { return std::move(calls_); }

 protected:
  std::vector<ParsedToolCall> calls_;
};

constexpr size_t kMaxNameBytes = 64;

constexpr bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         (c >= '0' && c <= '9') || c == '_' || c == '-';
}

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_CALL_CANDIDATE_H_
