// SPDX-License-Identifier: Apache-2.0
#include "router/intake/chat_json.h"

#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "router/validate/validate.h"

namespace tandem::router {
namespace {

using nlohmann::ordered_json;

// Before the closing brace of an object; `value` is JSON, spliced in as it is:
// a parser that sorts members would change the prompt.
void AddMember(std::string_view name, const std::string& value,
               std::string* object) {
  object->pop_back();
  absl::StrAppend(object, object->size() > 1 ? "," : "", "\"",
                  std::string(name), "\":", value, "}");
}

std::string List(const std::vector<std::string>& items) {
  return absl::StrCat("[", absl::StrJoin(items, ","), "]");
}

std::string CallJson(const v1::ToolCall& call) {
  std::string function = ordered_json{{"name", call.name()}}.dump();
  AddMember("arguments",
            call.arguments_json().empty() ? "{}" : call.arguments_json(),
            &function);
  std::string json =
      ordered_json{{"id", call.id()}, {"type", "function"}}.dump();
  AddMember("function", function, &json);
  return json;
}

std::string MessageJson(const v1::ChatMessage& message) {
  std::string content = message.content();
  for (const v1::ContentPart& part : message.parts()) content += part.text();
  ordered_json item = {{"role", message.role()}, {"content", content}};
  if (!message.name().empty()) item["name"] = message.name();
  if (!message.reasoning_content().empty()) {
    item["reasoning_content"] = message.reasoning_content();
  }
  if (!message.tool_call_id().empty()) {
    item["tool_call_id"] = message.tool_call_id();
  }
  if (message.tool_calls().empty()) return item.dump();
  // OpenAI's form; some templates (DeepSeek's) look for it.
  if (content.empty()) item["content"] = nullptr;
  std::vector<std::string> calls;
  for (const v1::ToolCall& call : message.tool_calls()) {
    calls.push_back(CallJson(call));
  }
  std::string json = item.dump();
  AddMember("tool_calls", List(calls), &json);
  return json;
}

std::string ToolJson(const v1::Tool& tool) {
  ordered_json named = {{"name", tool.name()}};
  if (!tool.description().empty()) named["description"] = tool.description();
  std::string function = named.dump();
  if (!tool.parameters_json_schema().empty()) {
    AddMember("parameters", tool.parameters_json_schema(), &function);
  }
  std::string json = ordered_json{{"type", "function"}}.dump();
  AddMember("function", function, &json);
  return json;
}

}  // namespace

std::string MessagesJson(const v1::Chat& chat) {
  std::vector<std::string> messages;
  for (const v1::ChatMessage& message : chat.messages()) {
    messages.push_back(MessageJson(message));
  }
  return List(messages);
}

std::string ToolsJson(const v1::Chat& chat) {
  if (!WantsTools(chat)) return "";
  std::vector<std::string> tools;
  for (const v1::Tool& tool : chat.tools()) tools.push_back(ToolJson(tool));
  return List(tools);
}

}  // namespace tandem::router
