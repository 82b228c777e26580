// SPDX-License-Identifier: Apache-2.0
// What stands beside an answer's choices. Timings and work are not OpenAI's,
// whose clients ignore them: how a request was served, and what its workers
// counted.

#ifndef TANDEM_ROUTER_HTTP_OPENAI_USAGE_H_
#define TANDEM_ROUTER_HTTP_OPENAI_USAGE_H_

#include "nlohmann/json.hpp"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

nlohmann::json UsageJson(const v1::Usage& usage);
nlohmann::json TimingsJson(const v1::GenerateDone& done);
nlohmann::json WorkJson(const v1::Work& work);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_OPENAI_USAGE_H_
