// SPDX-License-Identifier: Apache-2.0
// Calls that a model must make, as a format that its output has to match.

#include "router/validate/forced_call.h"

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/text/tool_calls.h"
#include "tests/router/text/styles.h"

namespace tandem::router {
namespace {

// A text that a format lets through: its first choice, and {} for schemas.
std::string TextOf(const nlohmann::json& format, const ModelLimits& limits) {
  const std::string type = format["type"];
  if (type == "const_string") return format["value"];
  if (type == "json_schema") return "{}";
  if (type == "regex") return "0";  // of an index
  if (type == "token") return limits.tool_call_markers.at(format["token"]);
  if (type == "or") return TextOf(format["elements"][0], limits);
  EXPECT_EQ(type, "sequence");
  std::string text;
  for (const nlohmann::json& part : format["elements"]) {
    text += TextOf(part, limits);
  }
  return text;
}

TEST(ForcedCallTest, WhatItLetsThroughIsACall) {
  v1::Chat chat;
  chat.set_tool_choice("required");
  chat.add_tools()->set_name("get_weather");
  chat.add_tools()->set_name("f");
  struct Style {
    ToolCallStyle style;
    bool by_name;
    std::map<int32_t, std::string> markers;
  };
  const Style kStyles[] = {
      {kHermes, false, {}},
      {kHermes, false, {{7, "<tool_call>"}, {8, "</tool_call>"}}},
      {kLlama, false, {{7, "<|python_tag|>"}}},
      {kMistral, false, {{7, "[TOOL_CALLS]"}}},
      {kMistral, true, {{7, "[TOOL_CALLS]"}, {9, "[ARGS]"}}},
      {kMistral, true, {}},
      {kQwen, false, {}},
      {kGlm, false, {{7, "<tool_call>"}, {8, "</tool_call>"}}},
      {kMiniMax, false, {}},
      {kDeepSeek, false, {}},
      {kDeepSeek,
       false,
       {{7, "<｜tool▁calls▁begin｜>"}, {8, "<｜tool▁sep｜>"}}},
      {kDeepSeek31, false, {}},
      {kDeepSeek31,
       false,
       {{7, "<｜tool▁call▁begin｜>"}, {8, "<｜tool▁calls▁end｜>"}}},
      {kKimi, false, {}},
      {kKimi,
       false,
       {{7, "<|tool_calls_section_begin|>"}, {8, "<|tool_call_end|>"}}},
      {kGemma, false, {}},
      {kGemma, false, {{7, "<|tool_call>"}, {8, "<tool_call|>"}}},
  };
  for (const Style& style : kStyles) {
    ModelLimits limits;
    limits.tool_call_style = style.style;
    limits.tool_calls_by_name = style.by_name;
    limits.tool_call_markers = style.markers;
    for (const bool named : {false, true}) {
      chat.clear_tool_choice_function();
      if (named) chat.set_tool_choice_function("f");
      const auto tag = ForcedCallTag(chat, limits);
      ASSERT_TRUE(tag.ok()) << tag.status();
      const std::string text =
          TextOf(nlohmann::json::parse(*tag)["format"], limits);
      ToolCallParser parser(style.style, {"f", "get_weather"});
      ToolCallParser::Result found = parser.Push(text);
      const ToolCallParser::Result rest = parser.Finish();
      found.calls.insert(found.calls.end(), rest.calls.begin(),
                         rest.calls.end());
      EXPECT_EQ(found.text + rest.text, "");
      ASSERT_EQ(found.calls.size(), 1u) << text;
      EXPECT_EQ(found.calls[0].name, named ? "f" : "get_weather");
      EXPECT_EQ(found.calls[0].arguments, "{}");
    }
  }
}

TEST(ForcedCallTest, SchemasAreOfObjectsAndKeepTheirOrder) {
  ModelLimits limits;
  limits.tool_call_style = kLlama;
  v1::Chat chat;
  chat.set_tool_choice("required");
  v1::Tool* const tool = chat.add_tools();
  tool->set_name("f");
  const auto tag = [&](const std::string& schema) {
    tool->set_parameters_json_schema(schema);
    return ForcedCallTag(chat, limits);
  };
  EXPECT_THAT(*tag(""), testing::HasSubstr(R"("additionalProperties":false)"));
  EXPECT_THAT(*tag(R"( {"z":1,"type":"object"} )"),
              testing::HasSubstr(R"("json_schema":{"z":1,"type":"object"}})"));
  EXPECT_THAT(*tag(R"({"z":1})"),
              testing::HasSubstr(R"(:{"type":"object","z":1}})"));
  EXPECT_THAT(*tag("{}"), testing::HasSubstr(R"(:{"type":"object"}})"));
  EXPECT_EQ(ErrorMetadata(tag(R"({"type":"array"})").status())["field"],
            "chat.tools[0].parameters_json_schema");
}

TEST(ForcedCallTest, ACallOrAnAnswerOfItsForm) {
  ModelLimits limits;
  limits.tool_call_style = kLlama;
  v1::Chat chat;
  chat.add_tools()->set_name("f");
  chat.mutable_tools(0)->set_parameters_json_schema(R"({"title":"F"})");
  chat.add_tools()->set_name("g");
  chat.mutable_tools(1)->set_parameters_json_schema(R"({"title":"G"})");
  chat.mutable_tools(1)->set_strict(true);
  const struct {
    std::function<void(v1::StructuredOptions*)> set;
    const char* answer;  // null: it stays as it is
  } kCases[] = {
      {[](auto* a) { a->set_json_schema(R"({"z":1,"a":2})"); },
       R"({"type":"json_schema","json_schema":{"z":1,"a":2}})"},
      {[](auto* a) { a->set_json_schema("{"); }, nullptr},
      {[](auto* a) { a->set_json_object(true); },
       R"({"type":"json_schema","json_schema":{"type":"object"}})"},
      {[](auto* a) { a->set_regex("\\d"); },
       R"({"type":"regex","pattern":"\\d"})"},
      {[](auto* a) { a->set_grammar("start: \"a\""); },
       R"({"type":"grammar","grammar":"start: \"a\""})"},
      {[](auto* a) {
         a->mutable_choice()->add_values("a");
         a->mutable_choice()->add_values("\"");
       },
       R"({"type":"grammar","grammar":"start: CHOICE\nCHOICE: \"a\" | \"\\\"\"\n"})"},
      {[](auto* a) {
         a->set_structural_tag(R"({"format":{"type":"any_text"}})");
       },
       R"({"type":"any_text"})"},
      {[](auto* a) { a->set_structural_tag(R"({"structures":[]})"); }, nullptr},
  };
  for (const auto& c : kCases) {
    v1::StructuredOptions answer;
    c.set(&answer);
    const auto tag = CallOrAnswerTag(chat, answer, limits);
    ASSERT_TRUE(tag.ok()) << tag.status();
    ASSERT_EQ(tag->has_value(), c.answer != nullptr) << answer.DebugString();
    if (c.answer == nullptr) continue;
    const auto parsed = nlohmann::ordered_json::parse(**tag)["format"];
    EXPECT_EQ(parsed["type"], "or");
    EXPECT_EQ(parsed["elements"][1].dump(), c.answer);
    const std::string calls = parsed["elements"][0].dump();
    EXPECT_EQ(calls.find(R"("title":"F")"), std::string::npos);
    EXPECT_NE(calls.find(R"("title":"G")"), std::string::npos);
  }
}

// Whatever a client sends as its tag is read in one pass and on no deep stack.
TEST(ForcedCallTest, ATagOfAnySizeIsReadOnce) {
  ModelLimits limits;
  limits.tool_call_style = kLlama;
  v1::Chat chat;
  chat.add_tools()->set_name("f");
  v1::StructuredOptions answer;
  const auto tag = [&](const std::string& own) {
    answer.set_structural_tag(own);
    return CallOrAnswerTag(chat, answer, limits);
  };
  const auto nested = [](size_t depth) {
    return absl::StrCat(R"({"format":)", std::string(depth, '['),
                        std::string(depth, ']'), "}");
  };
  ASSERT_TRUE(tag(nested(31)).ok());
  for (const std::string& wrong :
       {nested(32), nested(500'000), std::string(1 << 20, '['),
        std::string(R"({"format":)"), std::string(R"({"format":{}}})"),
        std::string("[]"), std::string()}) {
    const absl::Status status = tag(wrong).status();
    EXPECT_EQ(ErrorReason(status), "CONSTRAINT_INVALID") << status;
    EXPECT_EQ(ErrorMetadata(status)["field"], "structured.structural_tag");
  }
  std::string many = R"( {"format":{"type":"x"})";
  for (int i = 0; i < 60'000; ++i) absl::StrAppend(&many, R"(,")", i, R"(":1)");
  many += R"(, "format" : {"z":1, "a":2} } )";
  const auto made = tag(many);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_THAT(**made, testing::EndsWith(R"(,{"z":1, "a":2}]}})"));
}

}  // namespace
}  // namespace tandem::router
