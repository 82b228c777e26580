// SPDX-License-Identifier: Apache-2.0
// The bad requests of tests/router/validate/bad_requests.h at both ports for
// clients of a real router: each is refused with the right status that names
// the field, and the next good one is served.

#include "tests/router/validate/bad_requests.h"

#include <google/protobuf/util/json_util.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/error.h"
#include "gtest/gtest.h"
#include "tests/common/http/socket.h"
#include "tests/inner_words.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using router::Probe;
using router::Row;

constexpr size_t kMaxRequestBytes = 1 << 20;

// ---- As OpenAI's API has it

json FunctionOf(const json& from, const char* theirs, const char* ours) {
  json function = {{"name", from.value("name", "")}};
  if (from.contains("description")) {
    function["description"] = from["description"];
  }
  if (from.contains(ours)) function[theirs] = from[ours];
  return function;
}

json Message(const json& from) {
  json message = from;
  if (const auto parts = from.find("parts"); parts != from.end()) {
    message.erase("parts");
    for (json part : *parts) {
      part["type"] = "text";
      message["content"].push_back(std::move(part));
    }
  }
  if (const auto calls = from.find("tool_calls"); calls != from.end()) {
    message["tool_calls"] = json::array();
    for (const json& call : *calls) {
      message["tool_calls"].push_back(
          {{"id", call.value("id", "")},
           {"type", "function"},
           {"function", FunctionOf(call, "arguments", "arguments_json")}});
    }
  }
  return message;
}

void AddChat(const json& chat, json* body) {
  for (const auto& [name, value] : chat.items()) {
    if (name == "messages") {
      for (const json& message : value) {
        (*body)["messages"].push_back(Message(message));
      }
    } else if (name == "tools") {
      for (const json& tool : value) {
        json function =
            FunctionOf(tool, "parameters", "parameters_json_schema");
        if (function.contains("parameters")) {
          // What is no JSON stays a string, which is wrong there.
          const std::string text = function["parameters"];
          const json parsed = json::parse(text, nullptr, false);
          if (!parsed.is_discarded()) function["parameters"] = parsed;
        }
        (*body)["tools"].push_back(
            {{"type", "function"}, {"function", std::move(function)}});
      }
    } else if (name == "tool_choice_function") {
      (*body)["tool_choice"] = {{"type", "function"},
                                {"function", {{"name", value}}}};
    } else {
      (*body)[name] = value;
    }
  }
}

json Body(v1::GenerateRequest request) {
  json body;
  if (request.stopping().has_max_time()) {
    body["max_time"] = request.stopping().max_time().seconds();
    request.mutable_stopping()->clear_max_time();
  }
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  EXPECT_TRUE(MessageToJsonString(request, &text, options).ok());
  const json all = json::parse(text);
  for (const auto& [name, value] : all.items()) {
    if (name == "text") {
      body["prompt"] = value;
    } else if (name == "token_ids") {
      body["prompt"] = value["ids"];
    } else if (name == "chat") {
      AddChat(value, &body);
    } else if (name == "structured") {
      for (const auto& [kind, constraint] : value.items()) {
        body["structured_outputs"][kind == "json_schema" ? "json" : kind] =
            kind == "choice" ? constraint["values"] : constraint;
      }
    } else if (value.is_object()) {  // a group of fields, which it has flat
      body.update(value);
    } else {
      body[name] = value;
    }
  }
  if (request.has_beam()) {
    body["use_beam_search"] = true;
    body["n"] = request.beam().width();
    body.erase("width");
  }
  return body;
}

// Of the error for that row; empty: the API has no such field, or spells the
// bad values in a way of which they are good ones.
std::string Param(const Row& row) {
  static const std::map<std::string, std::string> kOthers = {
      {"adapter", ""},
      {"stopping.max_time.nanos", ""},
      {"structured.json_object", ""},
      {"text", "prompt"},
      {"token_ids.ids", "prompt"},
      {"beam.width", "n"},
      {"output.attention.layers", "attention"},
      {"output.attention.mean", "attention"},
      {"structured.json_schema", "structured_outputs.json"},
      {"structured.choice.values", "structured_outputs.choice"},
      {"chat.tool_choice_function", "tool_choice"}};
  if (const auto other = kOthers.find(row.path); other != kOthers.end()) {
    return other->second;
  }
  const std::string& field = row.field.empty() ? row.path : row.field;
  const size_t dot = field.find('.');
  if (dot == std::string::npos) return field;
  if (absl::StartsWith(field, "structured.")) {
    return absl::StrCat("structured_outputs", field.substr(dot));
  }
  return absl::StrReplaceAll(
      field.substr(dot + 1),
      {{"].name", "].function.name"},
       {"].arguments_json", "].function.arguments"},
       {"].parameters_json_schema", "].function.parameters"}});
}

// ---- Both ports

class BadRequestsTest : public testing::Test {
 protected:
  BadRequestsTest() { std::ofstream(template_) << router::kToolTemplate; }
  ~BadRequestsTest() override { std::remove(template_.c_str()); }

  void SetUp() override {
    const absl::Status status = cluster_.Start();
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(Post("/v1/completions", good_).first, 200);
    ASSERT_EQ(cluster_.WhatIsLeft(), "");
  }

  // The status, and the body of an answer in one piece.
  std::pair<int, json> Post(const std::string& path, const json& body) {
    const std::string text = body.dump();
    Socket socket(cluster_.http_port());
    socket.Send(absl::StrCat("POST ", path,
                             " HTTP/1.1\r\nConnection: close\r\n"
                             "Content-Type: application/json\r\n"
                             "Content-Length: ",
                             text.size(), "\r\n\r\n", text));
    const std::string raw = socket.Receive();
    const size_t end = raw.find("\r\n\r\n");
    if (raw.size() < 12 || end == std::string::npos) return {0, json()};
    return {std::stoi(raw.substr(9, 3)),
            json::parse(raw.substr(end + 4), nullptr, false)};
  }

  void ExpectRefused(const Row& row, const v1::GenerateRequest& request) {
    const absl::Status status = cluster_.Generate(request).status;
    ++sent_;
    if (request.ByteSizeLong() > kMaxRequestBytes) {
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    } else {
      EXPECT_EQ(status.code(), row.code) << status;
      EXPECT_NE(ErrorReason(status), "") << status;
      if (absl::IsInvalidArgument(status)) {
        EXPECT_EQ(ErrorMetadata(status)["field"],
                  row.field.empty() ? row.path : row.field)
            << status;
      }
    }
    EXPECT_EQ(InnerWordIn(status), "") << status;
    EXPECT_TRUE(cluster_.Generate(TextRequest("Once", 1)).status.ok());
  }

  void ExpectRefusedOverHttp(const Row& row,
                             const v1::GenerateRequest& request) {
    const std::string param = Param(row);
    if (param.empty()) return;
    const json body = Body(request);
    const auto [code, answer] = Post(
        request.has_chat() ? "/v1/chat/completions" : "/v1/completions", body);
    ++posted_;
    ASSERT_TRUE(answer.is_object() && answer.contains("error"))
        << code << answer;
    const json& error = answer["error"];
    EXPECT_NE(error["message"], "");
    if (body.dump().size() > kMaxRequestBytes) {
      EXPECT_EQ(code, 413) << answer;
    } else {
      EXPECT_EQ(code, absl::IsNotFound(absl::Status(row.code, "")) ? 404 : 400)
          << answer;
      if (code == 400) {
        EXPECT_EQ(error["param"], param) << answer;
      }
      EXPECT_NE(error["code"], json()) << answer;
    }
    EXPECT_EQ(InnerWordIn(absl::InvalidArgumentError(
                  error["message"].get<std::string>())),
              "");
    EXPECT_EQ(Post("/v1/completions", good_).first, 200);
  }

  const std::string template_ = absl::StrCat(
      testing::TempDir(), "/bad_requests_test_", getpid(), ".jinja");
  const json good_ = {{"prompt", "Once"}, {"max_tokens", 1}};
  Cluster cluster_{{.router_arguments = {"--chat-template", template_}}};
  int sent_ = 0, posted_ = 0;
};

TEST_F(BadRequestsTest, AreRefusedByNameAndTheNextIsServed) {
  v1::GetModelResponse answer;
  grpc::ClientContext context;
  ASSERT_TRUE(cluster_.Client()->GetModel(&context, {}, &answer).ok());
  const v1::ModelInfo& model = answer.model();
  for (const Row& row :
       router::BadRequests({.vocabulary = model.vocabulary_size(),
       .context = model.context_length(),
       .end_tokens = model.eos_token_ids_size()})) {
    for (const Probe& probe : row.probes) {
      if (probe.good) continue;
      SCOPED_TRACE(absl::StrCat(row.path, " = ", probe.what.substr(0, 80)));
      const v1::GenerateRequest request = RequestWith(row, probe);
      ExpectRefused(row, request);
      ExpectRefusedOverHttp(row, request);
    }
  }
  EXPECT_GE(sent_, 400);
  EXPECT_GE(posted_, 400);
  RecordProperty("sent", sent_);
  RecordProperty("posted", posted_);
  EXPECT_EQ(cluster_.WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
