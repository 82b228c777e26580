// SPDX-License-Identifier: Apache-2.0
// What a client gets of a text that a model writes, by tokens of a byte each,
// however it is cut into steps.

#ifndef TANDEM_TESTS_ROUTER_TEXT_GENERATED_ANSWER_H_
#define TANDEM_TESTS_ROUTER_TEXT_GENERATED_ANSWER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "router/core/output.h"
#include "router/text/reasoning.h"
#include "router/text/tool_call_output.h"
#include "router/validate/validate.h"
#include "tests/router/kept_events.h"
#include "tests/router/text/styles.h"

namespace tandem::router {

// A token for each byte, and kMark, which has no text. Marks of reasoning have
// text unless they are special tokens, too.
inline constexpr int32_t kMark = 1000;
inline constexpr ReasoningMarks kMarks{ReasoningStyle::kQwen3, 1001, 1002};
class Bytewise final : public TextCodec {
 public:
  Bytewise(bool special, ReasoningTexts marks)
      : special_(special), marks_(marks) {}

 private:
  class Text final : public TextStream {
   public:
    Text(bool special, ReasoningTexts marks)
        : special_(special), marks_(marks) {}
    std::string Push(int32_t id) override {
      if (id == kMark) return "";
      if (id < kMarks.begin_id) return std::string(1, static_cast<char>(id));
      if (special_) return "";
      return std::string(id == kMarks.begin_id ? marks_.begin : marks_.end);
    }
    std::string Finish() override { return ""; }

   private:
    const bool special_;
    const ReasoningTexts marks_;
  };
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t>,
                                        bool) override {
    return std::make_unique<Text>(special_, marks_);
  }
  std::string TokenBytes(int32_t) override { return ""; }
  const bool special_;
  const ReasoningTexts marks_;
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
inline Answer Generate(const EffectiveRequest& request, const std::string& text,
                       size_t together, v1::FinishReason reason,
                       bool special = false) {
  const ReasoningMarks marks = request.reasoning.value_or(kMarks);
  Bytewise codec(special, ReasoningTextsOf(marks.style));
  std::string content;
  google::protobuf::RepeatedPtrField<v1::ToolCall> calls;
  std::vector<v1::GenerateResponse> sent;
  KeptEvents client(&sent);
  Output output(request, {}, &codec, &client);
  Answer answer;
  const auto collect = [&] {
    for (const v1::GenerateResponse& event : sent) {
      const std::string& thought = event.delta().reasoning_content();
      EXPECT_TRUE(thought.empty() || answer.text.empty() || marks.content_first)
          << answer.text;
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

inline EffectiveRequest WithTools(ToolCallStyle style) {
  EffectiveRequest request;
  request.output.set_text(true);
  request.output.set_skip_special_tokens(true);
  request.tool_calls = ToolCallOptions{.style = style,
                                       .names = {"f", "g"},
                                       .markers = {{kMark, "[TOOL_CALLS]"}},
                                       .id_seed = 7};
  return request;
}

inline constexpr char kTwoCalls[] = "Yes.#f[ARGS]{\"a\":1}#g[ARGS]{}";

}  // namespace tandem::router

#endif  // TANDEM_TESTS_ROUTER_TEXT_GENERATED_ANSWER_H_
