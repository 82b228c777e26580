// SPDX-License-Identifier: Apache-2.0
#include "router/text/gemma_calls.h"

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "router/text/json_scanner.h"
#include "router/text/json_values.h"

namespace tandem::router {
namespace {

constexpr std::string_view kCall = "call:";

class GemmaCandidate final : public CallCandidate {
 public:
  Verdict Push(char c) override {
    switch (place_) {
      case Place::kMark:
        return PushMark(c);
      case Place::kName:
        return PushName(c);
      case Place::kKey:
        return PushKey(c);
      case Place::kBareKey:
        return PushBareKey(c);
      case Place::kValue:
        return PushValue(c);
      case Place::kBareValue:
        return PushBareValue(c);
      case Place::kText:
        return PushText(c);
      case Place::kString:
        return PushString(c);
      case Place::kNext:
        return PushNext(c);
      case Place::kEnd:
        break;
    }
    return Verdict::kNone;
  }

  bool CompleteAtEnd() const override { return !calls_.empty(); }

 private:
  enum class Place {
    kMark,  // mark_
    kName,
    kKey,  // or the end of an object
    kBareKey,
    kValue,  // or the end of a list
    kBareValue,
    kText,    // up to kGemmaText
    kString,  // of JSON
    kNext,    // behind a value
    kEnd,
  };
  struct Open {
    bool object;
    std::set<std::string> keys = {};  // so far, as JSON
  };

  void Expect(std::string_view mark, Place leads_to) {
    place_ = Place::kMark;
    mark_ = mark;
    leads_to_ = leads_to;
    matched_ = 0;
  }

  Verdict PushMark(char c) {
    if (matched_ == 0 && IsJsonSpace(c)) return Verdict::kMore;
    if (matched_ == 0 && mark_ == kCall && c == ':')
      matched_ = mark_.size() - 1;
    if (c != mark_[matched_]) return Verdict::kNone;
    if (++matched_ < mark_.size()) return Verdict::kMore;
    place_ = leads_to_;
    if (place_ == Place::kEnd) return Verdict::kCalls;
    if (mark_ == kGemmaCallBegin) Expect(kCall, Place::kName);
    return Verdict::kMore;
  }

  Verdict PushName(char c) {
    if (IsNameByte(c) && name_.size() < kMaxNameBytes) {
      name_.push_back(c);
      return Verdict::kMore;
    }
    if (name_.empty()) return IsJsonSpace(c) ? Verdict::kMore : Verdict::kNone;
    return c == '{' ? Begin(c) : Verdict::kNone;
  }

  // An object or a list.
  Verdict Begin(char c) {
    if (open_.size() == JsonScanner::kMaxDepth) return Verdict::kNone;
    arguments_.push_back(c);
    open_.push_back({.object = c == '{'});
    place_ = c == '{' ? Place::kKey : Place::kValue;
    return Verdict::kMore;
  }

  Verdict Close(char c) {
    if (open_.back().object != (c == '}')) return Verdict::kNone;
    arguments_.push_back(c);
    open_.pop_back();
    place_ = Place::kNext;
    if (!open_.empty()) return Verdict::kMore;
    calls_.push_back({std::move(name_), std::move(arguments_)});
    Expect(kGemmaCallEnd, Place::kEnd);
    return Verdict::kMore;
  }

  Verdict PushKey(char c) {
    if (IsJsonSpace(c)) return Verdict::kMore;
    if (c == '}') return Close(c);
    return BeginText(c, /*is_key=*/true);
  }

  Verdict PushValue(char c) {
    if (IsJsonSpace(c)) return Verdict::kMore;
    const bool in_list = !open_.back().object;
    if (in_list && c == ']') return Close(c);
    if (in_list) Separate();
    if (c == '{' || c == '[') return Begin(c);
    return BeginText(c, /*is_key=*/false);
  }

  Verdict BeginText(char c, bool is_key) {
    is_key_ = is_key;
    text_.clear();
    if (c == kGemmaText.front()) {
      Expect(kGemmaText, Place::kText);
      return PushMark(c);
    }
    if (c == '"') {
      place_ = Place::kString;
      text_.push_back(c);
      return Verdict::kMore;
    }
    place_ = is_key ? Place::kBareKey : Place::kBareValue;
    return Push(c);
  }

  Verdict PushBareKey(char c) {
    const std::string_view key = WithoutSpacesAround(text_);
    if (c == ':')
      return key.empty() ? Verdict::kNone : Take(JsonString(key), c);
    if (std::string_view("<{}[],\"").find(c) != std::string_view::npos) {
      return Verdict::kNone;
    }
    text_.push_back(c);
    return Verdict::kMore;
  }

  Verdict PushBareValue(char c) {
    if (c == ',' || c == '}' || c == ']') {
      const std::string_view value = WithoutSpacesAround(text_);
      return value.empty() ? Verdict::kNone : Take(JsonOf(value), c);
    }
    // Something is missing before it: a comma, or all that is left of a call.
    if (std::string_view("<{[\"").find(c) != std::string_view::npos) {
      return Verdict::kNone;
    }
    text_.push_back(c);
    return Verdict::kMore;
  }

  Verdict PushText(char c) {
    text_.push_back(c);
    if (c != '>' || !text_.ends_with(kGemmaText)) return Verdict::kMore;
    text_.resize(text_.size() - kGemmaText.size());
    return Take(JsonString(text_));
  }

  Verdict PushString(char c) {
    text_.push_back(c);
    if (c == '"' && !escaped_) {
      return IsJsonValue(text_) ? Take(text_) : Verdict::kNone;
    }
    escaped_ = c == '\\' && !escaped_;
    return Verdict::kMore;
  }

  // The key or value that was read.
  Verdict Take(const std::string& json) {
    if (!is_key_) {
      arguments_ += json;
      place_ = Place::kNext;
      return Verdict::kMore;
    }
    // Which of two is meant nobody knows.
    if (!open_.back().keys.insert(json).second) return Verdict::kNone;
    Separate();
    arguments_ += json + ": ";
    Expect(":", Place::kValue);
    return Verdict::kMore;
  }

  // It ended with a byte that is not its own.
  Verdict Take(const std::string& json, char c) {
    return Take(json) == Verdict::kMore ? Push(c) : Verdict::kNone;
  }

  void Separate() {
    const char last = arguments_.back();
    if (last != '{' && last != '[') arguments_ += ", ";
  }

  Verdict PushNext(char c) {
    if (IsJsonSpace(c)) return Verdict::kMore;
    if (c == '}' || c == ']') return Close(c);
    if (c != ',') return Verdict::kNone;
    place_ = open_.back().object ? Place::kKey : Place::kValue;
    return Verdict::kMore;
  }

  Place place_ = Place::kMark;
  std::string_view mark_ = kGemmaCallBegin;
  size_t matched_ = 0;  // bytes of it
  Place leads_to_ = Place::kName;
  std::string name_;
  std::vector<Open> open_;  // around the next byte
  bool is_key_ = false;     // of the text that is read
  bool escaped_ = false;    // is the next byte of a string
  std::string text_;
  std::string arguments_;  // as JSON
};

}  // namespace

std::unique_ptr<CallCandidate> NewGemmaCandidate() {
  return std::make_unique<GemmaCandidate>();
}

}  // namespace tandem::router
