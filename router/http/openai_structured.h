// SPDX-License-Identifier: Apache-2.0
// What OpenAI's and vLLM's bodies say the output must match.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_STRUCTURED_H_
#define TANDEM_ROUTER_HTTP_OPENAI_STRUCTURED_H_

#include <string>
#include <string_view>

#include "router/http/json_fields.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// response_format (OpenAI), structured_outputs and guided_* (vLLM) of `body`,
// whose members `fields` are. Only one constraint may be among them. Schemas
// keep the client's order of properties, which is that of the output. Returns
// the name of the one that is there.
std::string ReadStructured(std::string_view body, JsonFields* fields,
                           v1::GenerateRequest* request);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_STRUCTURED_H_
