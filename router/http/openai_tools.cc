// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_tools.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace tandem::router {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// The "function" of a tool or a call at `where`; null where there is none.
const json* Function(const json& item, const std::string& name,
                     const std::string& where, JsonFields* fields) {
  if (item.is_object()) {
    const auto type = item.find("type");
    if (type != item.end() && *type != "function") {
      fields->Refuse(where + ".type", *type, "only functions are understood");
      return nullptr;
    }
    const auto function = item.find("function");
    if (function != item.end() && function->is_object()) return &*function;
  }
  fields->Refuse(name, item, "objects with a function are needed");
  return nullptr;
}

// "auto", or {"type": "function", "function": {"name": "f"}}
void ReadToolChoice(JsonFields* fields, v1::Chat* chat) {
  const json* const choice = fields->Find("tool_choice");
  if (choice == nullptr) return;
  if (choice->is_string()) {
    return chat->set_tool_choice(choice->get<std::string>());
  }
  if (choice->is_object() &&
      choice->value("type", json("function")) == json("function")) {
    const auto function = choice->find("function");
    if (function != choice->end() && function->is_object()) {
      const auto name = function->find("name");
      if (name != function->end() && name->is_string()) {
        return chat->set_tool_choice_function(name->get<std::string>());
      }
    }
  }
  fields->Refuse("tool_choice", *choice,
                 "auto, none, required, or an object with a function's name");
}

}  // namespace

void ReadToolCalls(JsonFields* fields, v1::ChatMessage* message) {
  const json* const calls = fields->Array("tool_calls");
  if (calls == nullptr) return;
  for (size_t i = 0; i < calls->size(); ++i) {
    const json& call = (*calls)[i];
    const std::string where = absl::StrCat("tool_calls[", i, "]");
    const json* const function = Function(call, "tool_calls", where, fields);
    if (function == nullptr) return;
    const std::string prefix = fields->prefix() + where;
    JsonFields outer(call, prefix + ".");
    JsonFields inner(*function, prefix + ".function.");
    v1::ToolCall* const to = message->add_tool_calls();
    to->set_id(outer.String("id").value_or(""));
    to->set_name(inner.String("name").value_or(""));
    to->set_arguments_json(inner.String("arguments").value_or(""));
    fields->Keep(outer.status());
    fields->Keep(inner.status());
  }
}

void ReadTools(std::string_view body, JsonFields* fields, v1::Chat* chat) {
  const json* const tools = fields->Array("tools");
  ReadToolChoice(fields, chat);
  if (const auto many = fields->Bool("parallel_tool_calls")) {
    chat->set_parallel_tool_calls(*many);
  }
  if (tools == nullptr || tools->empty()) {
    // "auto" among none says nothing.
    if (chat->tool_choice() == "auto") chat->clear_tool_choice();
    return;
  }
  const absl::StatusOr<ordered_json> ordered = InOrder(body, "tools");
  if (!ordered.ok()) return fields->Keep(ordered.status());
  for (size_t i = 0; i < tools->size(); ++i) {
    const std::string where = absl::StrCat("tools[", i, "]");
    const json* const function = Function((*tools)[i], "tools", where, fields);
    if (function == nullptr) return;
    JsonFields inner(*function, where + ".function.");
    v1::Tool* const to = chat->add_tools();
    to->set_name(inner.String("name").value_or(""));
    to->set_description(inner.String("description").value_or(""));
    if (const auto strict = inner.Bool("strict")) to->set_strict(*strict);
    if (inner.Object("parameters") != nullptr) {
      to->set_parameters_json_schema(
          (*ordered)[i]["function"]["parameters"].dump(
              -1, ' ', false, ordered_json::error_handler_t::replace));
    }
    fields->Keep(inner.status());
  }
}

json ToolCallDeltaJson(const v1::ToolCallDelta& delta) {
  json item = {{"index", delta.index()},
               {"function", {{"arguments", delta.arguments_json()}}}};
  if (!delta.id().empty()) {
    item["id"] = delta.id();
    item["type"] = "function";
    item["function"]["name"] = delta.name();
  }
  return item;
}

json ToolCallsJson(
    const google::protobuf::RepeatedPtrField<v1::ToolCall>& calls) {
  json list = json::array();
  for (const v1::ToolCall& call : calls) {
    list.push_back(
        {{"id", call.id()},
         {"type", "function"},
         {"function",
          {{"name", call.name()}, {"arguments", call.arguments_json()}}}});
  }
  return list;
}

}  // namespace tandem::router
