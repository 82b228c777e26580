// SPDX-License-Identifier: Apache-2.0
// Encoding and decoding equal the Python package on hard inputs, for every
// kind of tokenizer (tools/oracle/text_golden.py made the goldens).

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "golden.h"
#include "gtest/gtest.h"
#include "text/tokenizer.h"

namespace tandem::text {
namespace {

std::string Fnv1a(const std::vector<int32_t>& ids) {
  uint64_t value = 0xCBF29CE484222325u;
  for (const int32_t id : ids) {
    for (int shift = 0; shift < 32; shift += 8) {
      value ^= (static_cast<uint32_t>(id) >> shift) & 0xFF;
      value *= 0x100000001B3u;
    }
  }
  char hex[17];
  std::snprintf(hex, sizeof(hex), "%016llx",
                static_cast<unsigned long long>(value));
  return hex;
}

class TokenizerGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string path = TokenizerPath(GetParam());
    if (path.empty()) {
      GTEST_SKIP() << GetParam() << ": no tokenizer here (TANDEM_TEST_DATA?)";
    }
    auto loaded = Tokenizer::FromJson(ReadWhole(path));
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    tokenizer_.emplace(*std::move(loaded));
    golden_ = ReadGolden(GetParam() + ".golden.json");
    ASSERT_GT(golden_["encode"].size(), 50u);
    ASSERT_GT(golden_["decode"].size(), 30u);
  }

  std::optional<Tokenizer> tokenizer_;
  nlohmann::json golden_;
};

TEST_P(TokenizerGoldenTest, EncodesAsPythonDoes) {
  for (const auto& entry : golden_["encode"]) {
    if (!entry.contains("ids")) continue;
    SCOPED_TRACE(entry["name"].get<std::string>());
    const auto text = entry["text"].get<std::string>();
    auto plain = tokenizer_->Encode(text, false);
    auto special = tokenizer_->Encode(text, true);
    ASSERT_TRUE(plain.ok()) << plain.status();
    ASSERT_TRUE(special.ok()) << special.status();
    EXPECT_EQ(*plain, entry["ids"].get<std::vector<int32_t>>());
    EXPECT_EQ(*special, entry["ids_special"].get<std::vector<int32_t>>());
  }
}

TEST_P(TokenizerGoldenTest, EncodesLongLinesAsPythonDoes) {
  for (const auto& entry : golden_["encode"]) {
    if (!entry.contains("unit")) continue;
    SCOPED_TRACE(entry["name"].get<std::string>());
    const auto unit = entry["unit"].get<std::string>();
    const int times = entry["times"].get<int>();
    std::string text;
    for (int i = 0; i < times; ++i) text += unit;
    auto ids = tokenizer_->Encode(text, false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(ids->size(), entry["count"].get<size_t>());
    EXPECT_EQ(Fnv1a(*ids), entry["fnv1a"].get<std::string>());
  }
}

TEST_P(TokenizerGoldenTest, DecodesAsPythonDoes) {
  for (const auto& entry : golden_["encode"]) {
    if (!entry.contains("decoded")) continue;
    SCOPED_TRACE(entry["name"].get<std::string>());
    const auto ids = entry["ids_special"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer_->Decode(ids, false).value(),
              entry["decoded"].get<std::string>());
    EXPECT_EQ(tokenizer_->Decode(ids, true).value(),
              entry["decoded_skip"].get<std::string>());
  }
}

TEST_P(TokenizerGoldenTest, DecodesRandomIdsAsPythonDoes) {
  for (const auto& entry : golden_["decode"]) {
    SCOPED_TRACE(entry["ids"].dump());
    const auto ids = entry["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tokenizer_->Decode(ids, false).value(),
              entry["text"].get<std::string>());
    EXPECT_EQ(tokenizer_->Decode(ids, true).value(),
              entry["text_skip"].get<std::string>());
  }
}

TEST_P(TokenizerGoldenTest, ThreadsShareOneTokenizer) {
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (const auto& entry : golden_["encode"]) {
        if (!entry.contains("ids")) continue;
        auto ids = tokenizer_->Encode(entry["text"].get<std::string>(), false);
        if (!ids.ok() || *ids != entry["ids"].get<std::vector<int32_t>>()) {
          ++wrong[t];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST_P(TokenizerGoldenTest, TokenToIdInvertsTheVocabulary) {
  const auto file = nlohmann::json::parse(ReadWhole(TokenizerPath(GetParam())));
  for (const auto& token : file["added_tokens"]) {
    EXPECT_EQ(tokenizer_->TokenToId(token["content"].get<std::string>()),
              token["id"].get<int32_t>());
  }
  EXPECT_EQ(tokenizer_->TokenToId("no such token in any vocabulary"),
            std::nullopt);
  EXPECT_EQ(tokenizer_->TokenToId("\xFF"), std::nullopt);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerGoldenTest, testing::ValuesIn([] {
                           auto kinds = CommittedKinds();
                           kinds.push_back("stories260K");
                           kinds.push_back("tales");
                           return kinds;
                         }()),
                         [](const auto& kind) { return kind.param; });

TEST(TokenizerTest, RefusesTextThatIsNotUtf8) {
  const Tokenizer tokenizer = TokenizerOf("gpt2");
  for (const std::string bad :
       {"\x80", "abc\xC3", "\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80"}) {
    const auto ids = tokenizer.Encode(bad, false);
    EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(TokenizerTest, RefusesTextBeyondTheLimit) {
  const Tokenizer tokenizer = TokenizerOf("gpt2");
  const auto ids = tokenizer.Encode(std::string(kMaxTextBytes + 1, 'a'), false);
  EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TokenizerTest, RefusesIdsOutsideTheVocabulary) {
  const Tokenizer tokenizer = TokenizerOf("llama2");
  const int32_t size = tokenizer.vocab_size();
  for (const int32_t id : {-1, size, INT32_MAX, INT32_MIN}) {
    const std::vector<int32_t> ids = {5, id};
    EXPECT_EQ(tokenizer.Decode(ids, false).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(tokenizer.TokenBytes(id), "");
  }
  const std::vector<int32_t> last = {size - 1};
  EXPECT_TRUE(tokenizer.Decode(last, false).ok());
}

TEST(TokenizerTest, TokenBytesAreRaw) {
  const Tokenizer llama = TokenizerOf("llama2");
  EXPECT_EQ(llama.TokenBytes(*llama.TokenToId("<0xE5>")), "\xE5");
  EXPECT_EQ(llama.TokenBytes(*llama.TokenToId("▁a")), " a");
  const Tokenizer gpt2 = TokenizerOf("gpt2");
  EXPECT_EQ(gpt2.TokenBytes(*gpt2.TokenToId("Ġa")), " a");
  EXPECT_EQ(gpt2.TokenBytes(*gpt2.TokenToId("Ã")), "\xC3");
  EXPECT_EQ(gpt2.TokenBytes(*gpt2.TokenToId("Ċ")), "\n");
}

// Bytes join to text: the property that logprobs with bytes rely on.
TEST(TokenizerTest, TokenBytesJoinToTheText) {
  for (const std::string kind : {"gpt2", "llama3", "gemma"}) {
    const Tokenizer tokenizer = TokenizerOf(kind);
    const std::string text =
        "Zoë 山田 12345 didn't  x\t\r\n👩‍👩‍👧";
    const auto ids = tokenizer.Encode(text, false).value();
    std::string joined;
    for (const int32_t id : ids) joined += tokenizer.TokenBytes(id);
    EXPECT_EQ(joined, text) << kind;
  }
}

TEST(TokenizerTest, SpecialTokensComeFromConfigThenMap) {
  const std::string file = ReadWhole(TokenizerPath("llama2"));
  struct Case {
    const char* config;
    const char* map;
    std::optional<int32_t> bos;
    std::optional<int32_t> eos;
  };
  const Case cases[] = {
      {R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}})", "", 1, 2},
      {R"({"bos_token": null})", R"({"eos_token": "</s>"})", std::nullopt, 2},
      {"", R"({"bos_token": {"content": "<s>"}})", 1, std::nullopt},
      {"", "", std::nullopt, std::nullopt},
      {R"({"eos_token": "<s>"})", R"({"eos_token": "</s>"})", std::nullopt, 1},
  };
  for (const Case& c : cases) {
    ModelDir dir;
    dir.Write("tokenizer.json", file);
    if (*c.config) dir.Write("tokenizer_config.json", c.config);
    if (*c.map) dir.Write("special_tokens_map.json", c.map);
    auto tokenizer = Tokenizer::Load(dir.path());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    EXPECT_EQ(tokenizer->bos_id(), c.bos) << c.config << c.map;
    EXPECT_EQ(tokenizer->eos_id(), c.eos) << c.config << c.map;
  }
}

// tools/oracle/make_added_token_goldens.py made the golden.
TEST(TokenizerTest, TokensThatOtherFilesNameAreThoseOfTransformers) {
  const std::string file = ReadWhole(GoldenPath("qwen2.json"));
  const auto golden = ReadGolden("added_tokens.json");
  ASSERT_GT(golden["cases"].size(), 5u);
  for (const auto& c : golden["cases"]) {
    SCOPED_TRACE(c["name"].get<std::string>());
    ModelDir dir;
    dir.Write("tokenizer.json", file);
    for (const auto& [name, content] : c["files"].items()) {
      dir.Write(name, content.dump());
    }
    const auto tokenizer = Tokenizer::Load(dir.path());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    if (!c["eos"].is_null()) {
      EXPECT_EQ(tokenizer->eos_id(), c["eos"].get<int32_t>());
    }
    for (const auto& entry : c["texts"]) {
      const auto ids =
          tokenizer->Encode(entry["text"].get<std::string>(), false);
      ASSERT_TRUE(ids.ok()) << ids.status();
      EXPECT_EQ(*ids, entry["ids"].get<std::vector<int32_t>>());
      EXPECT_EQ(tokenizer->Decode(*ids, true).value(),
                entry["decoded_skip"].get<std::string>());
    }
  }
}

}  // namespace
}  // namespace tandem::text
