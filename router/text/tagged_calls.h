// SPDX-License-Identifier: Apache-2.0
// Calls whose arguments are tagged text instead of JSON:
//
//   qwen3_coder  <tool_call>          glm45  <tool_call>f
//                <function=f>                <arg_key>key</arg_key>
//                <parameter=key>             <arg_value>value</arg_value>
//                value                       </tool_call>
//                </parameter>
//                </function>
//                </tool_call>
//   minimax_m2   <minimax:tool_call>
//                <invoke name="f">
//                <parameter name="key">value</parameter>
//                </invoke>
//                </minimax:tool_call>
//
// with any number of parameters, in the first and the last of functions too.
// Spaces between tags count for nothing. A function that is one of the
// request's needs no block around it. In place of the parameters there may be
// one JSON object: that can be held to a schema (validate/forced_call.h).
//
// A value goes up to the first tag that ends it. It is JSON where the schema
// declares something else than text for the parameter and it reads as that
// (also Python's True, False and None), else a string.

#ifndef TANDEM_ROUTER_TEXT_TAGGED_CALLS_H_
#define TANDEM_ROUTER_TEXT_TAGGED_CALLS_H_

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "router/text/call_candidate.h"
#include "router/text/tool_calls.h"

namespace tandem::router {

// In the order in which they come; those that a style has not are empty.
struct CallTags {
  std::string_view block_begin;
  std::string_view name_begin;
  std::string_view name_end;
  std::string_view key_begin;
  std::string_view key_end;
  std::string_view value_begin;
  std::string_view value_end;
  std::string_view call_end;
  std::string_view block_end;
  // A newline at either end of a value belongs to its tags.
  bool framed = false;
};

// Null: of styles without any.
const CallTags* CallTagsOf(ToolCallStyle style);

// What begins with '<', in a text of these functions' calls. `after_call`:
// nothing but spaces is between it and the call before it, whose block may end
// here though nothing began it. Borrows all of them.
std::unique_ptr<CallCandidate> NewTaggedCandidate(
    const CallTags* tags, const std::vector<std::string>* names,
    const JsonParameters* json_parameters, bool after_call);

// The parameters for which a function's schema declares something else than
// text, as far as it makes sense.
std::set<std::string> DeclaredJson(std::string_view schema);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_TAGGED_CALLS_H_
