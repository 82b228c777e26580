// SPDX-License-Identifier: Apache-2.0
// Models that reason before they answer: <think>...</think>, then the content.
// Either mark is a token of its own; the first is often the prompt's last, and
// need not come at all. As in vLLM an answer is reasoning up to </think>,
// unless the prompt has closed it already (Qwen3 with enable_thinking false).
// DeepSeek V3.1 reasons only where the prompt has begun it, and Kimi K2 may
// call a tool without having ended it.

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
enum class ReasoningStyle { kDeepSeekR1, kQwen3, kDeepSeekV3, kKimiK2 };
std::optional<ReasoningStyle> ReasoningStyleByName(std::string_view name);
// That of models whose chat template says that they reason: GLM 4.5 and later,
// MiniMax M2, DeepSeek R1, V3.1 and later, Kimi K2 Thinking.
std::optional<ReasoningStyle> DetectReasoningStyle(
    std::string_view chat_template);

inline constexpr std::string_view kThinkBegin = "<think>";
inline constexpr std::string_view kThinkEnd = "</think>";

struct ReasoningMarks {
  ReasoningStyle style = ReasoningStyle::kDeepSeekR1;
  int32_t begin_id = -1;
  int32_t end_id = -1;
  int32_t calls_id = -1;  // begins calls, which end it, too; -1: none does
};

// Whether the prompt's open turn has </think> behind it: then its answer is
// content from the first token on; of DeepSeek V3.1, whether it has no <think>.
// Turns before it end with one of `end_ids`, and say nothing.
bool ReasoningIsOver(absl::Span<const int32_t> prompt,
                     const ReasoningMarks& marks,
                     absl::Span<const int32_t> end_ids);

// Takes a sequence's text apart, in which an answer begins with reasoning.
class ReasoningOutput {
 public:
  explicit ReasoningOutput(const ReasoningMarks& marks) : marks_(marks) {}

  // A token was drawn whose text, `piece`, will be released later. Whether it
  // is one of the content.
  bool Arrives(int32_t token_id, std::string_view piece);
  // The next of that text: what is reasoning is added to `reasoning`, what is
  // content returned, a part of `text`.
  std::string_view Release(std::string_view text, std::string* reasoning);

  // Of the reasoning so far, without its marks.
  int tokens() const { return tokens_; }

 private:
  // In the text, to be left out.
  struct Mark {
    size_t begin = 0;
    size_t end = 0;
    bool is_end = false;
  };

  const ReasoningMarks marks_;
  size_t arrived_ = 0;   // bytes of text, up to the content
  size_t released_ = 0;  // of them
  std::deque<Mark> waiting_;
  bool arrived_over_ = false;  // </think> was drawn
  bool over_ = false;          // and its text released
  int tokens_ = 0;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_REASONING_H_
