// SPDX-License-Identifier: Apache-2.0
// Log probabilities in the shapes of OpenAI's two routes, and vLLM's of
// prompts.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_LOGPROBS_H_
#define TANDEM_ROUTER_HTTP_OPENAI_LOGPROBS_H_

#include <string>

#include "google/protobuf/repeated_ptr_field.h"
#include "nlohmann/json.hpp"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// Code points of valid UTF-8.
int Characters(const std::string& utf8);

// Completions' four lists. What has no rank, the prompt's first token, has no
// log probability. `offset` counts characters, and goes on behind these tokens.
nlohmann::json CompletionLogprobs(
    const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& records,
    int* offset);

// A chat's record of one token, without its alternatives.
nlohmann::json ChatLogprob(const std::string& token, float logprob);

// vLLM's `prompt_logprobs` of one token: by id, the token's own and the most
// probable ones. Null where there is no log probability.
nlohmann::json PromptLogprob(const v1::TokenLogprob& token);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_LOGPROBS_H_
