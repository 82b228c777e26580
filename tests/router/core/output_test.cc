// SPDX-License-Identifier: Apache-2.0
// What a client reads of a sequence's tokens.

#include "router/core/output.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/router/kept_events.h"
#include "text/tokenizer.h"

namespace tandem::router {
namespace {

// Token i has the i-th of these texts.
class Pieces final : public TextCodec {
 public:
  explicit Pieces(std::vector<std::string> texts) : texts_(std::move(texts)) {}
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t>,
                                        bool) override {
    return std::make_unique<Text>(&texts_);
  }
  std::string TokenBytes(int32_t id) override {
    return texts_[static_cast<size_t>(id)];
  }

 private:
  class Text final : public TextStream {
   public:
    explicit Text(const std::vector<std::string>* texts) : texts_(texts) {}
    std::string Push(int32_t id) override {
      return (*texts_)[static_cast<size_t>(id)];
    }
    std::string Finish() override { return ""; }

   private:
    const std::vector<std::string>* const texts_;
  };

  const std::vector<std::string> texts_;
};

// The tokens of a model.
class Decoded final : public TextCodec {
 public:
  explicit Decoded(const text::Tokenizer* tokenizer) : tokenizer_(tokenizer) {}
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t> prompt,
                                        bool) override {
    return std::make_unique<Text>(
        text::StreamDecoder(tokenizer_, {prompt.data(), prompt.size()}));
  }
  std::string TokenBytes(int32_t id) override {
    return tokenizer_->TokenBytes(id);
  }

 private:
  class Text final : public TextStream {
   public:
    explicit Text(text::StreamDecoder decoder) : decoder_(std::move(decoder)) {}
    std::string Push(int32_t id) override { return *decoder_.Push(id); }
    std::string Finish() override { return decoder_.Finish(); }

   private:
    text::StreamDecoder decoder_;
  };

  const text::Tokenizer* const tokenizer_;
};

// Each delta as "text/number of its token ids", then the reason.
std::string DeltasOf(const std::vector<v1::GenerateResponse>& sent) {
  std::string story;
  for (const v1::GenerateResponse& event : sent) {
    if (event.has_delta()) {
      story += event.delta().text() + "/" +
               std::to_string(event.delta().token_ids_size()) + " ";
    }
    if (!event.has_finished()) continue;
    story += v1::FinishReason_Name(event.finished().finish_reason())
                 .substr(std::string("FINISH_REASON_").size());
    story += event.finished().stop_string();
  }
  return story;
}

// One token after the other, up to a stop string or the limit.
std::string Told(const EffectiveRequest& request,
                 const std::vector<std::string>& texts) {
  Pieces codec(texts);
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, {}, &codec, &client);
  for (size_t i = 0; i < texts.size(); ++i) {
    v1::Token token;
    token.set_token_id(static_cast<int32_t>(i));
    const Output::Verdict verdict = output.Add(token);
    output.Flush();
    if (verdict != Output::Verdict::kStopString) continue;
    output.Finished(v1::FINISH_REASON_STOP);
    return DeltasOf(sent);
  }
  output.Finished(v1::FINISH_REASON_LENGTH);
  return DeltasOf(sent);
}

// None ends in the first min_tokens, but one may begin in them.
TEST(OutputTest, AStopStringMayBeginWithinMinTokens) {
  struct Case {
    int min_tokens;
    bool include;
    const char* stop;
    const char* told;
  };
  for (const Case& c :
       std::vector<Case>{{0, false, "n a", " upo/0 /2 STOPn a"},
                         {1, false, "n a", " upo/0 /2 STOPn a"},
                         {1, true, "n a", " upo/0 n a/2 STOPn a"},
                         {2, false, "n a", " upo/0 n a/2  time/1 LENGTH"},
                         {3, false, "me", " upon/1  a/1  time/1 LENGTH"},
                         {3, false, "ex", " upon/1  a/1  tim/0 e/1 LENGTH"},
                         {1, false, "a t", " upon/1  /0 /2 STOPa t"},
                         {1, false, "up", " upon/1  a/1  time/1 LENGTH"}}) {
    EffectiveRequest request;
    request.output.set_text(true);
    request.output.set_return_token_ids(true);
    request.stopping.set_min_tokens(c.min_tokens);
    request.stopping.set_include_stop_str_in_output(c.include);
    request.stopping.add_stop(c.stop);
    EXPECT_EQ(Told(request, {" upon", " a", " time"}), c.told)
        << c.min_tokens << ", stop " << c.stop;
  }
}

TEST(OutputTest, AnEndTokenEndsBehindMinTokensAndIsShownWhereAskedFor) {
  for (const bool include : {false, true}) {
    EffectiveRequest request;
    request.output.set_text(true);
    request.stopping.set_min_tokens(2);
    request.stopping.set_include_stop_str_in_output(include);
    request.end_token_ids = {1};
    Pieces codec({"a", "."});
    std::vector<v1::GenerateResponse> sent;
    KeptEvents client(&sent);
    Output output(request, {}, &codec, &client);
    for (const int id : {0, 1, 1}) {
      v1::Token token;
      token.set_token_id(id);
      const bool last = output.tokens() == 2;
      EXPECT_EQ(output.Add(token),
                last ? Output::Verdict::kEndToken : Output::Verdict::kGoesOn);
    }
    output.Finished(v1::FINISH_REASON_STOP);
    EXPECT_EQ(DeltasOf(sent), include ? "a../0 STOP" : "a./0 STOP");
    EXPECT_EQ(sent.back().finished().eos_token_id(), 1);
  }
}

// The text that must match ends with it, whatever min_tokens says; what comes
// before that text does not.
TEST(OutputTest, AnEndOfStructuredOutputEndsWithinMinTokens) {
  struct Case {
    bool reasons;
    bool content_first;
    std::vector<int>
        ids;  // 3 ends, 4 is another id that stops, 2 ends reasoning
    std::string told;
    bool ends;
  };
  for (const Case& c :
       std::vector<Case>{{false, false, {3}, "STOP", true},
                         {false, false, {0, 3}, "a/0 STOP", true},
                         {false, false, {0, 4}, "as/0 STOP", false},
                         {true, true, {3}, "STOP", true},
                         {true, false, {0, 3}, "/0 STOP", false},
                         {true, false, {0, 2, 1, 3}, "b/0 STOP", true}}) {
    EffectiveRequest request;
    request.output.set_text(true);
    request.stopping.set_min_tokens(5);
    request.end_token_ids = {3, 4};
    request.model_end_ids = {3};
    request.structured.emplace().set_regex("(abc)?");
    if (c.reasons) {
      request.reasoning = ReasoningMarks{
          .begin_id = 9, .end_id = 2, .content_first = c.content_first};
    }
    Pieces codec({"a", "b", "</think>", "<end>", "s"});
    std::vector<v1::GenerateResponse> sent;
    KeptEvents client(&sent);
    Output output(request, {}, &codec, &client);
    Output::Verdict last = Output::Verdict::kGoesOn;
    for (const int id : c.ids) {
      v1::Token token;
      token.set_token_id(id);
      last = output.Add(token);
      EXPECT_EQ(output.EndsSequence(id, output.tokens()),
                last == Output::Verdict::kEndToken);
    }
    EXPECT_EQ(last == Output::Verdict::kEndToken, c.ends) << c.told;
    output.Finished(v1::FINISH_REASON_STOP);
    EXPECT_EQ(DeltasOf(sent), c.told);
    EXPECT_EQ(sent.back().finished().has_eos_token_id(), c.ends) << c.told;
  }
}

TEST(OutputTest, ReasoningIsCountedWithoutText) {
  EffectiveRequest request;
  request.reasoning = ReasoningMarks{
      .style = ReasoningStyle::kQwen3, .begin_id = 4, .end_id = 6};
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, {}, nullptr, &client);
  for (const int id : {4, 1, 2, 6, 3}) {
    v1::Token token;
    token.set_token_id(id);
    output.Add(token);
  }
  EXPECT_EQ(output.reasoning_tokens(), 2);
}

TEST(OutputTest, EachDeltaCountsTheReasoningOfItsTokens) {
  Pieces codec({"<think>", "a", "</think>", "b", "x"});
  EffectiveRequest request;
  request.output.set_text(true);
  request.output.set_return_token_ids(true);
  request.stopping.add_stop("xy");
  request.reasoning = ReasoningMarks{.begin_id = 0, .end_id = 2};
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, {}, &codec, &client);
  for (const int id : {0, 1, 4, 1, 2, 3, 3}) {
    v1::Token token;
    token.set_token_id(id);
    output.Add(token);
    output.Flush();
  }
  std::string counts;  // token ids/of reasoning so far
  for (const v1::GenerateResponse& event : sent) {
    absl::StrAppend(&counts, absl::StrJoin(event.delta().token_ids(), ","), "/",
                    event.delta().reasoning_tokens(), " ");
  }
  EXPECT_EQ(counts, "0/0 1/1 4,1/3 2/3 3/3 3/3 ");  // 4 was held back
}

TEST(OutputTest, TheRestOfACharacterMayCompleteAStopString) {
  const auto tokenizer =
      text::Tokenizer::Load(TANDEM_SOURCE_DIR "/models/tales");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  Decoded codec(&*tokenizer);
  std::vector<int32_t> answer = *tokenizer->Encode("a\u65e5", false);
  answer.pop_back();
  EffectiveRequest request;
  request.output.set_text(true);
  request.stopping.add_stop("\uFFFD");
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, {}, &codec, &client);
  for (const int32_t id : answer) {
    v1::Token token;
    token.set_token_id(id);
    EXPECT_EQ(output.Add(token), Output::Verdict::kGoesOn);
  }
  EXPECT_EQ(output.Finished(v1::FINISH_REASON_LENGTH), v1::FINISH_REASON_STOP);
  EXPECT_EQ(DeltasOf(sent), "a/0 STOP\uFFFD");
}

// The echoed prompt and what follows are one text.
TEST(OutputTest, AnEchoMayEndWithinACharacter) {
  const auto tokenizer =
      text::Tokenizer::Load(TANDEM_SOURCE_DIR "/models/tales");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  Decoded codec(&*tokenizer);
  std::vector<int32_t> prompt = *tokenizer->Encode("a\u65e5", false);
  const int32_t last = prompt.back();
  prompt.pop_back();
  const std::string cut = *tokenizer->Decode(prompt, true);
  ASSERT_EQ(cut, "a\uFFFD");
  for (const auto& [answer, told] :
       std::vector<std::pair<std::vector<int32_t>, std::string>>{
           {{last}, "a\u65e5"}, {{prompt.front()}, cut + "a"}, {{}, cut}}) {
    EffectiveRequest request;
    request.output.set_text(true);
    request.output.set_echo(true);
    request.output.set_skip_special_tokens(true);
    std::vector<v1::GenerateResponse> sent;
    KeptEvents client(&sent);
    Output output(request, prompt, &codec, &client);
    output.Started("r", "tales", static_cast<int>(prompt.size()), 0, "");
    for (const int32_t id : answer) {
      v1::Token token;
      token.set_token_id(id);
      output.Add(token);
    }
    output.Finished(v1::FINISH_REASON_LENGTH);
    std::string text;
    for (const v1::GenerateResponse& event : sent) text += event.delta().text();
    EXPECT_EQ(text, told);
  }
}

}  // namespace
}  // namespace tandem::router
