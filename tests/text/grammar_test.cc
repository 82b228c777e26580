// SPDX-License-Identifier: Apache-2.0
// Masks against what texts match by independent judges: the corpus of schemas
// (verdicts of the Python package jsonschema), std::regex, membership.

#include "text/grammar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace tandem::text {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;  // llguidance's objects have their schema's order

constexpr absl::Duration kBudget = absl::Seconds(20);

// A token for each byte, some longer ones, and special tokens of which the
// last is the model's end token.
Tokenizer ByteTokenizer() {
  json vocab;
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    vocab[name] = byte;
  }
  int next = 256;
  for (const char* piece :
       {"{\"", "\":", "\",", "true", "false", "null", "ab", "abc", "12", "123",
        "red", "green", "▁", "\"}", "<tool", "[[", "é"}) {
    vocab[piece] = next++;
  }
  json added = json::array();
  for (const char* special : {"<unk>", "<|tool|>", "</s>"}) {
    vocab[special] = next;
    added.push_back({{"id", next++},
                     {"content", special},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const json file = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", nullptr},
                     {"post_processor", nullptr},
                     {"decoder",
                      {{"type", "Sequence"},
                       {"decoders",
                        {{{"type", "Replace"},
                          {"pattern", {{"String", "▁"}}},
                          {"content", " "}},
                         {{"type", "ByteFallback"}},
                         {{"type", "Fuse"}}}}}},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", "<unk>"},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", true},
                       {"byte_fallback", true},
                       {"ignore_merges", false},
                       {"vocab", vocab},
                       {"merges", json::array()}}}};
  auto tokenizer = Tokenizer::FromJson(file.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

class GrammarTest : public testing::Test {
 protected:
  // 20 ids more than the tokenizer has.
  GrammarTest()
      : tokenizer_(ByteTokenizer()),
        vocabulary_(*GrammarVocabulary::Create(tokenizer_,
                                               tokenizer_.vocab_size() + 20)) {}

  absl::StatusOr<Grammar> Compile(GrammarKind kind, std::string_view source) {
    return vocabulary_.Compile(kind, source, kBudget);
  }
  std::vector<uint32_t> NoMask() const {
    return std::vector<uint32_t>(static_cast<size_t>(vocabulary_.mask_words()),
                                 0);
  }
  static bool Names(const std::vector<uint32_t>& mask, int id) {
    return (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0;
  }

  // Whether the grammar takes the text, byte by byte, and lets it end there.
  bool Matches(Grammar& grammar, std::string_view text) {
    for (const char c : text) {  // '\1': a special token
      const int32_t id = c == '\1' ? *tokenizer_.TokenToId("<|tool|>")
                                   : static_cast<uint8_t>(c);
      auto mask = NoMask();
      const auto may_end = grammar.Mask(mask);
      if (!may_end.ok()) return false;
      const bool named = Names(mask, id);
      const auto taken = grammar.Consume({&id, 1});
      EXPECT_TRUE(taken.ok());
      EXPECT_EQ(named, *taken == 1) << "mask and grammar differ at " << text;
      if (!named) return false;
    }
    auto mask = NoMask();
    const auto may_end = grammar.Mask(mask);
    return may_end.ok() && *may_end;
  }
  bool Matches(GrammarKind kind, std::string_view source,
               std::string_view text) {
    auto grammar = Compile(kind, source);
    EXPECT_TRUE(grammar.ok()) << source << ": " << grammar.status();
    return grammar.ok() && Matches(*grammar, text);
  }

  // A text of tokens at random that the masks allow, ended as soon as it may
  // be with some chance; empty if it did not come to an end.
  std::string Draw(Grammar& grammar, std::mt19937& random, int most = 400) {
    std::vector<int32_t> ids;
    for (int i = 0; i < most; ++i) {
      if (grammar.ended()) return Text(ids);
      auto mask = NoMask();
      const auto may_end = grammar.Mask(mask);
      EXPECT_TRUE(may_end.ok()) << may_end.status();
      std::vector<int32_t> allowed;
      for (int id = 0; id < vocabulary_.vocab_size(); ++id) {
        if (Names(mask, id)) allowed.push_back(id);
      }
      if (*may_end && (allowed.empty() || random() % 4 == 0)) return Text(ids);
      EXPECT_FALSE(allowed.empty());
      ids.push_back(allowed[random() % allowed.size()]);
      // Closes what is open.
      if (i > most / 2) {
        for (const char c : {'"', '}', ']'}) {
          if (Names(mask, c)) ids.back() = c;
        }
      }
      EXPECT_EQ(*grammar.Consume({&ids.back(), 1}), 1);
    }
    return "";
  }
  std::string Text(const std::vector<int32_t>& ids) const {
    std::string text;
    for (const int32_t id : ids) {
      text += tokenizer_.TokenBytes(id);
    }
    return text;
  }

  Tokenizer tokenizer_;
  GrammarVocabulary vocabulary_;
};

ordered_json ReadJson(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return ordered_json::parse(file);
}

TEST_F(GrammarTest, SchemasTakeWhatTheReferenceTakes) {
  const ordered_json corpus = ReadJson(absl::StrCat(
      TANDEM_SOURCE_DIR, "/tests/text/corpus/structured/", "json_schema.json"));
  int texts = 0;
  for (const ordered_json& item : corpus["schemas"]) {
    for (const ordered_json& text : item["texts"]) {
      const std::string instance = text["text"];
      EXPECT_EQ(
          Matches(GrammarKind::kJsonSchema, item["schema"].dump(), instance),
          text["valid"].get<bool>())
          << item["schema"].dump() << " and " << instance;
      ++texts;
    }
  }
  EXPECT_GE(texts, 150);
}

TEST_F(GrammarTest, RandomTokensMakeJson) {
  auto prototype = Compile(GrammarKind::kJsonObject, "");
  ASSERT_TRUE(prototype.ok());
  int whole = 0;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    auto grammar = Compile(GrammarKind::kJsonObject, "");
    const std::string text = Draw(*grammar, random);
    if (text.empty()) continue;
    ++whole;
    try {
      EXPECT_TRUE(json::parse(text).is_object());
    } catch (const json::out_of_range&) {  // a number beyond doubles
    } catch (const json::exception& error) {
      ADD_FAILURE() << error.what() << ": " << text;
    }
  }
  EXPECT_GE(whole, 10);
}

TEST_F(GrammarTest, RandomTokensMatchTheRegex) {
  for (const char* pattern :
       {"[0-9]{3}-[0-9]{4}", "(ab|abc)+x?", "[a-f]*z", "^a{2,5}$",
        "(red|green) [^ ]{1,4}", "a|ab|abc"}) {
    const std::regex reference(pattern, std::regex::ECMAScript);
    for (uint32_t seed = 0; seed < 20; ++seed) {
      std::mt19937 random(seed);
      auto grammar = Compile(GrammarKind::kRegex, pattern);
      ASSERT_TRUE(grammar.ok()) << grammar.status();
      const std::string text = Draw(*grammar, random);
      if (text.empty()) continue;
      // "." of std::regex is a byte; characters of more are one.
      const bool ascii = std::all_of(text.begin(), text.end(), [](char c) {
        return static_cast<unsigned char>(c) < 128;
      });
      if (ascii) {
        EXPECT_TRUE(std::regex_match(text, reference))
            << pattern << ": " << text;
      }
    }
  }
}

TEST_F(GrammarTest, ChoicesAreTheTextsAndNoOthers) {
  const std::vector<std::string> values = {
      "a", "ab", "abc\"\n", "green", "greener", "é \\ / {x}", "\x7f\x1f"};
  const std::string source = json(values).dump();
  for (const std::string& value : values) {
    EXPECT_TRUE(Matches(GrammarKind::kChoice, source, value)) << value;
  }
  for (const char* other : {"", "abc", "b", "greene", "aa", "é"}) {
    EXPECT_FALSE(Matches(GrammarKind::kChoice, source, other)) << other;
  }
  for (uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    auto grammar = Compile(GrammarKind::kChoice, source);
    const std::string text = Draw(*grammar, random);
    EXPECT_NE(std::find(values.begin(), values.end(), text), values.end())
        << text;
  }
}

TEST_F(GrammarTest, LarkGrammarsNest) {
  constexpr char kNested[] = R"(
start: list
list: "[" (item ("," item)*)? "]"
item: list | NUMBER
NUMBER: /[0-9]+/
)";
  EXPECT_TRUE(Matches(GrammarKind::kLark, kNested, "[1,[2,[]],33]"));
  EXPECT_FALSE(Matches(GrammarKind::kLark, kNested, "[1,[2,[]],33"));
  EXPECT_FALSE(Matches(GrammarKind::kLark, kNested, "[,]"));
}

TEST_F(GrammarTest, SpecialTokensAreNoTextUnlessNamed) {
  const int tool = *tokenizer_.TokenToId("<|tool|>");
  const int end = *tokenizer_.TokenToId("</s>");
  auto any = Compile(GrammarKind::kRegex, "(.|\n)*");
  auto mask = NoMask();
  ASSERT_TRUE(any->Mask(mask).ok());
  EXPECT_FALSE(Names(mask, tool));
  EXPECT_FALSE(Names(mask, end));
  EXPECT_TRUE(Names(mask, 'a'));
  // Bytes that no text begins with or has, and ids beyond the tokenizer's.
  EXPECT_FALSE(Names(mask, 0x80));
  EXPECT_FALSE(Names(mask, 0xff));
  for (int id = tokenizer_.vocab_size(); id < vocabulary_.vocab_size(); ++id) {
    EXPECT_FALSE(Names(mask, id));
  }
  auto named = Compile(GrammarKind::kLark, "start: <|tool|> \"ab\"\n");
  ASSERT_TRUE(named.ok()) << named.status();
  ASSERT_TRUE(named->Mask(mask).ok());
  for (int id = 0; id < vocabulary_.vocab_size(); ++id) {
    EXPECT_EQ(Names(mask, id), id == tool) << id;
  }
}

TEST_F(GrammarTest, ByteTokensMakeCharacters) {
  auto grammar = Compile(GrammarKind::kRegex, "[é-ê]");
  const int whole = *tokenizer_.TokenToId("é");
  auto mask = NoMask();
  ASSERT_TRUE(grammar->Mask(mask).ok());
  EXPECT_TRUE(Names(mask, whole));
  EXPECT_TRUE(Names(mask, 0xc3));
  const int32_t first = 0xc3;
  ASSERT_EQ(*grammar->Consume({&first, 1}), 1);
  ASSERT_TRUE(grammar->Mask(mask).ok());
  for (int id = 0; id < vocabulary_.vocab_size(); ++id) {
    EXPECT_EQ(Names(mask, id), id == 0xa9 || id == 0xaa) << id;
  }
}

TEST_F(GrammarTest, AStateIsItsTokensHoweverItCameThere) {
  std::mt19937 random(7);
  const char* const schema =
      R"({"type":"object","properties":{"a":{"type":"array","items":)"
      R"({"type":"integer"}},"b":{"enum":["red","green"]}},"required":["a"]})";
  auto one = Compile(GrammarKind::kJsonSchema, schema);
  std::vector<int32_t> ids;
  for (int i = 0; i < 60 && !one->ended(); ++i) {
    auto mask = NoMask();
    const bool may_end = *one->Mask(mask);
    auto replayed = Compile(GrammarKind::kJsonSchema, schema);
    ASSERT_EQ(*replayed->Consume(ids), i);
    auto again = NoMask();
    EXPECT_EQ(*replayed->Mask(again), may_end);
    EXPECT_EQ(again, mask) << "behind " << Text(ids);
    std::vector<int32_t> allowed;
    for (int id = 0; id < vocabulary_.vocab_size(); ++id) {
      if (Names(mask, id)) allowed.push_back(id);
    }
    if (allowed.empty()) break;
    // Whatever becomes of a copy.
    absl::StatusOr<Grammar> copy = one->Copy();
    ASSERT_TRUE(copy.ok()) << copy.status();
    EXPECT_EQ(*copy->Mask(again), may_end);
    EXPECT_EQ(again, mask) << "behind " << Text(ids);
    const int32_t guess = allowed[random() % allowed.size()];
    ASSERT_EQ(*copy->Consume({&guess, 1}), 1);
    ASSERT_TRUE(copy->Mask(again).ok());
    EXPECT_EQ(*one->Mask(again), may_end);
    EXPECT_EQ(again, mask) << "behind " << Text(ids);
    ids.push_back(allowed[random() % allowed.size()]);
    ASSERT_EQ(*one->Consume({&ids.back(), 1}), 1);
  }
  EXPECT_GE(ids.size(), 10);
}

// A long output is replayed at once, where it was made with a mask per token.
TEST_F(GrammarTest, ALongReplayComesToTheSameState) {
  const char* const schema = R"({"type":"string","maxLength":4000})";
  auto made = Compile(GrammarKind::kJsonSchema, schema);
  ASSERT_TRUE(made.ok()) << made.status();
  auto replayed = made->Copy();
  auto mask = NoMask();
  std::vector<int32_t> ids = {'"'};
  for (int i = 0; i < 300; ++i) ids.push_back('a' + i % 26);
  for (const int32_t id : ids) {
    const auto may_end = made->Mask(mask);
    ASSERT_TRUE(may_end.ok()) << may_end.status();
    ASSERT_EQ(*made->Consume({&id, 1}), 1);
  }
  const absl::StatusOr<int> taken = replayed->Consume(ids);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(*taken, std::ssize(ids));
  auto again = NoMask();
  EXPECT_EQ(*made->Mask(mask), *replayed->Mask(again));
  EXPECT_EQ(mask, again);
}

TEST_F(GrammarTest, ATextThatCanOnlyEndHasEnded) {
  auto grammar = Compile(GrammarKind::kRegex, "ab");
  const int32_t ab = *tokenizer_.TokenToId("ab");
  EXPECT_FALSE(grammar->ended());
  ASSERT_EQ(*grammar->Consume({&ab, 1}), 1);
  EXPECT_TRUE(grammar->ended());
  auto mask = NoMask();
  EXPECT_TRUE(*grammar->Mask(mask));
  EXPECT_EQ(mask, NoMask());
  EXPECT_EQ(*grammar->Consume({&ab, 1}), 0);
  EXPECT_TRUE(grammar->Copy()->ended());
}

TEST_F(GrammarTest, StructuralTagsConstrainWhatFollowsATrigger) {
  const std::string legacy =
      R"({"structures":[{"begin":"<tool=f>","schema":{"type":"object",)"
      R"("properties":{"x":{"type":"integer"}},"required":["x"],)"
      R"("additionalProperties":false},"end":"</tool>"}],)"
      R"("triggers":["<tool="]})";
  const std::string format =
      R"({"type":"structural_tag","format":{"type":"triggered_tags",)"
      R"("triggers":["<tool="],"tags":[{"type":"tag","begin":"<tool=f>",)"
      R"("content":{"type":"json_schema","json_schema":{"type":"object",)"
      R"("properties":{"x":{"type":"integer"}},"required":["x"],)"
      R"("additionalProperties":false}},"end":"</tool>"}]}})";
  for (const std::string& source : {legacy, format}) {
    const struct {
      const char* text;
      bool matches;
    } kCases[] = {
        {"", true},
        {"any text at all", true},
        {"a <tool>, and more", true},
        {"say <tool=f>{\"x\": 1}</tool>", true},
        {"say <tool=f>{\"x\":1}</tool> and <tool=f>{\"x\":2}</tool> end", true},
        {"say <tool=f>{\"x\":1}</tool", false},
        {"say <tool=g>{\"x\":1}</tool>", false},
        {"say <tool=", false},
        {"say <tool=f>{\"y\":1}</tool>", false},
        {"<<tool=f>{\"x\":1}</tool><tool=f>{\"x\":1}</tool>", true},
    };
    for (const auto& c : kCases) {
      EXPECT_EQ(Matches(GrammarKind::kStructuralTag, source, c.text), c.matches)
          << c.text;
    }
  }
}

TEST_F(GrammarTest, TagsMayHaveAnyCharacter) {
  const std::string source =
      R"({"structures":[{"begin":"<\u007f\u001f>","schema":{"const":1},)"
      R"("end":"\u007f\""}],"triggers":["<\u007f"]})";
  EXPECT_TRUE(
      Matches(GrammarKind::kStructuralTag, source, "<\x7f\x1f>1\x7f\""));
  EXPECT_FALSE(Matches(GrammarKind::kStructuralTag, source, "<\x7f\x1f>1\x7f"));
}

TEST_F(GrammarTest, StructuralFormatsNest) {
  const std::string source =
      R"({"type":"structural_tag","format":{"type":"sequence","elements":[)"
      R"({"type":"tag","begin":"<think>","content":{"type":"any_text"},)"
      R"("end":"</think>"},{"type":"or","elements":[)"
      R"({"type":"const_string","value":"yes"},)"
      R"({"type":"regex","pattern":"^n[o]+$"},)"
      R"({"type":"grammar","grammar":"start: \"(\" start? \")\""}]}]}})";
  const struct {
    const char* text;
    bool matches;
  } kCases[] = {
      {"<think>a < b</think>yes", true},
      {"<think></think>noo", true},
      {"<think>\n</think>(())", true},
      {"<think>a</think>(()", false},
      {"<think>yes", false},
      {"yes", false},
      {"<think>a</think>n", false},
      {"<think></thinkyes", false},
  };
  for (const auto& c : kCases) {
    EXPECT_EQ(Matches(GrammarKind::kStructuralTag, source, c.text), c.matches)
        << c.text;
  }
}

TEST_F(GrammarTest, TagsBeginAndEndWithTokensToo) {
  const std::string token = absl::StrCat(
      R"({"type":"token","token":)", *tokenizer_.TokenToId("<|tool|>"), "}");
  const std::string digit = R"("content":{"type":"regex","pattern":"[0-9]"})";
  const auto format = [](const std::string& rest) {
    return absl::StrCat(R"({"type":"structural_tag","format":{"type":)", rest,
                        "}}");
  };
  const std::string triggered = format(
      absl::StrCat(R"("token_triggered_tags","trigger_tokens":[)",
                   *tokenizer_.TokenToId("<|tool|>"), R"(],"tags":[{"begin":)",
                   token, ",", digit, R"(,"end":"."}])"));
  const std::string either = format(
      absl::StrCat(R"("triggered_tags","triggers":["<t>",)", token,
                   R"(],"tags":[{"begin":["<t>",)", token, "],", digit,
                   R"(,"end":[".",)", token, R"(]}],"stop_after_first":true)"));
  const std::string listed = format(absl::StrCat(
      R"("tags_with_separator","separator":", ","tags":[{"begin":"a",)", digit,
      R"(,"end":""},{"begin":)", token, ",", digit, R"(,"end":""}])"));
  const std::string thought = format(absl::StrCat(
      R"("tag","begin":"<","content":{"type":"any_text"},"end":)", token));
  const struct {
    const std::string* source;
    std::string text;
    bool matches;
  } cases[] = {
      {&triggered, "", true},
      {&triggered, "any <text>", true},
      {&triggered,
       "\1"
       "5.",
       true},
      {&triggered,
       "a\1"
       "5.b\1"
       "6.",
       true},
      {&triggered, "a\1", false},
      {&triggered,
       "a\1"
       "b",
       false},
      {&triggered,
       "a\1"
       "5",
       false},
      {&either, "a<t>5.", true},
      {&either,
       "a\1"
       "5\1",
       true},
      {&either, "<t>5\1", true},
      {&either, "<t>5.b", false},
      {&either, "a < b", true},
      {&either, "a<t>b", false},
      {&listed, "", true},
      {&listed,
       "a1, \1"
       "2, a3",
       true},
      {&listed, "a1,", false},
      {&listed, "a1a2", false},
      {&thought, "<\1", true},
      {&thought, "<a < b\1", true},
      {&thought, "<a", false},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(Matches(GrammarKind::kStructuralTag, *c.source, c.text),
              c.matches)
        << *c.source << ": " << c.text;
  }
}

TEST_F(GrammarTest, BadSourcesSayWhatIsWrong) {
  const struct {
    GrammarKind kind;
    std::string source;
    const char* says;
  } kCases[] = {
      {GrammarKind::kJsonSchema, "{", "not JSON"},
      {GrammarKind::kJsonSchema, "[]", "an object or a boolean"},
      {GrammarKind::kJsonSchema, "false", "nsatisfiable"},
      {GrammarKind::kJsonSchema, R"({"type":"strin"})", "strin"},
      {GrammarKind::kJsonSchema, R"({"$ref":"#/nowhere"})", "nowhere"},
      {GrammarKind::kJsonSchema, R"({"not":{"type":"string"}})", "not"},
      {GrammarKind::kRegex, "(", ""},
      {GrammarKind::kRegex, "", "no text with a character"},
      {GrammarKind::kRegex, "a(?=b)", ""},
      {GrammarKind::kLark, "root ::= \"a\"", "GBNF"},
      {GrammarKind::kLark, "start: nothing", "nothing"},
      {GrammarKind::kLark, "", ""},
      {GrammarKind::kChoice, "[]", "not empty"},
      {GrammarKind::kChoice, "[1]", "list of texts"},
      {GrammarKind::kStructuralTag, "{}", "format"},
      {GrammarKind::kStructuralTag, R"({"format":{"type":"rhyme"}})", "rhyme"},
      {GrammarKind::kStructuralTag, R"({"format":{"type":"token"}})",
       "format.token: the id of a token"},
      {GrammarKind::kStructuralTag,
       R"({"format":{"type":"token","token":4294967295}})", ""},
      {GrammarKind::kStructuralTag,
       R"({"format":{"type":"tag","begin":1,"content":{},"end":""}})",
       "format.begin: a string is needed, or a token"},
      {GrammarKind::kStructuralTag,
       R"({"format":{"type":"triggered_tags","triggers":[""],"tags":[{"begin":"a","content":{"type":"any_text"},"end":""}]}})",
       "not empty"},
  };
  for (const auto& c : kCases) {
    const auto grammar = Compile(c.kind, c.source);
    EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument)
        << c.source << ": " << grammar.status();
    EXPECT_NE(grammar.status().message().find(c.says), std::string::npos)
        << c.source << ": " << grammar.status();
    EXPECT_LT(grammar.status().message().size(), 600) << c.source;
  }
}

std::string Repeated(std::string_view part, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += part;
  return all;
}

std::string Doubling(int depth) {
  std::string lark = "start: A0\n";
  for (int i = 0; i < depth; ++i) {
    lark += absl::StrCat("A", i, ": A", i + 1, " A", i + 1, "\n");
  }
  return absl::StrCat(lark, "A", depth, ": \"a\"?\n");
}

std::string Chain(int rules) {
  std::string lark = "start: r0\n";
  for (int i = 0; i < rules; ++i) {
    lark += absl::StrCat("r", i, ": \"a\" r", i + 1, "?\n");
  }
  return absl::StrCat(lark, "r", rules, ": \"b\"\n");
}

std::string ChainOfRefs(int length) {
  std::string schema = R"({"$ref":"#/$defs/0","$defs":{)";
  for (int i = 0; i < length; ++i) {
    absl::StrAppend(&schema, "\"", i, R"(":{"allOf":[{"$ref":"#/$defs/)", i + 1,
                    R"("}]},)");
  }
  return absl::StrCat(schema, "\"", length, "\":{}}}");
}

// What grows without bound is seen however it is written: what is cut out of
// the text here must be what the compiler cuts.
TEST_F(GrammarTest, TerminalsAreMeasuredAsTheCompilerReadsThem) {
  const auto doubling = [](std::string_view name, std::string_view head,
                           std::string_view before) {
    std::string lark = absl::StrCat(std::string(head), "\n");
    for (int i = 0; i < 26; ++i) {
      const std::string next = absl::StrCat(std::string(name), i + 1);
      absl::StrAppend(&lark, std::string(name), i, ": ", std::string(before),
                      next, " ", next, "\n");
    }
    return absl::StrCat(lark, std::string(name), "26: /a/\n");
  };
  for (const std::string& lark :
       {doubling("T-", "start: T-0", ""), doubling("T_-A", "start: T_-A0", ""),
        doubling("_T", "start: _T0", ""),
        doubling("T", "start: T0", "/x?\n?/ "),
        doubling("T", "start: <a/b> T0", ""),
        doubling("T", "start: <a\"b> T0", ""),
        doubling("T", "start: T0 // it's \" /", ""),
        doubling("T", "start: T0 # /", ""),
        doubling("T", "r::_: T0\nstart: r::0x0", ""),
        doubling("T", "start: %json {\"a\": 1} T0", ""),
        doubling("T", "start[capture=\"a\"]: T0", "")}) {
    const auto grammar = Compile(GrammarKind::kLark, lark);
    ASSERT_FALSE(grammar.ok()) << lark;
    EXPECT_NE(std::string(grammar.status().message())
                  .find("bytes with all that it names"),
              std::string::npos)
        << grammar.status();
  }
  // Behind a brace of ours they would be part of the whole.
  const json tag = {
      {"format",
       {{"type", "grammar"},
        {"grammar", "start: \"x\"\n}\nfoo: %lark {\nstart: \"y\""}}}};
  const auto unbalanced = Compile(GrammarKind::kStructuralTag, tag.dump());
  ASSERT_FALSE(unbalanced.ok());
  EXPECT_NE(std::string(unbalanced.status().message()).find("a brace"),
            std::string::npos);
  json triggers = {{"triggers", json::array()}, {"structures", json::array()}};
  for (int i = 0; i < 3000; ++i) {
    const std::string begin = absl::StrCat("<t", i, ">");
    triggers["triggers"].push_back(begin);
    triggers["structures"].push_back(
        {{"begin", begin}, {"schema", json::object()}, {"end", ""}});
  }
  const auto many = Compile(GrammarKind::kStructuralTag, triggers.dump());
  ASSERT_FALSE(many.ok());
  EXPECT_NE(std::string(many.status().message()).find("at most 64"),
            std::string::npos);
}

// Whatever a client writes within the limit of bytes ends soon, as a grammar or
// with a reason, and a mask behind it is bounded as well.
TEST_F(GrammarTest, HostileSourcesAreBounded) {
  json wide = {{"type", "object"}};
  for (int i = 0; i < 1000; ++i) {
    wide["properties"][absl::StrCat("p", i)] = {{"type", "string"}};
  }
  json refs = {{"$ref", "#/$defs/d0"}};
  for (int i = 0; i < 25; ++i) {
    const json next = {{"$ref", absl::StrCat("#/$defs/d", i + 1)}};
    refs["$defs"][absl::StrCat("d", i)] = {{"allOf", {next, next}}};
  }
  refs["$defs"]["d25"] = {{"type", "string"}};
  json crossed = {{"allOf", json::array()}};
  for (int i = 0; i < 12; ++i) {
    json any = json::array();
    for (int j = 0; j < 6; ++j) {
      any.push_back({{"type", "object"},
                     {"properties",
                      {{absl::StrCat("k", i, "_", j), {{"type", "string"}}}}}});
    }
    crossed["allOf"].push_back({{"anyOf", any}});
  }
  json choices = json::array();
  for (int i = 0; i < 10000; ++i) choices.push_back(absl::StrCat("choice ", i));
  const struct {
    const char* name;
    GrammarKind kind;
    std::string source;
  } kCases[] = {
      {"wide", GrammarKind::kJsonSchema, wide.dump()},
      {"refs", GrammarKind::kJsonSchema, refs.dump()},
      {"crossed", GrammarKind::kJsonSchema, crossed.dump()},
      {"deep schema", GrammarKind::kJsonSchema,
       Repeated(R"({"items":)", 20000) + "{}" + Repeated("}", 20000)},
      {"itself", GrammarKind::kJsonSchema,
       R"({"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}})"},
      {"many items", GrammarKind::kJsonSchema,
       R"({"type":"array","minItems":1000000,"maxItems":2000000000})"},
      {"long string", GrammarKind::kJsonSchema,
       R"({"type":"string","minLength":1000000,"maxLength":2000000000})"},
      {"pattern", GrammarKind::kJsonSchema,
       R"({"type":"string","pattern":"((a{1,100}){1,100}){1,100}$"})"},
      {"powers", GrammarKind::kRegex,
       "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
      {"catastrophe", GrammarKind::kRegex, "((a|aa|a*)*)*b"},
      {"determinism", GrammarKind::kRegex, "(a|b)*a(a|b){200}"},
      {"deep regex", GrammarKind::kRegex,
       Repeated("(", 50000) + "a" + Repeated(")", 50000)},
      {"flat regex", GrammarKind::kRegex, Repeated("a?", 2000)},
      {"flat pattern", GrammarKind::kJsonSchema,
       json({{"pattern", Repeated("a?", 50000)}}).dump()},
      {"flat pattern in lark", GrammarKind::kLark,
       "start: %json " + json({{"pattern", Repeated("a?", 50000)}}).dump()},
      {"substrings", GrammarKind::kLark,
       "start: %regex " +
           json({{"substring_chars", Repeated("ab", 50000)}}).dump()},
      {"flat lark", GrammarKind::kLark,
       "start: T\nT: " + Repeated("\"a\"? ", 20000)},
      {"doubling", GrammarKind::kLark, Doubling(30)},
      {"chain", GrammarKind::kLark, Chain(4900)},
      {"long chain", GrammarKind::kLark, Chain(20000)},
      {"chain of refs", GrammarKind::kJsonSchema, ChainOfRefs(6000)},
      {"not not", GrammarKind::kLark,
       "start: T\nT: " + Repeated("~", 100000) + "\"a\"\n"},
      {"alternatives", GrammarKind::kRegex, Repeated("[a-z]+|", 30000) + "x"},
      {"deep lark", GrammarKind::kLark,
       "start: " + Repeated("(", 50000) + "\"a\"" + Repeated(")", 50000)},
      {"ambiguous", GrammarKind::kLark, "start: s\ns: s s | \"a\" | s s s\n"},
      {"repeats", GrammarKind::kLark,
       "start: (((\"a\"){1,999}){1,999}){1,999}"},
      {"left", GrammarKind::kLark, "start: start\n"},
      {"choices", GrammarKind::kChoice, choices.dump()},
      {"brackets", GrammarKind::kChoice,
       json(std::vector<std::string>{Repeated("([{", 50000)}).dump()},
      {"tags", GrammarKind::kStructuralTag,
       Repeated(R"({"format":{"type":"or","elements":[)", 20000)},
  };
  for (const auto& c : kCases) {
    const absl::Time begun = absl::Now();
    auto grammar = Compile(c.kind, c.source);
    const absl::Duration compiled = absl::Now() - begun;
    if (!grammar.ok()) {
      EXPECT_EQ(grammar.status().code(), absl::StatusCode::kInvalidArgument)
          << c.name << ": " << grammar.status();
      EXPECT_EQ(grammar.status().message().find("panic"), std::string::npos);
    } else {
      std::mt19937 random(1);
      for (int i = 0; i < 60 && !grammar->ended(); ++i) {
        auto mask = NoMask();
        if (!grammar->Mask(mask).ok()) break;
        std::vector<int32_t> allowed;
        for (int id = 0; id < vocabulary_.vocab_size(); ++id) {
          if (Names(mask, id)) allowed.push_back(id);
        }
        if (allowed.empty()) break;
        const int32_t id = allowed[random() % allowed.size()];
        if (!grammar->Consume({&id, 1}).ok()) break;
      }
    }
    RecordProperty(c.name, absl::StrCat(absl::ToInt64Milliseconds(compiled)));
    if (std::getenv("TANDEM_VERBOSE") != nullptr) {
      std::printf("%-12s compiled %s, all %s: %s\n", c.name,
                  absl::FormatDuration(compiled).c_str(),
                  absl::FormatDuration(absl::Now() - begun).c_str(),
                  grammar.status().ToString().substr(0, 200).c_str());
    }
  }
}

TEST_F(GrammarTest, WhoWaitsNoLongerHearsIt) {
  json wide = {{"type", "object"}};
  for (int i = 0; i < 500; ++i) {
    wide["properties"][absl::StrCat("p", i)] = {{"type", "string"}};
  }
  const auto grammar = vocabulary_.Compile(GrammarKind::kJsonSchema,
                                           wide.dump(), absl::ZeroDuration());
  ASSERT_EQ(grammar.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(grammar.status().message().find("more than 0 ms"),
            std::string::npos);
}

TEST(GrammarVocabularyTest, SizesAreChecked) {
  const Tokenizer tokenizer = ByteTokenizer();
  EXPECT_FALSE(GrammarVocabulary::Create(tokenizer, 0).ok());
  EXPECT_FALSE(GrammarVocabulary::Create(tokenizer, 1 << 22).ok());
  // A model smaller than its tokenizer: the rest never comes.
  const auto few = GrammarVocabulary::Create(tokenizer, 100);
  ASSERT_TRUE(few.ok());
  EXPECT_FALSE(few->Compile(GrammarKind::kRegex, "z", kBudget).ok());
  EXPECT_TRUE(few->Compile(GrammarKind::kRegex, "A", kBudget).ok());
}

}  // namespace
}  // namespace tandem::text
