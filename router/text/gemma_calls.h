// SPDX-License-Identifier: Apache-2.0
// Calls of Gemma 4, in a syntax of its own:
//
//   <|tool_call>call:f{key:<|"|>text<|"|>,n:3,o:{list:[true,null]}}<tool_call|>
//
// any number of them, one behind the other. A text stands between two <|"|> as
// it is, without escapes; all else is bare. Spaces between parts count for
// nothing. As models get it wrong, "call" may be missing, a comma be one too
// many, keys be texts, and both be strings of JSON: so arguments may as well be
// a JSON object, which can be held to a schema (validate/forced_call.h).
//
// A bare value is JSON where it reads as that (also Python's True, False and
// None), else a string.

#ifndef TANDEM_ROUTER_TEXT_GEMMA_CALLS_H_
#define TANDEM_ROUTER_TEXT_GEMMA_CALLS_H_

#include <memory>
#include <string_view>

#include "router/text/call_candidate.h"

namespace tandem::router {

inline constexpr std::string_view kGemmaCallBegin = "<|tool_call>";
inline constexpr std::string_view kGemmaCallEnd = "<tool_call|>";
inline constexpr std::string_view kGemmaText = "<|\"|>";

// What begins with '<'.
std::unique_ptr<CallCandidate> NewGemmaCandidate();

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_GEMMA_CALLS_H_
