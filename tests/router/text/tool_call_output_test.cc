// SPDX-License-Identifier: Apache-2.0
// What a client gets of text with tool calls and reasoning in it, however it is
// cut into steps.

#include "router/text/tool_call_output.h"

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "router/core/output.h"
#include "router/text/reasoning.h"
#include "router/validate/validate.h"
#include "tests/router/kept_events.h"
#include "tests/router/text/styles.h"

namespace tandem::router {
namespace {

// A token for each byte, and kMark, which has no text. Marks of reasoning have
// text unless they are special tokens, too.
constexpr int32_t kMark = 1000;
constexpr ReasoningMarks kMarks{ReasoningStyle::kQwen3, 1001, 1002};
class Bytewise final : public TextCodec {
 public:
  explicit Bytewise(bool special) : special_(special) {}

 private:
  class Text final : public TextStream {
   public:
    explicit Text(bool special) : special_(special) {}
    std::string Push(int32_t id) override {
      if (id == kMark) return "";
      if (id < kMarks.begin_id) return std::string(1, static_cast<char>(id));
      return special_ ? "" : id == kMarks.begin_id ? "<think>" : "</think>";
    }
    std::string Finish() override { return ""; }

   private:
    const bool special_;
  };
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t>,
                                        bool) override {
    return std::make_unique<Text>(special_);
  }
  std::string TokenBytes(int32_t) override { return ""; }
  const bool special_;
};

struct Answer {
  std::string text;
  std::string reasoning;
  std::vector<v1::ToolCall> calls;
  v1::GenerateFinished finished;
  int reasoning_tokens = 0;
};

// `text` with kMark for each '#' and the marks of reasoning for '\1' and '\2',
// as a request of these options gets it; its first tokens in one step, the rest
// one by one.
Answer Generate(const EffectiveRequest& request, const std::string& text,
                size_t together, v1::FinishReason reason,
                bool special = false) {
  Bytewise codec(special);
  std::string content;
  google::protobuf::RepeatedPtrField<v1::ToolCall> calls;
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, {}, &codec, &client);
  Answer answer;
  const auto collect = [&] {
    for (const v1::GenerateResponse& event : sent) {
      const std::string& thought = event.delta().reasoning_content();
      EXPECT_TRUE(thought.empty() || answer.text.empty()) << answer.text;
      answer.reasoning += thought;
      answer.text += event.delta().text();
      JoinToolCalls(event.delta().tool_calls(), &calls);
      if (event.has_finished()) answer.finished = event.finished();
    }
    sent.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    v1::Token token;
    token.set_token_id(text[i] == '#'    ? kMark
                       : text[i] == '\1' ? kMarks.begin_id
                       : text[i] == '\2' ? kMarks.end_id
                                         : static_cast<unsigned char>(text[i]));
    const Output::Verdict verdict = output.Add(token);
    if (i >= together) {
      output.Flush();
      collect();
    }
    if (verdict == Output::Verdict::kStopString) break;
  }
  output.Flush();
  collect();
  const v1::FinishReason told = output.Finished(reason);
  collect();
  EXPECT_EQ(told, answer.finished.finish_reason());
  answer.calls.assign(calls.begin(), calls.end());
  answer.reasoning_tokens = output.reasoning_tokens();
  return answer;
}

EffectiveRequest WithTools(ToolCallStyle style) {
  EffectiveRequest request;
  request.output.set_text(true);
  request.output.set_skip_special_tokens(true);
  request.tool_calls = ToolCallOptions{.style = style,
                                       .names = {"f", "g"},
                                       .markers = {{kMark, "[TOOL_CALLS]"}},
                                       .id_seed = 7};
  return request;
}

constexpr char kTwoCalls[] = "Yes.#f[ARGS]{\"a\":1}#g[ARGS]{}";

TEST(ToolCallOutputTest, MarkersAreSeenThoughTheyAreNoText) {
  for (const size_t together : {size_t{0}, size_t{9}, size_t{99}}) {
    const Answer answer = Generate(WithTools(kMistral), kTwoCalls, together,
                                   v1::FINISH_REASON_STOP);
    EXPECT_EQ(answer.text, "Yes.");
    ASSERT_EQ(answer.calls.size(), 2u);
    EXPECT_EQ(answer.calls[0].name(), "f");
    EXPECT_EQ(answer.calls[0].arguments_json(), "{\"a\":1}");
    EXPECT_EQ(answer.calls[1].name(), "g");
    EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_TOOL_CALLS);
  }
  // What is no call reads as it would without tools.
  EXPECT_EQ(
      Generate(WithTools(kMistral), "a# b #c", 0, v1::FINISH_REASON_STOP).text,
      "a b c");
}

TEST(ToolCallOutputTest, IdsAreTheModelsOwnWhereItHasAny) {
  EffectiveRequest request = WithTools(kKimi);
  request.tool_calls->markers = {{kMark, "<|tool_calls_section_begin|>"}};
  Answer answer =
      Generate(request,
               "#<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
               "<|tool_call_end|><|tool_call_begin|>functions.g:1"
               "<|tool_call_argument_begin|>{\"a\":1}<|tool_call_end|>"
               "<|tool_calls_section_end|>",
               0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.text, "");
  ASSERT_EQ(answer.calls.size(), 2u);
  EXPECT_EQ(answer.calls[0].id(), "functions.f:0");
  EXPECT_EQ(answer.calls[1].id(), "functions.g:1");
  EXPECT_EQ(answer.calls[1].arguments_json(), "{\"a\":1}");
  request = WithTools(kDeepSeek31);
  request.tool_calls->markers = {{kMark, "<｜tool▁calls▁begin｜>"}};
  answer = Generate(
      request, "#<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", 0,
      v1::FINISH_REASON_STOP);
  ASSERT_EQ(answer.calls.size(), 1u);
  EXPECT_THAT(answer.calls[0].id(), testing::StartsWith("call_"));
}

TEST(ToolCallOutputTest, OneCallAloneWhereOnlyOneIsWanted) {
  EffectiveRequest request = WithTools(kMistral);
  request.tool_calls->parallel = false;
  const Answer answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  ASSERT_EQ(answer.calls.size(), 1u);
  EXPECT_EQ(answer.calls[0].name(), "f");
}

TEST(ToolCallOutputTest, OnlyAStopBecomesToolCalls) {
  const Answer answer =
      Generate(WithTools(kMistral), kTwoCalls, 0, v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.calls.size(), 2u);
  EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(Generate(WithTools(kMistral), "Yes.", 0, v1::FINISH_REASON_STOP)
                .finished.finish_reason(),
            v1::FINISH_REASON_STOP);
}

// Stop strings are looked for in the text without markers, before calls are.
TEST(ToolCallOutputTest, StopStringsGoBeforeCalls) {
  EffectiveRequest request = WithTools(kMistral);
  request.stopping.add_stop("s.f[");
  Answer answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.text, "Ye");
  EXPECT_TRUE(answer.calls.empty());
  EXPECT_EQ(answer.finished.stop_string(), "s.f[");
  // One that almost comes holds text back, and markers behind it.
  request.stopping.set_stop(0, "s.g");
  answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.text, "Yes.");
  EXPECT_EQ(answer.calls.size(), 2u);
  request.stopping.set_stop(0, "}g");
  answer = Generate(request, kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.text, "Yes.f[ARGS]{\"a\":1");
  EXPECT_EQ(answer.finished.stop_string(), "}g");
}

EffectiveRequest WithReasoning() {
  EffectiveRequest request;
  request.output.set_text(true);
  request.output.set_skip_special_tokens(true);
  request.reasoning = kMarks;
  return request;
}

struct Thought {
  const char* what;
  std::string drawn;
  std::string reasoning;
  std::string content;
  int tokens;
};

TEST(ReasoningTest, IsAllUpToItsEndMark) {
  for (const Thought& c : std::vector<Thought>{
           {"the model's own marks", "\1\nHm.\n\2\n\nYes.", "\nHm.\n",
            "\n\nYes.", 5},
           {"begun by the prompt", "Hm.\2Yes.", "Hm.", "Yes.", 3},
           {"cut", "\1Hm", "Hm", "", 2},
           {"nothing behind it", "Hm\2", "Hm", "", 2},
           {"no reasoning", "\1\2Yes", "", "Yes", 0},
           {"nothing at all", "", "", "", 0},
           {"marks in the content are text", "a\2b\1c\2d", "a",
            "b<think>c</think>d", 1},
           {"written out they are no marks", "a</think>b\2c", "a</think>b", "c",
            10}}) {
    for (const bool special : {false, true}) {
      if (special && c.drawn.find("\2b\1") != std::string::npos) continue;
      for (const size_t together : {size_t{0}, size_t{3}, size_t{99}}) {
        for (const char* const stop :
             {"", "Hm.\n</think>\n\nYes, I", "\n\n.."}) {
          EffectiveRequest request = WithReasoning();
          // Almost comes, and holds back what may be its beginning.
          if (*stop != 0) request.stopping.add_stop(stop);
          const Answer answer = Generate(request, c.drawn, together,
                                         v1::FINISH_REASON_STOP, special);
          SCOPED_TRACE(absl::StrCat(c.what, ", ", special, together, stop));
          EXPECT_EQ(answer.reasoning, c.reasoning);
          EXPECT_EQ(answer.text, c.content);
          EXPECT_EQ(answer.reasoning_tokens, c.tokens);
        }
      }
    }
  }
}

TEST(ReasoningTest, CallsAndStopStringsComeWhereTheyWould) {
  EffectiveRequest request = WithTools(kMistral);
  request.reasoning = kMarks;
  const std::string thought = "call#f[ARGS]{\"a\":0}?";
  Answer answer =
      Generate(request, thought + "\2" + kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.reasoning, "callf[ARGS]{\"a\":0}?");
  EXPECT_EQ(answer.text, "Yes.");
  ASSERT_EQ(answer.calls.size(), 2u);
  EXPECT_EQ(answer.calls[0].arguments_json(), "{\"a\":1}");
  EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_TOOL_CALLS);
  // As in vLLM, reasoning may be stopped too.
  request.stopping.add_stop("?");
  answer =
      Generate(request, thought + "\2" + kTwoCalls, 0, v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.reasoning, "callf[ARGS]{\"a\":0}");
  EXPECT_EQ(answer.text, "");
  EXPECT_EQ(answer.finished.stop_string(), "?");
  EXPECT_EQ(answer.finished.finish_reason(), v1::FINISH_REASON_STOP);
}

TEST(ReasoningTest, APromptMayHaveEndedIt) {
  constexpr int32_t kEnd = 5, kThink = kMarks.begin_id, kOver = kMarks.end_id;
  struct Prompt {
    const char* what;
    std::vector<int32_t> prompt;
    bool over;
    bool opened = false;
  };
  for (const Prompt& c : std::vector<Prompt>{
           {"no marks", {1, 2, kEnd, 3}, false},
           {"opened for it", {1, kEnd, 3, kThink, 4}, false, true},
           {"closed for it", {1, kEnd, 3, kThink, 4, kOver, 4}, true},
           {"an answer to go on with", {1, kThink, 4, kOver, 7, 8}, true},
           {"of an earlier turn", {kThink, 4, kOver, 9, kEnd, 3}, false},
           {"opened anew", {kThink, 4, kOver, 9, kThink}, false, true},
           {"empty", {}, false}}) {
    EXPECT_EQ(ReasoningIsOver(c.prompt, kMarks, {kEnd}), c.over) << c.what;
    // Of a model that reasons only where it is told to.
    ReasoningMarks told = kMarks;
    told.style = ReasoningStyle::kDeepSeekV3;
    EXPECT_EQ(ReasoningIsOver(c.prompt, told, {kEnd}), !c.opened) << c.what;
  }
}

// As where a stop string begins like its end.
TEST(ReasoningTest, AMarkMayBeReleasedInPieces) {
  ReasoningOutput output(kMarks);
  std::string reasoning;
  EXPECT_FALSE(output.Arrives(1, "Hm"));
  EXPECT_FALSE(output.Arrives(kMarks.end_id, "</think>"));
  EXPECT_EQ(output.Release("Hm</thin", &reasoning), "");
  EXPECT_EQ(output.Release("k>Yes", &reasoning), "Yes");
  EXPECT_EQ(reasoning, "Hm");
}

TEST(ReasoningTest, WhatMustMatchComesBehindIt) {
  ModelLimits limits;
  limits.vocabulary_size = 2000;
  limits.context_length = 100;
  limits.has_chat_template = true;
  limits.eos_token_ids = {5};
  v1::GenerateRequest request;
  request.mutable_chat()->add_messages()->set_role("user");
  request.mutable_structured()->set_regex("[0-9]+");
  const auto params = [&](const std::vector<int32_t>& prompt) {
    EffectiveRequest effective = *Validate(request, limits);
    NoteReasoning(request.chat(), prompt, limits, &effective);
    const bool told = std::count(effective.features.begin(),
                                 effective.features.end(), "structured_after");
    const v1::StructuredParams structured =
        ToSamplingParams(effective).structured();
    EXPECT_EQ(told, structured.has_after_token_id());
    EXPECT_EQ(effective.reasoning.has_value(), structured.has_after_token_id());
    return structured.has_after_token_id() ? structured.after_token_id() : -1;
  };
  EXPECT_EQ(params({1}), -1);  // no parser
  limits.reasoning = kMarks;
  EXPECT_EQ(params({1}), kMarks.end_id);
  EXPECT_EQ(params({1, kMarks.begin_id, kMarks.end_id}), -1);
  (*request.mutable_chat()
        ->mutable_chat_template_kwargs()
        ->mutable_fields())["enable_thinking"]
      .set_bool_value(false);
  EXPECT_EQ(params({1}), -1);
  limits.reasoning->style = ReasoningStyle::kDeepSeekR1;
  EXPECT_EQ(params({1}), kMarks.end_id);  // whose templates know no such thing
}

TEST(ToolCallOutputTest, IdsAreUniqueAndOfTheFormThatClientsAccept) {
  std::set<std::string> ids;
  for (const ToolCallStyle style : {kMistral, kHermes}) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
      EffectiveRequest request = WithTools(style);
      request.tool_calls->id_seed = seed;
      const Answer answer = Generate(
          request,
          style == kMistral
              ? kTwoCalls
              : R"(<tool_call>{"name":"f"}</tool_call><tool_call>{"name":"f"})",
          0, v1::FINISH_REASON_STOP);
      ASSERT_EQ(answer.calls.size(), 2u);
      for (const v1::ToolCall& call : answer.calls) {
        EXPECT_THAT(call.id(), testing::MatchesRegex(
                                   style == kMistral ? "[a-zA-Z0-9]{9}"
                                                     : "call_[a-zA-Z0-9]{24}"));
        ids.insert(call.id());
      }
    }
  }
  EXPECT_EQ(ids.size(), 200u);
  // Nor do the sequences of a request share any.
  ids.clear();
  for (const int index : {0, 1}) {
    ToolCallOutput output(*WithTools(kHermes).tool_calls, index);
    v1::GenerateDelta delta;
    output.Release(R"(<tool_call>{"name":"f"}</tool_call>)", &delta);
    ids.insert(delta.tool_calls(0).id());
  }
  EXPECT_EQ(ids.size(), 2u);
}

TEST(ToolCallOutputTest, SplitCallsJoinToWhatTheyWere) {
  const Answer answer =
      Generate(WithTools(kMistral), kTwoCalls, 0, v1::FINISH_REASON_STOP);
  google::protobuf::RepeatedPtrField<v1::ToolCall> calls(answer.calls.begin(),
                                                         answer.calls.end());
  google::protobuf::RepeatedPtrField<v1::ToolCallDelta> deltas;
  SplitToolCalls(calls, &deltas);
  EXPECT_EQ(deltas.size(), 4);
  google::protobuf::RepeatedPtrField<v1::ToolCall> joined;
  JoinToolCalls(deltas, &joined);
  ASSERT_EQ(joined.size(), 2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(joined[i].SerializeAsString(), calls[i].SerializeAsString());
  }
}

}  // namespace
}  // namespace tandem::router
