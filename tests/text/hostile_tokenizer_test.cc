// SPDX-License-Identifier: Apache-2.0
// Bad tokenizer files end in an error that names file and field, within a
// bounded time and memory.

#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "golden.h"
#include "gtest/gtest.h"
#include "text/tokenizer.h"

namespace tandem::text {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// The smallest good file of a kind, which each case then spoils.
json GoodBpe() {
  return json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 0, "content": "<s>", "single_word": false,
      "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null,
    "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "dropout": null, "unk_token": null,
      "continuing_subword_prefix": null, "end_of_word_suffix": null,
      "fuse_unk": false, "byte_fallback": false,
      "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3},
      "merges": [["a", "b"]]}})");
}

json GoodUnigram() {
  json file = GoodBpe();
  file["added_tokens"] = json::array();
  file["model"] = json::parse(
      R"({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]})");
  return file;
}

struct HostileFile {
  std::string what;
  std::string file;
  std::string message;  // the field, or what is said of it
};

HostileFile Spoiled(const std::string& what, const std::string& message,
                    const std::function<void(json&)>& spoil,
                    json file = GoodBpe()) {
  spoil(file);
  return {what, file.dump(), message};
}

std::string Replaced(std::string text, const std::string& from,
                     const std::string& to) {
  const size_t at = text.find(from);
  if (at == std::string::npos) return "the case is broken";
  return text.replace(at, from.size(), to);
}

std::vector<HostileFile> Malformed() {
  const std::string good = GoodBpe().dump();
  return {
      {"empty", "", "EOF"},
      {"a space", " ", "EOF"},
      {"not JSON", "hello", "expected value"},
      {"binary", std::string("\x00\x01\x02", 3), "expected value"},
      {"not UTF-8", "{\"\xFF\": 1}", "UTF-8"},
      {"a list", "[]", "invalid"},
      {"null", "null", "invalid type: null"},
      {"truncated", good.substr(0, good.size() / 2), "EOF"},
      {"truncated at the end", good.substr(0, good.size() - 1), "EOF"},
      {"text behind", good + "x", "trailing"},
      {"depth bomb", std::string(1'000'000, '['), "invalid"},
      {"depth bomb in a field",
       Replaced(good, "\"normalizer\":null",
                "\"normalizer\":" + std::string(100'000, '[')),
       "normalizer[0]"},
      {"nested sequences",
       Replaced(good, "\"normalizer\":null",
                [] {
                  std::string s;
                  for (int i = 0; i < 40; ++i) {
                    s += "{\"type\":\"Sequence\",\"normalizers\":[";
                  }
                  s += "{\"type\":\"NFC\"}";
                  for (int i = 0; i < 40; ++i) s += "]}";
                  return "\"normalizer\":" + s;
                }()),
       "normalizer: nested"},
      {"model twice", Replaced(good, "\"version\"", "\"model\":{},\"version\""),
       "model"},
      {"a key twice in the model",
       Replaced(good, "\"unk_token\":null",
                "\"unk_token\":null,\"unk_token\":null"),
       "model"},
      {"a token twice", Replaced(good, "\"a\":1", "\"a\":1,\"a\":7"),
       "model.vocab: token \"a\" is there twice"},
  };
}

std::vector<HostileFile> Contradictory() {
  return {
      Spoiled("no model", "model", [](json& f) { f.erase("model"); }),
      Spoiled("no vocab", "model: missing field `vocab`",
              [](json& f) { f["model"].erase("vocab"); }),
      Spoiled("no merges", "model.merges",
              [](json& f) { f["model"].erase("merges"); }),
      Spoiled("other version", "version",
              [](json& f) { f["version"] = "9.9"; }),
      Spoiled("unknown model", "model.type",
              [](json& f) { f["model"]["type"] = "Magic"; }),
      Spoiled("empty vocab", "model.vocab: is empty",
              [](json& f) { f["model"]["vocab"] = json::object(); }),
      Spoiled("vocab is a number", "model.vocab",
              [](json& f) { f["model"]["vocab"] = 5; }),
      Spoiled("negative id", "model.vocab.a: id -1",
              [](json& f) { f["model"]["vocab"]["a"] = -1; }),
      Spoiled("huge id", "model.vocab.a: id 4294967295",
              [](json& f) { f["model"]["vocab"]["a"] = 4294967295u; }),
      Spoiled("huger id", "model.vocab.a",
              [](json& f) { f["model"]["vocab"]["a"] = UINT64_MAX; }),
      Spoiled("fraction as id", "model.vocab.a",
              [](json& f) { f["model"]["vocab"]["a"] = 1.5; }),
      Spoiled("text as id", "model.vocab.a",
              [](json& f) { f["model"]["vocab"]["a"] = "1"; }),
      Spoiled("wide gap", "model.vocab: id 1000000 with only 4",
              [](json& f) { f["model"]["vocab"]["a"] = 1000000; }),
      Spoiled("an id twice", "model.vocab: id 2 belongs to",
              [](json& f) { f["model"]["vocab"]["a"] = 2; }),
      Spoiled("endless token", "model.vocab: token",
              [](json& f) {
                f["model"]["vocab"][std::string(1'000'000, 'x')] = 4;
              }),
      Spoiled("merge of unknown", "model.merges[1]: \"z\" is not in",
              [](json& f) {
                f["model"]["merges"].push_back({"a", "z"});
              }),
      Spoiled("merge into unknown", "model.merges[1]: \"ba\" is not in",
              [](json& f) {
                f["model"]["merges"].push_back({"b", "a"});
              }),
      Spoiled("cyclic merge", "model.merges[0]: a side is empty",
              [](json& f) {
                f["model"]["vocab"][""] = 4;
                f["model"]["merges"] = json::parse(R"([["a", ""]])");
              }),
      Spoiled("cyclic merge by prefix", "model.merges[0]: a side is empty",
              [](json& f) {
                f["model"]["continuing_subword_prefix"] = "##";
                f["model"]["vocab"]["##"] = 4;
                f["model"]["merges"] = json::parse(R"([["a", "##"]])");
              }),
      Spoiled(
          "merge shorter than the prefix", "model.merges[0]",
          [](json& f) { f["model"]["continuing_subword_prefix"] = "####"; }),
      Spoiled("duplicate merge",
              "model.merges[1]: \"a\" + \"b\" is there twice",
              [](json& f) {
                f["model"]["merges"].push_back({"a", "b"});
              }),
      Spoiled("merge of three", "model.merges[0]",
              [](json& f) {
                f["model"]["merges"] = {{"a", "b", "c"}};
              }),
      Spoiled("merge line of three", "model.merges[0]",
              [](json& f) { f["model"]["merges"] = {"a b c"}; }),
      Spoiled("merge is a number", "model.merges[0]",
              [](json& f) { f["model"]["merges"] = {1}; }),
      Spoiled("unknown unk_token", "model.unk_token",
              [](json& f) { f["model"]["unk_token"] = "<nope>"; }),
      Spoiled("dropout", "model.dropout",
              [](json& f) { f["model"]["dropout"] = 0.1; }),
      Spoiled(
          "unigram without scores", "model.vocab",
          [](json& f) {
            f["model"]["vocab"] = {{"a", 0}};
          },
          GoodUnigram()),
      Spoiled(
          "unigram unk_id out of range", "model.unk_id: 99",
          [](json& f) { f["model"]["unk_id"] = 99; }, GoodUnigram()),
      Spoiled(
          "unigram token twice", "model.vocab: token \"a\" is there twice",
          [](json& f) {
            f["model"]["vocab"].push_back({"a", -2.0});
          },
          GoodUnigram()),
      Spoiled(
          "unigram endless token", "model.vocab: token",
          [](json& f) {
            f["model"]["vocab"].push_back({std::string(100'000, 'x'), 0.0});
          },
          GoodUnigram()),
      Spoiled("added token twice", "added_tokens[1].content",
              [](json& f) {
                f["added_tokens"].push_back(f["added_tokens"][0]);
                f["added_tokens"][1]["id"] = 4;
              }),
      Spoiled("added id twice", "added_tokens[1].id",
              [](json& f) {
                f["added_tokens"].push_back(f["added_tokens"][0]);
                f["added_tokens"][1]["content"] = "<x>";
              }),
      Spoiled("added id against the vocabulary", "added_tokens[0].id: 3",
              [](json& f) { f["added_tokens"][0]["id"] = 3; }),
      Spoiled("added id behind a gap", "added_tokens[1].id: 9",
              [](json& f) {
                f["added_tokens"].push_back(f["added_tokens"][0]);
                f["added_tokens"][1]["content"] = "<x>";
                f["added_tokens"][1]["id"] = 9;
              }),
      Spoiled("negative added id", "added_tokens[0].id: id -5",
              [](json& f) { f["added_tokens"][0]["id"] = -5; }),
      Spoiled("empty added token", "added_tokens[0].content: is empty",
              [](json& f) { f["added_tokens"][0]["content"] = ""; }),
      Spoiled("unknown normalizer", "normalizer: ",
              [](json& f) {
                f["normalizer"] = {{"type", "Magic"}};
              }),
      Spoiled("decoder that cannot stream", "decoder: type \"CTC\"",
              [](json& f) {
                f["decoder"] = {{"type", "CTC"},
                                {"pad_token", "p"},
                                {"word_delimiter_token", "|"},
                                {"cleanup", false}};
              }),
      Spoiled("decoder that strips the end", "decoder.decoders[1]",
              [](json& f) {
                f["decoder"] = json::parse(
                    R"({"type": "Sequence", "decoders": [{"type": "Fuse"},
                      {"type": "Strip", "content": " ", "start": 0,
                       "stop": 1}]})");
              }),
      Spoiled("broken regular expression", "pre_tokenizer: ",
              [](json& f) {
                f["pre_tokenizer"] = json::parse(
                    R"({"type": "Split", "pattern": {"Regex": "(("},
                        "behavior": "Isolated", "invert": false})");
              }),
      Spoiled("enormous regular expression", "pre_tokenizer: ",
              [](json& f) {
                f["pre_tokenizer"] = json::parse(
                    R"json({"type": "Split", "pattern":
                        {"Regex": "((((\\p{L}{1000}){1000}){1000}){1000})"},
                        "behavior": "Isolated", "invert": false})json");
              }),
      Spoiled("normalizers that explode", "normalizer: its steps",
              [](json& f) {
                json step = json::parse(
                    R"({"type": "Replace", "pattern": {"String": "a"},
                        "content": "aaaaaaaa"})");
                f["normalizer"] = {{"type", "Sequence"},
                                   {"normalizers", json::array()}};
                for (int i = 0; i < 30; ++i) {
                  f["normalizer"]["normalizers"].push_back(step);
                }
              }),
      Spoiled("a megabyte in a component", "normalizer: ",
              [](json& f) {
                f["normalizer"] = {{"type", "Prepend"},
                                   {"prepend", std::string(1 << 20, 'x')}};
              }),
      Spoiled("a template that names no token", "post_processor: ",
              [](json& f) {
                f["post_processor"] = json::parse(
                    R"({"type": "TemplateProcessing", "single":
                        [{"SpecialToken": {"id": "<nope>", "type_id": 0}}],
                        "pair": [], "special_tokens": {}})");
              }),
      Spoiled("a broken character map", "normalizer: ",
              [](json& f) {
                f["normalizer"] = {{"type", "Precompiled"},
                                   {"precompiled_charsmap", "AAAA"}};
              }),
  };
}

std::string BigVocab(int tokens) {
  std::string file = R"({"model": {"type": "BPE", "merges": [], "vocab": {)";
  for (int i = 0; i < tokens; ++i) {
    if (i > 0) file += ',';
    file += "\"t" + std::to_string(i) + "\":" + std::to_string(i);
  }
  return file + "}}}";
}

std::vector<HostileFile> Oversized() {
  std::string merges =
      R"({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [)";
  for (int i = 0; i < (2 << 20) + 1; ++i) merges += "\"a a\",";
  merges += "\"a a\"]}}";
  return {
      {"more than a million tokens", BigVocab((1 << 20) + 1), "model.vocab"},
      {"more than two million merges", merges, "model.merges: more than"},
  };
}

class HostileTokenizerTest : public testing::Test {
 protected:
  void Check(const std::vector<HostileFile>& cases) {
    double slowest = 0;
    for (const HostileFile& c : cases) {
      SCOPED_TRACE(c.what);
      ModelDir dir;
      dir.Write("tokenizer.json", c.file);
      const std::clock_t start = std::clock();
      const auto tokenizer = Tokenizer::Load(dir.path());
      const double seconds =
          static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
      ASSERT_FALSE(tokenizer.ok());
      EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
      const std::string message(tokenizer.status().message());
      EXPECT_THAT(message, HasSubstr(dir.path() + "/tokenizer.json: "));
      EXPECT_THAT(message, HasSubstr(c.message));
      EXPECT_LT(message.size(), 600u);
      // Not a speed: far beyond any sanitizer, far below forever.
      EXPECT_LT(seconds, 60);
      slowest = std::max(slowest, seconds);
    }
    RecordProperty("files", static_cast<int>(cases.size()));
    RecordProperty("slowest_ms", std::to_string(slowest * 1e3));
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    EXPECT_LT(usage.ru_maxrss, 3 << 20) << "KiB at the peak";
  }
};

TEST_F(HostileTokenizerTest, TheGoodFilesAreGood) {
  for (const json& file : {GoodBpe(), GoodUnigram()}) {
    const auto tokenizer = Tokenizer::FromJson(file.dump());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  }
}

TEST_F(HostileTokenizerTest, MalformedFilesAreRefused) { Check(Malformed()); }

TEST_F(HostileTokenizerTest, ContradictoryFilesAreRefusedByField) {
  Check(Contradictory());
}

TEST_F(HostileTokenizerTest, OversizedFilesAreRefused) { Check(Oversized()); }

TEST_F(HostileTokenizerTest, EveryTruncationIsRefused) {
  const std::string good = ReadWhole(TokenizerPath("llama3"));
  ASSERT_GT(good.size(), 5000u);
  for (size_t size = 0; size < good.size(); size += 97) {
    EXPECT_FALSE(Tokenizer::FromJson(good.substr(0, size)).ok()) << size;
  }
}

TEST_F(HostileTokenizerTest, GapsInTheVocabularyDecodeToNothing) {
  json file = GoodBpe();
  file["model"]["vocab"]["c"] = 9;
  const auto tokenizer = Tokenizer::FromJson(file.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->vocab_size(), 10);
  const std::vector<int32_t> ids = {1, 5, 9};
  EXPECT_EQ(tokenizer->Decode(ids, false).value(), "ac");
  EXPECT_EQ(tokenizer->TokenBytes(5), "");
}

TEST_F(HostileTokenizerTest, TruncationAndPaddingOfTheFileAreIgnored) {
  json file = GoodBpe();
  file["truncation"] = {{"direction", "Right"},
                        {"max_length", 2},
                        {"strategy", "LongestFirst"},
                        {"stride", 0}};
  file["padding"] = json::parse(
      R"({"strategy": {"Fixed": 8}, "direction": "Right",
          "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
          "pad_token": "<s>"})");
  const auto tokenizer = Tokenizer::FromJson(file.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->Encode("ababab", false).value(),
            (std::vector<int32_t>{3, 3, 3}));
}

TEST_F(HostileTokenizerTest, NulInATokenIsACharacterLikeOthers) {
  json file = GoodBpe();
  file["model"]["vocab"][std::string("x\0y", 3)] = 4;
  file["added_tokens"].push_back(file["added_tokens"][0]);
  file["added_tokens"][1]["content"] = std::string("x\0y", 3);
  file["added_tokens"][1]["id"] = 4;
  const auto tokenizer = Tokenizer::FromJson(file.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(tokenizer->Encode(std::string("ax\0yb", 5), false).value(),
            (std::vector<int32_t>{1, 4, 2}));
}

TEST_F(HostileTokenizerTest, BadSideFilesAreRefusedByName) {
  const std::pair<std::string, std::string> cases[] = {
      {"{", "tokenizer_config.json: "},
      {"[]", "tokenizer_config.json: "},
      {R"({"eos_token": 5})", "tokenizer_config.json: eos_token: "},
      {R"({"eos_token": {"x": 1}})",
       "tokenizer_config.json: eos_token.content: "},
      {R"({"eos_token": "<nope>"})",
       "tokenizer_config.json: eos_token: \"<nope>\" is not a token"},
  };
  for (const auto& [config, message] : cases) {
    ModelDir dir;
    dir.Write("tokenizer.json", GoodBpe().dump());
    dir.Write("tokenizer_config.json", config);
    const auto tokenizer = Tokenizer::Load(dir.path());
    ASSERT_FALSE(tokenizer.ok()) << config;
    EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(message));
  }
}

TEST_F(HostileTokenizerTest, TokensOfOtherFilesThatCannotBeAreRefusedByName) {
  struct Case {
    const char* file;
    const char* content;
    const char* message;
  };
  static constexpr char kConfig[] = "tokenizer_config.json";
  static constexpr char kAdded[] = "added_tokens.json";
  const Case cases[] = {
      {kConfig, R"({"added_tokens_decoder": []})",
       "/tokenizer_config.json: added_tokens_decoder: is not an object"},
      {kConfig, R"({"added_tokens_decoder": {"x": {"content": "<x>"}}})",
       "added_tokens_decoder[\"x\"]: is no id"},
      {kConfig, R"({"added_tokens_decoder": {"99999999": {"content": "<x>"}}})",
       "added_tokens_decoder[\"99999999\"]: is no id"},
      {kConfig, R"({"added_tokens_decoder": {"4": "<x>"}})",
       "/tokenizer_config.json: added_tokens_decoder[\"4\"]: invalid type"},
      {kConfig, R"({"added_tokens_decoder": {"0": {"content": "<x>"}}})",
       "/tokenizer.json: tokenizer_config.json: added_tokens_decoder[\"0\"]"
       ".id: 0 is there twice"},
      {kConfig, R"({"added_tokens_decoder": {"6": {"content": "<x>"}}})",
       "added_tokens_decoder[\"6\"].id: 6 for \"<x>\", but its place in the "
       "vocabulary gives it 4"},
      {kConfig, R"({"additional_special_tokens": "<x>"})",
       "/tokenizer_config.json: additional_special_tokens: is neither"},
      {kConfig, R"({"additional_special_tokens": [{"content": "<x>"}]})",
       "lacks \"<x>\", of tokenizer_config.json: additional_special_tokens"},
      {kConfig, R"({"extra_special_tokens": {"x_token": "<x>"}})",
       "lacks \"<x>\", of tokenizer_config.json: extra_special_tokens"},
      {kAdded, "[]", "/added_tokens.json: "},
      {kAdded, R"({"<x>": "4"})",
       "/added_tokens.json: \"<x>\": is given no id"},
      {kAdded, R"({"<x>": 9})", "added_tokens.json: \"<x>\".id: 9 for"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.content);
    ModelDir dir;
    dir.Write("tokenizer.json", GoodBpe().dump());
    dir.Write(c.file, c.content);
    const auto tokenizer = Tokenizer::Load(dir.path());
    ASSERT_FALSE(tokenizer.ok());
    EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(tokenizer.status().message()),
                HasSubstr(c.message));
  }
}

TEST_F(HostileTokenizerTest, APointerOfGitLfsIsNamed) {
  ModelDir dir;
  dir.Write("tokenizer.json",
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
  EXPECT_EQ(std::string(Tokenizer::Load(dir.path()).status().message()),
            dir.path() +
                "/tokenizer.json: is a Git LFS pointer, not the file itself: "
                "run `git lfs pull`");
  const absl::Status status = Tokenizer::FromJson("hello").status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("tokenizer.json: expected value"));
}

TEST_F(HostileTokenizerTest, AMissingFileIsNotFoundAndADirectoryIsRefused) {
  ModelDir dir;
  EXPECT_EQ(Tokenizer::Load(dir.path()).status().code(),
            absl::StatusCode::kNotFound);
  std::filesystem::create_directory(dir.path() + "/tokenizer.json");
  const auto status = Tokenizer::Load(dir.path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tokenizer.json"));
}

}  // namespace
}  // namespace tandem::text
