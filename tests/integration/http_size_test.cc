// SPDX-License-Identifier: Apache-2.0
// Calls over HTTP that are too large to be let in, however idle the router is.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

using nlohmann::json;

class HttpSizeTest : public testing::Test {
 protected:
  void SetUp() override {
    cluster_ = std::make_unique<Cluster>(
        ClusterOptions{.router_arguments = {"--max-requests", "4"}});
    const absl::Status status = cluster_->Start();
    ASSERT_TRUE(status.ok()) << status;
  }
  // The whole answer, up to the peer's close.
  std::string Post(const std::string& path, const json& body) {
    const std::string text = body.dump();
    Socket socket(cluster_->http_port());
    socket.Send(absl::StrCat(
        "POST ", path, " HTTP/1.1\r\nConnection: close\r\n",
        "Content-Type: application/json\r\nContent-Length: ", text.size(),
        "\r\n\r\n", text));
    return socket.Receive();
  }
  double PromptTokens() {
    double sum = 0;
    for (const auto& [name, value] : cluster_->Metrics("router")) {
      if (name.starts_with("tandem_prompt_tokens_total")) sum += value;
    }
    return sum;
  }

  std::unique_ptr<Cluster> cluster_;
};

TEST_F(HttpSizeTest, ACallThatCanNeverFitIsTheClientsError) {
  const json chat = {{{"role", "user"}, {"content", "a"}}};
  const struct {
    const char* path;
    json body;
    const char* param;  // null: it is let in
    int sequences;
  } kCases[] = {
      {"/v1/completions", {{"prompt", {"a", "b", "c"}}, {"n", 2}}, "prompt", 6},
      {"/v1/completions",
       {{"prompt", {"a", "b", "c", "d", "e"}}, {"stream", true}},
       "prompt",
       5},
      {"/v1/completions", {{"prompt", "a"}, {"n", 5}}, "n", 5},
      {"/v1/completions",
       {{"prompt", "a"}, {"n", 2}, {"best_of", 5}},
       "best_of",
       5},
      {"/v1/chat/completions", {{"messages", chat}, {"n", 5}}, "n", 5},
      {"/v1/completions", {{"prompt", {"a", "b"}}, {"n", 2}}, nullptr, 4},
      // Beams are one sequence.
      {"/v1/completions",
       {{"prompt", {"a", "b", "c"}},
        {"n", 2},
        {"use_beam_search", true},
        {"temperature", 0}},
       nullptr,
       3}};
  for (const auto& c : kCases) {
    const double before = PromptTokens();
    json body = c.body;
    body["max_tokens"] = 2;
    const std::string answer = Post(c.path, body);
    SCOPED_TRACE(absl::StrCat(body.dump(), answer));
    if (c.param == nullptr) {
      EXPECT_EQ(answer.substr(9, 3), "200");
      continue;
    }
    EXPECT_EQ(answer.substr(9, 3), "400");
    EXPECT_EQ(answer.find("Retry-After"), std::string::npos);
    const json error =
        json::parse(answer.substr(answer.find("\r\n\r\n") + 4))["error"];
    EXPECT_EQ(error["param"], c.param);
    EXPECT_EQ(error["message"],
              absl::StrCat(c.param, " = ", c.sequences,
                           " sequences: at most 4 of one call, as many as "
                           "this router's --max-requests"));
    EXPECT_EQ(PromptTokens(), before);
  }
  EXPECT_EQ(cluster_->WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
