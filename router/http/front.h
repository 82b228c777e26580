// SPDX-License-Identifier: Apache-2.0
// OpenAI's HTTP API, thin: JSON to GenerateRequest, events to JSON or
// server-sent events; everything else is the core's.
//
//   POST /v1/chat/completions, /v1/completions
//   GET  /v1/models, /v1/models/NAME, /version
//   POST /tokenize, /detokenize (vLLM's)
//   GET  /v1/tandem/capabilities, and /v1/tandem/events where there is a feed
//   POST /v1/load_lora_adapter, /v1/unload_lora_adapter (vLLM's, where allowed)
//
// Errors have OpenAI's shape, and name the field. Bodies must be
// application/json: a web page of another origin cannot send that without
// asking first.

#ifndef TANDEM_ROUTER_HTTP_FRONT_H_
#define TANDEM_ROUTER_HTTP_FRONT_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/http/server.h"
#include "common/loop.h"
#include "router/core/core.h"
#include "router/http/live_feed.h"
#include "router/http/openai_request.h"
#include "router/intake/intake.h"
#include "router/intake/structured_gate.h"

namespace tandem::router {

struct HttpFrontOptions {
  size_t max_bytes = 0;        // of an answer that is not streamed
  int max_requests = 0;        // RouterOptions'
  bool lora_updating = false;  // clients may load and unload adapters
  LiveFeed* feed = nullptr;    // null: nobody may watch
};

class HttpFront {
 public:
  // All outlive the server that Register was called with.
  HttpFront(Loop* loop, RouterCore* core, StructuredGate* gate,
            const Intake* intake, const HttpFrontOptions& options)
      : loop_(loop),
        core_(core),
        gate_(gate),
        intake_(intake),
        options_(options) {}

  void Register(HttpServer* server);

  // HttpOptions::error_page: OpenAI's shape, but for the page's paths.
  static HttpResponse ErrorPage(int code, const std::string& path,
                                const std::string& message);
  // HttpOptions::request_id: what the client calls its request, or a name for
  // it, which people quote who ask about an error.
  static std::string RequestId(std::string_view sent);

 private:
  using Parse = absl::StatusOr<OpenAiRequest> (*)(std::string_view body);

  // Answers who brings no key of a tenant; else says whose it is.
  std::optional<HttpResponse> Guard(HttpRequest* head) const;
  // Where no request at all would be let in: before its body is parsed.
  std::optional<HttpResponse> RefuseWhenFull(const HttpRequest& http) const;
  // Those of the tenant's limits per minute, where it has any.
  void AddRateHeaders(
      const std::string& tenant,
      std::vector<std::pair<std::string, std::string>>* headers) const;
  // A call too large to be let in at once, however little else there is.
  absl::Status CheckSize(const OpenAiRequest& request,
                         const std::string& tenant) const;
  void Generate(Parse parse, std::unique_ptr<HttpExchange> exchange) const;
  HttpResponse Models() const;
  HttpResponse Capabilities() const;
  HttpResponse Model(const std::string& name) const;
  void LoadAdapter(std::unique_ptr<HttpExchange> exchange) const;
  void UnloadAdapter(std::unique_ptr<HttpExchange> exchange) const;
  HttpResponse Tokenize(const HttpRequest& request) const;
  HttpResponse Detokenize(const HttpRequest& request) const;

  Loop* const loop_;
  RouterCore* const core_;
  StructuredGate* const gate_;
  const Intake* const intake_;
  const HttpFrontOptions options_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_FRONT_H_
