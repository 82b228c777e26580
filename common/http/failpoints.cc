// SPDX-License-Identifier: Apache-2.0
#include "common/http/failpoints.h"

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"

namespace tandem {

void ServeFailpoints(HttpServer* server) {
  server->Handle("GET", "/failpoints", [](const HttpRequest&) {
    HttpResponse response;
    for (const failpoint::State& state : failpoint::States()) {
      absl::StrAppend(&response.body, state.name, " ", state.hits, " ",
                      state.passed, ": ", state.actions, "\n");
    }
    return response;
  });
  server->Handle("POST", "/failpoints", [](const HttpRequest& request) {
    const absl::Status armed = failpoint::Arm(request.body);
    if (armed.ok()) return HttpResponse{};
    return HttpResponse{.code = 400, .body = std::string(armed.message())};
  });
}

}  // namespace tandem
