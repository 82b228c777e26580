// SPDX-License-Identifier: Apache-2.0
#include "router/text/tool_calls.h"

#include <algorithm>
#include <array>
#include <utility>

#include "router/text/call_candidate.h"
#include "router/text/gemma_calls.h"
#include "router/text/harmony.h"
#include "router/text/json_calls.h"
#include "router/text/json_scanner.h"
#include "router/text/marked_calls.h"
#include "router/text/tagged_calls.h"

namespace tandem::router {
namespace {

// Of a byte that is held back.
constexpr char kHidden = 1;   // it is no content
constexpr char kInValue = 2;  // no call begins there

struct NamedStyle {
  std::string_view name;
  ToolCallStyle style;
};
// The first name of each is its own.
constexpr std::array<NamedStyle, 14> kStyles = {{
    {"none", ToolCallStyle::kNone},
    {"llama3_json", ToolCallStyle::kLlama3Json},
    {"hermes", ToolCallStyle::kHermes},
    {"mistral", ToolCallStyle::kMistral},
    {"openai", ToolCallStyle::kOpenAi},
    {"qwen3_coder", ToolCallStyle::kQwen3Coder},
    {"qwen3_xml", ToolCallStyle::kQwen3Coder},
    {"glm45", ToolCallStyle::kGlm45},
    {"glm47", ToolCallStyle::kGlm45},
    {"minimax_m2", ToolCallStyle::kMinimaxM2},
    {"deepseek_v3", ToolCallStyle::kDeepSeekV3},
    {"deepseek_v31", ToolCallStyle::kDeepSeekV31},
    {"kimi_k2", ToolCallStyle::kKimiK2},
    {"gemma4", ToolCallStyle::kGemma4},
}};

}  // namespace

std::optional<ToolCallStyle> ToolCallStyleByName(std::string_view name) {
  for (const NamedStyle& known : kStyles) {
    if (known.name == name) return known.style;
  }
  return std::nullopt;
}

std::string_view ToolCallStyleName(ToolCallStyle style) {
  for (const NamedStyle& known : kStyles) {
    if (known.style == style) return known.name;
  }
  return "";
}

ToolCallStyle DetectToolCallStyle(std::string_view chat_template) {
  const auto has = [&](std::string_view text) {
    return chat_template.find(text) != std::string_view::npos;
  };
  if (WritesHarmony(chat_template)) return ToolCallStyle::kOpenAi;
  if (has(kToolCalls)) return ToolCallStyle::kMistral;
  if (has(kGemmaCallBegin) && has(kGemmaCallEnd)) return ToolCallStyle::kGemma4;
  // What V3's have V3.1's have, too.
  for (const ToolCallStyle style :
       {ToolCallStyle::kDeepSeekV3, ToolCallStyle::kDeepSeekV31,
        ToolCallStyle::kKimiK2}) {
    if (WritesMarks(chat_template, *CallMarksOf(style))) return style;
  }
  for (const ToolCallStyle style :
       {ToolCallStyle::kQwen3Coder, ToolCallStyle::kGlm45,
        ToolCallStyle::kMinimaxM2}) {
    const CallTags& tags = *CallTagsOf(style);
    // As templates may quote it.
    const size_t quote = tags.key_begin.find('"');
    if (has(tags.block_begin) && has(tags.key_begin.substr(0, quote))) {
      return style;
    }
  }
  if (has(kHermesOpen)) {
    // The same marker around something else.
    const bool is_tagged = has("<function=") || has("<arg_key>");
    return is_tagged ? ToolCallStyle::kNone : ToolCallStyle::kHermes;
  }
  if (has(kPythonTag) || has(R"({"name": function name, "parameters":)")) {
    return ToolCallStyle::kLlama3Json;
  }
  return ToolCallStyle::kNone;
}

std::vector<std::string_view> ToolCallMarkers(ToolCallStyle style) {
  switch (style) {
    case ToolCallStyle::kHermes:
      return {kHermesOpen, kHermesClose};
    case ToolCallStyle::kLlama3Json:
      return {kPythonTag};
    case ToolCallStyle::kMistral:
      return {kToolCalls, kCallId, kArgs};
    case ToolCallStyle::kGemma4:
      return {kGemmaCallBegin, kGemmaCallEnd, kGemmaText};
    default:
      break;
  }
  std::vector<std::string_view> markers;
  if (const CallMarks* const marks = CallMarksOf(style)) {
    markers = {marks->block_begin, marks->block_end};
    for (const CallPart& part : marks->call) {
      if (part.text.starts_with('<')) markers.push_back(part.text);
    }
  }
  if (const CallTags* const tags = CallTagsOf(style)) {
    for (const std::string_view tag :
         {tags->block_begin, tags->key_begin, tags->key_end, tags->value_begin,
          tags->value_end, tags->call_end, tags->block_end}) {
      if (tag.starts_with('<') && tag.ends_with('>')) markers.push_back(tag);
    }
  }
  return markers;
}

bool IsFunctionName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), IsNameByte);
}

ToolCallParser::ToolCallParser(ToolCallStyle style,
                               std::vector<std::string> names,
                               JsonParameters json_parameters)
    : style_(style),
      names_(std::move(names)),
      json_parameters_(std::move(json_parameters)) {}

ToolCallParser::~ToolCallParser() = default;

ToolCallParser::Result ToolCallParser::Push(std::string_view piece,
                                            bool hidden) {
  held_.append(piece);
  flags_.append(piece.size(), hidden ? kHidden : '\0');
  Result result;
  Run(&result);
  Compact();
  return result;
}

ToolCallParser::Result ToolCallParser::Finish() {
  Result result;
  while (candidate_ != nullptr) {
    if (candidate_->CompleteAtEnd()) {
      Accept(&result);
    } else {
      GiveUp(&result);
    }
    Run(&result);
  }
  if (!after_call_) Release(held_.size(), &result);
  begin_ = cursor_ = held_.size();
  Compact();
  return result;
}

// Whether a call may begin at the cursor.
bool ToolCallParser::MayBegin(char c) const {
  switch (style_) {
    case ToolCallStyle::kHermes:
      return c == kHermesOpen.front();
    case ToolCallStyle::kLlama3Json:
      return c == kPythonTag.front() || (c == '{' && in_gap_);
    case ToolCallStyle::kMistral:
      return c == kToolCalls.front();
    case ToolCallStyle::kQwen3Coder:
    case ToolCallStyle::kGlm45:
    case ToolCallStyle::kMinimaxM2:
      return c == '<' && (flags_[cursor_] & kInValue) == 0;
    case ToolCallStyle::kDeepSeekV3:
    case ToolCallStyle::kDeepSeekV31:
    case ToolCallStyle::kKimiK2:
    case ToolCallStyle::kGemma4:
      return c == '<';
    case ToolCallStyle::kOpenAi:
    case ToolCallStyle::kNone:
      return false;
  }
  return false;
}

std::unique_ptr<CallCandidate> ToolCallParser::NewCandidate(char c) const {
  if (const CallTags* const tags = CallTagsOf(style_)) {
    return NewTaggedCandidate(tags, &names_, &json_parameters_,
                              in_gap_ && after_call_);
  }
  if (const CallMarks* const marks = CallMarksOf(style_)) {
    return NewMarkedCandidate(marks, in_gap_ && in_block_);
  }
  if (style_ == ToolCallStyle::kGemma4) return NewGemmaCandidate();
  return NewJsonCandidate(style_, &names_, c != '{');
}

void ToolCallParser::Run(Result* result) {
  while (cursor_ < held_.size()) {
    const char c = held_[cursor_];
    if (candidate_ == nullptr && !MayBegin(c)) {
      ++cursor_;
      in_gap_ = in_gap_ && IsJsonSpace(c);
      if (!in_gap_) Release(cursor_, result);
      continue;
    }
    if (candidate_ == nullptr) {
      candidate_ = NewCandidate(c);
      candidate_begin_ = cursor_;
    }
    ++cursor_;
    switch (candidate_->Push(c)) {
      case CallCandidate::Verdict::kMore:
        if (candidate_->in_value()) flags_[cursor_ - 1] |= kInValue;
        break;
      case CallCandidate::Verdict::kCalls:
        Accept(result);
        break;
      case CallCandidate::Verdict::kNone:
        GiveUp(result);
        break;
    }
  }
}

void ToolCallParser::Accept(Result* result) {
  in_block_ = candidate_->block_goes_on();
  for (ParsedToolCall& call : candidate_->TakeCalls()) {
    result->calls.push_back(std::move(call));
  }
  candidate_.reset();
  begin_ = cursor_;
  in_gap_ = after_call_ = true;
}

// Its first byte is text; a call may begin at the next. Of candidates that are
// looked at twice no more than two overlap: a later one begins within a string
// of the earlier, its first quote ends that, and from there on each quote ends
// a string of one and begins one of the other, so that the next marker ends
// one of them. Each of Gemma's quotes has one of JSON's in it, so that it ends
// a string of either. Of tagged ones a later begins in no value of an earlier,
// and where it begins between them, with a function, it ends with that.
void ToolCallParser::GiveUp(Result* result) {
  candidate_.reset();
  Release(candidate_begin_ + 1, result);
  in_gap_ = false;
}

// The bytes before `end` are text. Looks at those behind it again.
void ToolCallParser::Release(size_t end, Result* result) {
  for (; begin_ < end; ++begin_) {
    if ((flags_[begin_] & kHidden) == 0) result->text.push_back(held_[begin_]);
  }
  cursor_ = end;
}

void ToolCallParser::Compact() {
  if (begin_ == 0) return;
  held_.erase(0, begin_);
  flags_.erase(0, begin_);
  cursor_ -= begin_;
  candidate_begin_ -= std::min(begin_, candidate_begin_);
  begin_ = 0;
}

}  // namespace tandem::router
