// SPDX-License-Identifier: Apache-2.0
// Bodies of OpenAI's completions and chat completions, with vLLM's further
// fields, as GenerateRequests. Fields that are not known are ignored, as both
// do; a wrong one is INVALID_ARGUMENT, FIELD_INVALID with its name. Values are
// judged by router/validate/validate.h, whose messages go by
// OpenAiRequest::names.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_REQUEST_H_
#define TANDEM_ROUTER_HTTP_OPENAI_REQUEST_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "router/http/field_names.h"
#include "tandem/v1/admin.pb.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// Prompts of one completions call.
inline constexpr int kMaxPrompts = 128;

struct OpenAiRequest {
  bool chat = false;
  bool stream = false;
  bool include_usage = false;           // a last chunk with the usage
  bool continuous_usage_stats = false;  // usage in every chunk
  bool work = false;                    // likewise what was done so far
  bool return_token_ids = false;
  bool prompt_logprobs = false;  // wanted in a field of their own
  bool echo_logprobs = false;    // before those of the output: echo, logprobs
  std::string echoed;            // of a chat: before each choice's content
  FieldNames names;              // as this body has them
  // One for each prompt; exactly one of a chat.
  std::vector<v1::GenerateRequest> prompts;
};

absl::StatusOr<OpenAiRequest> ParseCompletion(std::string_view body);
absl::StatusOr<OpenAiRequest> ParseChatCompletion(std::string_view body);

// vLLM's /tokenize ({prompt} or {messages}) and /detokenize ({tokens}).
absl::StatusOr<v1::TokenizeRequest> ParseTokenize(std::string_view body);
absl::StatusOr<v1::DetokenizeRequest> ParseDetokenize(std::string_view body);

// vLLM's {lora_name, lora_path} and {lora_name}.
absl::StatusOr<v1::LoadLoraAdapterRequest> ParseLoadLoraAdapter(
    std::string_view body);
absl::StatusOr<v1::UnloadLoraAdapterRequest> ParseUnloadLoraAdapter(
    std::string_view body);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_REQUEST_H_
