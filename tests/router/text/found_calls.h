// SPDX-License-Identifier: Apache-2.0
// What a text in pieces comes to: the calls in it and what is around them.

#ifndef TANDEM_TESTS_ROUTER_TEXT_FOUND_CALLS_H_
#define TANDEM_TESTS_ROUTER_TEXT_FOUND_CALLS_H_

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "router/text/tool_calls.h"

namespace tandem::router {

struct FoundCalls {
  std::string text;
  std::vector<std::string> calls;  // name(arguments)
  bool operator==(const FoundCalls&) const = default;
};

// Of f, g and get_weather; "n" and "o" of f are JSON where they have tags.
inline FoundCalls FindCalls(ToolCallStyle style,
                            const std::vector<std::string>& pieces) {
  ToolCallParser parser(style, {"f", "g", "get_weather"}, {{"f", {"n", "o"}}});
  FoundCalls all;
  const auto add = [&](const ToolCallParser::Result& result) {
    all.text += result.text;
    for (const ParsedToolCall& call : result.calls) {
      all.calls.push_back(call.name + "(" + call.arguments + ")");
    }
  };
  for (const std::string& piece : pieces) add(parser.Push(piece));
  add(parser.Finish());
  EXPECT_FALSE(parser.holding());
  return all;
}

inline std::vector<std::string> ByteByByte(const std::string& text) {
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  return bytes;
}

// Byte by byte, and in two pieces of every length, it comes to the same.
inline void ExpectAlikeHoweverCut(ToolCallStyle style,
                                  const std::string& text) {
  SCOPED_TRACE(text);
  const FoundCalls whole = FindCalls(style, {text});
  EXPECT_EQ(FindCalls(style, ByteByByte(text)), whole);
  for (size_t i = 1; i < text.size(); ++i) {
    ASSERT_EQ(FindCalls(style, {text.substr(0, i), text.substr(i)}), whole)
        << i;
  }
}

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_TEXT_FOUND_CALLS_H_
