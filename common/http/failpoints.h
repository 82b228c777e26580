// SPDX-License-Identifier: Apache-2.0
// GET /failpoints: "name hits passed: actions", a line for each place of this
// program. POST /failpoints: arms what the body says, 400 with the reason if it
// cannot. For programs of tests alone (common/failpoint.h).

#ifndef TANDEM_COMMON_HTTP_FAILPOINTS_H_
#define TANDEM_COMMON_HTTP_FAILPOINTS_H_

#include "common/http/server.h"

namespace tandem {

// Before `server` starts.
void ServeFailpoints(HttpServer* server);

}  // namespace tandem

#endif  // TANDEM_COMMON_HTTP_FAILPOINTS_H_
