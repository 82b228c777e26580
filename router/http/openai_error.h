// SPDX-License-Identifier: Apache-2.0
// Errors as OpenAI's clients know them.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_ERROR_H_
#define TANDEM_ROUTER_HTTP_OPENAI_ERROR_H_

#include <string>

#include "absl/status/status.h"
#include "common/http/server.h"
#include "nlohmann/json.hpp"
#include "router/http/field_names.h"

namespace tandem::router {

// {"error": {message, type, param, code}}. `code` is the reason in lower case
// ("context_length_exceeded"). Fields go by the names that the client gave
// them.
nlohmann::json ErrorJson(const absl::Status& status, const FieldNames& names);
// The same with the status that belongs to it, and Retry-After where the error
// knows. x-should-retry: false where SDKs would ask again in vain.
HttpResponse ErrorResponse(const absl::Status& status,
                           const FieldNames& names = {});
// The same shape for what never became a call: no such path, a body too large.
HttpResponse ListenerError(int code, const std::string& message);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_ERROR_H_
