// SPDX-License-Identifier: Apache-2.0
// Tokens to text, as the core needs it: a few microseconds per token, on the
// loop. The real one stands on text/; a simulation has none and relays ids.

#ifndef TANDEM_ROUTER_TEXT_TEXT_CODEC_H_
#define TANDEM_ROUTER_TEXT_TEXT_CODEC_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/span.h"

namespace tandem::router {

// The text of one sequence, piece by piece.
class TextStream {
 public:
  virtual ~TextStream() = default;
  // What `token_id` adds: whole characters, maybe none yet.
  virtual std::string Push(int32_t token_id) = 0;
  // The end: bytes that never completed a character become U+FFFD.
  virtual std::string Finish() = 0;
};

class TextCodec {
 public:
  virtual ~TextCodec() = default;
  // The text that follows `prompt`, whose own text is not returned.
  virtual std::unique_ptr<TextStream> NewStream(
      absl::Span<const int32_t> prompt, bool skip_special_tokens) = 0;
  // The bytes of one token by itself, for logprobs.
  virtual std::string TokenBytes(int32_t token_id) = 0;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_TEXT_TEXT_CODEC_H_
