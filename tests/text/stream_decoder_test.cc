// SPDX-License-Identifier: Apache-2.0
// Streaming never emits half a character, and its pieces join to exactly the
// whole: on random ids (so on much broken UTF-8), from every place a prompt
// may end, for every kind of decoder.

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "golden.h"
#include "gtest/gtest.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace tandem::text {
namespace {

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Step step = NextUtf8(text);
    if (step.kind != Utf8Kind::kCharacter) return false;
    text.remove_prefix(step.size);
  }
  return true;
}

class StreamDecoderTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (TokenizerPath(GetParam()).empty()) {
      GTEST_SKIP() << GetParam() << ": no tokenizer here (TANDEM_TEST_DATA?)";
    }
  }
};

TEST_P(StreamDecoderTest, PiecesJoinToTheWholeAndAreUtf8) {
  const Tokenizer tokenizer = TokenizerOf(GetParam());
  std::mt19937 random(20260101);
  // Low ids are where byte tokens and single bytes live: half of the draws.
  std::uniform_int_distribution<int32_t> any(0, tokenizer.vocab_size() - 1);
  std::uniform_int_distribution<int32_t> low(
      0, std::min(259, tokenizer.vocab_size() - 1));
  int broken = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<int32_t> ids(random() % 40);
    for (int32_t& id : ids) id = random() % 2 ? any(random) : low(random);
    const bool skip = random() % 2 == 0;
    StreamDecoder decoder(&tokenizer, {}, {.skip_special_tokens = skip});
    std::string joined;
    for (const int32_t id : ids) {
      const std::string piece = decoder.Push(id).value();
      ASSERT_TRUE(IsUtf8(piece)) << piece;
      joined += piece;
    }
    const std::string rest = decoder.Finish();
    ASSERT_TRUE(IsUtf8(rest)) << rest;
    joined += rest;
    ASSERT_EQ(joined, tokenizer.Decode(ids, skip).value());
    broken += joined.find(kReplacementCharacter) != std::string::npos;
  }
  // The property says little if bytes were never broken.
  if (GetParam() != "unigram" && GetParam() != "wordpiece") {
    EXPECT_GT(broken, 100);
  }
}

TEST_P(StreamDecoderTest, StreamAfterAContextGoesOnWithItsText) {
  const Tokenizer tokenizer = TokenizerOf(GetParam());
  const auto golden = ReadGolden(GetParam() + ".golden.json");
  for (const auto& entry : golden["encode"]) {
    if (!entry.contains("ids")) continue;
    SCOPED_TRACE(entry["name"].get<std::string>());
    const auto ids = entry["ids_special"].get<std::vector<int32_t>>();
    const std::string whole = tokenizer.Decode(ids, true).value();
    for (size_t cut = 0; cut <= ids.size(); cut += 1 + ids.size() / 7) {
      // What a stream without context has said at the cut, then the rest.
      StreamDecoder before(&tokenizer, {});
      std::string joined;
      for (size_t i = 0; i < cut; ++i) joined += before.Push(ids[i]).value();
      StreamDecoder after(&tokenizer, std::span(ids).first(cut));
      for (size_t i = cut; i < ids.size(); ++i) {
        joined += after.Push(ids[i]).value();
      }
      joined += after.Finish();
      ASSERT_EQ(joined, whole) << "cut at " << cut;
    }
  }
}

TEST_P(StreamDecoderTest, CompleteCharactersAreNotHeldBack) {
  const Tokenizer tokenizer = TokenizerOf(GetParam());
  for (const std::string text : {"Tom sees a cat.", "1 2 3", "a b"}) {
    const auto ids = tokenizer.Encode(text, false).value();
    StreamDecoder decoder(&tokenizer, {});
    std::string so_far;
    for (const int32_t id : ids) so_far += decoder.Push(id).value();
    // Nothing was waiting for Finish.
    EXPECT_EQ(so_far, tokenizer.Decode(ids, true).value());
    EXPECT_EQ(decoder.Finish(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, StreamDecoderTest, testing::ValuesIn([] {
                           auto kinds = CommittedKinds();
                           kinds.push_back("stories260K");
                           return kinds;
                         }()),
                         [](const auto& kind) { return kind.param; });

// Spelled out: how broken bytes appear. `tokens` are vocabulary entries.
struct BrokenBytes {
  const char* kind;
  std::vector<std::string> tokens;
  std::vector<std::string> pieces;  // one for each token, then Finish
};

TEST(StreamDecoderBytesTest, BrokenBytesAreReplacedWhenTheyCannotComplete) {
  const std::string mark(kReplacementCharacter);
  const BrokenBytes cases[] = {
      // SentencePiece: one mark for each byte, good neighbours survive.
      {"llama2", {"<0xE5>", "<0x8F>", "<0xAB>"}, {"", "", "叫", ""}},
      {"llama2", {"<0xE5>", "<0x8F>"}, {"", "", mark + mark}},
      {"llama2", {"<0xE5>", "▁a"}, {"", mark + " a", ""}},
      {"llama2", {"<0x41>", "<0xE5>"}, {"A", "", mark}},
      {"llama2", {"<0xFF>", "<0xFE>", "<0x41>"}, {mark, mark, "A", ""}},
      {"llama2",
       {"<0xE5>", "<0xE5>", "<0x8F>", "<0xAB>"},
       {"", mark, "", "叫", ""}},
      // The space of the first token goes, and only that one.
      {"llama2", {"▁a", "▁a"}, {"a", " a", ""}},
      {"llama2", {"▁", "▁a"}, {"", " a", ""}},
      {"llama2", {"<0x20>", "▁a"}, {"", " a", ""}},
      {"llama2", {"<s>", "▁a"}, {"", "a", ""}},
      {"gemma", {"▁a", "▁a"}, {" a", " a", ""}},
      {"unigram", {"▁a", "▁a"}, {"a", " a", ""}},
      {"wordpiece", {"a", "a", "##s"}, {"a", " a", "s", ""}},
      // Byte level: one mark for each maximal subpart, as Unicode has it.
      {"gpt2", {"å", "ı", "«"}, {"", "", "叫", ""}},
      {"gpt2", {"å", "ı"}, {"", "", mark}},
      {"gpt2", {"å", "a"}, {"", mark + "a", ""}},
      {"gpt2", {"ð", "Ł", "ĺ", "Ħ"}, {"", "", "", "😄", ""}},
      {"gpt2", {"í", "ł"}, {"", mark + mark, ""}},  // ED A0: a surrogate
      {"gpt2", {"Ġa", "Ġa"}, {" a", " a", ""}},
  };
  for (const BrokenBytes& c : cases) {
    const Tokenizer tokenizer = TokenizerOf(c.kind);
    StreamDecoder decoder(&tokenizer, {});
    std::vector<std::string> pieces;
    for (const std::string& token : c.tokens) {
      const auto id = tokenizer.TokenToId(token);
      ASSERT_TRUE(id.has_value()) << c.kind << " has no " << token;
      pieces.push_back(decoder.Push(*id).value());
    }
    pieces.push_back(decoder.Finish());
    EXPECT_EQ(pieces, c.pieces) << c.kind << " " << c.tokens[0];
  }
}

TEST(StreamDecoderBytesTest, ARefusedIdLeavesTheStreamAsItWas) {
  const Tokenizer tokenizer = TokenizerOf("llama2");
  StreamDecoder decoder(&tokenizer, {});
  EXPECT_EQ(decoder.Push(*tokenizer.TokenToId("<0xC3>")).value(), "");
  EXPECT_EQ(decoder.Push(-1).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decoder.Push(tokenizer.vocab_size()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decoder.Push(*tokenizer.TokenToId("<0xA9>")).value(), "é");
}

TEST(StreamDecoderBytesTest, AContextEndingWithinACharacterIsCompleted) {
  const Tokenizer tokenizer = TokenizerOf("llama2");
  const std::vector<int32_t> context = {1, *tokenizer.TokenToId("▁a"),
                                        *tokenizer.TokenToId("<0xC3>")};
  StreamDecoder decoder(&tokenizer, context);
  EXPECT_EQ(decoder.Push(*tokenizer.TokenToId("<0xA9>")).value(), "é");
  EXPECT_EQ(decoder.Push(*tokenizer.TokenToId("▁a")).value(), " a");
}

}  // namespace
}  // namespace tandem::text
