// SPDX-License-Identifier: Apache-2.0
// Calls whose arguments are JSON between marks, any number of them in a block:
//
//   deepseek_v3   <｜tool▁calls▁begin｜>
//                 <｜tool▁call▁begin｜>function<｜tool▁sep｜>f
//                 ```json
//                 {..}
//                 ```<｜tool▁call▁end｜>
//                 <｜tool▁calls▁end｜>
//   deepseek_v31  the same, of <｜tool▁call▁begin｜>f<｜tool▁sep｜>{..}
//                 <｜tool▁call▁end｜>
//   kimi_k2       <|tool_calls_section_begin|>
//                 <|tool_call_begin|>functions.f:0
//                 <|tool_call_argument_begin|>{..}<|tool_call_end|>
//                 <|tool_calls_section_end|>
//
// Spaces between their parts count for nothing, and functions. may be missing.
// Kimi counts the calls of a chat: functions.f:0 is the call's id. Each call is
// complete with its own end, or with the block's where that is left out, and
// found also where the next one is not.

#ifndef TANDEM_ROUTER_TEXT_MARKED_CALLS_H_
#define TANDEM_ROUTER_TEXT_MARKED_CALLS_H_

#include <memory>
#include <span>
#include <string_view>

#include "router/text/call_candidate.h"
#include "router/text/tool_calls.h"

namespace tandem::router {

struct CallPart {
  enum class Kind { kText, kName, kIndex, kArguments };
  Kind kind;
  std::string_view text;  // as models write it; of a name, what is before it
};

struct CallMarks {
  std::string_view block_begin;
  std::span<const CallPart> call;
  std::string_view between;  // of two calls
  std::string_view block_end;
};

// Null: of styles without any.
const CallMarks* CallMarksOf(ToolCallStyle style);

// Whether a chat template has all of them.
bool WritesMarks(std::string_view chat_template, const CallMarks& marks);

// What begins with '<'. `in_block`: nothing but spaces is between it and the
// call before it, behind which the block goes on. Borrows the marks.
std::unique_ptr<CallCandidate> NewMarkedCandidate(const CallMarks* marks,
                                                  bool in_block);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_MARKED_CALLS_H_
