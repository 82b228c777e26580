// SPDX-License-Identifier: Apache-2.0
// OpenAI's Harmony format, in which gpt-oss answers: messages, each with a
// header that says what it is, behind a prompt that ends with
// <|start|>assistant.
//
//   <|channel|>analysis<|message|>what it thinks<|end|>
//   <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
//     <|message|>{"a": 1}<|call|>
//   <|start|>assistant<|channel|>final<|message|>what it says<|return|>
//
// The recipient may stand before <|channel|>, and <|constrain|> may be missing.
// Marks are special tokens; roles, channels and recipients are text. What goes
// to a function is a call, what else is in `analysis` is reasoning, and all
// other messages are content: vLLM drops those of unknown channels and those to
// other tools, and sends arguments that are no JSON as they are, which here are
// content too. Messages of one kind are divided by a newline, as in vLLM.

#ifndef TANDEM_ROUTER_TEXT_HARMONY_H_
#define TANDEM_ROUTER_TEXT_HARMONY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "router/text/text_codec.h"
#include "router/text/tool_call_output.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

inline constexpr std::string_view kHarmonyStart = "<|start|>";
inline constexpr std::string_view kHarmonyChannel = "<|channel|>";
inline constexpr std::string_view kHarmonyConstrain = "<|constrain|>";
inline constexpr std::string_view kHarmonyMessage = "<|message|>";
inline constexpr std::string_view kHarmonyEnd = "<|end|>";
inline constexpr std::string_view kHarmonyCall = "<|call|>";
inline constexpr std::string_view kHarmonyReturn = "<|return|>";

// Those without which there are no messages come first.
inline constexpr std::array<std::string_view, 7> kHarmonyMarks = {
    kHarmonyStart, kHarmonyChannel,   kHarmonyMessage, kHarmonyEnd,
    kHarmonyCall,  kHarmonyConstrain, kHarmonyReturn};
inline constexpr size_t kNeededHarmonyMarks = 4;

// Whether a chat template writes messages like these.
bool WritesHarmony(std::string_view chat_template);

struct HarmonyFormat {
  std::map<int32_t, std::string> marks = {};  // of kHarmonyMarks, by tokens
  bool reasoning = true;                      // apart, or content as well
};

// Takes a sequence's text apart. What it returns, joined, does not depend on
// how the text was cut, nor on whether marks are in it. Time is linear in the
// text. Not thread-safe.
class HarmonyOutput {
 public:
  // `calls`: null where none are looked for, and what would be one is content.
  // `index`: the sequence's, for ids of its own.
  HarmonyOutput(const HarmonyFormat& format, const ToolCallOptions* calls,
                int index);

  // Reads the message that `prompt` leaves open, which the answer goes on with.
  void Begin(absl::Span<const int32_t> prompt, TextCodec* codec);

  // A token was drawn whose text, `piece`, will be released later.
  void Arrives(int32_t token_id, std::string_view piece);
  // The next of that text; what it lets go is added to `delta`.
  void Release(std::string_view text, v1::GenerateDelta* delta);
  // Nothing follows.
  void Finish(v1::GenerateDelta* delta);

  bool called() const { return calls_ && calls_->any(); }
  // Of reasoning so far, whose text was released: without headers and marks.
  int reasoning_tokens() const { return reasoning_tokens_; }

 private:
  enum class Part { kHeader, kReasoning, kContent, kCall };
  // One that waits for its text, and is what `mark` says where that is set.
  struct Token {
    size_t end = 0;  // of its text
    const std::string* mark = nullptr;
    size_t mark_bytes = 0;  // of its text, at the end: to be left out
  };

  void OnToken(const Token& token, v1::GenerateDelta* delta);
  void OnText(std::string_view text, v1::GenerateDelta* delta);
  void BeginHeader(std::string_view role);
  bool IsNoHeader() const;
  void ReadHeader(std::string_view header);
  size_t NameEnd() const;
  void HeaderIsText(v1::GenerateDelta* delta);
  void EndMessage(v1::GenerateDelta* delta);
  void EndCall(v1::GenerateDelta* delta);
  void Say(std::string_view text, v1::GenerateDelta* delta);

  const HarmonyFormat format_;
  std::optional<ToolCallDeltas> calls_;
  size_t arrived_ = 0;   // bytes of text
  size_t released_ = 0;  // of them
  std::deque<Token> waiting_;
  Part part_ = Part::kHeader;
  std::string header_;     // a space for each mark in it
  size_t name_begin_ = 0;  // in it: of the role, the channel or the type
  std::string function_;   // which is called
  std::string arguments_;
  // Whether the message has said something, and earlier ones of its kind have.
  bool begun_ = false;
  bool reasoned_ = false;
  bool said_ = false;
  int reasoning_tokens_ = 0;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_HARMONY_H_
