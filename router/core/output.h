// SPDX-License-Identifier: Apache-2.0
// From tokens to what a client reads: text, stop strings, token ids,
// logprobs, and the four events in their order. Text that may be the
// beginning of a stop string is held back, and so are the ids of its tokens.
// Text that may be a tool call is held back as well, but for its tokens. What
// a model reasons first comes apart from what it says.

#ifndef TANDEM_ROUTER_CORE_OUTPUT_H_
#define TANDEM_ROUTER_CORE_OUTPUT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "router/core/dialer.h"
#include "router/text/harmony.h"
#include "router/text/reasoning.h"
#include "router/text/stop_strings.h"
#include "router/text/text_codec.h"
#include "router/text/tool_call_output.h"
#include "router/validate/validate.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

class Output {
 public:
  // `codec` may be null where the request asks for no text. Both outlive this.
  // `index` is that of the sequence.
  Output(const EffectiveRequest& request, absl::Span<const int32_t> prompt,
         TextCodec* codec, ClientStream* client, int index = 0);

  void Started(std::string request_id, const std::string& model,
               int prompt_tokens, int cached_tokens,
               std::string system_fingerprint);
  bool started() const { return started_; }
  // The prompt's text; Started sends it where it is to be returned.
  void Echo();

  // Sends what is known of the next tokens of the prompt. REQUIRES: Started.
  void Scores(int position, absl::Span<const v1::Token* const> tokens);

  // What the sequence has come to with `token`, the next one.
  enum class Verdict { kGoesOn, kEndToken, kStopString };
  Verdict Add(const v1::Token& token);
  // What was done for the tokens added so far, for the next delta.
  void Worked(v1::Work so_far) { *delta_.mutable_work() = std::move(so_far); }
  // Sends what the tokens added so far let go.
  void Flush();

  // The sequence ended: whatever was held back, then `finished`.
  // Returns the reason given: the last bytes may complete a stop string.
  v1::FinishReason Finished(v1::FinishReason reason);
  void Done(v1::GenerateDone done);

  int tokens() const { return tokens_; }
  int reasoning_tokens() const;
  // Whether it ends with `token_id`, its `nth` token and the last one added or
  // the next: by itself, or because a text that must match is whole.
  bool EndsSequence(int32_t token_id, int nth) const;

 private:
  Verdict Take(const v1::Token& token);
  // Releases the next of the text; whether a stop string ends in it.
  bool Stops(std::string_view piece);
  // Behind stop strings, in front of tool calls.
  void Release(std::string_view text);
  void Arrives(int32_t token_id, std::string_view piece);
  void ArrivesUnseen(int32_t token_id);
  void Record(const v1::Token& token);
  void Fill(const v1::Token& token, v1::TokenLogprob* record) const;
  void RecordAttention(const v1::Token& token);
  std::string TokenBytes(int32_t token_id) const;

  const EffectiveRequest request_;
  const std::vector<int32_t> prompt_;  // only where it is returned or echoed
  TextCodec* const codec_;
  ClientStream* const client_;
  const int index_;
  std::unique_ptr<TextStream> text_;  // null without text
  StopStrings stops_;
  // Of these the first excludes the others.
  std::unique_ptr<HarmonyOutput> harmony_;    // null: the text is no messages
  std::optional<ReasoningOutput> reasoning_;  // none: all is content
  std::unique_ptr<ToolCallOutput> calls_;     // null: none are looked for
  // What must match has begun: behind reasoning, where there is some.
  bool constrained_;
  v1::GenerateDelta delta_;  // not sent yet
  v1::GenerateDelta held_;   // what is known of held-back text's tokens
  int tokens_ = 0;
  int stop_string_ = -1;
  int32_t end_token_ = -1;
  bool started_ = false;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_OUTPUT_H_
