// SPDX-License-Identifier: Apache-2.0
// Calls whose arguments are tagged text: what values come to, however the text
// is cut, and that what is no call comes back as it was.

#include "router/text/tagged_calls.h"

#include <random>
#include <set>
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
using testing::IsEmpty;

// As each style writes calls, without their block.
std::string Function(
    ToolCallStyle style, const std::string& name,
    const std::vector<std::pair<std::string, std::string>>& parameters) {
  const CallTags& tags = *CallTagsOf(style);
  const char* const frame = tags.framed ? "\n" : "";
  std::string text = absl::StrCat(std::string(tags.name_begin), name,
                                  std::string(tags.name_end), "\n");
  for (const auto& [key, value] : parameters) {
    absl::StrAppend(&text, std::string(tags.key_begin), key,
                    std::string(tags.key_end), frame,
                    std::string(tags.value_begin), value, frame,
                    std::string(tags.value_end), "\n");
  }
  return absl::StrCat(text, std::string(tags.call_end));
}

std::string Block(ToolCallStyle style, const std::string& functions) {
  const CallTags& tags = *CallTagsOf(style);
  const char* const between = tags.name_begin.empty() ? "" : "\n";
  return absl::StrCat(std::string(tags.block_begin), between, functions,
                      between, std::string(tags.block_end));
}

TEST(TaggedCallsTest, ValuesAreOfTheTypeThatIsDeclared) {
  const struct {
    const char* why;
    const char* key;
    std::string value;
    std::string json;
  } cases[] = {
      {"text", "s", "Köln", R"("Köln")"},
      {"that reads like a number", "s", "5", R"("5")"},
      {"or JSON", "s", R"({"a": 1})", R"("{\"a\": 1}")"},
      {"or Python", "s", "None", R"("None")"},
      {"empty", "s", "", R"("")"},
      {"with its spaces", "s", "  a\n\n", R"("  a\n\n")"},
      {"of many lines", "s", "a\n\"b\"\\\n<c></c>", R"("a\n\"b\"\\\n<c></c>")"},
      {"with a tag cut", "s", "</para</arg_val</tool",
       R"("</para</arg_val</tool")"},
      {"that looks like a call", "s", "<tool_call>\n<function=f>\n<x",
       R"("<tool_call>\n<function=f>\n<x")"},
      {"a number", "n", "5", "5"},
      {"as it is written", "n", "2.50e3", "2.50e3"},
      {"with spaces around", "n", " \n5\t", "5"},
      {"an object", "o", R"({"a": [1, {"b": null}]})",
       R"({"a": [1, {"b": null}]})"},
      {"a string", "o", R"("a")", R"("a")"},
      {"Python's", "o", "True", "true"},
      {"Python's", "o", " False", "false"},
      {"Python's", "o", "None\n", "null"},
      {"no JSON", "o", "Köln", R"("Köln")"},
      {"nor this", "o", "{'a': True}", R"("{'a': True}")"},
      {"nor this", "n", "1, \"s\": 2", R"("1, \"s\": 2")"},
      {"nor this", "n", "1}", R"("1}")"},
      {"nor this", "n", "01", R"("01")"},
      {"nor this", "n", "1 2", R"("1 2")"},
      {"nor this", "o", "\"a\nb\"", R"("\"a\nb\"")"},
      {"nothing", "n", " ", R"(" ")"},
      {"deep", "o", std::string(31, '[') + std::string(31, ']'),
       std::string(31, '[') + std::string(31, ']')},
      {"too deep to be sent back", "o",
       std::string(32, '[') + std::string(32, ']'),
       "\"" + std::string(32, '[') + std::string(32, ']') + "\""},
  };
  for (const ToolCallStyle style : {kQwen, kGlm, kMiniMax}) {
    for (const auto& c : cases) {
      SCOPED_TRACE(absl::StrCat(c.why, ": ", c.value));
      const std::string text =
          Block(style, Function(style, "f", {{c.key, c.value}}));
      EXPECT_EQ(FindCalls(style, {text}),
                (FoundCalls{
                    "", {absl::StrCat("f({\"", c.key, "\": ", c.json, "})")}}))
          << text;
    }
  }
}

struct TaggedCase {
  ToolCallStyle style;
  std::string text;
  std::string content;
  std::vector<std::string> calls;
};

// As the families' own templates write calls, and as models get them wrong.
std::vector<TaggedCase> TaggedCases() {
  std::vector<TaggedCase> cases;
  for (const ToolCallStyle style : {kQwen, kGlm, kMiniMax}) {
    const CallTags& tags = *CallTagsOf(style);
    const std::string begin(tags.block_begin);
    const std::string end(tags.block_end);
    const std::string f = Function(style, "f", {{"s", "a"}, {"n", "1"}});
    const std::string g = Function(style, "g", {});
    const std::string call = Block(style, f);
    const std::string seen = R"(f({"s": "a", "n": 1}))";
    const std::vector<std::string> none;
    const auto all = [&](const std::string& text, const std::string& content,
                         const std::vector<std::string>& calls) {
      cases.push_back({style, text, content, calls});
    };
    all("", "", none);
    all("a <b> < c", "a <b> < c", none);
    all(call, "", {seen});
    all("\n" + call + " \n", "", {seen});
    all("So.\n" + call, "So.\n", {seen});
    all(call + "\n So", "\n So", {seen});
    all(call + "\n" + Block(style, g), "", {seen, "g({})"});
    all("<" + call, "<", {seen});
    all(begin + call, begin, {seen});
    // A function that there is not is for the client to answer.
    all(Block(style, Function(style, "h", {})), "", {"h({})"});
    // An object in place of parameters, as where a schema must hold.
    const std::string before = absl::StrCat(std::string(tags.name_begin), "f",
                                            std::string(tags.name_end), "\n");
    const std::string after(tags.call_end);
    all(Block(style, before + R"({"s": ["</tool_call>"]})" + "\n" + after), "",
        {R"(f({"s": ["</tool_call>"]}))"});
    // No calls.
    for (const std::string& bad :
         {begin, begin + end, begin + "<" + end, begin + "f g" + end,
          begin + "\n" + before, Block(style, Function(style, "f g", {})),
          Block(style, Function(style, "", {})),
          Block(style, Function(style, std::string(65, 'f'), {})),
          Block(style, Function(style, "f", {{"", "a"}})),
          Block(style, Function(style, "f", {{"a\nb", "a"}})),
          Block(style, Function(style, "h", {{"s", "a"}, {"s", "b"}})),
          Block(style, before + "{\"s\": 1" + after),
          Block(style, before + "[1]" + after),
          Block(style, before + "{} {}" + after),
          Block(style, before + "a" + after),
          Block(style, Function(style, "h", {{"s", "a"}}) + " and"),
          begin + "\n" + Function(style, "h", {{"s", "a"}}).substr(0, 30)}) {
      all(bad, bad, none);
    }
    if (style == kGlm) continue;
    // Several functions in one block, and without any.
    all(Block(style, f + "\n" + g), "", {seen, "g({})"});
    all(f, "", {seen});
    all(f + "\n" + g, "", {seen, "g({})"});
    all("So. " + f + "\n" + end + "\n", "So. ", {seen});
    all(f + end + call, "", {seen, seen});
    all(Function(style, "h", {}), Function(style, "h", {}), none);
    all(end + f, end, {seen});
    // The last tag is due, or an incomplete call follows.
    all(begin + f, "", {seen});
    all(begin + f + "\n" + end.substr(0, 5), "", {seen});
    all(begin + f + std::string(tags.name_begin),
        begin + std::string(tags.name_begin), {seen});
    all(begin + f + " and" + end, begin + " and" + end, {seen});
  }
  const std::vector<TaggedCase> own = {
      {kQwen,
       "<tool_call>\n<function=f>\n<parameter=s>\n\n a\n\n</parameter>\n"
       "<parameter=o>\n[\n1\n]\n</parameter>\n</function>\n</tool_call>",
       "",
       {"f({\"s\": \"\\n a\\n\", \"o\": [\n1\n]})"}},
      {kQwen,
       "<tool_call><function=f><parameter=s>a</parameter></function>"
       "</tool_call>",
       "",
       {R"(f({"s": "a"}))"}},
      {kQwen,
       "<tool_call>\n<function=f>\n<parameter=a\"b\\>\n1\n</parameter>\n"
       "</function>\n</tool_call>",
       "",
       {R"(f({"a\"b\\": "1"}))"}},
      {kGlm,
       "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value><arg_key>n"
       "</arg_key><arg_value>1</arg_value></tool_call><tool_call>g</tool_call>",
       "",
       {R"(f({"s": "a", "n": 1}))", "g({})"}},
      {kGlm,
       "<tool_call>\nf\n<arg_key>s</arg_key>\n<arg_value>\na\n</arg_value>\n"
       "</tool_call>",
       "",
       {R"(f({"s": "\na\n"}))"}},
      // Arguments may be missing where the end tag is.
      {kGlm, "<tool_call>f\n", "<tool_call>f\n", {}},
      {kGlm,
       "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value>",
       "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value>",
       {}},
      {kGlm,
       "<tool_call>f</arg_value></tool_call>",
       "<tool_call>f</arg_value></tool_call>",
       {}},
      {kMiniMax,
       "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">\na\n"
       "</parameter>\n</invoke>\n</minimax:tool_call>",
       "",
       {R"(f({"s": "\na\n"}))"}},
      {kMiniMax,
       "<minimax:tool_call>\n<invoke name=f>\n</invoke>",
       "<minimax:tool_call>\n<invoke name=f>\n</invoke>",
       {}},
  };
  cases.insert(cases.end(), own.begin(), own.end());
  return cases;
}

TEST(TaggedCallsTest, CallsAreFoundAndAllElseComesBack) {
  for (const TaggedCase& c : TaggedCases()) {
    SCOPED_TRACE(c.text);
    EXPECT_EQ(FindCalls(c.style, {c.text}), (FoundCalls{c.content, c.calls}));
  }
}

TEST(TaggedCallsTest, NothingDependsOnHowTheTextIsCut) {
  for (const TaggedCase& c : TaggedCases()) {
    ExpectAlikeHoweverCut(c.style, c.text);
  }
}

// Texts of what calls are made of, in no order.
TEST(TaggedCallsTest, NorOfTextsThatAreAlmostCalls) {
  std::mt19937 random(7);
  for (const ToolCallStyle style : {kQwen, kGlm, kMiniMax}) {
    const CallTags& tags = *CallTagsOf(style);
    const std::string f = Function(style, "f", {{"s", "a"}});
    std::vector<std::string> parts = {
        f, Block(style, f), "f", "s", "{\"a\": \"", "}", "{}", " ", "\n", "<"};
    for (const std::string_view tag :
         {tags.block_begin, tags.name_begin, tags.name_end, tags.key_begin,
          tags.key_end, tags.value_begin, tags.value_end, tags.call_end,
          tags.block_end}) {
      parts.emplace_back(tag);
    }
    int with_calls = 0;
    for (int round = 0; round < 8000; ++round) {
      std::string text;
      for (size_t n = random() % 14; n > 0; --n) {
        text += parts[random() % parts.size()];
      }
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
    EXPECT_GT(with_calls, 500);
  }
}

// A text of a megabyte that keeps nearly beginning calls, with an end that
// breaks all of them: quadratic work would take minutes.
TEST(TaggedCallsTest, TimeIsLinear) {
  for (const ToolCallStyle style : {kQwen, kGlm, kMiniMax}) {
    const CallTags& tags = *CallTagsOf(style);
    const std::string begin(tags.block_begin);
    const std::string call = Block(style, Function(style, "f", {{"s", ""}}));
    const size_t value = call.find(tags.value_end);
    for (const std::string& part :
         {begin, call.substr(0, value), call.substr(begin.size(), value),
          call.substr(0, value) + std::string(tags.value_end),
          call.substr(0, call.find('f') + 1),
          begin + "\n" + Function(style, "f", {}),
          begin + std::string(tags.name_begin) + "f" +
              std::string(tags.name_end) + "\n{\"",
          std::string(tags.name_begin) + "f" + std::string(tags.name_end) +
              "\n{\" : \""}) {
      if (part.empty()) continue;
      for (const std::string& end :
           {std::string(), std::string(tags.value_end) + "?"}) {
        std::string text;
        while (text.size() < 1 << 20) text += part;
        EXPECT_LE(FindCalls(style, {text + end}).text.size(),
                  text.size() + end.size());
      }
    }
  }
}

TEST(TaggedCallsTest, ACallIsReturnedAtItsEnd) {
  ToolCallParser parser(kGlm, {});
  EXPECT_TRUE(parser.Push("<tool_call>f</tool_call").calls.empty());
  EXPECT_EQ(parser.Push(">").calls.size(), 1u);
  EXPECT_EQ(parser.Push("<b>").text, "<b>");
}

TEST(TaggedCallsTest, MarksMayBeSpecialTokens) {
  ToolCallParser parser(kGlm, {});
  for (const auto& [piece, hidden] :
       std::vector<std::pair<const char*, bool>>{{"a", false},
                                                 {"<tool_call>", true},
                                                 {"f", false},
                                                 {"<arg_key>", true},
                                                 {"s", false},
                                                 {"</arg_key>", true},
                                                 {"<arg_value>", true},
                                                 {"b", false},
                                                 {"</arg_value>", true}}) {
    const ToolCallParser::Result result = parser.Push(piece, hidden);
    EXPECT_EQ(result.text, piece == std::string("a") ? "a" : "");
  }
  const ToolCallParser::Result result = parser.Push("</tool_call>", true);
  ASSERT_EQ(result.calls.size(), 1u);
  EXPECT_EQ(result.calls[0].arguments, R"({"s": "b"})");
  EXPECT_EQ(parser.Push("<tool_call>", true).text, "");
  EXPECT_EQ(parser.Push("f ?").text, "f ?");
  EXPECT_THAT(ToolCallMarkers(kGlm),
              ElementsAre("<tool_call>", "<arg_key>", "</arg_key>",
                          "<arg_value>", "</arg_value>", "</tool_call>"));
  EXPECT_THAT(ToolCallMarkers(kMiniMax),
              ElementsAre("<minimax:tool_call>", "</parameter>", "</invoke>",
                          "</minimax:tool_call>"));
}

TEST(DeclaredJsonTest, IsAllThatIsNotText) {
  const auto json = [](const std::string& schema) {
    return DeclaredJson(
        R"({"type": "object", "$defs": {"T": {"type": "string"},)"
        R"( "N": {"type": "integer"}, "L": {"$ref": "#/$defs/L"}},)"
        R"( "properties": {"p": )" +
        schema + "}}");
  };
  for (const char* const text :
       {R"({"type": "string"})", R"({"type": ["string", "null"]})",
        R"({"enum": ["a", "b"]})", R"({"enum": ["a", null]})",
        R"({"type": "string", "enum": ["a"]})", R"({"const": "a"})",
        R"({"anyOf": [{"type": "string"}, {"type": "null"}]})",
        R"({"$ref": "#/$defs/T"})", R"({"allOf": [{"$ref": "#/$defs/T"}]})",
        R"({})", R"({"description": "any"})", R"(true)", R"(5)",
        R"({"type": []})", R"({"anyOf": []})"}) {
    EXPECT_THAT(json(text), IsEmpty()) << text;
  }
  for (const char* const other :
       {R"({"type": "integer"})", R"({"type": "object"})",
        R"({"type": ["string", "integer"]})", R"({"enum": [1, "a"]})",
        R"({"const": 1})", R"({"type": "null"})", R"({"type": 5})",
        R"({"oneOf": [{"type": "string"}, {"type": "array"}]})",
        R"({"$ref": "#/$defs/N"})", R"({"$ref": "#/$defs/X"})",
        R"({"$ref": 5})", R"({"$ref": "#/$defs/L"})"}) {
    EXPECT_THAT(json(other), ElementsAre("p")) << other;
  }
  for (const char* const bad :
       {"", "{", "[]", "null", R"({"properties": 5})",
        R"({"properties": ["p"]})", "{\"properties\": {\"\xff\": {}}}"}) {
    EXPECT_THAT(DeclaredJson(bad), IsEmpty()) << bad;
  }
}

// As large and as knotted as a request's tools may be.
TEST(DeclaredJsonTest, TakesBoundedTime) {
  std::string list;
  for (int i = 0; i < 10'000; ++i) {
    absl::StrAppend(&list, i ? "," : "", R"({"$ref":"#/$defs/a"})");
  }
  std::string schema = absl::StrCat(R"({"$defs":{"a":{"anyOf":[)", list,
                                    R"(]}},"properties":{)");
  for (int i = 0; i < 2'000; ++i) {
    absl::StrAppend(&schema, i ? "," : "", "\"", i,
                    R"(":{"$ref":"#/$defs/a"})");
  }
  EXPECT_LE(DeclaredJson(schema + "}}").size(), 2'000u);
  const std::string deep(100'000, '[');
  EXPECT_THAT(DeclaredJson(R"({"properties":{"p":)" + deep), IsEmpty());
}

}  // namespace
}  // namespace tandem::router
