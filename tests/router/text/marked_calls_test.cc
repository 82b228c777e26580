// SPDX-License-Identifier: Apache-2.0
// Calls whose arguments are JSON between marks: they are found one by one,
// however the text is cut, and what is no call comes back as it was.

#include "router/text/marked_calls.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/router/text/found_calls.h"
#include "tests/router/text/styles.h"

namespace tandem::router {
namespace {

using testing::ElementsAre;

constexpr ToolCallStyle kMarked[] = {kDeepSeek, kDeepSeek31, kKimi};

// As models write it.
std::string MarkedCall(ToolCallStyle style, const std::string& name,
                       const std::string& arguments) {
  switch (style) {
    case kDeepSeek31:
      return "<｜tool▁call▁begin｜>" + name + "<｜tool▁sep｜>" + arguments +
             "<｜tool▁call▁end｜>";
    case kKimi:
      return "<|tool_call_begin|>functions." + name +
             ":7<|tool_call_argument_begin|>" + arguments + "<|tool_call_end|>";
    default:
      return "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + name +
             "\n```json\n" + arguments + "\n```<｜tool▁call▁end｜>";
  }
}

struct MarkedStyle {
  explicit MarkedStyle(ToolCallStyle s)
      : style(s),
        begin(CallMarksOf(s)->block_begin),
        between(CallMarksOf(s)->between),
        end(CallMarksOf(s)->block_end) {}

  std::string Call(const std::string& name,
                   const std::string& arguments) const {
    return MarkedCall(style, name, arguments);
  }
  std::string Block(const std::string& calls) const {
    return begin + calls + end;
  }

  ToolCallStyle style;
  std::string begin;
  std::string between;
  std::string end;
};

struct MarkedCase {
  ToolCallStyle style;
  std::string text;
  std::string content;
  std::vector<std::string> calls;
};

void AddCases(const MarkedStyle& style, std::vector<MarkedCase>* cases) {
  const std::string& begin = style.begin;
  const std::string& end = style.end;
  const std::string weather = R"({"city": "Köln", "days": [1, 2.5e3]})";
  const std::string f = style.Call("get_weather", weather);
  const std::string g = style.Call("g", "{}");
  const std::string call = style.Block(f);
  const std::string seen = "get_weather(" + weather + ")";
  const std::vector<std::string> none;
  const auto add = [&](const std::string& text, const std::string& content,
                       const std::vector<std::string>& calls) {
    cases->push_back({style.style, text, content, calls});
  };
  add("", "", none);
  add("a <b> <｜c｜> <|d|>", "a <b> <｜c｜> <|d|>", none);
  add(call, "", {seen});
  add("\n" + call + " \n", "", {seen});
  add("So.\n" + call, "So.\n", {seen});
  add(call + "\n So", "\n So", {seen});
  add(style.Block(f + style.between + g), "", {seen, "g({})"});
  add(begin + "\n" + f + " \n" + g + "\n" + end, "", {seen, "g({})"});
  add(call + "\n" + style.Block(g), "", {seen, "g({})"});
  add("<" + call, "<", {seen});
  add(begin + call, begin, {seen});
  // A function that there is not is for the client to answer.
  add(style.Block(style.Call("other", "{}")), "", {"other({})"});
  // Marks in a string are its own.
  const std::string marks =
      R"({"s": ")" + begin + f.substr(0, 3) + end + R"(\"```"})";
  add(style.Block(style.Call("f", marks)), "", {"f(" + marks + ")"});
  // The last marks are due, or an incomplete call follows.
  add(begin + f, "", {seen});
  add(begin + f + end.substr(0, end.size() - 2), "", {seen});
  const size_t object = f.find('}') + 1;
  add(begin + f.substr(0, object), "", {seen});
  add(begin + f.substr(0, object + 3), "", {seen});
  add(begin + f + f.substr(0, 30), f.substr(0, 30), {seen});
  add(begin + f + " and" + end, " and" + end, {seen});
  // The call's own end is left out; the block ends all the same.
  const std::string open_end =
      f.substr(0, f.size() - CallMarksOf(style.style)->call.back().text.size());
  add(begin + open_end + end, "", {seen});
  add(begin + g + open_end + "\n" + end + " So", " So", {"g({})", seen});
  add(begin + open_end + end + g, g, {seen});
  add(begin + open_end + g + end, begin + open_end + g + end, none);
  // A good call behind a bad one.
  const std::string open = f.substr(0, f.find('{') + 1);
  add(begin + open + call, begin + open, {seen});
  add(begin + open + "\"" + call, begin + open + "\"", {seen});
  // No calls.
  for (const std::string& bad :
       {begin, end, begin + end, f, begin + "<" + end, begin + "f" + end,
        begin + f.substr(0, object - 1), begin + open,
        style.Block(style.Call("", "{}")), style.Block(style.Call("f g", "{}")),
        style.Block(style.Call(std::string(65, 'f'), "{}")),
        style.Block(style.Call("f", "")), style.Block(style.Call("f", "[1]")),
        style.Block(style.Call("f", "{} {}")),
        style.Block(style.Call("f", "{'a': 1}")),
        style.Block(style.Call("f", "{\"a\": \"\n\"}")),
        style.Block(style.Call("f", R"({"a": "\ud800"})")),
        style.Block(f.substr(3)), begin.substr(1) + f + end}) {
    add(bad, bad, none);
  }
  // Behind a block none begins without another.
  add(call + g, g, {seen});
}

// As the families' own templates write calls, and as models get them wrong.
std::vector<MarkedCase> MarkedCases() {
  std::vector<MarkedCase> cases;
  for (const ToolCallStyle style : kMarked) {
    AddCases(MarkedStyle(style), &cases);
  }
  const std::string tool =
      "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool<｜tool▁sep｜>f\n```"
      "json\n{}"
      "\n```<｜tool▁call▁end｜>";
  cases.push_back({kDeepSeek, tool, tool, {}});
  // Neither is the other's.
  const std::string old =
      MarkedStyle(kDeepSeek).Block(MarkedCall(kDeepSeek, "f", "{}"));
  const std::string later =
      MarkedStyle(kDeepSeek31).Block(MarkedCall(kDeepSeek31, "f", "{}"));
  cases.push_back({kDeepSeek, later, later, {}});
  cases.push_back({kDeepSeek31, old, old, {}});
  const MarkedStyle kimi(kKimi);
  const auto of_kimi = [&](const std::string& id) {
    return kimi.begin + "<|tool_call_begin|>" + id +
           "<|tool_call_argument_begin|>{}<|tool_call_end|>" + kimi.end;
  };
  for (const char* const id : {"functions.f:0", "f:0", " functions.f : 12 ",
                               "functions.f:123456789"}) {
    cases.push_back({kKimi, of_kimi(id), "", {"f({})"}});
  }
  cases.push_back({kKimi, of_kimi("functions:0"), "", {"functions({})"}});
  for (const char* const id :
       {"f", "f:", "f:a", "f:-1", "f:1234567890", "tools.f:0", "functions.:0",
        "f.:0", "call_f0"}) {
    cases.push_back({kKimi, of_kimi(id), of_kimi(id), {}});
  }
  return cases;
}

TEST(MarkedCallsTest, CallsAreFoundAndAllElseComesBack) {
  for (const MarkedCase& c : MarkedCases()) {
    SCOPED_TRACE(c.text);
    EXPECT_EQ(FindCalls(c.style, {c.text}), (FoundCalls{c.content, c.calls}));
  }
}

TEST(MarkedCallsTest, NothingDependsOnHowTheTextIsCut) {
  for (const MarkedCase& c : MarkedCases()) {
    ExpectAlikeHoweverCut(c.style, c.text);
  }
}

// Texts of what calls are made of, in no order.
TEST(MarkedCallsTest, NorOfTextsThatAreAlmostCalls) {
  std::mt19937 random(7);
  for (const ToolCallStyle kind : kMarked) {
    const MarkedStyle style(kind);
    const std::string f = style.Call("f", R"({"a": "b"})");
    std::vector<std::string> parts = {
        f,   style.Block(f), "f",  R"({"a": ")", "}",         "{}",
        " ", "\n",           "\"", "<",          style.begin, style.end};
    for (const CallPart& part : CallMarksOf(kind)->call) {
      parts.emplace_back(part.text);
    }
    int with_calls = 0;
    for (int round = 0; round < 8000; ++round) {
      std::string text;
      for (size_t n = random() % 14; n > 0; --n) {
        text += parts[random() % parts.size()];
      }
      const FoundCalls whole = FindCalls(kind, {text});
      ASSERT_EQ(FindCalls(kind, ByteByByte(text)), whole) << text;
      const size_t cut = text.empty() ? 0 : random() % text.size();
      ASSERT_EQ(FindCalls(kind, {text.substr(0, cut), text.substr(cut)}), whole)
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
    EXPECT_GT(with_calls, 500);
  }
}

// A text of a megabyte that keeps nearly beginning calls: quadratic work would
// take minutes.
TEST(MarkedCallsTest, TimeIsLinear) {
  for (const ToolCallStyle kind : kMarked) {
    const MarkedStyle style(kind);
    const std::string call = style.begin + style.Call("f", "{\" : \"\"}");
    const size_t object = call.find('{');
    for (const std::string& part :
         {style.begin, call.substr(0, object), call.substr(0, object + 2),
          call.substr(0, object + 6), call.substr(0, object - 1),
          call.substr(0, object) + "{}"}) {
      for (const std::string end : {"", "\"", "}"}) {
        std::string text;
        while (text.size() < 1 << 20) text += part;
        EXPECT_LE(FindCalls(kind, {text + end}).text.size(),
                  text.size() + end.size());
      }
    }
  }
}

TEST(MarkedCallsTest, EachCallIsReturnedAtItsEnd) {
  for (const ToolCallStyle kind : kMarked) {
    const MarkedStyle style(kind);
    const std::string call = style.Call("f", "{}");
    ToolCallParser parser(kind, {});
    EXPECT_EQ(parser.Push("So.").text, "So.");
    EXPECT_TRUE(parser.Push(style.begin + call.substr(0, call.size() - 1))
                    .calls.empty());
    EXPECT_EQ(parser.Push(call.substr(call.size() - 1)).calls.size(), 1u);
    EXPECT_EQ(parser.Push(style.between + call).calls.size(), 1u);
    EXPECT_EQ(parser.Push(style.end).text, "");
    EXPECT_EQ(parser.Push("<b>").text, "<b>");
  }
}

TEST(MarkedCallsTest, KimisCallsHaveIdsOfTheirOwn) {
  const MarkedStyle style(kKimi);
  ToolCallParser parser(kKimi, {});
  std::vector<std::string> ids;
  for (const ParsedToolCall& call :
       parser
           .Push(style.Block(
               "<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}"
               "<|tool_call_end|><|tool_call_begin|> g: 14 "
               "<|tool_call_argument_begin|>{}<|tool_call_end|>"))
           .calls) {
    ids.push_back(call.id);
  }
  EXPECT_THAT(ids, ElementsAre("functions.f:3", "functions.g:14"));
  ToolCallParser other(kDeepSeek31, {});
  const MarkedStyle deepseek(kDeepSeek31);
  EXPECT_EQ(other.Push(deepseek.Block(deepseek.Call("f", "{}"))).calls[0].id,
            "");
}

TEST(MarkedCallsTest, MarksMayBeSpecialTokens) {
  for (const ToolCallStyle kind : kMarked) {
    const MarkedStyle style(kind);
    const std::string text = style.Block(style.Call("f", "{}"));
    ToolCallParser parser(kind, {});
    std::vector<ParsedToolCall> calls;
    for (size_t at = 0; at < text.size();) {
      size_t bytes = 1;
      bool hidden = false;
      for (const std::string_view mark : ToolCallMarkers(kind)) {
        if (!std::string_view(text).substr(at).starts_with(mark)) continue;
        bytes = mark.size();
        hidden = true;
      }
      ToolCallParser::Result result =
          parser.Push(std::string_view(text).substr(at, bytes), hidden);
      EXPECT_EQ(result.text, "");
      calls.insert(calls.end(), result.calls.begin(), result.calls.end());
      at += bytes;
    }
    ASSERT_EQ(calls.size(), 1u);
    EXPECT_EQ(calls[0].name, "f");
    // Where they mark nothing they are no content.
    EXPECT_EQ(parser.Push(style.begin, true).text, "");
    EXPECT_EQ(parser.Push("f ?").text, "f ?");
  }
  EXPECT_THAT(ToolCallMarkers(kDeepSeek),
              ElementsAre("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
                          "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
                          "<｜tool▁call▁end｜>"));
}

}  // namespace
}  // namespace tandem::router
