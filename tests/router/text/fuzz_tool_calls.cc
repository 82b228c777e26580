// SPDX-License-Identifier: Apache-2.0
// What a model writes, in any style and cut anywhere: the same calls and text
// as in one piece, calls of functions with objects as arguments, and no more
// text than was written. The first bytes are the style and how it is cut.

#include <algorithm>
#include <string>
#include <vector>

#include "common/utf8.h"
#include "nlohmann/json.hpp"
#include "router/text/harmony.h"
#include "router/text/tagged_calls.h"
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
  ToolCallParser parser(style, {"get_weather", "f"}, {{"f", {"a", "b"}}});
  Parsed parsed;
  while (!text.empty()) {
    parsed.Add(parser.Push(text.substr(0, cut)));
    text.remove_prefix(std::min(cut, text.size()));
  }
  parsed.Add(parser.Finish());
  TANDEM_FUZZ_REQUIRE(!parser.holding());
  return parsed;
}

struct Messages {
  std::string text;
  std::string reasoning;
  std::vector<std::string> calls;
  bool operator==(const Messages&) const = default;
};

// Of text in Harmony's format, in which marks that are written out are tokens.
Messages ReadMessages(std::string_view text, size_t cut) {
  HarmonyFormat format;
  for (size_t i = 0; i < kHarmonyMarks.size(); ++i) {
    format.marks.emplace(i, kHarmonyMarks[i]);
  }
  ToolCallOptions options;
  options.style = ToolCallStyle::kOpenAi;
  HarmonyOutput output(format, &options, 0);
  std::string shown;  // and not yet released
  v1::GenerateDelta delta;
  const auto release = [&](size_t most) {
    while (shown.size() > most) {
      const size_t bytes = std::min(cut, shown.size());
      output.Release(shown.substr(0, bytes), &delta);
      shown.erase(0, bytes);
    }
  };
  while (!text.empty()) {
    size_t bytes = std::min(cut, text.size());
    int32_t id = -1;
    for (size_t i = 0; i < kHarmonyMarks.size(); ++i) {
      const size_t at = text.find(kHarmonyMarks[i]);
      if (at > 0) bytes = std::min(bytes, at);
      if (at > 0) continue;
      id = static_cast<int32_t>(i);
      bytes = kHarmonyMarks[i].size();
      break;
    }
    const std::string_view piece = id < 0 ? text.substr(0, bytes) : "";
    output.Arrives(id, piece);
    shown += piece;
    text.remove_prefix(bytes);
    release(cut);
  }
  release(0);
  output.Release("", &delta);
  output.Finish(&delta);
  google::protobuf::RepeatedPtrField<v1::ToolCall> calls;
  JoinToolCalls(delta.tool_calls(), &calls);
  Messages all{delta.text(), delta.reasoning_content(), {}};
  for (const v1::ToolCall& call : calls) {
    all.calls.push_back(call.name() + " " + call.arguments_json());
    TANDEM_FUZZ_REQUIRE(IsFunctionName(call.name()));
    const auto json =
        nlohmann::json::parse(call.arguments_json(), nullptr, false);
    TANDEM_FUZZ_REQUIRE(json.is_object());
  }
  return all;
}

}  // namespace
}  // namespace tandem::router

TANDEM_FUZZ_TARGET(fuzz_tool_calls)(const uint8_t* data, size_t size) {
  using namespace tandem::router;  // NOLINT(google-build-using-namespace)
  tandem::fuzz::Input input(data, size);
  const auto style = static_cast<ToolCallStyle>(input.Below(12));
  const size_t cut = 1 + input.Byte();
  const std::string text = AsUtf8(input.Rest());
  if (style == ToolCallStyle::kOpenAi) {
    const Messages messages = ReadMessages(text, text.size() + 1);
    TANDEM_FUZZ_REQUIRE(messages.text.size() + messages.reasoning.size() <=
                        text.size());
    TANDEM_FUZZ_REQUIRE(ReadMessages(text, cut) == messages);
    TANDEM_FUZZ_REQUIRE(ReadMessages(text, 1) == messages);
    return 0;
  }
  const Parsed whole = Parse(style, text, std::string::npos);
  TANDEM_FUZZ_REQUIRE(whole.text.size() <= text.size());
  DeclaredJson(text);
  TANDEM_FUZZ_REQUIRE(Parse(style, text, cut) == whole);
  TANDEM_FUZZ_REQUIRE(Parse(style, text, 1) == whole);
  return 0;
}
