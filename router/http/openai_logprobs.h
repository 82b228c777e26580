// SPDX-License-Identifier: Apache-2.0
// Log probabilities in the shapes of OpenAI's two routes, and vLLM's of
// prompts.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_LOGPROBS_H_
#define TANDEM_ROUTER_HTTP_OPENAI_LOGPROBS_H_

#include <string>
#include <string_view>

#include "google/protobuf/repeated_ptr_field.h"
#include "nlohmann/json.hpp"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// Characters of UTF-8 that tokens cut anywhere; a byte that belongs to none is
// the one (U+FFFD) that the text has in its place.
class CharacterCount {
 public:
  void Add(std::string_view bytes);
  int count() const { return count_; }

 private:
  int count_ = 0;
  int open_ = 0;  // bytes that the last one still lacks
};

// Completions' four lists. What has no rank, the prompt's first token, has no
// log probability. `before` counts what comes before these tokens, and then
// them, too.
nlohmann::json CompletionLogprobs(
    const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& records,
    CharacterCount* before);

// A chat's record of one token, without its alternatives.
nlohmann::json ChatLogprob(const std::string& token, float logprob);

// vLLM's `prompt_logprobs` of one token: by id, the token's own and the most
// probable ones. Null where there is no log probability.
nlohmann::json PromptLogprob(const v1::TokenLogprob& token);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_LOGPROBS_H_
