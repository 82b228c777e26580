// SPDX-License-Identifier: Apache-2.0
// Calls in Gemma's own syntax: they are found one by one, however the text is
// cut, and what is no call comes back as it was.

#include "router/text/gemma_calls.h"

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/router/text/found_calls.h"
#include "tests/router/text/styles.h"

namespace tandem::router {
namespace {

using testing::ElementsAre;

// `arguments` with ' for each <|"|>.
std::string Quoted(const std::string& arguments) {
  std::string text;
  for (const char c : arguments) {
    c == '\'' ? text.append(kGemmaText) : text.append(1, c);
  }
  return text;
}

std::string GemmaCall(const std::string& name, const std::string& arguments) {
  return absl::StrCat(std::string(kGemmaCallBegin), "call:", name, "{",
                      Quoted(arguments), "}", std::string(kGemmaCallEnd));
}

TEST(GemmaCallsTest, ArgumentsAreWhatTheirSyntaxSays) {
  const std::string deep = std::string(31, '[') + std::string(31, ']');
  const struct {
    const char* why;
    std::string arguments;
    std::string json;
  } cases[] = {
      {"nothing", "", "{}"},
      {"spaces", " \n", "{}"},
      {"text", "city:'Köln'", R"({"city": "Köln"})"},
      {"empty text", "a:''", R"({"a": ""})"},
      {"text that has no escapes", "a:'\"b\"\\n\n{c:1},[d]}<tool_call|>'",
       R"({"a": "\"b\"\\n\n{c:1},[d]}<tool_call|>"})"},
      {"text with a quote cut", "a:'<|\"|<|\"'", R"({"a": "<|\"|<|\""})"},
      {"that reads like a number", "a:'5',b:'true'",
       R"({"a": "5", "b": "true"})"},
      {"numbers", "a:3,b:-2.50,c:1e-05", R"({"a": 3, "b": -2.50, "c": 1e-05})"},
      {"literals", "a:true,b:false,c:null",
       R"({"a": true, "b": false, "c": null})"},
      {"Python's", "a:True,b:False,c:None",
       R"({"a": true, "b": false, "c": null})"},
      {"bare text", "a:Köln am Rhein ,b:10:30,c:01",
       R"({"a": "Köln am Rhein", "b": "10:30", "c": "01"})"},
      {"objects", "a:{b:{c:'d',e:1},f:{}},g:2",
       R"({"a": {"b": {"c": "d", "e": 1}, "f": {}}, "g": 2})"},
      {"lists", "a:['b',1,true,[],[2,['c']],{d:'e'}]",
       R"({"a": ["b", 1, true, [], [2, ["c"]], {"d": "e"}]})"},
      {"spaces between parts", " a : 'b' ,\n c\t: [ 1 , { d : 2 } ] ",
       R"({"a": "b", "c": [1, {"d": 2}]})"},
      {"keys of any letters", "a b.c-d\\:1,ключ:2",
       R"({"a b.c-d\\": 1, "ключ": 2})"},
      {"keys that are texts", "'a':1,'b:{\"':{'c':2}",
       R"({"a": 1, "b:{\"": {"c": 2}})"},
      {"commas too many", "a:[1,],b:{c:1,},", R"({"a": [1], "b": {"c": 1}})"},
      {"the same key elsewhere", "a:{a:1},b:{a:[{a:2},{a:3}]}",
       R"({"a": {"a": 1}, "b": {"a": [{"a": 2}, {"a": 3}]}})"},
      {"JSON", R"({"a": "\"b\\", "c":[1, {"d": null}], "e": "}"})",
       R"({"a": "\"b\\", "c": [1, {"d": null}], "e": "}"})"},
      {"both", R"("a":'b',c:"d")", R"({"a": "b", "c": "d"})"},
      {"deep", "a:" + deep, R"({"a": )" + deep + "}"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.why);
    const bool whole = c.arguments.starts_with('{');
    const std::string arguments =
        whole ? c.arguments.substr(1, c.arguments.size() - 2) : c.arguments;
    const std::string text = GemmaCall("f", arguments);
    EXPECT_EQ(FindCalls(kGemma, {text}),
              (FoundCalls{"", {"f(" + c.json + ")"}}))
        << text;
    ExpectAlikeHoweverCut(kGemma, text);
  }
}

struct GemmaCase {
  std::string text;
  std::string content;
  std::vector<std::string> calls;
};

std::vector<GemmaCase> GemmaCases() {
  const std::string f = GemmaCall("get_weather", "city:'Rome',days:2");
  const std::string g = GemmaCall("g", "");
  const std::string seen = R"(get_weather({"city": "Rome", "days": 2}))";
  const std::string open = f.substr(0, f.find("Rome"));
  const std::string whole = f.substr(0, f.size() - kGemmaCallEnd.size());
  std::vector<GemmaCase> cases = {
      {"", "", {}},
      {"a <b> <|c|> {d:1}", "a <b> <|c|> {d:1}", {}},
      {f, "", {seen}},
      {"\n" + f + " \n", "", {seen}},
      {"So.\n" + f, "So.\n", {seen}},
      {f + "\n So", "\n So", {seen}},
      {f + g + f, "", {seen, "g({})", seen}},
      {f + "\n" + g, "", {seen, "g({})"}},
      {"<" + f, "<", {seen}},
      {"<|tool_call>" + f, "<|tool_call>", {seen}},
      // A function that there is not is for the client to answer.
      {GemmaCall("other", ""), "", {"other({})"}},
      // Some checkpoints leave a word out.
      {"<|tool_call>:g{}<tool_call|>", "", {"g({})"}},
      {"<|tool_call> call: g{}\n<tool_call|>", "", {"g({})"}},
      // The last mark is due, or another call follows that is cut.
      {whole, "", {seen}},
      {whole + "<tool_c", "", {seen}},
      {f + open, open, {seen}},
      // A good call behind a bad one.
      {open + f, open, {seen}},
      {"<|tool_call>call:f{\"" + f, "<|tool_call>call:f{\"", {seen}},
      {whole + " and" + f, whole + " and", {seen}},
  };
  for (const std::string& bad :
       {std::string(kGemmaCallBegin),
        std::string(kGemmaCallEnd),
        open,
        f.substr(1),
        f.substr(kGemmaCallBegin.size()),
        whole.substr(0, whole.size() - 1),
        GemmaCall("", ""),
        GemmaCall("f g", ""),
        GemmaCall("f.g", ""),
        GemmaCall(std::string(65, 'f'), ""),
        GemmaCall("f", "a"),
        GemmaCall("f", "a:"),
        GemmaCall("f", "a:,b:1"),
        GemmaCall("f", ":1"),
        GemmaCall("f", "a:1,a:2"),
        GemmaCall("f", "a:1,'a':2"),
        GemmaCall("f", "b:{a:1,a:2}"),
        GemmaCall("f", "a:'b' 'c'"),
        GemmaCall("f", "a:[1}"),
        GemmaCall("f", "a:{b:1]"),
        GemmaCall("f", "a:b{c:1}"),
        GemmaCall("f", "a:1<2"),
        GemmaCall("f", "a:\"b\nc\""),
        GemmaCall("f", R"(a:"\ud800")"),
        GemmaCall("f", "a:" + std::string(32, '[') + std::string(32, ']')),
        std::string("<|tool_call>call:f(a:1)<tool_call|>"),
        std::string("<|tool_call>call:f{}}<tool_call|>"),
        std::string("<|tool_call>call f{}<tool_call|>")}) {
    cases.push_back({bad, bad, {}});
  }
  return cases;
}

TEST(GemmaCallsTest, CallsAreFoundAndAllElseComesBack) {
  for (const GemmaCase& c : GemmaCases()) {
    SCOPED_TRACE(c.text);
    EXPECT_EQ(FindCalls(kGemma, {c.text}), (FoundCalls{c.content, c.calls}));
    ExpectAlikeHoweverCut(kGemma, c.text);
  }
}

// Texts of what calls are made of, in no order.
TEST(GemmaCallsTest, NorDoTextsThatAreAlmostCallsDependOnTheCut) {
  const std::vector<std::string> parts = {"<|tool_call>",
                                          "call:",
                                          "f{",
                                          "}",
                                          "<tool_call|>",
                                          "<|\"|>",
                                          "a:",
                                          "b:",
                                          "[",
                                          "]",
                                          "{",
                                          ",",
                                          "1",
                                          "\"",
                                          "\"c\"",
                                          "\\",
                                          " ",
                                          "<",
                                          "f",
                                          ":",
                                          "a:1",
                                          "b:[",
                                          "f{}",
                                          GemmaCall("f", "a:'b'")};
  std::mt19937 random(7);
  int with_calls = 0;
  for (int round = 0; round < 16000; ++round) {
    std::string text;
    for (size_t n = random() % 14; n > 0; --n) {
      text += parts[random() % parts.size()];
    }
    const FoundCalls whole = FindCalls(kGemma, {text});
    ASSERT_EQ(FindCalls(kGemma, ByteByByte(text)), whole) << text;
    const size_t cut = text.empty() ? 0 : random() % text.size();
    ASSERT_EQ(FindCalls(kGemma, {text.substr(0, cut), text.substr(cut)}), whole)
        << text;
    with_calls += whole.calls.empty() ? 0 : 1;
    if (whole.calls.empty()) {
      ASSERT_EQ(whole.text, text);
    }
    for (const std::string& call : whole.calls) {
      const size_t open = call.find('(');
      EXPECT_TRUE(
          nlohmann::json::accept(call.substr(open + 1, call.size() - open - 2)))
          << call;
    }
  }
  EXPECT_GT(with_calls, 500);
}

// A text of a megabyte that keeps nearly beginning calls, with an end that
// breaks all of them: quadratic work would take minutes.
TEST(GemmaCallsTest, TimeIsLinear) {
  const std::string begin = "<|tool_call>call:f{";
  for (const std::string& part :
       {std::string("<|tool_call>"), begin, begin + "a:", begin + "\"",
        begin + "a:\"", begin + "a:<|\"|>", begin + "a:1,", begin + "}",
        begin + "a:{b:<|\"|>", begin + "<|\"|>" + begin + "\"",
        begin + "\"" + begin + "<|\"|>", begin + "a:<|\"|><|\"|>,b:\""}) {
    for (const std::string& first : {std::string(), begin + "a:<|\"|>"}) {
      std::string text = first;
      while (text.size() < 1 << 20) text += part;
      text += "?";
      EXPECT_LE(FindCalls(kGemma, {text}).text.size(), text.size());
    }
  }
}

TEST(GemmaCallsTest, ACallIsReturnedAtItsEnd) {
  ToolCallParser parser(kGemma, {});
  EXPECT_TRUE(parser.Push("<|tool_call>call:f{}<tool_call|").calls.empty());
  EXPECT_EQ(parser.Push(">").calls.size(), 1u);
  EXPECT_EQ(parser.Push("<b>").text, "<b>");
}

TEST(GemmaCallsTest, MarksMayBeSpecialTokens) {
  ToolCallParser parser(kGemma, {});
  const std::pair<const char*, bool> kPieces[] = {
      {"<|tool_call>", true}, {"call:f{s:", false}, {"<|\"|>", true},
      {"b", false},           {"<|\"|>", true},     {"}", false}};
  for (const auto& [piece, hidden] : kPieces) {
    EXPECT_EQ(parser.Push(piece, hidden).text, "");
  }
  const ToolCallParser::Result result = parser.Push("<tool_call|>", true);
  ASSERT_EQ(result.calls.size(), 1u);
  EXPECT_EQ(result.calls[0].arguments, R"({"s": "b"})");
  EXPECT_EQ(parser.Push("<|tool_call>", true).text, "");
  EXPECT_EQ(parser.Push("f ?").text, "f ?");
  EXPECT_THAT(ToolCallMarkers(kGemma),
              ElementsAre("<|tool_call>", "<tool_call|>", "<|\"|>"));
}

}  // namespace
}  // namespace tandem::router
