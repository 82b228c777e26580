// SPDX-License-Identifier: Apache-2.0
// Models that reason before they answer: <think>...</think>, then the content.
// Either mark is a token of its own; the first is often the prompt's last, and
// need not come at all. As in vLLM an answer is reasoning up to </think>,
// unless the prompt has closed it already (Qwen3 with enable_thinking false).
// DeepSeek V3.1 reasons only where the prompt has begun it, and Kimi K2 may
// call a tool without having ended it, as Gemma 4 may. That writes
//
//   <|channel>thought
//   ...<channel|>
//
// and its answers are content up to <|channel>, which may come anywhere. The
// label is left out as the marks are.

#ifndef TANDEM_ROUTER_TEXT_REASONING_H_
#define TANDEM_ROUTER_TEXT_REASONING_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "absl/types/span.h"

namespace tandem::router {

// With the names of vLLM's --reasoning-parser: glm45 is as qwen3, minimax_m2 as
// deepseek_r1.
enum class ReasoningStyle {
  kDeepSeekR1,
  kQwen3,
  kDeepSeekV3,
  kKimiK2,
  kGemma4,
};
std::optional<ReasoningStyle> ReasoningStyleByName(std::string_view name);
// That of models whose chat template says that they reason: GLM 4.5 and later,
// MiniMax M2, DeepSeek R1, V3.1 and later, Kimi K2 Thinking, Gemma 4.
std::optional<ReasoningStyle> DetectReasoningStyle(
    std::string_view chat_template);

inline constexpr std::string_view kThinkBegin = "<think>";
inline constexpr std::string_view kThinkEnd = "</think>";
inline constexpr std::string_view kChannelBegin = "<|channel>";
inline constexpr std::string_view kChannelEnd = "<channel|>";

struct ReasoningTexts {
  std::string_view begin;
  std::string_view end;
};
ReasoningTexts ReasoningTextsOf(ReasoningStyle style);

struct ReasoningMarks {
  ReasoningStyle style = ReasoningStyle::kDeepSeekR1;
  int32_t begin_id = -1;
  int32_t end_id = -1;
  int32_t calls_id = -1;       // begins calls, which end it, too; -1: none does
  bool content_first = false;  // up to begin_id
};

// What a prompt's open turn leaves an answer in, by the last of its marks.
// Turns before it end with one of `end_ids`, and say nothing.
enum class PromptReasoning { kUnsaid, kBegun, kOver };
PromptReasoning ReasoningIn(absl::Span<const int32_t> prompt,
                            const ReasoningMarks& marks,
                            absl::Span<const int32_t> end_ids);

// Takes a sequence's text apart, of which some is reasoning.
class ReasoningOutput {
 public:
  explicit ReasoningOutput(const ReasoningMarks& marks);

  // A token was drawn whose text, `piece`, will be released later. The bytes
  // of it that are content; none of tokens of reasoning.
  std::optional<size_t> Arrives(int32_t token_id, std::string_view piece);
  // The next of that text, without marks, is added to what it is.
  void Release(std::string_view text, std::string* reasoning,
               std::string* content);

  // Of the reasoning so far, without its marks.
  int tokens() const { return tokens_; }

 private:
  // In the text, to be left out.
  struct Mark {
    size_t begin = 0;
    size_t end = 0;
    bool is_end = false;
  };

  void AddReasoning(std::string_view text, std::string* reasoning);

  const ReasoningMarks marks_;
  const ReasoningTexts texts_;
  const std::string_view label_;  // of each thought
  size_t arrived_ = 0;            // bytes of text
  size_t released_ = 0;           // of them
  std::deque<Mark> waiting_;
  bool arrived_reasoning_;   // by the marks drawn
  bool released_reasoning_;  // by those of them whose text is released
  size_t labelled_ = 0;      // bytes of label_ seen in this thought
  int tokens_ = 0;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_REASONING_H_
