// SPDX-License-Identifier: Apache-2.0
#include "router/text/marked_calls.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "router/text/json_scanner.h"

namespace tandem::router {
namespace {

using Kind = CallPart::Kind;

constexpr CallPart kDeepSeekV3Call[] = {
    {Kind::kText, "<｜tool▁call▁begin｜>"},
    {Kind::kText, "function"},
    {Kind::kText, "<｜tool▁sep｜>"},
    {Kind::kName, ""},
    {Kind::kText, "\n```json\n"},
    {Kind::kArguments, ""},
    {Kind::kText, "\n```"},
    {Kind::kText, "<｜tool▁call▁end｜>"},
};
constexpr CallPart kDeepSeekV31Call[] = {
    {Kind::kText, "<｜tool▁call▁begin｜>"}, {Kind::kName, ""},
    {Kind::kText, "<｜tool▁sep｜>"},        {Kind::kArguments, ""},
    {Kind::kText, "<｜tool▁call▁end｜>"},
};
constexpr CallPart kKimiK2Call[] = {
    {Kind::kText, "<|tool_call_begin|>"},
    {Kind::kName, "functions."},
    {Kind::kText, ":"},
    {Kind::kIndex, ""},
    {Kind::kText, "<|tool_call_argument_begin|>"},
    {Kind::kArguments, ""},
    {Kind::kText, "<|tool_call_end|>"},
};
constexpr size_t kMaxIndexBytes = 9;

struct StyleMarks {
  ToolCallStyle style;
  CallMarks marks;
};
constexpr std::array<StyleMarks, 3> kMarkedStyles = {{
    {ToolCallStyle::kDeepSeekV3,
     {.block_begin = "<｜tool▁calls▁begin｜>",
      .call = kDeepSeekV3Call,
      .between = "\n",
      .block_end = "<｜tool▁calls▁end｜>"}},
    {ToolCallStyle::kDeepSeekV31,
     {.block_begin = "<｜tool▁calls▁begin｜>",
      .call = kDeepSeekV31Call,
      .between = "",
      .block_end = "<｜tool▁calls▁end｜>"}},
    {ToolCallStyle::kKimiK2,
     {.block_begin = "<|tool_calls_section_begin|>",
      .call = kKimiK2Call,
      .between = "",
      .block_end = "<|tool_calls_section_end|>"}},
}};

// One call, with the beginning of its block, or the end of a block.
class MarkedCandidate final : public CallCandidate {
 public:
  MarkedCandidate(const CallMarks* marks, bool in_block) : marks_(*marks) {
    texts_.push_back({marks_.block_begin, 0});
    if (in_block) {
      texts_.push_back({marks_.call.front().text, 1});
      texts_.push_back({marks_.block_end, behind_block()});
    }
  }

  Verdict Push(char c) override {
    if (!texts_.empty()) return PushText(c);
    switch (marks_.call[part_].kind) {
      case Kind::kName:
        return PushName(c);
      case Kind::kIndex:
        return PushIndex(c);
      default:
        return PushObject(c);
    }
  }

  bool CompleteAtEnd() const override {
    const bool ends_block =
        texts_.size() == 1 && texts_.front().leads_to == behind_block();
    return !calls_.empty() || ends_block;
  }

  bool block_goes_on() const override { return !block_over_; }

 private:
  struct Text {
    std::string_view text;
    size_t leads_to;  // a part of the call, or behind the last
  };

  size_t behind_block() const { return marks_.call.size() + 1; }

  // None of texts_ begins another.
  Verdict PushText(char c) {
    if (matched_ == 0 && IsJsonSpace(c)) return Verdict::kMore;
    std::erase_if(texts_,
                  [&](const Text& text) { return text.text[matched_] != c; });
    if (texts_.empty()) return Verdict::kNone;
    if (texts_.front().text.size() > ++matched_) return Verdict::kMore;
    return GoTo(texts_.front().leads_to);
  }

  Verdict GoTo(size_t part) {
    texts_.clear();
    block_over_ = part == behind_block();
    if (part >= marks_.call.size()) return Verdict::kCalls;
    part_ = part;
    if (marks_.call[part].kind == Kind::kText) {
      texts_ = {{WithoutSpacesAround(marks_.call[part].text), part + 1}};
      if (part + 1 == marks_.call.size()) {
        texts_.push_back({marks_.block_end, behind_block()});
      }
      matched_ = 0;
    }
    return Verdict::kMore;
  }

  Verdict PushName(char c) {
    if (IsNameByte(c) && name_.size() < kMaxNameBytes) {
      name_.push_back(c);
      return Verdict::kMore;
    }
    if (name_.empty()) return IsJsonSpace(c) ? Verdict::kMore : Verdict::kNone;
    if (c == '.' && marks_.call[part_].text == name_ + c) {
      name_.clear();
      return Verdict::kMore;
    }
    GoTo(part_ + 1);
    return Push(c);
  }

  Verdict PushIndex(char c) {
    if (c >= '0' && c <= '9' && index_.size() < kMaxIndexBytes) {
      index_.push_back(c);
      return Verdict::kMore;
    }
    if (index_.empty()) return IsJsonSpace(c) ? Verdict::kMore : Verdict::kNone;
    GoTo(part_ + 1);
    return Push(c);
  }

  Verdict PushObject(char c) {
    if (object_.empty() && IsJsonSpace(c)) return Verdict::kMore;
    object_.push_back(c);
    switch (scanner_.Push(c)) {
      case JsonScanner::Verdict::kBroken:
        return Verdict::kNone;
      case JsonScanner::Verdict::kMore:
        return Verdict::kMore;
      case JsonScanner::Verdict::kComplete:
        break;
    }
    std::string id;
    if (!index_.empty()) id = "functions." + name_ + ":" + index_;
    calls_.push_back({std::move(name_), std::move(object_), std::move(id)});
    return GoTo(part_ + 1);
  }

  const CallMarks& marks_;
  std::vector<Text> texts_;  // one of them, where any is due
  size_t matched_ = 0;       // bytes of each
  size_t part_ = 0;          // of the call
  bool block_over_ = false;
  std::string name_;
  std::string index_;
  JsonScanner scanner_;
  std::string object_;
};

}  // namespace

const CallMarks* CallMarksOf(ToolCallStyle style) {
  for (const StyleMarks& known : kMarkedStyles) {
    if (known.style == style) return &known.marks;
  }
  return nullptr;
}

// Templates may have the parts of an id or all of it.
bool WritesMarks(std::string_view chat_template, const CallMarks& marks) {
  const auto has = [&](std::string_view text) {
    return chat_template.find(text) != std::string_view::npos;
  };
  return has(marks.block_begin) &&
         std::all_of(marks.call.begin(), marks.call.end(),
                     [&](const CallPart& part) {
                       return part.kind != Kind::kText || part.text == ":" ||
                              has(WithoutSpacesAround(part.text));
                     });
}

std::unique_ptr<CallCandidate> NewMarkedCandidate(const CallMarks* marks,
                                                  bool in_block) {
  return std::make_unique<MarkedCandidate>(marks, in_block);
}

}  // namespace tandem::router
