// SPDX-License-Identifier: Apache-2.0
// A chat as chat templates are given it: the JSON of OpenAI's messages and
// tools, as `transformers` has it (apply_chat_template). Arguments of calls are
// objects but for DeepSeek's templates, and their and schemas' members keep the
// client's order.

#ifndef TANDEM_ROUTER_INTAKE_CHAT_JSON_H_
#define TANDEM_ROUTER_INTAKE_CHAT_JSON_H_

#include <string>
#include <string_view>

#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// What a template expects of them.
enum class ChatForm {
  kUsual,
  // The same, but for calls without a text: their content is null, not "".
  // DeepSeek's look for it; many more fail of it.
  kNullContent,
  // That, and arguments of calls are text, to which the template adds more.
  kDeepSeek,
  // The usual, but results of calls are the `tool_responses` of the message
  // that made these. Gemma 4's first know nothing else.
  kToolResponses,
  // gpt-oss' (text/harmony.h): one call in a message, what led to it in
  // `thinking` and none of it in `content`, its result behind it, and a
  // description of each tool.
  kHarmony,
};

// Of a template, by its source.
ChatForm ChatFormOf(std::string_view chat_template);

// A message's text; of several parts each begins a line, as vLLM and llama.cpp
// have it.
std::string ContentOf(const v1::ChatMessage& message);

// REQUIRES of both: ValidateChat.
std::string MessagesJson(const v1::Chat& chat, ChatForm form);
// Empty: none are wanted.
std::string ToolsJson(const v1::Chat& chat, ChatForm form);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_INTAKE_CHAT_JSON_H_
