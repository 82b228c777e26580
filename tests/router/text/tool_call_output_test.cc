// SPDX-License-Identifier: Apache-2.0
// What a client gets of text with tool calls in it, however it is cut into
// steps.

#include "router/text/tool_call_output.h"

#include <cstdint>
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/router/text/generated_answer.h"
#include "tests/router/text/styles.h"

namespace tandem::router {
namespace {

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
