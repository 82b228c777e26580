// SPDX-License-Identifier: Apache-2.0
// Calls whose arguments are JSON, of Hermes, Llama and Mistral (tool_calls.h).

#ifndef TANDEM_ROUTER_TEXT_JSON_CALLS_H_
#define TANDEM_ROUTER_TEXT_JSON_CALLS_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "router/text/call_candidate.h"
#include "router/text/tool_calls.h"

namespace tandem::router {

inline constexpr std::string_view kHermesOpen = "<tool_call>";
inline constexpr std::string_view kHermesClose = "</tool_call>";
inline constexpr std::string_view kPythonTag = "<|python_tag|>";
inline constexpr std::string_view kToolCalls = "[TOOL_CALLS]";
inline constexpr std::string_view kCallId = "[CALL_ID]";
inline constexpr std::string_view kArgs = "[ARGS]";

// What begins with the style's marker, or, if it is not `marked`, with '{':
// then it must be calls of these functions. Borrows them.
std::unique_ptr<CallCandidate> NewJsonCandidate(
    ToolCallStyle style, const std::vector<std::string>* names, bool marked);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_JSON_CALLS_H_
