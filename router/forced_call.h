// SPDX-License-Identifier: Apache-2.0
// A tool call that the model must make, as a text that its output must match:
// exactly one call, in the style that the model writes calls in, of the
// functions that may be called, with arguments that satisfy the function's
// schema. The text is a structural tag (text/grammar.h); tool_calls.h reads
// what comes of it.

#ifndef TANDEM_ROUTER_FORCED_CALL_H_
#define TANDEM_ROUTER_FORCED_CALL_H_

#include <string>

#include "absl/status/statusor.h"
#include "router/validate.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::router {

// Whether the chat says that a tool must be called.
bool ForcesCall(const v1::Chat& chat);

// INVALID_ARGUMENT, with the tool's field, where a schema is not of objects.
// REQUIRES: ForcesCall and ValidateChat; a style other than none.
absl::StatusOr<std::string> ForcedCallTag(const v1::Chat& chat,
                                          const ModelLimits& limits);

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_FORCED_CALL_H_
