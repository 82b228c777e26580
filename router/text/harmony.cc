// SPDX-License-Identifier: Apache-2.0
#include "router/text/harmony.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "router/text/json_scanner.h"

namespace tandem::router {
namespace {

// More is no header. A function's name has 64 at most.
constexpr size_t kMaxHeaderBytes = 256;
// Of a role, a channel or a type.
constexpr size_t kMaxHeaderNameBytes = 64;
constexpr std::string_view kAssistant = "assistant";
constexpr std::string_view kAnalysis = "analysis";
constexpr std::string_view kTo = "to=";
constexpr std::string_view kFunctions = "functions.";
constexpr char kSpaces[] = " \t\r\n";

std::string_view WithoutSpaces(std::string_view text) {
  while (!text.empty() && IsJsonSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsJsonSpace(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (!(text = WithoutSpaces(text)).empty()) {
    words.push_back(text.substr(0, text.find_first_of(kSpaces)));
    text.remove_prefix(words.back().size());
  }
  return words;
}

bool IsJsonObject(std::string_view text) {
  JsonScanner scanner;
  auto verdict = JsonScanner::Verdict::kMore;
  for (const char c : text) {
    if (verdict != JsonScanner::Verdict::kMore) return false;
    verdict = scanner.Push(c);
  }
  return verdict == JsonScanner::Verdict::kComplete;
}

}  // namespace

bool WritesHarmony(std::string_view chat_template) {
  return chat_template.find(kHarmonyChannel) != std::string_view::npos &&
         chat_template.find(kHarmonyMessage) != std::string_view::npos;
}

HarmonyOutput::HarmonyOutput(const HarmonyFormat& format,
                             const ToolCallOptions* calls, int index)
    : format_(format) {
  if (calls != nullptr) calls_.emplace(*calls, index);
  BeginHeader(kAssistant);
}

void HarmonyOutput::Begin(absl::Span<const int32_t> prompt, TextCodec* codec) {
  const auto is_start = [&](int32_t id) {
    const auto mark = format_.marks.find(id);
    return mark != format_.marks.end() && mark->second == kHarmonyStart;
  };
  const auto start = std::find_if(prompt.rbegin(), prompt.rend(), is_start);
  if (start == prompt.rend()) return;
  v1::GenerateDelta unsaid;
  for (const int32_t id : prompt.last(start - prompt.rbegin() + 1)) {
    // Of what is said nothing depends on the text, which may be long.
    const bool said = part_ == Part::kContent || part_ == Part::kReasoning;
    const bool needed = !said || format_.marks.contains(id);
    const std::string piece = needed ? codec->TokenBytes(id) : "";
    Arrives(id, piece);
    Release(piece, &unsaid);
    unsaid.Clear();
  }
  begun_ = reasoned_ = said_ = false;
  reasoning_tokens_ = 0;
}

void HarmonyOutput::Arrives(int32_t token_id, std::string_view piece) {
  arrived_ += piece.size();
  Token token{.end = arrived_};
  const auto mark = format_.marks.find(token_id);
  if (mark != format_.marks.end()) {
    token.mark = &mark->second;
    // Mostly it has no text; before one that has there may be bytes of a
    // character that never became whole.
    if (piece.ends_with(mark->second)) token.mark_bytes = mark->second.size();
  }
  waiting_.push_back(token);
}

void HarmonyOutput::Release(std::string_view text, v1::GenerateDelta* delta) {
  const auto take = [&](size_t end) {
    const std::string_view taken =
        text.substr(0, end - std::min(end, released_));
    text.remove_prefix(taken.size());
    released_ += taken.size();
    return taken;
  };
  while (!waiting_.empty()) {
    const Token token = waiting_.front();
    const size_t mark_begin = token.end - token.mark_bytes;
    OnText(take(mark_begin), delta);
    if (released_ < mark_begin) return;
    take(token.end);
    if (released_ < token.end) return;
    waiting_.pop_front();
    OnToken(token, delta);
  }
  OnText(text, delta);  // what ends the text is no token's
  released_ += text.size();
}

void HarmonyOutput::Finish(v1::GenerateDelta* delta) {
  // Of text that a stop string cut off.
  for (const Token& token : waiting_) {
    if (token.mark != nullptr || part_ != Part::kReasoning) break;
    ++reasoning_tokens_;
  }
  waiting_.clear();
  // Without arguments it is a call only if it was ended as one.
  if (part_ == Part::kCall && WithoutSpaces(arguments_).empty()) {
    part_ = Part::kContent;
  }
  EndMessage(delta);
}

void HarmonyOutput::OnToken(const Token& token, v1::GenerateDelta* delta) {
  if (token.mark == nullptr) {
    if (part_ == Part::kReasoning) ++reasoning_tokens_;
    return;
  }
  const std::string_view mark = *token.mark;
  if (mark == kHarmonyStart) {
    EndMessage(delta);
    BeginHeader("");
  } else if (mark == kHarmonyChannel || mark == kHarmonyConstrain) {
    if (part_ != Part::kHeader && mark == kHarmonyConstrain) return;
    if (part_ != Part::kHeader) EndMessage(delta);
    if (header_.size() < kMaxHeaderBytes) header_.push_back(' ');
    name_begin_ = header_.size();
  } else if (mark == kHarmonyMessage) {
    if (part_ == Part::kHeader) ReadHeader(header_);
  } else {
    EndMessage(delta);
  }
}

void HarmonyOutput::OnText(std::string_view text, v1::GenerateDelta* delta) {
  if (part_ == Part::kHeader) {
    const std::string_view head =
        text.substr(0, kMaxHeaderBytes - header_.size());
    header_.append(head);
    text.remove_prefix(head.size());
    if (text.empty() && !IsNoHeader()) return;
    HeaderIsText(delta);
  }
  if (part_ == Part::kCall) {
    arguments_.append(text);
  } else {
    Say(text, delta);
  }
}

void HarmonyOutput::BeginHeader(std::string_view role) {
  part_ = Part::kHeader;
  begun_ = false;
  header_ = role;
  name_begin_ = 0;
}

// Where a message's role is known no more than a recipient can come before a
// mark: models that write none just answer.
bool HarmonyOutput::IsNoHeader() const {
  const std::string_view header = header_;
  if (name_begin_ > 0 || !header.starts_with(kAssistant)) return false;
  const std::string_view rest = WithoutSpaces(header.substr(kAssistant.size()));
  return !kTo.starts_with(rest.substr(0, kTo.size()));
}

// Its words come in any order, and some of them not at all.
void HarmonyOutput::ReadHeader(std::string_view header) {
  std::string_view recipient;
  bool is_analysis = false;
  for (const std::string_view word : Words(header)) {
    if (word.starts_with(kTo)) {
      recipient = word.substr(kTo.size());
    } else if (word == kAnalysis) {
      is_analysis = true;
    } else if (word == "final" || word == "commentary") {
      is_analysis = false;
    }
  }
  part_ = is_analysis && format_.reasoning ? Part::kReasoning : Part::kContent;
  if (!calls_ || !recipient.starts_with(kFunctions)) return;
  part_ = Part::kCall;
  function_ = recipient.substr(kFunctions.size());
  arguments_.clear();
}

// Of the role, the channel or the type that it ends with, as far as it is one.
size_t HarmonyOutput::NameEnd() const {
  if (name_begin_ == 0 && header_.starts_with(kAssistant)) {
    return kAssistant.size();
  }
  const size_t size = header_.size();
  const size_t begin =
      std::min(header_.find_first_not_of(kSpaces, name_begin_), size);
  const size_t end = std::min(header_.find_first_of(kSpaces, begin), size);
  return end - begin > kMaxHeaderNameBytes ? begin : end;
}

// A <|message|> was left out.
void HarmonyOutput::HeaderIsText(v1::GenerateDelta* delta) {
  const size_t end = NameEnd();
  const std::string header = std::exchange(header_, "");
  ReadHeader(std::string_view(header).substr(0, end));
  OnText(std::string_view(header).substr(end), delta);
}

void HarmonyOutput::EndMessage(v1::GenerateDelta* delta) {
  if (part_ == Part::kHeader) {
    const std::string rest = header_.substr(NameEnd());
    const std::string_view words = WithoutSpaces(rest);
    // One that was cut off has nothing to show.
    const bool is_header = kTo.starts_with(words) || words == "json" ||
                           words.find(kTo) != std::string_view::npos;
    if (!is_header) HeaderIsText(delta);
  }
  if (part_ == Part::kCall) EndCall(delta);
  BeginHeader(kAssistant);
}

void HarmonyOutput::EndCall(v1::GenerateDelta* delta) {
  const std::string_view arguments = WithoutSpaces(arguments_);
  const bool valid = arguments.empty() || IsJsonObject(arguments);
  if (valid && IsFunctionName(function_)) {
    calls_->Add(
        {.name = function_,
         .arguments = std::string(arguments.empty() ? "{}" : arguments)},
        delta);
  } else {
    part_ = Part::kContent;
    Say(arguments_, delta);
  }
}

void HarmonyOutput::Say(std::string_view text, v1::GenerateDelta* delta) {
  if (text.empty()) return;
  const bool reasons = part_ == Part::kReasoning;
  std::string* const to =
      reasons ? delta->mutable_reasoning_content() : delta->mutable_text();
  bool& earlier = reasons ? reasoned_ : said_;
  if (!std::exchange(begun_, true) && std::exchange(earlier, true)) {
    to->push_back('\n');
  }
  to->append(text);
}

}  // namespace tandem::router
