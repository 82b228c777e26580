// SPDX-License-Identifier: Apache-2.0
// The styles of tool calls, by short names.

#ifndef TANDEM_TESTS_ROUTER_TEXT_STYLES_H_
#define TANDEM_TESTS_ROUTER_TEXT_STYLES_H_

#include "router/text/tool_calls.h"

namespace tandem::router {

inline constexpr ToolCallStyle kLlama = ToolCallStyle::kLlama3Json;
inline constexpr ToolCallStyle kHermes = ToolCallStyle::kHermes;
inline constexpr ToolCallStyle kMistral = ToolCallStyle::kMistral;
inline constexpr ToolCallStyle kQwen = ToolCallStyle::kQwen3Coder;
inline constexpr ToolCallStyle kGlm = ToolCallStyle::kGlm45;
inline constexpr ToolCallStyle kMiniMax = ToolCallStyle::kMinimaxM2;
inline constexpr ToolCallStyle kDeepSeek = ToolCallStyle::kDeepSeekV3;
inline constexpr ToolCallStyle kDeepSeek31 = ToolCallStyle::kDeepSeekV31;
inline constexpr ToolCallStyle kKimi = ToolCallStyle::kKimiK2;
inline constexpr ToolCallStyle kGemma = ToolCallStyle::kGemma4;

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_TEXT_STYLES_H_
