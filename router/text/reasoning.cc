// SPDX-License-Identifier: Apache-2.0
#include "router/text/reasoning.h"

#include <algorithm>

#include "router/text/tool_calls.h"

namespace tandem::router {

ReasoningTexts ReasoningTextsOf(ReasoningStyle style) {
  if (style == ReasoningStyle::kGemma4) return {kChannelBegin, kChannelEnd};
  return {kThinkBegin, kThinkEnd};
}

std::optional<ReasoningStyle> ReasoningStyleByName(std::string_view name) {
  if (name == "deepseek_r1" || name == "minimax_m2") {
    return ReasoningStyle::kDeepSeekR1;
  }
  if (name == "qwen3" || name == "glm45") return ReasoningStyle::kQwen3;
  if (name == "deepseek_v3") return ReasoningStyle::kDeepSeekV3;
  if (name == "kimi_k2") return ReasoningStyle::kKimiK2;
  if (name == "gemma4") return ReasoningStyle::kGemma4;
  return std::nullopt;
}

std::optional<ReasoningStyle> DetectReasoningStyle(
    std::string_view chat_template) {
  const auto has = [&](std::string_view mark) {
    return chat_template.find(mark) != std::string_view::npos;
  };
  if (has(kChannelEnd)) return ReasoningStyle::kGemma4;
  if (!has(kThinkEnd)) return std::nullopt;
  switch (DetectToolCallStyle(chat_template)) {
    case ToolCallStyle::kGlm45:
      return ReasoningStyle::kQwen3;
    case ToolCallStyle::kMinimaxM2:
    case ToolCallStyle::kDeepSeekV3:  // R1's, too
      return ReasoningStyle::kDeepSeekR1;
    case ToolCallStyle::kDeepSeekV31:
      return ReasoningStyle::kDeepSeekV3;
    case ToolCallStyle::kKimiK2:
      return ReasoningStyle::kKimiK2;
    default:
      return std::nullopt;
  }
}

PromptReasoning ReasoningIn(absl::Span<const int32_t> prompt,
                            const ReasoningMarks& marks,
                            absl::Span<const int32_t> end_ids) {
  for (size_t i = prompt.size(); i > 0; --i) {
    const int32_t id = prompt[i - 1];
    if (id == marks.end_id) return PromptReasoning::kOver;
    if (id == marks.begin_id) return PromptReasoning::kBegun;
    if (std::find(end_ids.begin(), end_ids.end(), id) != end_ids.end()) break;
  }
  return PromptReasoning::kUnsaid;
}

ReasoningOutput::ReasoningOutput(const ReasoningMarks& marks)
    : marks_(marks),
      texts_(ReasoningTextsOf(marks.style)),
      label_(marks.style == ReasoningStyle::kGemma4 ? "thought\n" : ""),
      arrived_reasoning_(!marks.content_first),
      released_reasoning_(!marks.content_first) {}

std::optional<size_t> ReasoningOutput::Arrives(int32_t token_id,
                                               std::string_view piece) {
  const bool calls = arrived_reasoning_ && token_id == marks_.calls_id;
  if (calls) {
    waiting_.push_back({arrived_, arrived_, true});
    arrived_reasoning_ = false;
  }
  arrived_ += piece.size();
  const bool again = marks_.style == ReasoningStyle::kGemma4;
  const bool begins =
      token_id == marks_.begin_id && (arrived_reasoning_ || again);
  if (!arrived_reasoning_ && !begins) return piece.size();
  const bool ends = token_id == marks_.end_id;
  if (!begins && !ends) {
    ++tokens_;
    return std::nullopt;
  }
  // A special token has no text; before a mark that has one there may be bytes
  // of a character that never became whole.
  const std::string_view mark = ends ? texts_.end : texts_.begin;
  const size_t bytes = piece.ends_with(mark) ? mark.size() : 0;
  waiting_.push_back({arrived_ - bytes, arrived_, ends});
  const bool in_content = !arrived_reasoning_;
  arrived_reasoning_ = begins;
  if (in_content) return piece.size() - bytes;
  return std::nullopt;
}

void ReasoningOutput::Release(std::string_view text, std::string* reasoning,
                              std::string* content) {
  const auto take = [&](size_t end) {
    const std::string_view taken = text.substr(0, end - released_);
    text.remove_prefix(taken.size());
    released_ += taken.size();
    return taken;
  };
  const auto add = [&](size_t end) {
    const std::string_view taken = take(end);
    released_reasoning_ ? AddReasoning(taken, reasoning)
                        : static_cast<void>(content->append(taken));
  };
  while (!waiting_.empty()) {
    const Mark& mark = waiting_.front();
    if (released_ < mark.begin) add(mark.begin);
    if (released_ < mark.begin) return;
    take(mark.end);
    if (released_ < mark.end) return;
    released_reasoning_ = !mark.is_end;
    labelled_ = 0;
    waiting_.pop_front();
  }
  add(released_ + text.size());
}

// A label that is cut goes with it.
void ReasoningOutput::AddReasoning(std::string_view text,
                                   std::string* reasoning) {
  while (labelled_ < label_.size() && !text.empty()) {
    if (text.front() != label_[labelled_]) {
      reasoning->append(label_.substr(0, labelled_));
      labelled_ = label_.size();
      break;
    }
    ++labelled_;
    text.remove_prefix(1);
  }
  reasoning->append(text);
}

}  // namespace tandem::router
