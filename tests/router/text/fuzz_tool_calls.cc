// SPDX-License-Identifier: Apache-2.0
// What a model writes, in any style and cut anywhere: the same calls and text
// as in one piece, calls of functions with objects as arguments, and no more
// text than was written. The first bytes are the style and how it is cut.

#include <algorithm>
#include <string>
#include <vector>

#include "common/utf8.h"
#include "nlohmann/json.hpp"
#include "router/text/tool_calls.h"
#include "tests/fuzz.h"

namespace tandem::router {
namespace {

// As text comes from the tokenizer.
std::string AsUtf8(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const size_t length = Utf8Length(bytes);
    length > 0 ? text.append(bytes.substr(0, length)) : text.append("?");
    bytes.remove_prefix(std::max<size_t>(length, 1));
  }
  return text;
}

struct Parsed {
  std::string text;
  std::vector<std::string> calls;

  void Add(const ToolCallParser::Result& result) {
    text += result.text;
    for (const ParsedToolCall& call : result.calls) {
      calls.push_back(call.name + " " + call.arguments);
      TANDEM_FUZZ_REQUIRE(IsFunctionName(call.name));
      const auto json = nlohmann::json::parse(call.arguments, nullptr, false);
      TANDEM_FUZZ_REQUIRE(json.is_object());
    }
  }
  bool operator==(const Parsed&) const = default;
};

Parsed Parse(ToolCallStyle style, std::string_view text, size_t cut) {
  ToolCallParser parser(style, {"get_weather", "f"});
  Parsed parsed;
  while (!text.empty()) {
    parsed.Add(parser.Push(text.substr(0, cut)));
    text.remove_prefix(std::min(cut, text.size()));
  }
  parsed.Add(parser.Finish());
  TANDEM_FUZZ_REQUIRE(!parser.holding());
  return parsed;
}

}  // namespace
}  // namespace tandem::router

TANDEM_FUZZ_TARGET(fuzz_tool_calls)(const uint8_t* data, size_t size) {
  using namespace tandem::router;  // NOLINT(google-build-using-namespace)
  tandem::fuzz::Input input(data, size);
  const auto style = static_cast<ToolCallStyle>(input.Below(4));
  const size_t cut = 1 + input.Byte();
  const std::string text = AsUtf8(input.Rest());
  const Parsed whole = Parse(style, text, std::string::npos);
  TANDEM_FUZZ_REQUIRE(whole.text.size() <= text.size());
  TANDEM_FUZZ_REQUIRE(Parse(style, text, cut) == whole);
  TANDEM_FUZZ_REQUIRE(Parse(style, text, 1) == whole);
  return 0;
}
