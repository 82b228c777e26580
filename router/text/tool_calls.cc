// SPDX-License-Identifier: Apache-2.0
#include "router/text/tool_calls.h"

#include <algorithm>
#include <array>
#include <utility>

#include "nlohmann/json.hpp"
#include "router/text/harmony.h"
#include "router/text/json_scanner.h"

namespace tandem::router {
namespace {

constexpr size_t kMaxNameBytes = 64;
constexpr std::string_view kHermesOpen = "<tool_call>";
constexpr std::string_view kHermesClose = "</tool_call>";
constexpr std::string_view kPythonTag = "<|python_tag|>";
constexpr std::string_view kToolCalls = "[TOOL_CALLS]";
constexpr std::string_view kCallId = "[CALL_ID]";
constexpr std::string_view kArgs = "[ARGS]";

struct NamedStyle {
  std::string_view name;
  ToolCallStyle style;
};
constexpr std::array<NamedStyle, 5> kStyles = {{
    {"none", ToolCallStyle::kNone},
    {"llama3_json", ToolCallStyle::kLlama3Json},
    {"hermes", ToolCallStyle::kHermes},
    {"mistral", ToolCallStyle::kMistral},
    {"openai", ToolCallStyle::kOpenAi},
}};

bool IsNameByte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         (c >= '0' && c <= '9') || c == '_' || c == '-';
}

// The text of a JSON string; nothing where it is none.
std::optional<std::string> Unquote(std::string_view quoted) {
  const auto value = nlohmann::json::parse(quoted.begin(), quoted.end(),
                                           nullptr, /*allow_exceptions=*/false);
  if (!value.is_string()) return std::nullopt;
  return value.get<std::string>();
}

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
  if (has(kHermesOpen)) {
    // The same marker around XML: Qwen3-Coder, GLM.
    const bool is_xml = has("<function=") || has("<arg_key>");
    return is_xml ? ToolCallStyle::kNone : ToolCallStyle::kHermes;
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
    case ToolCallStyle::kOpenAi:
    case ToolCallStyle::kNone:
      return {};
  }
  return {};
}

bool IsFunctionName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), IsNameByte);
}

// What may be one call or several, from its first byte on.
class ToolCallParser::Candidate {
 public:
  enum class Verdict { kMore, kCalls, kNone };

  Candidate(ToolCallStyle style, const std::vector<std::string>* names,
            bool marked)
      : style_(style), names_(names), marked_(marked) {
    if (!marked) {
      phase_ = Phase::kBeforeObject;
      return;
    }
    Expect(style == ToolCallStyle::kHermes       ? kHermesOpen
           : style == ToolCallStyle::kLlama3Json ? kPythonTag
                                                 : kToolCalls,
           style == ToolCallStyle::kMistral ? Phase::kAfterToolCalls
                                            : Phase::kBeforeObject);
  }

  // kCalls: they end with `c`.
  Verdict Push(char c) {
    switch (phase_) {
      case Phase::kLiteral:
        return PushLiteral(c);
      case Phase::kName:
        return PushName(c);
      case Phase::kId:
        if (c == '[') return ExpectFrom(c, kArgs, Phase::kBeforeObject);
        return IsNameByte(c) && ++id_bytes_ <= kMaxNameBytes ? Verdict::kMore
                                                             : Verdict::kNone;
      case Phase::kObject:
        return PushObject(c);
      default:
        break;
    }
    if (IsJsonSpace(c)) return Verdict::kMore;
    switch (phase_) {
      case Phase::kAfterToolCalls:
        return AfterToolCalls(c);
      case Phase::kBeforeObject:
        return BeginObject(c);
      case Phase::kAfterObject:
        return AfterObject(c);
      default:
        return Verdict::kMore;  // what closes them is complete
    }
  }

  // Whether what was read is calls if nothing follows. Models may end where a
  // closing tag is due.
  bool CompleteAtEnd() const {
    if (calls_.empty() || in_array_) return false;
    return phase_ != Phase::kObject;
  }

  std::vector<ParsedToolCall> TakeCalls() { return std::move(calls_); }

 private:
  enum class Phase {
    kLiteral,         // literal_, then next_
    kAfterToolCalls,  // an array, an object or a name
    kName,
    kId,
    kBeforeObject,
    kObject,
    kAfterObject,
    kClosed,
  };

  void Expect(std::string_view literal, Phase next) {
    phase_ = Phase::kLiteral;
    literal_ = literal;
    next_ = next;
  }

  Verdict ExpectFrom(char c, std::string_view literal, Phase next) {
    Expect(literal, next);
    return Push(c);
  }

  Verdict PushLiteral(char c) {
    if (c != literal_.front()) return Verdict::kNone;
    literal_.remove_prefix(1);
    if (!literal_.empty()) return Verdict::kMore;
    phase_ = next_;
    return phase_ == Phase::kClosed ? Verdict::kCalls : Verdict::kMore;
  }

  Verdict AfterToolCalls(char c) {
    if (c == '[') {
      in_array_ = true;
      phase_ = Phase::kBeforeObject;
      return Verdict::kMore;
    }
    if (c == '{') return BeginObject(c);
    phase_ = Phase::kName;
    return PushName(c);
  }

  // name{..}, name[ARGS]{..} or name[CALL_ID]id[ARGS]{..}
  Verdict PushName(char c) {
    if (after_bracket_) {
      after_bracket_ = false;
      if (c == 'C') {
        return ExpectFrom(c, kCallId.substr(1), Phase::kId);
      }
      return ExpectFrom(c, kArgs.substr(1), Phase::kBeforeObject);
    }
    if (IsNameByte(c) && name_.size() < kMaxNameBytes) {
      name_.push_back(c);
      return Verdict::kMore;
    }
    if (name_.empty()) return Verdict::kNone;
    if (c == '{') return BeginObject(c);
    after_bracket_ = true;
    return c == '[' ? Verdict::kMore : Verdict::kNone;
  }

  Verdict BeginObject(char c) {
    phase_ = Phase::kObject;
    scanner_ = JsonScanner();
    object_.clear();
    return PushObject(c);
  }

  Verdict PushObject(char c) {
    object_.push_back(c);
    switch (scanner_.Push(c)) {
      case JsonScanner::Verdict::kBroken:
        return Verdict::kNone;
      case JsonScanner::Verdict::kMore:
        return name_.empty() && !IsKnownKey() ? Verdict::kNone : Verdict::kMore;
      case JsonScanner::Verdict::kComplete:
        break;
    }
    if (!name_.empty()) {
      calls_.push_back({std::move(name_), std::move(object_)});
      return Verdict::kCalls;
    }
    if (!ReadCall()) return Verdict::kNone;
    phase_ = Phase::kAfterObject;
    const bool ends = style_ == ToolCallStyle::kMistral && !in_array_;
    return ends ? Verdict::kCalls : Verdict::kMore;
  }

  // The newest key is one of a call, or not read to its end: an object that is
  // no call is known by its first keys.
  bool IsKnownKey() const {
    if (scanner_.members().empty()) return true;
    const JsonScanner::Member& last = scanner_.members().back();
    if (scanner_.members().size() > kKeys.size()) return false;
    if (last.key_end != object_.size()) return true;
    const std::string_view key = Slice(last.key_begin, last.key_end);
    return std::find(kKeys.begin(), kKeys.end(), key) != kKeys.end();
  }

  std::string_view Slice(size_t begin, size_t end) const {
    return std::string_view(object_).substr(begin, end - begin);
  }

  bool ReadCall() {
    std::optional<std::string> name;
    std::optional<std::string_view> arguments;
    for (const JsonScanner::Member& member : scanner_.members()) {
      const std::string_view key = Slice(member.key_begin, member.key_end);
      const std::string_view value =
          Slice(member.value_begin, member.value_end);
      if (key == kKeys[0]) {
        if (name) return false;
        name = Unquote(value);
        if (!name || !IsFunctionName(*name)) return false;
      } else if (key == kKeys[1] || key == kKeys[2]) {
        if (arguments || value.front() != '{') return false;
        arguments = value;
      }
    }
    if (!name) return false;
    if (!marked_ && (!arguments || std::find(names_->begin(), names_->end(),
                                             *name) == names_->end())) {
      return false;
    }
    calls_.push_back({*std::move(name), std::string(arguments.value_or("{}"))});
    return true;
  }

  Verdict AfterObject(char c) {
    switch (style_) {
      case ToolCallStyle::kHermes:
        return ExpectFrom(c, kHermesClose, Phase::kClosed);
      case ToolCallStyle::kLlama3Json:
        phase_ = Phase::kBeforeObject;
        return c == ';' ? Verdict::kMore : Verdict::kNone;
      default:
        if (c == ']') return Verdict::kCalls;
        phase_ = Phase::kBeforeObject;
        return c == ',' ? Verdict::kMore : Verdict::kNone;
    }
  }

  static constexpr std::array<std::string_view, 5> kKeys = {
      R"("name")", R"("arguments")", R"("parameters")", R"("type")", R"("id")"};

  const ToolCallStyle style_;
  const std::vector<std::string>* const names_;
  const bool marked_;
  Phase phase_ = Phase::kLiteral;
  Phase next_ = Phase::kLiteral;
  std::string_view literal_;
  bool in_array_ = false;
  bool after_bracket_ = false;
  std::string name_;  // of [TOOL_CALLS]name
  size_t id_bytes_ = 0;
  JsonScanner scanner_;
  std::string object_;
  std::vector<ParsedToolCall> calls_;
};

ToolCallParser::ToolCallParser(ToolCallStyle style,
                               std::vector<std::string> names)
    : style_(style), names_(std::move(names)) {}

ToolCallParser::~ToolCallParser() = default;

ToolCallParser::Result ToolCallParser::Push(std::string_view piece,
                                            bool hidden) {
  held_.append(piece);
  hidden_.append(piece.size(), hidden ? '\1' : '\0');
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
      return c == kPythonTag.front() || (c == '{' && in_gap_ && !after_call_);
    case ToolCallStyle::kMistral:
      return c == kToolCalls.front();
    case ToolCallStyle::kOpenAi:
    case ToolCallStyle::kNone:
      return false;
  }
  return false;
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
      candidate_ = std::make_unique<Candidate>(style_, &names_, c != '{');
      candidate_begin_ = cursor_;
    }
    ++cursor_;
    switch (candidate_->Push(c)) {
      case Candidate::Verdict::kMore:
        break;
      case Candidate::Verdict::kCalls:
        Accept(result);
        break;
      case Candidate::Verdict::kNone:
        GiveUp(result);
        break;
    }
  }
}

void ToolCallParser::Accept(Result* result) {
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
// one of them.
void ToolCallParser::GiveUp(Result* result) {
  candidate_.reset();
  Release(candidate_begin_ + 1, result);
  in_gap_ = false;
}

// The bytes before `end` are text. Looks at those behind it again.
void ToolCallParser::Release(size_t end, Result* result) {
  for (; begin_ < end; ++begin_) {
    if (hidden_[begin_] == '\0') result->text.push_back(held_[begin_]);
  }
  cursor_ = end;
}

void ToolCallParser::Compact() {
  if (begin_ == 0) return;
  held_.erase(0, begin_);
  hidden_.erase(0, begin_);
  cursor_ -= begin_;
  candidate_begin_ -= std::min(begin_, candidate_begin_);
  begin_ = 0;
}

}  // namespace tandem::router
