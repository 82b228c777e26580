// SPDX-License-Identifier: Apache-2.0
#include "router/text/tagged_calls.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <utility>

#include "router/text/json_scanner.h"
#include "router/text/json_values.h"

namespace tandem::router {
namespace {

struct StyleTags {
  ToolCallStyle style;
  CallTags tags;
};
constexpr std::array<StyleTags, 3> kTaggedStyles = {{
    {ToolCallStyle::kQwen3Coder,
     {.block_begin = "<tool_call>",
      .name_begin = "<function=",
      .name_end = ">",
      .key_begin = "<parameter=",
      .key_end = ">",
      .value_begin = "",
      .value_end = "</parameter>",
      .call_end = "</function>",
      .block_end = "</tool_call>",
      .framed = true}},
    {ToolCallStyle::kGlm45,
     {.block_begin = "<tool_call>",
      .name_begin = "",
      .name_end = "",
      .key_begin = "<arg_key>",
      .key_end = "</arg_key>",
      .value_begin = "<arg_value>",
      .value_end = "</arg_value>",
      .call_end = "",
      .block_end = "</tool_call>"}},
    {ToolCallStyle::kMinimaxM2,
     {.block_begin = "<minimax:tool_call>",
      .name_begin = "<invoke name=\"",
      .name_end = "\">",
      .key_begin = "<parameter name=\"",
      .key_end = "\">",
      .value_begin = "",
      .value_end = "</parameter>",
      .call_end = "</invoke>",
      .block_end = "</minimax:tool_call>"}},
}};

std::string_view WithoutFrame(std::string_view text) {
  if (text.starts_with('\n')) text.remove_prefix(1);
  if (text.ends_with('\n')) text.remove_suffix(1);
  return text;
}

class TaggedCandidate final : public CallCandidate {
 public:
  TaggedCandidate(const CallTags* tags, const std::vector<std::string>* names,
                  const JsonParameters* json_parameters, bool after_call)
      : tags_(*tags), names_(*names), json_parameters_(*json_parameters) {
    next_.push_back({tags_.block_begin, Place::kBlock});
    if (!tags_.name_begin.empty()) {
      next_.push_back({tags_.name_begin, Place::kBareName});
    }
    if (after_call) next_.push_back({tags_.block_end, Place::kBlockEnd});
  }

  Verdict Push(char c) override {
    switch (place_) {
      case Place::kName:
        return PushName(c);
      case Place::kKey:
        return PushKey(c);
      case Place::kValue:
        return PushValue(c);
      case Place::kObject:
        return PushObject(c);
      default:
        return PushTag(c);
    }
  }

  bool CompleteAtEnd() const override {
    return !calls_.empty() && place_ == Place::kTag &&
           next_.back().leads_to == Place::kBlockEnd;
  }

  bool in_value() const override {
    return place_ == Place::kValue || place_ == Place::kObject;
  }

 private:
  enum class Place {
    kTag,  // one of next_
    kBlock,
    kBareName,  // of a call without a block
    kName,
    kParameters,
    kKey,
    kBeforeValue,
    kValue,
    kObject,  // in place of parameters
    kCallEnd,
    kBlockEnd,
  };
  struct Tag {
    std::string_view text;
    Place leads_to;
  };

  void Expect(std::initializer_list<Tag> tags) {
    place_ = Place::kTag;
    next_ = tags;
    matched_ = 0;
  }

  // None of next_ begins another.
  Verdict PushTag(char c) {
    if (matched_ == 0) {
      if (IsJsonSpace(c)) return Verdict::kMore;
      const bool object = next_.front().leads_to == Place::kKey && c == '{';
      if (object && arguments_.empty()) {
        place_ = Place::kObject;
        scanner_ = JsonScanner();
        return PushObject(c);
      }
    }
    std::erase_if(next_,
                  [&](const Tag& tag) { return tag.text[matched_] != c; });
    if (next_.empty()) return Verdict::kNone;
    if (next_.front().text.size() > ++matched_) return Verdict::kMore;
    return GoOn(next_.front().leads_to);
  }

  Verdict GoOn(Place place) {
    switch (place) {
      case Place::kBlock:
        if (tags_.name_begin.empty()) return GoOn(Place::kName);
        Expect({{tags_.name_begin, Place::kName}});
        if (!calls_.empty()) {
          next_.push_back({tags_.block_end, Place::kBlockEnd});
        }
        return Verdict::kMore;
      case Place::kBareName:
        bare_ = true;
        return GoOn(Place::kName);
      case Place::kName:
        name_.clear();
        arguments_.clear();
        keys_.clear();
        break;
      case Place::kParameters:
        Expect({{tags_.key_begin, Place::kKey}, AfterParameters()});
        return Verdict::kMore;
      case Place::kKey:
        key_.clear();
        break;
      case Place::kBeforeValue:
        if (tags_.value_begin.empty()) return GoOn(Place::kValue);
        Expect({{tags_.value_begin, Place::kValue}});
        return Verdict::kMore;
      case Place::kValue:
        value_.clear();
        break;
      case Place::kCallEnd:
        calls_.push_back({name_, arguments_.empty() ? "{}" : arguments_});
        if (bare_ || tags_.call_end.empty()) return Verdict::kCalls;
        return GoOn(Place::kBlock);
      case Place::kBlockEnd:
        return Verdict::kCalls;
      default:
        break;
    }
    place_ = place;
    return Verdict::kMore;
  }

  Tag AfterParameters() const {
    return {tags_.call_end.empty() ? tags_.block_end : tags_.call_end,
            Place::kCallEnd};
  }

  Verdict PushName(char c) {
    if (IsNameByte(c) && name_.size() < kMaxNameBytes) {
      name_.push_back(c);
      return Verdict::kMore;
    }
    if (name_.empty()) {
      const bool before = tags_.name_begin.empty() && IsJsonSpace(c);
      return before ? Verdict::kMore : Verdict::kNone;
    }
    if (bare_ &&
        std::find(names_.begin(), names_.end(), name_) == names_.end()) {
      return Verdict::kNone;
    }
    if (tags_.name_end.empty()) {
      GoOn(Place::kParameters);
    } else {
      Expect({{tags_.name_end, Place::kParameters}});
    }
    return PushTag(c);
  }

  Verdict PushKey(char c) {
    if (c == tags_.key_end.front() && !key_.empty()) {
      Expect({{tags_.key_end, Place::kBeforeValue}});
      return PushTag(c);
    }
    if (c == '<' || c == '>' || c == '\n') return Verdict::kNone;
    key_.push_back(c);
    return Verdict::kMore;
  }

  Verdict PushValue(char c) {
    value_.push_back(c);
    if (c != '>' || !value_.ends_with(tags_.value_end)) return Verdict::kMore;
    value_.resize(value_.size() - tags_.value_end.size());
    // Which of two is meant nobody knows.
    if (!keys_.insert(key_).second) return Verdict::kNone;
    const std::string_view value =
        tags_.framed ? WithoutFrame(value_) : std::string_view(value_);
    const auto declared = json_parameters_.find(name_);
    const bool json =
        declared != json_parameters_.end() && declared->second.contains(key_);
    if (arguments_.empty()) {
      arguments_ = "{";
    } else {
      arguments_.back() = ',';
      arguments_ += ' ';
    }
    arguments_ +=
        JsonString(key_) + ": " + (json ? JsonOf(value) : JsonString(value));
    arguments_ += '}';
    return GoOn(Place::kParameters);
  }

  Verdict PushObject(char c) {
    arguments_.push_back(c);
    switch (scanner_.Push(c)) {
      case JsonScanner::Verdict::kBroken:
        return Verdict::kNone;
      case JsonScanner::Verdict::kMore:
        return Verdict::kMore;
      case JsonScanner::Verdict::kComplete:
        break;
    }
    Expect({AfterParameters()});
    return Verdict::kMore;
  }

  const CallTags& tags_;
  const std::vector<std::string>& names_;
  const JsonParameters& json_parameters_;
  Place place_ = Place::kTag;
  std::vector<Tag> next_;
  size_t matched_ = 0;  // bytes of each of next_
  bool bare_ = false;
  std::string name_;
  std::string key_;
  std::set<std::string> keys_;  // of the parameters so far
  std::string value_;
  JsonScanner scanner_;
  std::string arguments_;  // an object, once there are any
};

}  // namespace

const CallTags* CallTagsOf(ToolCallStyle style) {
  for (const StyleTags& known : kTaggedStyles) {
    if (known.style == style) return &known.tags;
  }
  return nullptr;
}

std::unique_ptr<CallCandidate> NewTaggedCandidate(
    const CallTags* tags, const std::vector<std::string>* names,
    const JsonParameters* json_parameters, bool after_call) {
  return std::make_unique<TaggedCandidate>(tags, names, json_parameters,
                                           after_call);
}

}  // namespace tandem::router
