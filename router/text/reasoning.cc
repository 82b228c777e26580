// SPDX-License-Identifier: Apache-2.0
#include "router/text/reasoning.h"

#include <algorithm>

#include "router/text/tool_calls.h"

namespace tandem::router {

std::optional<ReasoningStyle> ReasoningStyleByName(std::string_view name) {
  if (name == "deepseek_r1" || name == "minimax_m2") {
    return ReasoningStyle::kDeepSeekR1;
  }
  if (name == "qwen3" || name == "glm45") return ReasoningStyle::kQwen3;
  if (name == "deepseek_v3") return ReasoningStyle::kDeepSeekV3;
  if (name == "kimi_k2") return ReasoningStyle::kKimiK2;
  return std::nullopt;
}

std::optional<ReasoningStyle> DetectReasoningStyle(
    std::string_view chat_template) {
  if (chat_template.find(kThinkEnd) == std::string_view::npos) return {};
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

bool ReasoningIsOver(absl::Span<const int32_t> prompt,
                     const ReasoningMarks& marks,
                     absl::Span<const int32_t> end_ids) {
  for (size_t i = prompt.size(); i > 0; --i) {
    const int32_t id = prompt[i - 1];
    if (id == marks.end_id) return true;
    if (id == marks.begin_id) return false;
    if (std::find(end_ids.begin(), end_ids.end(), id) != end_ids.end()) break;
  }
  return marks.style == ReasoningStyle::kDeepSeekV3;
}

bool ReasoningOutput::Arrives(int32_t token_id, std::string_view piece) {
  if (arrived_over_) return true;
  if (token_id == marks_.calls_id) {
    waiting_.push_back({arrived_, arrived_, true});
    return arrived_over_ = true;
  }
  arrived_ += piece.size();
  const bool is_end = token_id == marks_.end_id;
  if (!is_end && token_id != marks_.begin_id) {
    ++tokens_;
    return false;
  }
  // A special token has no text; before a mark that has one there may be bytes
  // of a character that never became whole.
  const std::string_view mark = is_end ? kThinkEnd : kThinkBegin;
  const size_t bytes = piece.ends_with(mark) ? mark.size() : 0;
  waiting_.push_back({arrived_ - bytes, arrived_, is_end});
  arrived_over_ = is_end;
  return false;
}

std::string_view ReasoningOutput::Release(std::string_view text,
                                          std::string* reasoning) {
  if (over_) return text;
  const auto take = [&](size_t end) {
    const std::string_view taken = text.substr(0, end - released_);
    text.remove_prefix(taken.size());
    released_ += taken.size();
    return taken;
  };
  while (!waiting_.empty()) {
    const Mark& mark = waiting_.front();
    if (released_ < mark.begin) reasoning->append(take(mark.begin));
    if (released_ < mark.begin) return text;
    take(mark.end);
    if (released_ < mark.end) return text;
    over_ = mark.is_end;
    waiting_.pop_front();
    if (over_) return text;
  }
  reasoning->append(take(released_ + text.size()));
  return text;
}

}  // namespace tandem::router
