// SPDX-License-Identifier: Apache-2.0
#include "router/http/front.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "common/error.h"
#include "common/random.h"
#include "common/version.h"
#include "nlohmann/json.hpp"
#include "router/http/openai_answer.h"
#include "router/http/openai_call.h"
#include "router/intake/charged_stream.h"
#include "router/validate/errors.h"

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
  const absl::string_view media = type;
  if (absl::StripAsciiWhitespace(media.substr(0, media.find(';'))) ==
      "application/json") {
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kInvalidArgument, "CONTENT_TYPE",
      absl::StrCat("Content-Type = ", type.empty() ? "(none)" : type,
                   ": application/json is needed"));
}

template <typename Message>
absl::StatusOr<Message> Parsed(
    const HttpRequest& request,
    absl::StatusOr<Message> (*parse)(std::string_view body)) {
  const absl::Status type = CheckContentType(request);
  if (!type.ok()) return type;
  return parse(request.body);
}

// Of one prompt, as RouterCore::Admit counts them: all beams are one.
int64_t Sequences(const v1::GenerateRequest& request) {
  const v1::SamplingOptions& sampling = request.sampling();
  if (request.has_beam()) return 1;
  return std::max(1,
                  sampling.has_best_of() ? sampling.best_of() : sampling.n());
}

// 0.7 rather than the nearest float's 0.699999988.
double Rounded(float value) {
  return std::round(static_cast<double>(value) * 1e6) / 1e6;
}

constexpr char kChatCompletions[] = "/v1/chat/completions";
constexpr char kCompletions[] = "/v1/completions";
constexpr char kModels[] = "/v1/models/";
constexpr char kEvents[] = "/v1/tandem/events";
constexpr char kLoadAdapter[] = "/v1/load_lora_adapter";
constexpr char kUnloadAdapter[] = "/v1/unload_lora_adapter";
constexpr char kRequestIdHeader[] = "X-Request-Id";

// Names in paths; what is no escape stays as it is.
std::string PercentDecoded(std::string_view text) {
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() &&
        absl::ascii_isxdigit(static_cast<unsigned char>(text[i + 1])) &&
        absl::ascii_isxdigit(static_cast<unsigned char>(text[i + 2]))) {
      decoded += absl::HexStringToBytes(std::string(text.substr(i + 1, 2)));
      i += 2;
    } else {
      decoded += text[i];
    }
  }
  return decoded;
}

// As vLLM lists models, and adapters as models that have a parent.
json Card(const v1::ModelInfo& info, int max_model_len) {
  json card = {{"id", info.model()},
               {"object", "model"},
               {"created", 0},
               {"owned_by", "tandem"},
               {"root", info.parent().empty() ? info.model() : info.parent()},
               {"parent", nullptr},
               {"max_model_len", max_model_len}};
  if (!info.parent().empty()) card["parent"] = info.parent();
  return card;
}

// In vLLM's words.
AdapterControl::Done Answering(const char* done,
                               std::unique_ptr<HttpExchange> exchange) {
  return [done, exchange = std::move(exchange)](
             absl::StatusOr<v1::LoraAdapter> adapter) {
    if (!adapter.ok()) {
      exchange->Answer(ErrorResponse(adapter.status()));
      return;
    }
    exchange->Answer(
        {.body = absl::StrCat("Success: LoRA adapter '", adapter->lora_name(),
                              "' ", done, " successfully.")});
  };
}

}  // namespace

void HttpFront::Register(HttpServer* server) {
  if (intake_->access().closed()) {
    server->SetGuard([this](HttpRequest* head) { return Guard(head); });
    server->Open("/version");
  }
  const auto generate = [&](const char* path, Parse parse) {
    server->HandleLater(
        "POST", path,
        [this, parse](std::unique_ptr<HttpExchange> exchange) {
          Generate(parse, std::move(exchange));
        },
        [this](const HttpRequest& http) { return RefuseWhenFull(http); });
  };
  generate(kChatCompletions, &ParseChatCompletion);
  generate(kCompletions, &ParseCompletion);
  const auto text = [&](const char* path, HttpResponse (HttpFront::*answer)(
                                              const HttpRequest&) const) {
    server->HandleLater(
        "POST", path, [this, answer](std::unique_ptr<HttpExchange> exchange) {
          HttpResponse response = (this->*answer)(exchange->request());
          AddRateHeaders(exchange->request().caller, &response.headers);
          exchange->Answer(std::move(response));
        });
  };
  text("/tokenize", &HttpFront::Tokenize);
  text("/detokenize", &HttpFront::Detokenize);
  server->Handle("GET", "/v1/models",
                 [this](const HttpRequest&) { return Models(); });
  server->Handle("GET", kModels, [this](const HttpRequest& request) {
    return Model(PercentDecoded(
        std::string_view(request.path).substr(std::strlen(kModels))));
  });
  server->Handle("GET", "/v1/tandem/capabilities",
                 [this](const HttpRequest&) { return Capabilities(); });
  if (options_.feed != nullptr) {
    server->HandleLater(
        "GET", kEvents, [this](std::unique_ptr<HttpExchange> exchange) {
          if (exchange->request().method == "HEAD") {  // no watcher
            return exchange->Answer({.content_type = kEventStream});
          }
          loop_->Post(
              [feed = options_.feed, exchange = std::move(exchange)]() mutable {
                feed->Watch(std::move(exchange));
              });
        });
  }
  if (options_.lora_updating) {
    server->HandleLater("POST", kLoadAdapter,
                        [this](std::unique_ptr<HttpExchange> exchange) {
                          LoadAdapter(std::move(exchange));
                        });
    server->HandleLater("POST", kUnloadAdapter,
                        [this](std::unique_ptr<HttpExchange> exchange) {
                          UnloadAdapter(std::move(exchange));
                        });
  }
  server->Handle("GET", "/version", [](const HttpRequest&) {
    return Json({{"version", kVersion}});
  });
}

HttpResponse HttpFront::ErrorPage(int code, const std::string& path,
                                  const std::string& message) {
  // The page's are read by people. Of a connection that is refused, no path
  // was read.
  if (path == "/" || absl::StartsWith(path, "/page/")) {
    return {.code = code, .body = message + "\n"};
  }
  // A base URL without its end is the commonest mistake.
  const std::string meant = absl::StrCat("/v1", path);
  const bool known = meant == kChatCompletions || meant == kCompletions ||
                     absl::StartsWith(absl::StrCat(meant, "/"), kModels);
  if (code == 404 && known) {
    return ListenerError(code,
                         absl::StrCat(message, "; did you mean ", meant, "?"));
  }
  // Paths that Register leaves out without their flag.
  std::string flag;
  if (path == kLoadAdapter || path == kUnloadAdapter) {
    flag = "--allow-runtime-lora-updating";
  }
  if (path == kEvents) flag = "--live-feed on";
  if (code == 404 && !flag.empty()) {
    return ListenerError(
        code,
        absl::StrCat(message, ": this server was started without ", flag));
  }
  return ListenerError(code, message);
}

std::string HttpFront::RequestId(std::string_view sent) {
  if (!sent.empty() && ValidateRequestId(sent).ok()) return std::string(sent);
  SystemRandom random;
  return Uuid(&random);
}

std::optional<HttpResponse> HttpFront::Guard(HttpRequest* head) const {
  absl::StatusOr<std::string> caller =
      intake_->access().Authenticate(head->Header("authorization"));
  if (caller.ok()) {
    head->caller = *std::move(caller);
    return std::nullopt;
  }
  intake_->CountRefused(Api::kHttp, caller.status());
  return ErrorResponse(caller.status());
}

std::optional<HttpResponse> HttpFront::RefuseWhenFull(
    const HttpRequest& http) const {
  // Its body says how urgent it is: here it may be the most.
  const absl::Status room = intake_->HasRoom(Api::kHttp, http.caller, INT_MIN);
  if (room.ok()) return std::nullopt;
  HttpResponse response = ErrorResponse(room);
  AddRateHeaders(http.caller, &response.headers);
  return response;
}

void HttpFront::AddRateHeaders(
    const std::string& tenant,
    std::vector<std::pair<std::string, std::string>>* headers) const {
  if (tenant.empty()) return;
  for (auto& header : intake_->RateHeaders(tenant)) {
    headers->push_back(std::move(header));
  }
}

absl::Status HttpFront::CheckSize(const OpenAiRequest& request,
                                  const std::string& tenant) const {
  const auto prompts = static_cast<int64_t>(request.prompts.size());
  const TenantLimits limits = intake_->LimitsOf(tenant);
  const int64_t per_minute = limits.requests_per_minute;
  if (per_minute > 0 && prompts > per_minute) {
    return FieldInvalid(
        "prompt", absl::StrCat(prompts, " prompts"),
        absl::StrCat("at most ", per_minute,
                     " of one call, as many as your key's rpm_limit"));
  }
  const v1::GenerateRequest& first = request.prompts.front();
  const int64_t sequences = prompts * Sequences(first);
  const auto check = [&](int64_t most, const char* limit) {
    if (sequences <= most) return absl::OkStatus();
    return FieldInvalid(
        prompts > 1                      ? "prompt"
        : first.sampling().has_best_of() ? "sampling.best_of"
                                         : "sampling.n",
        absl::StrCat(sequences, " sequences"),
        absl::StrCat("at most ", most, " of one call, as many as ", limit));
  };
  if (const int64_t parallel = limits.parallel_requests; parallel > 0) {
    const absl::Status status =
        check(parallel, "your key's max_parallel_requests");
    if (!status.ok()) return status;
  }
  return check(options_.max_requests, "this router's --max-requests");
}

void HttpFront::Generate(Parse parse,
                         std::unique_ptr<HttpExchange> exchange) const {
  const HttpRequest& http = exchange->request();
  std::vector<std::pair<std::string, std::string>> headers;
  const std::string& id = http.id;
  headers.emplace_back(kRequestIdHeader, id);
  FieldNames names;
  const auto refuse = [&](const absl::Status& status) {
    HttpResponse response = ErrorResponse(status, names);
    AddRateHeaders(http.caller, &headers);
    response.headers.insert(response.headers.end(), headers.begin(),
                            headers.end());
    exchange->Answer(std::move(response));
  };
  if (const absl::Status type = CheckContentType(http); !type.ok()) {
    return refuse(type);
  }
  absl::StatusOr<OpenAiRequest> request = parse(http.body);
  if (!request.ok()) {
    intake_->CountRefused(Api::kHttp, request.status());
    return refuse(request.status());
  }
  names = request->names;
  if (const absl::Status size = CheckSize(*request, http.caller); !size.ok()) {
    intake_->CountRefused(Api::kHttp, size);
    return refuse(size);
  }
  const bool single = request->prompts.size() == 1;
  if (const std::string& own = request->prompts.front().request_id();
      !own.empty() && http.Header("x-request-id").empty() &&
      ValidateRequestId(own).ok()) {
    headers.front().second = own;
  }
  std::vector<AdmittedRequest> admitted;
  for (v1::GenerateRequest& prompt : request->prompts) {
    // Several prompts cannot share one name: NAME-0, NAME-1, ...
    std::string name = id;
    if (!single) {
      name = absl::StrCat(headers.front().second, "-", admitted.size());
      if (!prompt.request_id().empty()) {
        prompt.set_request_id(
            absl::StrCat(prompt.request_id(), "-", admitted.size()));
      }
    }
    absl::StatusOr<AdmittedRequest> one =
        intake_->PrepareUncharged(Api::kHttp, prompt,
                                  {.request_id = name,
                                   .traceparent = http.Header("traceparent"),
                                   .tracestate = http.Header("tracestate"),
                                   .tenant = http.caller},
                                  absl::InfiniteDuration());
    if (!one.ok()) return refuse(one.status());
    admitted.push_back(*std::move(one));
  }
  const bool bounded = request->prompts.front().stopping().has_max_tokens();
  const absl::Status charged =
      intake_->Charge(Api::kHttp, bounded, absl::MakeSpan(admitted));
  if (!charged.ok()) return refuse(charged);
  AddRateHeaders(http.caller, &headers);
  // All of a call's prompts ask for the same.
  const std::string& adapter = admitted.front().effective.adapter;
  OpenAiAnswer answer(*request,
                      adapter.empty() ? intake_->Limits().model : adapter,
                      absl::ToUnixSeconds(absl::Now()));
  loop_->Post([loop = loop_, gate = gate_, exchange = std::move(exchange),
               answer = std::move(answer), admitted = std::move(admitted),
               headers = std::move(headers), stream = request->stream,
               max_bytes = options_.max_bytes]() mutable {
    const auto call = std::make_shared<OpenAiCall>(
        loop, std::move(exchange), std::move(answer),
        static_cast<int>(admitted.size()), stream, max_bytes,
        std::move(headers));
    call->Start();
    for (size_t i = 0; i < admitted.size() && !call->ended(); ++i) {
      std::unique_ptr<ClientStream> client =
          Charged(call->StreamOf(static_cast<int>(i)), admitted[i].charge);
      gate->Enter(std::move(admitted[i]), std::move(client));
    }
  });
}

HttpResponse HttpFront::Models() const {
  const int length = intake_->Limits().context_length;
  json data = json::array();
  for (const v1::ModelInfo& info : intake_->Infos()) {
    data.push_back(Card(info, length));
  }
  return Json({{"object", "list"}, {"data", std::move(data)}});
}

// What the page, or another client that wants more than OpenAI's fields, can
// ask of this server.
HttpResponse HttpFront::Capabilities() const {
  const ModelLimits limits = intake_->Limits();
  json adapters = json::array();
  for (const v1::ModelInfo& info : intake_->Infos()) {
    if (!info.parent().empty()) adapters.push_back(info.model());
  }
  return Json({{"model", limits.model},
               {"adapters", std::move(adapters)},
               {"chat", limits.has_chat_template},
               {"max_model_len", limits.context_length},
               {"default_max_tokens", limits.offers.default_max_tokens},
               {"layers", limits.layers},
               {"kv_block_size", limits.kv_block_size},
               {"kv_bytes_per_token", limits.kv_bytes_per_token},
               {"attention", limits.offers.attention},
               {"max_attention_weights", kMaxAttentionWeights},
               {"no_kv_cache", limits.offers.no_kv_cache},
               {"events", options_.feed != nullptr},
               {"defaults",
                {{"temperature", Rounded(limits.temperature)},
                 {"top_p", Rounded(limits.top_p)},
                 {"top_k", limits.top_k}}},
               {"version", kVersion}});
}

HttpResponse HttpFront::Model(const std::string& name) const {
  absl::StatusOr<v1::ModelInfo> info =
      absl::NotFoundError("/v1/models/NAME: no name is given");
  if (!name.empty()) info = intake_->Find(name);
  if (!info.ok()) return ErrorResponse(info.status());
  return Json(Card(*info, intake_->Limits().context_length));
}

void HttpFront::LoadAdapter(std::unique_ptr<HttpExchange> exchange) const {
  absl::StatusOr<v1::LoadLoraAdapterRequest> parsed =
      Parsed(exchange->request(), &ParseLoadLoraAdapter);
  if (!parsed.ok()) return exchange->Answer(ErrorResponse(parsed.status()));
  loop_->Post([core = core_, request = *std::move(parsed),
               exchange = std::move(exchange)]() mutable {
    core->LoadAdapter(request.lora_name(), request.lora_path(),
                      Answering("added", std::move(exchange)));
  });
}

void HttpFront::UnloadAdapter(std::unique_ptr<HttpExchange> exchange) const {
  absl::StatusOr<v1::UnloadLoraAdapterRequest> parsed =
      Parsed(exchange->request(), &ParseUnloadLoraAdapter);
  if (!parsed.ok()) return exchange->Answer(ErrorResponse(parsed.status()));
  loop_->Post([core = core_, request = *std::move(parsed),
               exchange = std::move(exchange)]() mutable {
    core->UnloadAdapter(request.lora_name(),
                        Answering("removed", std::move(exchange)));
  });
}

HttpResponse HttpFront::Tokenize(const HttpRequest& request) const {
  absl::Status status = CheckContentType(request);
  if (status.ok()) status = intake_->AdmitCall(request.caller);
  if (!status.ok()) return ErrorResponse(status);
  const absl::StatusOr<v1::TokenizeRequest> parsed =
      ParseTokenize(request.body);
  if (!parsed.ok()) return ErrorResponse(parsed.status());
  const absl::StatusOr<v1::TokenizeResponse> answer =
      intake_->Tokenize(*parsed);
  if (!answer.ok()) {
    return ErrorResponse(answer.status(),
                         {{"text", "prompt"}, {"chat", "messages"}});
  }
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
  if (status.ok()) status = intake_->AdmitCall(request.caller);
  if (!status.ok()) return ErrorResponse(status);
  const absl::StatusOr<v1::DetokenizeRequest> parsed =
      ParseDetokenize(request.body);
  if (!parsed.ok()) return ErrorResponse(parsed.status());
  const absl::StatusOr<v1::DetokenizeResponse> answer =
      intake_->Detokenize(*parsed);
  if (!answer.ok()) {
    return ErrorResponse(answer.status(), {{"token_ids", "tokens"}});
  }
  return Json({{"prompt", answer->text()}});
}

}  // namespace tandem::router
