// SPDX-License-Identifier: Apache-2.0
#include "router/text/json_calls.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <utility>

#include "nlohmann/json.hpp"
#include "router/text/json_scanner.h"

namespace tandem::router {
namespace {

// The text of a JSON string; nothing where it is none.
std::optional<std::string> Unquote(std::string_view quoted) {
  const auto value = nlohmann::json::parse(quoted.begin(), quoted.end(),
                                           nullptr, /*allow_exceptions=*/false);
  if (!value.is_string()) return std::nullopt;
  return value.get<std::string>();
}

class JsonCandidate final : public CallCandidate {
 public:
  JsonCandidate(ToolCallStyle style, const std::vector<std::string>* names,
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

  Verdict Push(char c) override {
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

  bool CompleteAtEnd() const override {
    if (calls_.empty() || in_array_) return false;
    return phase_ != Phase::kObject;
  }

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
};

}  // namespace

std::unique_ptr<CallCandidate> NewJsonCandidate(
    ToolCallStyle style, const std::vector<std::string>* names, bool marked) {
  return std::make_unique<JsonCandidate>(style, names, marked);
}

}  // namespace tandem::router
