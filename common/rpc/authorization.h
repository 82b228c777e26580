// SPDX-License-Identifier: Apache-2.0
// Who may call what. Under mutual TLS a server asks, before any handler runs
// and for each call (health and reflection too), whether one of the peer's
// roles is among those of the method; a method that no rule names is nobody's.
// Without client certificates there is nothing to ask.

#ifndef TANDEM_COMMON_RPC_AUTHORIZATION_H_
#define TANDEM_COMMON_RPC_AUTHORIZATION_H_

#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/auth_metadata_processor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/rpc/identity.h"

namespace tandem::rpc {

struct MethodRule {
  std::string_view method;  // "/tandem.v1.DecodeService/Decode"
  std::vector<PeerRole> roles = {};
  // Whoever has a certificate of the authority, with a role or without.
  bool anybody = false;
};

// Of every method that a process of the cluster serves.
absl::Span<const MethodRule> ClusterRules();

// PERMISSION_DENIED, with who may.
absl::Status Authorize(absl::Span<const MethodRule> rules,
                       std::string_view method,
                       const std::vector<Identity>& identities);

// The peer of a connection. What its certificate says is empty where that
// cannot be read: nobody, never everybody.
PeerIdentity PeerOf(const grpc::AuthContext& context);

// For the credentials of a server with mutual TLS. `rules` outlive it.
std::shared_ptr<grpc::AuthMetadataProcessor> MakeAuthorizer(
    absl::Span<const MethodRule> rules);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_AUTHORIZATION_H_
