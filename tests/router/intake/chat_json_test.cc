// SPDX-License-Identifier: Apache-2.0
// Chats as their templates are given them.

#include "router/intake/chat_json.h"

#include <google/protobuf/text_format.h>

#include <string>

#include "gtest/gtest.h"

namespace tandem::router {
namespace {

v1::Chat Parse(const std::string& text) {
  v1::Chat chat;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &chat));
  return chat;
}

TEST(ChatJson, EachPartBeginsALine) {
  const v1::Chat chat = Parse(R"pb(
    messages { role: "user" content: "whole" }
    messages {
      role: "user"
      parts { text: "one" }
    }
    messages {
      role: "user"
      parts { text: "Look:" }
      parts { text: "two" }
    })pb");
  EXPECT_EQ(MessagesJson(chat, ChatForm::kUsual),
            R"([{"role":"user","content":"whole"},)"
            R"({"role":"user","content":"one"},)"
            R"({"role":"user","content":"Look:\ntwo"}])");
}

}  // namespace
}  // namespace tandem::router
