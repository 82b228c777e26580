// SPDX-License-Identifier: Apache-2.0
// Chats as their templates are given them.

#include "router/intake/chat_json.h"

#include <google/protobuf/text_format.h>

#include <string>

#include "absl/strings/str_cat.h"
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

TEST(ChatJson, CallsWithoutATextHaveAnEmptyOneOrNone) {
  const v1::Chat chat = Parse(R"pb(
    messages {
      role: "assistant"
      tool_calls { id: "c1" name: "f" arguments_json: "{}" }
    }
    messages { role: "assistant" })pb");
  const std::string calls = R"("tool_calls":[{"id":"c1","type":"function",)"
                            R"("function":{"name":"f","arguments":{}}}]},)"
                            R"({"role":"assistant","content":""}])";
  EXPECT_EQ(MessagesJson(chat, ChatForm::kUsual),
            R"([{"role":"assistant","content":"",)" + calls);
  EXPECT_EQ(MessagesJson(chat, ChatForm::kNullContent),
            R"([{"role":"assistant","content":null,)" + calls);
}

TEST(ChatJson, ArgumentsAreTextForDeepSeek) {
  const v1::Chat chat = Parse(R"pb(
    messages {
      role: "assistant"
      content: "So:"
      tool_calls {
        id: "c1"
        name: "f"
        arguments_json: "{\"b\": 1, \"a\": \"\\n\"}"
      }
      tool_calls { id: "c2" name: "g" }
    })pb");
  EXPECT_EQ(MessagesJson(chat, ChatForm::kDeepSeek),
            R"([{"role":"assistant","content":"So:","tool_calls":[)"
            R"({"id":"c1","type":"function","function":{"name":"f",)"
            R"("arguments":"{\"b\": 1, \"a\": \"\\n\"}"}},)"
            R"({"id":"c2","type":"function","function":{"name":"g",)"
            R"("arguments":"{}"}}]}])");
}

TEST(ChatJson, ResultsMayBeOfTheMessageThatCalled) {
  const v1::Chat chat = Parse(R"pb(
    messages {
      role: "assistant"
      tool_calls { id: "c1" name: "f" }
      tool_calls { id: "c2" name: "g" }
    }
    messages { role: "tool" tool_call_id: "c2" content: "{\"a\": 1}" }
    messages {
      role: "tool"
      tool_call_id: "c1"
      parts { text: "x" }
      parts { text: "y" }
    }
    messages {
      role: "assistant"
      tool_calls { id: "c3" name: "g" }
    }
    messages { role: "user" content: "No." })pb");
  const auto calls = [](const char* id, const char* name) {
    return absl::StrCat(R"({"id":")", id, R"(","type":"function",)",
                        R"("function":{"name":")", name,
                        R"(","arguments":{}}})");
  };
  EXPECT_EQ(
      MessagesJson(chat, ChatForm::kToolResponses),
      absl::StrCat(R"([{"role":"assistant","content":"","tool_calls":[)",
                   calls("c1", "f"), ",", calls("c2", "g"),
                   R"(],"tool_responses":[)",
                   R"({"response":"{\"a\": 1}","name":"g"},)",
                   R"({"response":"x\ny","name":"f"}]},)",
                   R"({"role":"assistant","content":"","tool_calls":[)",
                   calls("c3", "g"), R"(]},{"role":"user","content":"No."}])"));
}

TEST(ChatJson, NullContentIsForTemplatesThatLookForIt) {
  const struct {
    const char* source;
    ChatForm form;
  } cases[] = {
      {"{{ message.content }}", ChatForm::kUsual},
      {"{% if message['content'] is none %}", ChatForm::kNullContent},
      {"{% if message[\"content\"] is not none %}", ChatForm::kNullContent},
      {"{% elif content is none %}", ChatForm::kNullContent},
      {"{% if message.reasoning_content is not none %}", ChatForm::kUsual},
      {"{% if message.content is not string %}", ChatForm::kUsual},
      {"{% if m.content is none or m.content == '' %}", ChatForm::kUsual},
      {"{% if m['content'] == \"\" or m['content'] is none %}",
       ChatForm::kUsual},
      {"{{ 'content", ChatForm::kUsual},
      {"<|channel|>{% if content is none %}<|message|>", ChatForm::kHarmony},
      {"{% if content is none %}{{ call['arguments'] + '<' }}",
       ChatForm::kDeepSeek},
      {"{% if content is none %}{{ '>' + call.arguments+'<' }}",
       ChatForm::kDeepSeek},
      {"{% if content is none %}{{ '>' + call['arguments']|tojson + '<' }}",
       ChatForm::kNullContent},
      {"{% if content is none %}{{ '>' + call.arguments",
       ChatForm::kNullContent},
      {"{{ call['arguments'] + '<' }}", ChatForm::kUsual},
      {"{% for r in m['tool_responses'] %}", ChatForm::kToolResponses},
      {"{% for r in m['tool_responses'] %}{{ n.tool_call_id }}",
       ChatForm::kUsual},
  };
  for (const auto& c : cases)
    EXPECT_EQ(ChatFormOf(c.source), c.form) << c.source;
}

}  // namespace
}  // namespace tandem::router
