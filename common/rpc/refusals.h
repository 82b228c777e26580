// SPDX-License-Identifier: Apache-2.0
// How often this process turned somebody away, since its start. Thread-safe.

#ifndef TANDEM_COMMON_RPC_REFUSALS_H_
#define TANDEM_COMMON_RPC_REFUSALS_H_

#include <cstdint>
#include <map>
#include <string>

namespace tandem::rpc {

// Calls, by why: "role_not_allowed", "no_role" (the certificate names none),
// "no_method" (no rule names it). See authorization.h.
std::map<std::string, int64_t> RefusedCalls();

// TLS handshakes of gRPC that failed, at either end, as its log tells of them.
int64_t FailedHandshakes();

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_REFUSALS_H_
