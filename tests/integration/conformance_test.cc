// SPDX-License-Identifier: Apache-2.0
// tests/sdk/conformance.json through the generated C++ stubs and the channel
// that the command line makes: what the other languages' clients are held to.

#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "cli/connect.h"
#include "common/error.h"
#include "common/rpc/status.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {
namespace {

using nlohmann::json;
using Stub = v1::InferenceService::Stub;

// Where `got` is not what conformance.json means by `want`; or "".
std::string Differs(const json& want, const json& got, const std::string& at) {
  if (want.is_number()) {
    const double number = got.is_number() ? got.get<double>() : 0;
    if (!got.is_null() && !got.is_number()) {
      return absl::StrCat(at, ": ", got.dump());
    }
    if (std::abs(want.get<double>() - number) <= 1e-3) return "";
  } else if (want.is_object() && got.is_object()) {
    for (const auto& [key, value] : want.items()) {
      const std::string wrong =
          Differs(value, got.contains(key) ? got[key] : json(), at + "." + key);
      if (!wrong.empty()) return wrong;
    }
    return "";
  } else if (want.is_array() && got.is_array() && want.size() == got.size()) {
    for (size_t i = 0; i < want.size(); ++i) {
      const std::string wrong =
          Differs(want[i], got[i], absl::StrCat(at, "[", i, "]"));
      if (!wrong.empty()) return wrong;
    }
    return "";
  } else if (want == got) {
    return "";
  }
  return absl::StrCat(at, ": ", got.dump(), ", not ", want.dump());
}

json ToJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  EXPECT_TRUE(
      google::protobuf::util::MessageToJsonString(message, &text, options)
          .ok());
  return json::parse(text);
}

template <typename Request>
Request FromJson(const json& request) {
  Request message;
  EXPECT_TRUE(
      google::protobuf::util::JsonStringToMessage(request.dump(), &message)
          .ok())
      << request;
  return message;
}

// The stream, folded as GenerateOnce folds it.
grpc::Status Collect(Stub* stub, const json& c, grpc::ClientContext* context,
                     v1::GenerateOnceResponse* answer) {
  const auto reader =
      stub->Generate(context, FromJson<v1::GenerateRequest>(c.at("request")));
  std::map<int, v1::GeneratedSequence> sequences;
  v1::GenerateResponse event;
  int deltas = 0;
  while (reader->Read(&event)) {
    if (!event.request_id().empty()) {
      answer->set_request_id(event.request_id());
    }
    if (event.has_started()) *answer->mutable_started() = event.started();
    if (event.has_prompt_logprobs()) {
      answer->mutable_prompt_logprobs()->MergeFrom(
          event.prompt_logprobs().tokens());
    }
    if (event.has_delta()) {
      v1::GeneratedSequence& sequence = sequences[event.delta().index()];
      sequence.set_index(event.delta().index());
      sequence.mutable_text()->append(event.delta().text());
      sequence.mutable_token_ids()->MergeFrom(event.delta().token_ids());
      sequence.mutable_logprobs()->MergeFrom(event.delta().logprobs());
      if (++deltas == c.value("cancel_after_deltas", 0)) context->TryCancel();
    }
    if (event.has_finished()) {
      *sequences[event.finished().index()].mutable_finished() =
          event.finished();
    }
    if (event.has_done()) *answer->mutable_done() = event.done();
  }
  for (const auto& [index, sequence] : sequences) {
    *answer->add_sequences() = sequence;
  }
  return reader->Finish();
}

template <typename Request, typename Response>
grpc::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*,
                                               const Request&, Response*),
                  Stub* stub, const json& c, grpc::ClientContext* context,
                  json* answer) {
  Response response;
  const grpc::Status status =
      (stub->*method)(context, FromJson<Request>(c.at("request")), &response);
  *answer = ToJson(response);
  return status;
}

grpc::Status RunCase(Stub* stub, const json& c, grpc::ClientContext* context,
                     json* answer) {
  const std::string call = c.at("call");
  if (call == "generate") {
    v1::GenerateOnceResponse folded;
    const grpc::Status status = Collect(stub, c, context, &folded);
    *answer = ToJson(folded);
    return status;
  }
  if (call == "generate_once") {
    return Call(&Stub::GenerateOnce, stub, c, context, answer);
  }
  if (call == "tokenize") {
    return Call(&Stub::Tokenize, stub, c, context, answer);
  }
  if (call == "detokenize") {
    return Call(&Stub::Detokenize, stub, c, context, answer);
  }
  if (call == "get_model") {
    return Call(&Stub::GetModel, stub, c, context, answer);
  }
  EXPECT_EQ(call, "list_models");
  return Call(&Stub::ListModels, stub, c, context, answer);
}

TEST(ConformanceTest, TheListForAllClientsHoldsForStubs) {
  std::ifstream file(TANDEM_SOURCE_DIR "/tests/sdk/conformance.json");
  ASSERT_TRUE(file.good());
  const json cases = json::parse(file).at("cases");
  ASSERT_GT(cases.size(), 20u);
  Cluster cluster({});
  ASSERT_TRUE(cluster.Start().ok());
  const auto channel =
      cli::Connect({.address = absl::StrCat("127.0.0.1:", cluster.grpc_port()),
                    .tls_cert = {},
                    .tls_key = {},
                    .tls_ca = {}});
  ASSERT_TRUE(channel.ok());
  const auto stub = v1::InferenceService::NewStub(*channel);
  for (const json& c : cases) {
    SCOPED_TRACE(c.at("name").get<std::string>());
    grpc::ClientContext context;
    context.set_deadline(
        std::chrono::system_clock::now() +
        std::chrono::milliseconds(c.value("timeout_ms", 60000)));
    json answer;
    const absl::Status status =
        rpc::FromGrpc(RunCase(stub.get(), c, &context, &answer));
    if (!c.contains("error")) {
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(Differs(c.at("expect"), answer, ""), "");
      continue;
    }
    const std::map<std::string, std::string> metadata = ErrorMetadata(status);
    const auto field = metadata.find("field");
    EXPECT_EQ(Differs(c.at("error"),
                      {{"code", absl::StatusCodeToString(status.code())},
                       {"reason", ErrorReason(status)},
                       {"field", field == metadata.end() ? "" : field->second}},
                      "error"),
              "")
        << status;
  }
  EXPECT_EQ(cluster.WhatIsLeft(), "");
}

}  // namespace
}  // namespace tandem::integration
