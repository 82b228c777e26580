// SPDX-License-Identifier: Apache-2.0
// A model that answers in messages, as gpt-oss does, served by real processes:
// what clients of OpenAI's API get of it, and give back.

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

using nlohmann::json;

// Its weights say what it writes. No flag says that it is such a model.
class HttpHarmonyTest : public testing::Test {
 protected:
  void SetUp() override {
    model_ = absl::StrCat(testing::TempDir(), "/harmony_test_", getpid());
    ASSERT_EQ(std::system(absl::StrCat("python3 " TANDEM_SOURCE_DIR
                                       "/tests/clients/make_scripted_model.py "
                                       "openai ",
                                       model_)
                              .c_str()),
              0);
    cluster_ = std::make_unique<Cluster>(ClusterOptions{.model_dir = model_});
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
    chat_ = {{"messages", {{{"role", "user"}, {"content", "Is it warm?"}}}},
             {"temperature", 0}};
  }
  void TearDown() override {
    if (cluster_ != nullptr && !HasFatalFailure()) {
      EXPECT_EQ(cluster_->WhatIsLeft(), "");
    }
    cluster_.reset();
    std::filesystem::remove_all(model_);
  }

  std::string Post(const std::string& path, const json& body) {
    const std::string text = body.dump();
    Socket socket(cluster_->http_port());
    socket.Send(
        absl::StrCat("POST ", path, " HTTP/1.1\r\nConnection: close\r\n",
                     "Content-Type: application/json\r\n",
                     "Content-Length: ", text.size(), "\r\n\r\n", text));
    return socket.Receive();
  }
  json Ask(const std::string& path, const json& body) {
    const std::string raw = Post(path, body);
    const size_t begin = raw.find("\r\n\r\n");
    EXPECT_TRUE(absl::StartsWith(raw, "HTTP/1.1 200")) << raw;
    return json::parse(raw.substr(std::min(raw.size(), begin)), nullptr, false);
  }
  json Chat() { return Ask("/v1/chat/completions", chat_); }

  std::string model_;
  std::unique_ptr<Cluster> cluster_;
  json chat_;
};

TEST_F(HttpHarmonyTest, ThoughtsAndAnswersComeApart) {
  const json answer = Chat();
  const json& choice = answer["choices"][0];
  EXPECT_EQ(choice["message"]["reasoning_content"], "I should look.");
  EXPECT_EQ(choice["message"]["content"], "I have no tools here.");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(answer["usage"]["completion_tokens"], 13);
  EXPECT_EQ(answer["usage"]["completion_tokens_details"]["reasoning_tokens"],
            3);

  chat_["stream"] = true;
  std::string reasoning, content;
  for (const absl::string_view line :
       absl::StrSplit(Post("/v1/chat/completions", chat_), '\n')) {
    if (!absl::StartsWith(line, "data: {")) continue;
    const json chunk =
        json::parse(absl::StripPrefix(line, "data: "), nullptr, false);
    ASSERT_FALSE(chunk.is_discarded()) << line;
    if (chunk["choices"].empty()) continue;
    const json& delta = chunk["choices"][0]["delta"];
    EXPECT_TRUE(content.empty() || !delta.contains("reasoning_content"));
    reasoning += delta.value("reasoning_content", "");
    if (delta.contains("content") && delta["content"].is_string()) {
      content += delta["content"].get<std::string>();
    }
  }
  EXPECT_EQ(reasoning, "I should look.");
  EXPECT_EQ(content, "I have no tools here.");
}

TEST_F(HttpHarmonyTest, CallsComeAndGoBackWithWhatLedToThem) {
  chat_["tools"] = {
      {{"type", "function"}, {"function", {{"name", "get_weather"}}}}};
  json message = Chat()["choices"][0];
  EXPECT_EQ(message["finish_reason"], "tool_calls");
  message = message["message"];
  EXPECT_EQ(message["content"], nullptr);
  ASSERT_EQ(message["tool_calls"].size(), 1u);
  const json call = message["tool_calls"][0];
  EXPECT_EQ(call["function"]["name"], "get_weather");
  EXPECT_EQ(call["function"]["arguments"], R"({"city": "Rome", "days": 2})");

  message["reasoning_content"] = "Rome, then.";
  chat_["messages"].push_back(message);
  chat_["messages"].push_back(
      {{"role", "tool"}, {"tool_call_id", call["id"]}, {"content", "21"}});
  EXPECT_EQ(Chat()["choices"][0]["message"]["content"], "It is warm in Rome.");
  // The prompt's text, token by token.
  chat_["return_token_strs"] = true;
  std::string prompt;
  const json tokenized = Ask("/tokenize", chat_);
  for (const json& token : tokenized["token_strs"]) {
    prompt += token.get<std::string>();
  }
  EXPECT_NE(prompt.find("assistant<|message|>Rome, then."), std::string::npos)
      << prompt;
}

// Whoever draws its tokens.
TEST_F(HttpHarmonyTest, WhatMustMatchIsInTheMessage) {
  chat_["chat_template_kwargs"] = {{"answer", true}};
  chat_["structured_outputs"] = {{"choice", {"warm", "cold"}}};
  for (const char* const placement : {"local", "split"}) {
    chat_["placement"] = placement;
    const json choice = Chat()["choices"][0];
    EXPECT_EQ(choice["message"]["content"], "cold");
    EXPECT_EQ(choice["message"].value("reasoning_content", ""), "");
    EXPECT_EQ(choice["finish_reason"], "stop");
  }
}

}  // namespace
}  // namespace tandem::integration
