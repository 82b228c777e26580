// SPDX-License-Identifier: Apache-2.0
// What a model may write where functions are strict, by the grammar that is
// compiled of it: any text, and calls whose arguments satisfy their schemas.
// What it lets through is read again by the parser of calls.

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "router/text/tool_calls.h"
#include "router/validate/forced_call.h"
#include "tests/router/validate/tag_writer.h"

namespace tandem::router {
namespace {

struct CallFormat {
  const char* what;
  ToolCallStyle kind;
  bool by_name;
  // Special tokens of the tokenizer that stand for marks.
  std::map<int32_t, std::string> markers;
};
// 3, 4 and 5 are special tokens of models/tales.
const CallFormat kHermesText = {"hermes", ToolCallStyle::kHermes, false, {}};
const CallFormat kHermesTokens = {"hermes, tokens",
                                  ToolCallStyle::kHermes,
                                  false,
                                  {{3, "<tool_call>"}, {4, "</tool_call>"}}};
const CallFormat kMistralList = {
    "mistral", ToolCallStyle::kMistral, false, {{3, "[TOOL_CALLS]"}}};
const CallFormat kMistralNames = {"mistral by name",
                                  ToolCallStyle::kMistral,
                                  true,
                                  {{3, "[TOOL_CALLS]"}, {4, "[ARGS]"}}};
const CallFormat kLlamaText = {"llama", ToolCallStyle::kLlama3Json, false, {}};
const CallFormat kLlamaToken = {
    "llama, token", ToolCallStyle::kLlama3Json, false, {{3, "<|python_tag|>"}}};
const CallFormat kQwenText = {"qwen", ToolCallStyle::kQwen3Coder, false, {}};
const CallFormat kQwenTokens = {"qwen, tokens",
                                ToolCallStyle::kQwen3Coder,
                                false,
                                {{3, "<tool_call>"}, {4, "</tool_call>"}}};
const CallFormat kGlmText = {"glm", ToolCallStyle::kGlm45, false, {}};
const CallFormat kGlmTokens = {"glm, tokens",
                               ToolCallStyle::kGlm45,
                               false,
                               {{3, "<tool_call>"}, {4, "</tool_call>"}}};
const CallFormat kMiniMaxText = {
    "minimax", ToolCallStyle::kMinimaxM2, false, {}};
const CallFormat kMiniMaxTokens = {
    "minimax, tokens",
    ToolCallStyle::kMinimaxM2,
    false,
    {{3, "<minimax:tool_call>"}, {4, "</minimax:tool_call>"}}};
const CallFormat kDeepSeekText = {
    "deepseek", ToolCallStyle::kDeepSeekV3, false, {}};
const CallFormat kDeepSeekTokens = {"deepseek, tokens",
                                    ToolCallStyle::kDeepSeekV3,
                                    false,
                                    {{3, "<｜tool▁calls▁begin｜>"},
                                     {4, "<｜tool▁sep｜>"},
                                     {5, "<｜tool▁calls▁end｜>"}}};
const CallFormat kDeepSeek31Text = {
    "deepseek 3.1", ToolCallStyle::kDeepSeekV31, false, {}};
const CallFormat kDeepSeek31Tokens = {"deepseek 3.1, tokens",
                                      ToolCallStyle::kDeepSeekV31,
                                      false,
                                      {{3, "<｜tool▁calls▁begin｜>"},
                                       {4, "<｜tool▁sep｜>"},
                                       {5, "<｜tool▁call▁end｜>"}}};
const CallFormat kKimiText = {"kimi", ToolCallStyle::kKimiK2, false, {}};
const CallFormat kKimiTokens = {"kimi, tokens",
                                ToolCallStyle::kKimiK2,
                                false,
                                {{3, "<|tool_calls_section_begin|>"},
                                 {4, "<|tool_call_argument_begin|>"},
                                 {5, "<|tool_call_end|>"}}};
const CallFormat kGemmaText = {"gemma", ToolCallStyle::kGemma4, false, {}};
const CallFormat kGemmaTokens = {
    "gemma, tokens",
    ToolCallStyle::kGemma4,
    false,
    {{3, "<|tool_call>"}, {4, "<tool_call|>"}, {5, "<|\"|>"}}};

class StrictCallsTest : public testing::Test {
 protected:
  StrictCallsTest() {
    v1::Tool* const strict = chat_.add_tools();
    strict->set_name("weather");
    strict->set_strict(true);
    strict->set_parameters_json_schema(
        R"({"type":"object","properties":{"days":{"type":"integer"}},)"
        R"("required":["days"],"additionalProperties":false})");
    chat_.add_tools()->set_name("clock");
    chat_.add_tools()->set_name("clocks");
  }

  static ModelLimits Limits(const CallFormat& style) {
    ModelLimits limits;
    limits.tool_call_style = style.kind;
    limits.tool_calls_by_name = style.by_name;
    limits.tool_call_markers = style.markers;
    return limits;
  }

  // Whether all of `text` may be written, and be all.
  bool Allows(const CallFormat& style, std::string_view text) {
    const auto tag = StrictCallsTag(chat_, Limits(style));
    EXPECT_TRUE(tag.ok()) << tag.status();
    return tag.ok() && writer_.Allows(*tag, text);
  }

  // As the router's parser reads it: "text|name(arguments)..".
  static std::string Read(const CallFormat& style, std::string text) {
    for (const auto& [id, marker] : style.markers) {
      for (size_t at;
           (at = text.find(absl::StrCat("^", id))) != std::string::npos;) {
        text.replace(at, 2, marker);
      }
    }
    ToolCallParser parser(style.kind, {"weather", "clock"});
    ToolCallParser::Result all = parser.Push(text);
    ToolCallParser::Result rest = parser.Finish();
    std::string read = all.text + rest.text + "|";
    for (const auto* result : {&all, &rest}) {
      for (const ParsedToolCall& call : result->calls) {
        absl::StrAppend(&read, call.name, "(", call.arguments, ")");
      }
    }
    return read;
  }

  TagWriter writer_;
  v1::Chat chat_;
};

TEST_F(StrictCallsTest, TextAndCallsAreWrittenAsTheModelLikes) {
  const struct {
    const CallFormat* style;
    const char* text;
    const char* read;
  } cases[] = {
      {&kHermesText, "", "|"},
      {&kHermesText, "Once <b>upon</b> a {time}.\n",
       "Once <b>upon</b> a {time}.\n|"},
      {&kHermesText,
       "So: <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": "
       "2}}\n"
       "</tool_call>",
       "So: |weather({\"days\": 2})"},
      {&kHermesText,
       "<tool_call>\n{\"name\": \"clock\", \"arguments\": {\"x\": [1]}}\n"
       "</tool_call>\n<tool_call>\n{\"name\": \"weather\", \"arguments\": "
       "{\"days\":7}}\n</tool_call>",
       "|clock({\"x\": [1]})weather({\"days\":7})"},
      {&kHermesTokens,
       "So: ^3\n{\"name\": \"weather\", \"arguments\": {\"days\": 2}}\n^4 "
       "<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>",
       "So: |weather({\"days\": 2})clock({})"},
      {&kMistralList,
       "^3[{\"name\": \"weather\", \"arguments\": {\"days\": 1}}, "
       "{\"name\": \"clock\", \"arguments\": {}}]",
       "|weather({\"days\": 1})clock({})"},
      {&kMistralNames, "Hm.^3weather^4{\"days\": 1}^3clock^4{\"a\": 1}",
       "Hm.|weather({\"days\": 1})clock({\"a\": 1})"},
      {&kMistralNames, "[TOOL_CALLS]weather[ARGS]{\"days\": 1}",
       "|weather({\"days\": 1})"},
      {&kLlamaText, "It is {warm}.", "It is {warm}.|"},
      {&kLlamaText, "{\"name\": \"weather\", \"parameters\": {\"days\": 3}}",
       "|weather({\"days\": 3})"},
      {&kLlamaText,
       "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"days\": 3}}; "
       "{\"name\": \"clock\", \"parameters\": {}}",
       "|weather({\"days\": 3})clock({})"},
      {&kLlamaToken,
       "^3{\"name\": \"clock\", \"parameters\": {\"zone\": \"CET\"}}",
       "|clock({\"zone\": \"CET\"})"},
      {&kQwenText,
       "So: <tool_call>\n<function=weather>\n{\"days\": 2}\n</function>\n"
       "</tool_call>\n<tool_call>\n<function=clock>\n{\"x\": [1]}\n"
       "</function>\n</tool_call>",
       "So: |weather({\"days\": 2})clock({\"x\": [1]})"},
      {&kQwenText,
       "So: <function=weather>\n{\"days\": 2}\n</function>\n</tool_call>",
       "So: |weather({\"days\": 2})"},
      {&kQwenTokens,
       "^3\n<function=weather>\n{\"days\": 2}\n</function>\n^4 Done.",
       " Done.|weather({\"days\": 2})"},
      {&kGlmText, "Hm.<tool_call>weather\n{\"days\": 2}\n</tool_call>",
       "Hm.|weather({\"days\": 2})"},
      {&kGlmTokens, "^3clock\n{}\n^4\n^3weather\n{\"days\": 7}\n^4",
       "|clock({})weather({\"days\": 7})"},
      {&kMiniMaxText,
       "Hm.<minimax:tool_call>\n<invoke name=\"weather\">\n{\"days\": 2}\n"
       "</invoke>\n<invoke name=\"clock\">\n{}\n</invoke>\n"
       "</minimax:tool_call>",
       "Hm.|weather({\"days\": 2})clock({})"},
      {&kMiniMaxTokens,
       "Hm.^3\n<invoke name=\"weather\">\n{\"days\": 2}\n</invoke>\n"
       "<invoke name=\"clock\">\n{}\n</invoke>\n^4",
       "Hm.|weather({\"days\": 2})clock({})"},
      {&kDeepSeekText,
       "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
       "weather\n```json\n{\"days\": 2}\n```<｜tool▁call▁end｜>\n"
       "<｜tool▁call▁begin｜>function<｜tool▁sep｜>clocks\n```json\n"
       "{\"x\": [1]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> So.",
       "So:  So.|weather({\"days\": 2})clocks({\"x\": [1]})"},
      // What is no block is text.
      {&kDeepSeekText,
       "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```"
       "<｜tool▁call▁end｜>",
       "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```"
       "<｜tool▁call▁end｜>|"},
      {&kDeepSeekText,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock"
       "\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
       "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```"
       "<｜tool▁call▁end｜>",
       "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```"
       "<｜tool▁call▁end｜>|clock({})"},
      {&kDeepSeekTokens,
       "Hm.^3<｜tool▁call▁begin｜>function^4clock\n```json\n{}\n```"
       "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather"
       "\n```json\n{\"days\": 7}\n```<｜tool▁call▁end｜>^5",
       "Hm.|clock({})weather({\"days\": 7})"},
      {&kDeepSeek31Text,
       "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
       "{\"days\": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clocks"
       "<｜tool▁sep｜>{\"x\": [1]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "So: |weather({\"days\": 2})clocks({\"x\": [1]})"},
      {&kDeepSeek31Tokens,
       "Hm.^3<｜tool▁call▁begin｜>clock^4{}^5<｜tool▁call▁begin｜>weather"
       "<｜tool▁sep｜>{\"days\": 7}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       "Hm.|clock({})weather({\"days\": 7})"},
      {&kKimiText,
       "So: <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
       "<|tool_call_argument_begin|>{\"days\": 2}<|tool_call_end|>"
       "<|tool_call_begin|>functions.clocks:1<|tool_call_argument_begin|>"
       "{\"x\": [1]}<|tool_call_end|><|tool_calls_section_end|>",
       "So: |weather({\"days\": 2})clocks({\"x\": [1]})"},
      {&kKimiTokens,
       "Hm.^3<|tool_call_begin|>functions.clock:11^4{}^5<|tool_call_begin|>"
       "functions.weather:12<|tool_call_argument_begin|>{\"days\": 7}"
       "<|tool_call_end|><|tool_calls_section_end|>",
       "Hm.|clock({})weather({\"days\": 7})"},
      {&kGemmaText,
       "So: <|tool_call>call:weather{\"days\": 2}<tool_call|>"
       "<|tool_call>call:clocks{\"x\": [\"<|\"]}<tool_call|> So.",
       "So:  So.|weather({\"days\": 2})clocks({\"x\": [\"<|\"]})"},
      {&kGemmaTokens, "Hm.^3call:clock{}^4^3call:weather{\"days\":7}^4",
       "Hm.|clock({})weather({\"days\": 7})"},
  };
  for (const auto& c : cases) {
    EXPECT_TRUE(Allows(*c.style, c.text)) << c.style->what << ": " << c.text;
    EXPECT_EQ(Read(*c.style, c.text), c.read) << c.style->what;
  }
}

TEST_F(StrictCallsTest, NoCallBreaksItsSchema) {
  const struct {
    const CallFormat* style;
    const char* text;
  } cases[] = {
      {&kHermesText,
       "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": "
       "\"2\"}}\n"
       "</tool_call>"},
      {&kHermesText,
       "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}\n</tool_call>"},
      {&kHermesText,
       "<tool_call>\n{\"name\": \"other\", \"arguments\": {}}\n</tool_call>"},
      {&kHermesText, "<tool_call>"},
      {&kHermesText,
       "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": 2}}"},
      {&kHermesTokens,
       "^3\n{\"name\": \"weather\", \"arguments\": {\"day\": 2}}\n^4"},
      // The mark counts as text too.
      {&kHermesTokens,
       "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"day\": 2}}\n"
       "</tool_call>"},
      {&kMistralList,
       "^3[{\"name\": \"clock\", \"arguments\": {}}, "
       "{\"name\": \"weather\", \"arguments\": {}}]"},
      {&kMistralNames, "^3weather^4{\"days\": true}"},
      {&kMistralNames, "[TOOL_CALLS]weather{\"days\": true}"},
      {&kLlamaText, "{\"name\": \"weather\", \"parameters\": {\"d\": 3}}"},
      {&kLlamaText, " \n {\"name\": \"weather\", \"parameters\": {}}"},
      {&kLlamaText,
       "a <|python_tag|>{\"name\": \"weather\", \"parameters\": {}}"},
      {&kLlamaToken, "^3{\"name\": \"weather\", \"parameters\": {}}"},
      {&kQwenText,
       "<tool_call>\n<function=weather>\n{}\n</function>\n</tool_call>"},
      {&kQwenText, "<function=weather>\n{\"days\": \"2\"}\n</function>"},
      // No schema can be held to in tags.
      {&kQwenText,
       "<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n"
       "</function>\n</tool_call>"},
      {&kQwenText,
       "<function=weather>\n<parameter=days>\n2\n</parameter>\n</function>"},
      {&kQwenTokens, "^3\n<function=weather>\n{}\n</function>\n^4"},
      {&kGlmText,
       "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>"
       "\n</tool_call>"},
      {&kGlmText, "<tool_call>weather</tool_call>"},
      {&kGlmTokens, "^3weather\n{}\n^4"},
      {&kMiniMaxTokens, "^3\n<invoke name=\"weather\">\n{}\n</invoke>\n^4"},
      {&kMiniMaxTokens, "<invoke name=\"weather\">\n{}\n</invoke>"},
      {&kDeepSeekText,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
       "weather"
       "\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {&kDeepSeekText,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock"
       "\n```json\n{}\n```<｜tool▁call▁end｜>"},
      {&kDeepSeekText,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>other"
       "\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {&kDeepSeekTokens, "^3Hm."},
      {&kDeepSeekTokens,
       "^3<｜tool▁call▁begin｜>function^4weather\n```json\n{\"days\": true}"
       "\n```<｜tool▁call▁end｜>^5"},
      {&kDeepSeek31Text,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}"
       "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"},
      {&kDeepSeek31Tokens,
       "^3<｜tool▁call▁begin｜>clocks^4{}^5<｜tool▁call▁begin｜>weather^4{}^5"
       "<｜tool▁calls▁end｜>"},
      {&kKimiText,
       "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
       "<|tool_call_argument_begin|>{}<|tool_call_end|>"
       "<|tool_calls_section_end|>"},
      {&kKimiTokens,
       "^3<|tool_call_begin|>functions.weather:0^4{}^5"
       "<|tool_calls_section_end|>"},
      {&kKimiTokens,
       "^3<|tool_call_begin|>functions.clock:^4{}^5<|tool_calls_section_end|>"},
      {&kGemmaText, "<|tool_call>call:weather{}<tool_call|>"},
      {&kGemmaText, "<|tool_call>call:other{}<tool_call|>"},
      {&kGemmaText, "<|tool_call>call:clocks{}"},
      // No schema can be held to in Gemma's own syntax.
      {&kGemmaText, "<|tool_call>call:weather{days:2}<tool_call|>"},
      {&kGemmaTokens, "^3call:weather{\"days\":true}^4"},
      {&kGemmaTokens, "^3call:clock{x:^5a^5}^4"},
  };
  for (const auto& c : cases) {
    EXPECT_FALSE(Allows(*c.style, c.text)) << c.style->what << ": " << c.text;
  }
}

}  // namespace
}  // namespace tandem::router
