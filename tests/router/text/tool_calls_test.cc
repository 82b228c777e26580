// SPDX-License-Identifier: Apache-2.0
// Calls are found in the text of models of three families, however the text is
// cut, and what is no call comes back as it was.

#include "router/text/tool_calls.h"

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/router/text/found_calls.h"
#include "tests/router/text/styles.h"

namespace tandem::router {
namespace {

struct ParserCase {
  ToolCallStyle style;
  std::string text;
  std::string content;
  std::vector<std::string> calls;
};

// As the families' own templates write calls, and as models get them wrong.
std::vector<ParserCase> ParserCases() {
  const std::string weather = R"({"city": "Köln", "days": [1, 2.5e3]})";
  const std::string call =
      R"({"name": "get_weather", "arguments": )" + weather + "}";
  const std::string llama =
      R"({"name": "get_weather", "parameters": )" + weather + "}";
  const std::string seen = "get_weather(" + weather + ")";
  const std::string hermes = "<tool_call>\n" + call + "\n</tool_call>";
  std::vector<ParserCase> cases = {
      // No call at all.
      {kHermes, "", "", {}},
      {kHermes, " \n", " \n", {}},
      {kHermes, "It rains < 3 mm.", "It rains < 3 mm.", {}},
      {kHermes, "<tool_call", "<tool_call", {}},
      {kLlama, " Hello {x}", " Hello {x}", {}},
      {kMistral, "[TOOL_CALL] [1]", "[TOOL_CALL] [1]", {}},
      {ToolCallStyle::kNone, hermes, hermes, {}},
      // Hermes.
      {kHermes, hermes, "", {seen}},
      {kHermes, "\n\n" + hermes + "\n", "", {seen}},
      {kHermes, "Let me look.\n" + hermes, "Let me look.\n", {seen}},
      {kHermes, hermes + "\n" + hermes, "", {seen, seen}},
      {kHermes, hermes + "\n So.", "\n So.", {seen}},
      {kHermes, "<tool_call>" + call, "", {seen}},
      {kHermes, "<tool_call>" + call + "</tool_", "", {seen}},
      {kHermes, R"(<tool_call>{"name": "f"}</tool_call>)", "", {"f({})"}},
      {kHermes,
       R"(<tool_call>{"arguments":{"a":"</tool_call>\"}"},"name":"f"} )"
       "</tool_call>",
       "",
       {R"(f({"a":"</tool_call>\"}"}))"}},
      // A function that there is not is for the client to answer.
      {kHermes,
       R"(<tool_call>{"name": "other"}</tool_call>)",
       "",
       {"other({})"}},
      {kHermes, "<<tool_call>" + call + "</tool_call>", "<", {seen}},
      {kHermes, "<tool_<tool_call>" + call + "</tool_call>", "<tool_", {seen}},
      // Llama.
      {kLlama, llama, "", {seen}},
      {kLlama, "\n" + llama + " ", "", {seen}},
      {kLlama, "<|python_tag|>" + llama, "", {seen}},
      {kLlama, "Sure. <|python_tag|>" + llama, "Sure. ", {seen}},
      {kLlama, llama + "; " + llama, "", {seen, seen}},
      {kLlama, "<|python_tag|>" + llama + ";" + call, "", {seen, seen}},
      {kLlama, llama + ";", "", {seen}},
      {kLlama, llama + R"(; {"na)", llama + R"(; {"na)", {}},
      {kLlama, llama + "," + llama, llama + "," + llama, {}},
      {kLlama, "{" + llama, "{" + llama, {}},
      {kLlama,
       R"({"type": "function", "name": "f", "parameters": {}})",
       "",
       {"f({})"}},
      // Mistral.
      {kMistral, "[TOOL_CALLS] [" + call + "]", "", {seen}},
      {kMistral,
       "[TOOL_CALLS][" + call + ", " + call + "]\n",
       "",
       {seen, seen}},
      {kMistral, "Yes. [TOOL_CALLS] [" + call + "]", "Yes. ", {seen}},
      {kMistral, "[TOOL_CALLS]" + call, "", {seen}},
      {kMistral, "[TOOL_CALLS]get_weather[ARGS]" + weather, "", {seen}},
      {kMistral, "[TOOL_CALLS]get_weather" + weather, "", {seen}},
      {kMistral,
       "[TOOL_CALLS]get_weather[CALL_ID]aB3cD4eF5[ARGS]" + weather,
       "",
       {seen}},
      {kMistral,
       "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{\"a\":1}",
       "",
       {"f({})", "f({\"a\":1})"}},
      {kMistral,
       R"([TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "aB3cD4eF5"}])",
       "",
       {"f({})"}},
      {kMistral,
       "[TOOL_CALLS]f[CALL_ID]" + std::string(65, 'a') + "[ARGS]{}",
       "[TOOL_CALLS]f[CALL_ID]" + std::string(65, 'a') + "[ARGS]{}",
       {}},
      {kHermes,
       R"(<tool_call>{"name": "f", "arguments": {}, "parameters": {}})",
       R"(<tool_call>{"name": "f", "arguments": {}, "parameters": {}})",
       {}},
      // A good call behind a bad one.
      {kHermes,
       "<tool_call>{\"name\": f}</tool_call>" + hermes,
       "<tool_call>{\"name\": f}</tool_call>",
       {seen}},
      {kHermes,
       "<tool_call>{\"name\": \"" + hermes,
       "<tool_call>{\"name\": \"",
       {seen}},
      {kMistral,
       "[TOOL_CALLS] [" + call + " [TOOL_CALLS]f{}",
       "[TOOL_CALLS] [" + call + " ",
       {"f({})"}},
  };
  const std::pair<ToolCallStyle, std::string> bad[] = {
      {kHermes, absl::StrCat("<tool_call>", call.substr(0, 40))},
      {kHermes, "<tool_call>" + call + " and </tool_call>"},
      {kHermes, "<tool_call>[" + call + "]</tool_call>"},
      {kHermes, "<tool_call></tool_call>"},
      {kHermes, R"(<tool_call>{"name": "f", "name": "f"}</tool_call>)"},
      {kHermes, R"(<tool_call>{"name": "f g"}</tool_call>)"},
      {kHermes, R"(<tool_call>{"name": 5}</tool_call>)"},
      {kHermes, R"(<tool_call>{"arguments": {}}</tool_call>)"},
      {kHermes, R"(<tool_call>{"name": "f", "arguments": "{}"}</tool_call>)"},
      {kHermes, R"(<tool_call>{'name': 'f'}</tool_call>)"},
      {kHermes, "<tool_call>{\"name\": \"f\n\"}</tool_call>"},
      {kHermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"\n\"}}"},
      {kHermes, R"(<tool_call>{"name": "\ud800"}</tool_call>)"},
      {kHermes, R"(<tool_call>{"nom": "f"}</tool_call>)"},
      {kHermes, "<tool_call><function=f></function></tool_call>"},
      {kLlama, llama + " is how I would call it."},
      {kLlama, "To call: " + llama},
      {kLlama, R"({"name": "Ada", "parameters": {}})"},
      {kLlama, R"({"name": "f"})"},
      {kLlama, R"({"city": "Köln"})"},
      {kLlama, "{\"name\": \"f\", \"parameters\": {}"},
      {kLlama, "<|python_tag|>print(1)"},
      {kLlama, llama + llama},
      {kMistral, "[TOOL_CALLS] [" + call},
      {kMistral, "[TOOL_CALLS] [" + call + ","},
      {kMistral, "[TOOL_CALLS] []"},
      {kMistral, "[TOOL_CALLS]f[ARGS]"},
      {kMistral, "[TOOL_CALLS]f[ARG]{}"},
      {kMistral,
       absl::StrCat("[TOOL_CALLS]", std::string(65, 'f'), "[ARGS]{}")},
      {kMistral, "[TOOL_CALLS][ARGS]{}"},
  };
  for (const auto& [style, text] : bad)
    cases.push_back({style, text, text, {}});
  return cases;
}

TEST(ToolCallsTest, CallsAreFoundAndAllElseComesBack) {
  for (const ParserCase& c : ParserCases()) {
    SCOPED_TRACE(c.text);
    EXPECT_EQ(FindCalls(c.style, {c.text}), (FoundCalls{c.content, c.calls}));
  }
}

TEST(ToolCallsTest, NothingDependsOnHowTheTextIsCut) {
  for (const ParserCase& c : ParserCases()) {
    ExpectAlikeHoweverCut(c.style, c.text);
  }
}

// Texts of what calls are made of, in no order.
TEST(ToolCallsTest, NorOfTextsThatAreAlmostCalls) {
  const std::vector<std::string> parts = {
      "<tool_call>",
      "</tool_call>",
      "<|python_tag|>",
      "[TOOL_CALLS]",
      "[ARGS]",
      "{",
      "}",
      "[",
      "]",
      "\"name\"",
      ":",
      "\"f\"",
      "\"arguments\"",
      "{}",
      ",",
      ";",
      " ",
      "\\\"",
      "\"",
      "f",
      R"({"name":"f","parameters":{"a":"b"}})",
      R"({"name": "f", "arguments": {}})"};
  std::mt19937 random(7);
  int with_calls = 0;
  for (int round = 0; round < 16000; ++round) {
    std::string text;
    for (size_t n = random() % 14; n > 0; --n) {
      text += parts[random() % parts.size()];
    }
    for (const ToolCallStyle style : {kHermes, kLlama, kMistral}) {
      const FoundCalls whole = FindCalls(style, {text});
      ASSERT_EQ(FindCalls(style, ByteByByte(text)), whole) << text;
      const size_t cut = text.empty() ? 0 : random() % text.size();
      ASSERT_EQ(FindCalls(style, {text.substr(0, cut), text.substr(cut)}),
                whole)
          << text;
      with_calls += whole.calls.empty() ? 0 : 1;
      if (whole.calls.empty()) {
        ASSERT_EQ(whole.text, text);
      }
      for (const std::string& call : whole.calls) {
        const size_t open = call.find('(');
        EXPECT_TRUE(nlohmann::json::accept(
            call.substr(open + 1, call.size() - open - 2)))
            << call;
      }
    }
  }
  EXPECT_GT(with_calls, 500);
}

TEST(ToolCallsTest, TextIsReturnedAsSoonAsItCannotBeACall) {
  ToolCallParser parser(kHermes, {});
  EXPECT_EQ(parser.Push("Hello <").text, "Hello ");
  EXPECT_TRUE(parser.holding());
  EXPECT_EQ(parser.Push("b> and").text, "<b> and");
  EXPECT_FALSE(parser.holding());
  // The first key tells an answer in JSON from a call.
  ToolCallParser llama(kLlama, {"f"});
  EXPECT_EQ(llama.Push("{\"cit").text, "");
  EXPECT_EQ(llama.Push("y\"").text, "{\"city\"");
  EXPECT_EQ(llama.Push(": 1").text, ": 1");
}

TEST(ToolCallsTest, ACallIsReturnedAtItsEnd) {
  ToolCallParser parser(kMistral, {});
  EXPECT_TRUE(parser.Push("[TOOL_CALLS]f[ARGS]{\"a\": 1").calls.empty());
  EXPECT_EQ(parser.Push("}").calls.size(), 1u);
}

TEST(ToolCallsTest, TextOfSpecialTokensIsNoContent) {
  ToolCallParser good(kMistral, {});
  EXPECT_EQ(good.Push("[TOOL_CALLS]", true).text, "");
  EXPECT_EQ(good.Push("f{}").calls.size(), 1u);
  ToolCallParser bad(kMistral, {});
  EXPECT_EQ(bad.Push("a").text, "a");
  EXPECT_EQ(bad.Push("[TOOL_CALLS]", true).text, "");
  EXPECT_EQ(bad.Push(" see [ARGS").text, " see [ARGS");
  ToolCallParser plain(kMistral, {});
  EXPECT_EQ(plain.Push("[TOOL_CALLS]", true).text, "");
  EXPECT_EQ(plain.Push("f g").text, "f g");
}

// A text of a megabyte that keeps nearly beginning calls: quadratic work would
// take minutes.
TEST(ToolCallsTest, TimeIsLinear) {
  for (const std::string& part :
       {std::string("<tool_call>{\" : \""), std::string("<tool_call>{\""),
        std::string("<tool_call>"), std::string("<tool_call>{\"name\":\"f\"} "),
        std::string("[TOOL_CALLS][{\"name\":\"f\"},{\""),
        std::string("[TOOL_CALLS]f{\"a\":\""), std::string("{\"name\":\"\\"),
        std::string("<|python_tag|>{\"name\":\"f\",\"id\":\"")}) {
    std::string text;
    while (text.size() < 1 << 20) text += part;
    for (const ToolCallStyle style : {kHermes, kLlama, kMistral}) {
      EXPECT_LE(FindCalls(style, {text}).text.size(), text.size());
    }
  }
}

TEST(ToolCallStylesTest, AreKnownByTheTemplate) {
  EXPECT_EQ(DetectToolCallStyle("..[TOOL_CALLS]..<tool_call>"), kMistral);
  EXPECT_EQ(DetectToolCallStyle("<tool_call>\\n{\"name\": "), kHermes);
  EXPECT_EQ(DetectToolCallStyle("<tool_call>\n<function=x>"),
            ToolCallStyle::kNone);
  EXPECT_EQ(DetectToolCallStyle("<tool_call>\n<function=x>\n<parameter=y>"),
            kQwen);
  EXPECT_EQ(DetectToolCallStyle("<tool_call>{name}\n<arg_key>"), kGlm);
  EXPECT_EQ(DetectToolCallStyle("{% set begin = '<minimax:tool_call>' %}{{"
                                "'<invoke name=\"' ~ call.name ~ '\">"
                                "<parameter name=\"' ~ key"),
            kMiniMax);
  EXPECT_EQ(
      DetectToolCallStyle(
          "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + "
          "'<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + "
          "'```json' + '\\n' + tool['function']['arguments'] + '\\n' + "
          "'```' + '<｜tool▁call▁end｜>'"),
      kDeepSeek);
  EXPECT_EQ(DetectToolCallStyle(
                "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + "
                "tool['function']['name'] + '<｜tool▁sep｜>' + "
                "tool['function']['arguments'] + '<｜tool▁call▁end｜>'"),
            kDeepSeek31);
  EXPECT_EQ(
      DetectToolCallStyle("<|tool_calls_section_begin|>{% for call in calls %}"
                          "<|tool_call_begin|>{{ call.id }}"
                          "<|tool_call_argument_begin|>{{ call.arguments }}"
                          "<|tool_call_end|>{% endfor %}"),
      kKimi);
  EXPECT_EQ(DetectToolCallStyle("{{- '<|tool_call>call:' + function['name'] + "
                                "'{' -}}..{{- '}<tool_call|>' -}}"),
            kGemma);
  EXPECT_EQ(DetectToolCallStyle("<|tool_call|>..</tool_call>"),
            ToolCallStyle::kNone);
  EXPECT_EQ(DetectToolCallStyle("{{- \"<|python_tag|>\" + tool_call.name }}"),
            kLlama);
  EXPECT_EQ(DetectToolCallStyle("{% for m in messages %}"),
            ToolCallStyle::kNone);
  EXPECT_EQ(DetectToolCallStyle("'<|start|>assistant<|channel|>final<|message|>"
                                "' + message.content"),
            ToolCallStyle::kOpenAi);
  EXPECT_EQ(DetectToolCallStyle("<|start|>assistant<|message|>"),
            ToolCallStyle::kNone);
  for (const char* name : {"none", "llama3_json", "hermes", "mistral", "openai",
                           "qwen3_coder", "glm45", "minimax_m2", "deepseek_v3",
                           "deepseek_v31", "kimi_k2", "gemma4"}) {
    EXPECT_EQ(ToolCallStyleName(ToolCallStyleByName(name).value()), name);
  }
  EXPECT_EQ(ToolCallStyleByName("qwen3_xml"), kQwen);
  EXPECT_EQ(ToolCallStyleByName("glm47"), kGlm);
  EXPECT_FALSE(ToolCallStyleByName("pythonic").has_value());
}

}  // namespace
}  // namespace tandem::router
