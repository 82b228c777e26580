// SPDX-License-Identifier: Apache-2.0
// OpenAI's HTTP API, thin: JSON to GenerateRequest, events to JSON or
// server-sent events; everything else is the core's.
//
//   POST /v1/chat/completions, /v1/completions
//   GET  /v1/models, /v1/models/NAME, /version
//   POST /tokenize, /detokenize (vLLM's)
//
// Errors have OpenAI's shape, and name the field. Bodies must be
// application/json: a web page of another origin cannot send that without
// asking first.

#ifndef TANDEM_ROUTER_HTTP_FRONT_H_
#define TANDEM_ROUTER_HTTP_FRONT_H_

#include <memory>

#include "common/http/server.h"
#include "common/loop.h"
#include "router/core.h"
#include "router/http/openai_request.h"
#include "router/intake.h"

namespace tandem::router {

class HttpFront {
 public:
  // All outlive the server that Register was called with. `max_bytes` of an
  // answer that is not streamed.
  HttpFront(Loop* loop, RouterCore* core, const Intake* intake,
            size_t max_bytes)
      : loop_(loop), core_(core), intake_(intake), max_bytes_(max_bytes) {}

  void Register(HttpServer* server);

 private:
  using Parse = absl::StatusOr<OpenAiRequest> (*)(std::string_view body);

  void Generate(Parse parse, std::unique_ptr<HttpExchange> exchange) const;
  HttpResponse Models() const;
  HttpResponse Model() const;
  HttpResponse Tokenize(const HttpRequest& request) const;
  HttpResponse Detokenize(const HttpRequest& request) const;

  Loop* const loop_;
  RouterCore* const core_;
  const Intake* const intake_;
  const size_t max_bytes_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_FRONT_H_
