// SPDX-License-Identifier: Apache-2.0
#include "router/intake/chat_json.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "router/text/harmony.h"
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

std::string CallJson(const v1::ToolCall& call, ChatForm form) {
  std::string function = ordered_json{{"name", call.name()}}.dump();
  const std::string arguments =
      call.arguments_json().empty() ? "{}" : call.arguments_json();
  AddMember(
      "arguments",
      form == ChatForm::kDeepSeek ? ordered_json(arguments).dump() : arguments,
      &function);
  std::string json =
      ordered_json{{"id", call.id()}, {"type", "function"}}.dump();
  AddMember("function", function, &json);
  return json;
}

std::string MessageJson(const v1::ChatMessage& message, ChatForm form) {
  const std::string content = ContentOf(message);
  ordered_json item = {{"role", message.role()}, {"content", content}};
  if (!message.name().empty()) item["name"] = message.name();
  if (!message.reasoning_content().empty()) {
    item["reasoning_content"] = message.reasoning_content();
  }
  if (!message.tool_call_id().empty()) {
    item["tool_call_id"] = message.tool_call_id();
  }
  if (message.tool_calls().empty()) return item.dump();
  const bool null_content =
      form == ChatForm::kNullContent || form == ChatForm::kDeepSeek;
  if (content.empty() && null_content) item["content"] = nullptr;
  std::vector<std::string> calls;
  for (const v1::ToolCall& call : message.tool_calls()) {
    calls.push_back(CallJson(call, form));
  }
  std::string json = item.dump();
  AddMember("tool_calls", List(calls), &json);
  return json;
}

// Behind the messages from `begin` on that are results of calls.
int EndOfResults(const v1::Chat& chat, int begin) {
  int end = begin;
  while (end < chat.messages_size() && chat.messages(end).role() == "tool") {
    ++end;
  }
  return end;
}

// An assistant's message with calls, and those behind it with their results;
// returns where they end.
int AddCallsWithResponses(const v1::Chat& chat, int begin,
                          std::vector<std::string>* messages) {
  const v1::ChatMessage& calling = chat.messages(begin);
  const int end = EndOfResults(chat, begin + 1);
  ordered_json responses = ordered_json::array();
  for (int i = begin + 1; i < end; ++i) {
    const v1::ChatMessage& result = chat.messages(i);
    ordered_json response = {{"response", ContentOf(result)}};
    for (const v1::ToolCall& call : calling.tool_calls()) {
      if (call.id() == result.tool_call_id()) response["name"] = call.name();
    }
    responses.push_back(std::move(response));
  }
  messages->push_back(MessageJson(calling, ChatForm::kToolResponses));
  if (!responses.empty()) {
    AddMember("tool_responses", responses.dump(), &messages->back());
  }
  return end;
}

// A message with one of its calls; `thinking` is of the first alone.
std::string HarmonyCallJson(const std::string& thinking,
                            const v1::ToolCall& call) {
  ordered_json item = {{"role", "assistant"}};
  if (!thinking.empty()) item["thinking"] = thinking;
  std::string json = item.dump();
  AddMember("tool_calls", List({CallJson(call, ChatForm::kHarmony)}), &json);
  return json;
}

// An assistant's message with calls, and those behind it with their results,
// from `begin` on; returns where they end. The template takes a result for that
// of the call before it.
int AddHarmonyCalls(const v1::Chat& chat, int begin,
                    std::vector<std::string>* messages) {
  const v1::ChatMessage& calling = chat.messages(begin);
  const int end = EndOfResults(chat, begin + 1);
  const std::string content = ContentOf(calling);
  const bool both = !calling.reasoning_content().empty() && !content.empty();
  std::string thinking =
      absl::StrCat(calling.reasoning_content(), both ? "\n" : "", content);
  std::vector<bool> told(static_cast<size_t>(end - begin), false);
  const auto tell = [&](int i) {
    if (told[static_cast<size_t>(i - begin)]) return;
    told[static_cast<size_t>(i - begin)] = true;
    messages->push_back(MessageJson(chat.messages(i), ChatForm::kHarmony));
  };
  for (const v1::ToolCall& call : calling.tool_calls()) {
    messages->push_back(HarmonyCallJson(std::exchange(thinking, ""), call));
    for (int i = begin + 1; i < end; ++i) {
      if (chat.messages(i).tool_call_id() == call.id()) tell(i);
    }
  }
  for (int i = begin + 1; i < end; ++i) tell(i);  // of earlier calls
  return end;
}

std::string ToolJson(const v1::Tool& tool, ChatForm form) {
  ordered_json named = {{"name", tool.name()}};
  if (!tool.description().empty() || form == ChatForm::kHarmony) {
    named["description"] = tool.description();
  }
  std::string function = named.dump();
  if (!tool.parameters_json_schema().empty()) {
    AddMember("parameters", tool.parameters_json_schema(), &function);
  }
  std::string json = ordered_json{{"type", "function"}}.dump();
  AddMember("function", function, &json);
  return json;
}

// What a template does with a member whose name ends at `at`.
std::string_view Behind(std::string_view source, size_t at) {
  std::string_view rest = source.substr(at);
  rest.remove_prefix(std::min(rest.size(), rest.find_first_not_of("'\"] ")));
  return rest;
}

// Whether a template has `['arguments'] + ..`, of which an object fails.
bool AddsToArguments(std::string_view source) {
  constexpr std::string_view kName = "arguments";
  for (size_t at = source.find(kName); at != source.npos;
       at = source.find(kName, at + 1)) {
    if (Behind(source, at + kName.size()).starts_with('+')) return true;
  }
  return false;
}

// Whether a template has `content is none` or `['content'] is not none`, and
// nowhere takes an empty text for the same.
bool LooksForNullContent(std::string_view source) {
  constexpr std::string_view kName = "content";
  bool looks = false;
  for (size_t at = source.find(kName); at != source.npos;
       at = source.find(kName, at + 1)) {
    const char before = at == 0 ? ' ' : source[at - 1];
    if (before == '_' || absl::ascii_isalnum(before)) continue;
    const std::string_view rest = Behind(source, at + kName.size());
    if (rest.starts_with("== ''") || rest.starts_with("== \"\"")) return false;
    looks |= rest.starts_with("is none") || rest.starts_with("is not none");
  }
  return looks;
}

}  // namespace

ChatForm ChatFormOf(std::string_view chat_template) {
  if (WritesHarmony(chat_template)) return ChatForm::kHarmony;
  const auto has = [&](std::string_view text) {
    return chat_template.find(text) != std::string_view::npos;
  };
  // Later ones know OpenAI's messages too.
  if (has("tool_responses") && !has("tool_call_id")) {
    return ChatForm::kToolResponses;
  }
  if (!LooksForNullContent(chat_template)) return ChatForm::kUsual;
  return AddsToArguments(chat_template) ? ChatForm::kDeepSeek
                                        : ChatForm::kNullContent;
}

std::string ContentOf(const v1::ChatMessage& message) {
  if (message.parts().empty()) return message.content();
  return absl::StrJoin(message.parts(), "\n",
                       [](std::string* out, const v1::ContentPart& part) {
                         absl::StrAppend(out, part.text());
                       });
}

std::string MessagesJson(const v1::Chat& chat, ChatForm form) {
  std::vector<std::string> messages;
  for (int i = 0; i < chat.messages_size();) {
    const v1::ChatMessage& message = chat.messages(i);
    const bool calls = !message.tool_calls().empty();
    if (calls && form == ChatForm::kHarmony) {
      i = AddHarmonyCalls(chat, i, &messages);
      continue;
    }
    if (calls && form == ChatForm::kToolResponses) {
      i = AddCallsWithResponses(chat, i, &messages);
      continue;
    }
    messages.push_back(MessageJson(message, form));
    ++i;
  }
  return List(messages);
}

std::string ToolsJson(const v1::Chat& chat, ChatForm form) {
  if (!WantsTools(chat)) return "";
  std::vector<std::string> tools;
  for (const v1::Tool& tool : chat.tools()) {
    tools.push_back(ToolJson(tool, form));
  }
  return List(tools);
}

}  // namespace tandem::router
