// SPDX-License-Identifier: Apache-2.0
// What a client gets of text that begins with reasoning, however it is cut into
// steps.

#include "router/text/reasoning.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "router/validate/validate.h"
#include "tests/router/text/generated_answer.h"
#include "tests/router/text/styles.h"

namespace tandem::router {
namespace {

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

TEST(ReasoningTest, CallsMayEndIt) {
  const std::string calls =
      "#<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
      "<|tool_call_end|><|tool_calls_section_end|>";
  for (const size_t together : {size_t{0}, size_t{9}, size_t{999}}) {
    EffectiveRequest request = WithTools(kKimi);
    request.tool_calls->markers = {{kMark, "<|tool_calls_section_begin|>"}};
    request.reasoning = kMarks;
    request.reasoning->calls_id = kMark;
    Answer answer =
        Generate(request, "Hm." + calls, together, v1::FINISH_REASON_STOP);
    EXPECT_EQ(answer.reasoning, "Hm.");
    EXPECT_EQ(answer.text, "");
    ASSERT_EQ(answer.calls.size(), 1u);
    EXPECT_EQ(answer.calls[0].id(), "functions.f:0");
    EXPECT_EQ(answer.reasoning_tokens, 3);
    answer =
        Generate(request, "Hm.\2So." + calls, together, v1::FINISH_REASON_STOP);
    EXPECT_EQ(answer.reasoning, "Hm.");
    EXPECT_EQ(answer.text, "So.");
    EXPECT_EQ(answer.calls.size(), 1u);
    request.reasoning->calls_id = -1;
    answer = Generate(request, "Hm." + calls, together, v1::FINISH_REASON_STOP);
    EXPECT_TRUE(answer.calls.empty());
    EXPECT_EQ(answer.reasoning, "Hm." + calls.substr(1));
  }
}

// Gemma's.
constexpr ReasoningMarks kThoughts{ReasoningStyle::kGemma4, kMarks.begin_id,
                                   kMarks.end_id, kMark, true};

TEST(ReasoningTest, ThoughtsBeginWithTheirMarkAndALabel) {
  for (const Thought& c : std::vector<Thought>{
           {"a thought", "\1thought\nHm.\n\2Yes.", "Hm.\n", "Yes.", 12},
           {"none", "Yes.", "", "Yes.", 0},
           {"an empty one", "\1thought\n\2Yes.", "", "Yes.", 8},
           {"one without a label", "\1though I\2Yes.", "though I", "Yes.", 8},
           {"one that begins like it", "\1thoughts\2.", "thoughts", ".", 8},
           {"the label alone", "\1thought\2Yes.", "", "Yes.", 7},
           {"cut in the label", "\1thou", "", "", 4},
           {"cut", "\1thought\nHm", "Hm", "", 10},
           {"behind content", "So.\1thought\nHm.\2Yes.", "Hm.", "So.Yes.", 11},
           {"several", "\1thought\na\2b\1thought\nc\2\1d\2e", "acd", "be", 19},
           {"a mark twice", "\1thought\na\1thought\nb\2c", "ab", "c", 18},
           {"written out it is none", "<|channel>a", "", "<|channel>a", 0},
           {"nothing at all", "", "", "", 0}}) {
    for (const bool special : {false, true}) {
      for (const size_t together : {size_t{0}, size_t{3}, size_t{99}}) {
        for (const char* const stop :
             {"", "Hm.</think>", "Yes, I", "So.<|c."}) {
          EffectiveRequest request = WithReasoning();
          request.reasoning = kThoughts;
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
  // The template has begun it.
  EffectiveRequest request = WithReasoning();
  request.reasoning = kThoughts;
  request.reasoning->content_first = false;
  for (const char* const label : {"", "thought\n"}) {
    const Answer answer = Generate(request, absl::StrCat(label, "Hm.\2Yes."), 0,
                                   v1::FINISH_REASON_STOP);
    EXPECT_EQ(answer.reasoning, "Hm.");
    EXPECT_EQ(answer.text, "Yes.");
  }
}

TEST(ReasoningTest, CallsEndThoughtsAndStandBehindThem) {
  const std::string call = "#call:f{a:<|\"|>b<|\"|>}<tool_call|>";
  for (const bool special : {false, true}) {
    for (const size_t together : {size_t{0}, size_t{9}, size_t{999}}) {
      EffectiveRequest request = WithTools(kGemma);
      request.tool_calls->markers = {{kMark, "<|tool_call>"}};
      request.reasoning = kThoughts;
      for (const std::string& text : {"So.\1thought\nHm.\2" + call + call,
                                      "So.\1thought\nHm." + call + call,
                                      "So.\1Hm." + call + "\1\2" + call}) {
        const Answer answer =
            Generate(request, text, together, v1::FINISH_REASON_STOP, special);
        SCOPED_TRACE(absl::StrCat(text, special, together));
        EXPECT_EQ(answer.reasoning, "Hm.");
        EXPECT_EQ(answer.text, "So.");
        ASSERT_EQ(answer.calls.size(), 2u);
        EXPECT_EQ(answer.calls[1].arguments_json(), R"({"a": "b"})");
      }
    }
  }
}

TEST(ReasoningTest, APromptMayHaveEndedIt) {
  constexpr int32_t kEnd = 5, kThink = kMarks.begin_id, kOver = kMarks.end_id;
  struct Prompt {
    const char* what;
    std::vector<int32_t> prompt;
    PromptReasoning left;
  };
  constexpr auto kUnsaid = PromptReasoning::kUnsaid;
  constexpr auto kBegun = PromptReasoning::kBegun;
  constexpr auto kIsOver = PromptReasoning::kOver;
  for (const Prompt& c : std::vector<Prompt>{
           {"no marks", {1, 2, kEnd, 3}, kUnsaid},
           {"opened for it", {1, kEnd, 3, kThink, 4}, kBegun},
           {"closed for it", {1, kEnd, 3, kThink, 4, kOver, 4}, kIsOver},
           {"an answer to go on with", {1, kThink, 4, kOver, 7, 8}, kIsOver},
           {"of an earlier turn", {kThink, 4, kOver, 9, kEnd, 3}, kUnsaid},
           {"opened anew", {kThink, 4, kOver, 9, kThink}, kBegun},
           {"empty", {}, kUnsaid}}) {
    EXPECT_EQ(ReasoningIn(c.prompt, kMarks, {kEnd}), c.left) << c.what;
  }
}

// As where a stop string begins like its end.
TEST(ReasoningTest, AMarkMayBeReleasedInPieces) {
  ReasoningOutput output(kMarks);
  std::string reasoning;
  EXPECT_FALSE(output.Arrives(1, "Hm"));
  EXPECT_FALSE(output.Arrives(kMarks.end_id, "</think>"));
  std::string content;
  output.Release("Hm</thin", &reasoning, &content);
  EXPECT_EQ(content, "");
  output.Release("k>Yes", &reasoning, &content);
  EXPECT_EQ(content, "Yes");
  EXPECT_EQ(reasoning, "Hm");
}

TEST(ReasoningTest, PromptAndRequestSayWhetherItBegins) {
  constexpr int32_t kThink = kMarks.begin_id, kOver = kMarks.end_id;
  const std::vector<int32_t> unsaid = {1}, begun = {1, kThink},
                             over = {1, kThink, kOver};
  enum Reasons { kNo, kYes, kLater };
  using Style = ReasoningStyle;
  const struct {
    ReasoningStyle style;
    const std::vector<int32_t>& prompt;
    std::optional<bool> asked;
    Reasons reasons;
    bool waits;  // with what must match
  } cases[] = {
      {Style::kDeepSeekR1, unsaid, {}, kYes, true},
      {Style::kDeepSeekR1, unsaid, false, kYes, true},
      {Style::kDeepSeekR1, over, {}, kNo, false},
      {Style::kQwen3, unsaid, {}, kYes, true},
      {Style::kQwen3, unsaid, false, kNo, false},
      {Style::kQwen3, over, true, kNo, false},
      {Style::kDeepSeekV3, unsaid, {}, kNo, false},
      {Style::kDeepSeekV3, begun, {}, kYes, true},
      {Style::kDeepSeekV3, over, {}, kNo, false},
      {Style::kGemma4, unsaid, {}, kLater, false},
      {Style::kGemma4, unsaid, false, kLater, false},
      {Style::kGemma4, unsaid, true, kLater, false},
      {Style::kGemma4, begun, {}, kYes, true},
      {Style::kGemma4, over, {}, kLater, false},
      {Style::kGemma4, over, true, kLater, false},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(absl::StrCat(static_cast<int>(c.style), ", ", c.prompt.size(),
                              c.asked ? *c.asked ? "true" : "false" : ""));
    ModelLimits limits;
    limits.reasoning = kMarks;
    limits.reasoning->style = c.style;
    v1::Chat chat;
    if (c.asked) {
      (*chat.mutable_chat_template_kwargs()
            ->mutable_fields())["enable_thinking"]
          .set_bool_value(*c.asked);
    }
    EffectiveRequest free;
    NoteReasoning(chat, c.prompt, limits, &free);
    ASSERT_EQ(free.reasoning.has_value(), c.reasons != kNo);
    if (free.reasoning) {
      EXPECT_EQ(free.reasoning->content_first, c.reasons == kLater);
    }
    EffectiveRequest bound;
    bound.structured.emplace().set_regex("a");
    NoteReasoning(chat, c.prompt, limits, &bound);
    EXPECT_EQ(ToSamplingParams(bound).structured().has_after_token_id(),
              c.waits);
  }
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
    if (effective.reasoning) {
      EXPECT_EQ(effective.reasoning->calls_id, -1);
    }
    return structured.has_after_token_id() ? structured.after_token_id() : -1;
  };
  EXPECT_EQ(params({1}), -1);  // no parser
  limits.reasoning = kMarks;
  limits.reasoning->calls_id = 7;
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

}  // namespace
}  // namespace tandem::router
