// SPDX-License-Identifier: Apache-2.0
#include "cli/chat/conversation.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::chat {

using nlohmann::json;

bool Conversation::ReopenLastQuestion() {
  if (!messages_.empty() && messages_.back().role == "assistant") {
    messages_.pop_back();
  }
  return !messages_.empty() && messages_.back().role == "user";
}

void Conversation::DropOpenQuestion() {
  if (!messages_.empty() && messages_.back().role == "user") {
    messages_.pop_back();
  }
}

void Conversation::Fill(v1::Chat* chat) const {
  const auto add = [chat](const std::string& role, const std::string& content) {
    v1::ChatMessage* const message = chat->add_messages();
    message->set_role(role);
    message->set_content(content);
  };
  if (!system_.empty()) add("system", system_);
  for (const Message& message : messages_) add(message.role, message.content);
}

std::string Conversation::ToJson() const {
  json list = json::array();
  if (!system_.empty()) {
    list.push_back({{"role", "system"}, {"content", system_}});
  }
  for (const Message& message : messages_) {
    list.push_back({{"role", message.role}, {"content", message.content}});
  }
  return json{{"messages", list}}.dump(1, ' ', false,
                                       json::error_handler_t::replace) +
         "\n";
}

absl::Status Conversation::FromJson(std::string_view text) {
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto list = object.is_object() ? object.find("messages") : object.end();
  if (!object.is_object() || list == object.end() || !list->is_array()) {
    return absl::InvalidArgumentError(
        "expected {\"messages\": [{\"role\": ..., \"content\": ...}, ...]}");
  }
  Conversation read;
  for (size_t i = 0; i < list->size(); ++i) {
    const json& entry = (*list)[i];
    const auto field = [&](const char* name) -> const std::string* {
      const auto found = entry.is_object() ? entry.find(name) : entry.end();
      return entry.is_object() && found != entry.end()
                 ? found->get_ptr<const std::string*>()
                 : nullptr;
    };
    const std::string* const role = field("role");
    const std::string* const content = field("content");
    if (role == nullptr || content == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("messages[", i,
                       "]: role and content must both be there, as strings"));
    }
    if (*role == "system" && read.messages_.empty()) {
      read.system_ = *content;
    } else {
      read.Add(*role, *content);
    }
  }
  *this = std::move(read);
  return absl::OkStatus();
}

}  // namespace tandem::chat
