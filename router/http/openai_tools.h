// SPDX-License-Identifier: Apache-2.0
// OpenAI's tools, tool_choice and tool_calls: of requests, and of answers.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_TOOLS_H_
#define TANDEM_ROUTER_HTTP_OPENAI_TOOLS_H_

#include <string_view>

#include "google/protobuf/repeated_ptr_field.h"
#include "nlohmann/json.hpp"
#include "router/http/json_fields.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// `fields` are those of a message, or of the whole body, which `body` is.
void ReadToolCalls(JsonFields* fields, v1::ChatMessage* message);
void ReadTools(std::string_view body, JsonFields* fields, v1::Chat* chat);

// {index, id, type, function: {name, arguments}}, or of what follows {index,
// function: {arguments}}.
nlohmann::json ToolCallDeltaJson(const v1::ToolCallDelta& delta);
// [{id, type, function: {name, arguments}}, ...]
nlohmann::json ToolCallsJson(
    const google::protobuf::RepeatedPtrField<v1::ToolCall>& calls);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_TOOLS_H_
