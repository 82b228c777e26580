// SPDX-License-Identifier: Apache-2.0
#include "router/http/front.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/error.h"
#include "common/version.h"
#include "nlohmann/json.hpp"
#include "router/http/openai_answer.h"
#include "router/http/openai_call.h"

namespace tandem::router {
namespace {

using nlohmann::json;

HttpResponse Json(const json& value) {
  return {.content_type = "application/json",
          .body = value.dump(-1, ' ', false, json::error_handler_t::replace)};
}

absl::Status CheckContentType(const HttpRequest& request) {
  const std::string type =
      absl::AsciiStrToLower(std::string(request.Header("content-type")));
  if (absl::StartsWith(type, "application/json")) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "CONTENT_TYPE",
      absl::StrCat("Content-Type = ", type, ": application/json is needed"));
}

}  // namespace

void HttpFront::Register(HttpServer* server) {
  const auto generate = [&](const char* path, Parse parse) {
    server->HandleLater("POST", path,
                        [this, parse](std::unique_ptr<HttpExchange> exchange) {
                          Generate(parse, std::move(exchange));
                        });
  };
  generate("/v1/chat/completions", &ParseChatCompletion);
  generate("/v1/completions", &ParseCompletion);
  const auto text = [&](const char* path, HttpResponse (HttpFront::*answer)(
                                              const HttpRequest&) const) {
    server->HandleLater(
        "POST", path, [this, answer](std::unique_ptr<HttpExchange> exchange) {
          exchange->Answer((this->*answer)(exchange->request()));
        });
  };
  text("/tokenize", &HttpFront::Tokenize);
  text("/detokenize", &HttpFront::Detokenize);
  server->Handle("GET", "/v1/models",
                 [this](const HttpRequest&) { return Models(); });
  server->Handle("GET", absl::StrCat("/v1/models/", intake_->Limits().model),
                 [this](const HttpRequest&) { return Model(); });
  server->Handle("GET", "/version", [](const HttpRequest&) {
    return Json({{"version", kVersion}});
  });
}

void HttpFront::Generate(Parse parse,
                         std::unique_ptr<HttpExchange> exchange) const {
  const HttpRequest& http = exchange->request();
  std::vector<std::pair<std::string, std::string>> headers;
  const std::string id(http.Header("x-request-id"));
  if (!id.empty() && ValidateRequestId(id).ok()) {
    headers.emplace_back("X-Request-Id", id);
  }
  const auto refuse = [&](const absl::Status& status) {
    HttpResponse response = ErrorResponse(status);
    response.headers.insert(response.headers.end(), headers.begin(),
                            headers.end());
    exchange->Answer(std::move(response));
  };
  if (const absl::Status type = CheckContentType(http); !type.ok()) {
    HttpResponse response = ErrorResponse(type);
    response.code = 415;
    return exchange->Answer(std::move(response));
  }
  absl::StatusOr<OpenAiRequest> request = parse(http.body);
  if (!request.ok()) {
    intake_->CountRefused(Api::kHttp, request.status());
    return refuse(request.status());
  }
  std::vector<AdmittedRequest> admitted;
  for (v1::GenerateRequest& prompt : request->prompts) {
    // Several prompts cannot share one name.
    const bool single = request->prompts.size() == 1;
    if (!single) prompt.clear_request_id();
    absl::StatusOr<AdmittedRequest> one = intake_->Prepare(
        Api::kHttp, prompt, single ? id : "", absl::InfiniteDuration());
    if (!one.ok()) return refuse(one.status());
    admitted.push_back(*std::move(one));
  }
  OpenAiAnswer answer(*request, intake_->Limits().model,
                      absl::ToUnixSeconds(absl::Now()));
  loop_->Post([loop = loop_, core = core_, exchange = std::move(exchange),
               answer = std::move(answer), admitted = std::move(admitted),
               headers = std::move(headers), stream = request->stream,
               max_bytes = max_bytes_]() mutable {
    const auto call = std::make_shared<OpenAiCall>(
        loop, std::move(exchange), std::move(answer),
        static_cast<int>(admitted.size()), stream, max_bytes,
        std::move(headers));
    call->Start();
    for (size_t i = 0; i < admitted.size() && !call->ended(); ++i) {
      core->Submit(std::move(admitted[i]), call->StreamOf(static_cast<int>(i)));
    }
  });
}

// vLLM lists adapters as models that have a parent.
HttpResponse HttpFront::Models() const {
  json data = json::array({json::parse(Model().body)});
  const std::vector<v1::ModelInfo> infos = intake_->Infos();
  for (size_t i = 1; i < infos.size(); ++i) {
    data.push_back(data[0]);
    data.back()["id"] = infos[i].model();
    data.back()["parent"] = infos[i].parent();
  }
  return Json({{"object", "list"}, {"data", std::move(data)}});
}

HttpResponse HttpFront::Model() const {
  const ModelLimits limits = intake_->Limits();
  return Json({{"id", limits.model},
               {"object", "model"},
               {"created", 0},
               {"owned_by", "tandem"},
               {"root", limits.model},
               {"parent", nullptr},
               {"max_model_len", limits.context_length}});
}

HttpResponse HttpFront::Tokenize(const HttpRequest& request) const {
  absl::Status status = CheckContentType(request);
  if (!status.ok()) return ErrorResponse(status);
  const absl::StatusOr<v1::TokenizeRequest> parsed =
      ParseTokenize(request.body);
  if (!parsed.ok()) return ErrorResponse(parsed.status());
  const absl::StatusOr<v1::TokenizeResponse> answer =
      intake_->Tokenize(*parsed);
  if (!answer.ok()) return ErrorResponse(answer.status());
  json body = {{"count", answer->token_ids_size()},
               {"max_model_len", intake_->Limits().context_length},
               {"tokens", answer->token_ids()},
               {"token_strs", nullptr}};
  if (parsed->return_tokens()) {
    body["token_strs"] = json::array();
    for (const std::string& token : answer->tokens()) {
      body["token_strs"].push_back(token);
    }
  }
  return Json(body);
}

HttpResponse HttpFront::Detokenize(const HttpRequest& request) const {
  absl::Status status = CheckContentType(request);
  if (!status.ok()) return ErrorResponse(status);
  const absl::StatusOr<v1::DetokenizeRequest> parsed =
      ParseDetokenize(request.body);
  if (!parsed.ok()) return ErrorResponse(parsed.status());
  const absl::StatusOr<v1::DetokenizeResponse> answer =
      intake_->Detokenize(*parsed);
  if (!answer.ok()) return ErrorResponse(answer.status());
  return Json({{"prompt", answer->text()}});
}

}  // namespace tandem::router
