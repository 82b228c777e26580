// SPDX-License-Identifier: Apache-2.0
// Who a process of the cluster is, as its certificate says in a URI of its
// subject alternative names (SPIFFE's form):
//
//   spiffe://tandem/<role>               any process of the role
//   spiffe://tandem/<role>/<worker-id>   that worker alone
//
// A certificate has such a URI for each role that its process plays: one,
// unless several roles share a machine and a certificate (`tandem serve`).
// URIs of other trust domains, as a service mesh adds, mean nothing here. No
// gRPC in this header: cores include it.

#ifndef TANDEM_COMMON_RPC_IDENTITY_H_
#define TANDEM_COMMON_RPC_IDENTITY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::rpc {

enum class PeerRole : uint8_t {
  kRouter,
  kPrefill,
  kDecode,
  kOperator,  // people and tools that may see and change the cluster
  kClient,    // may send requests
};

// As in the URI: "prefill".
std::string_view RoleName(PeerRole role);

struct Identity {
  PeerRole role = PeerRole::kClient;
  std::string worker_id = {};  // empty: any worker of the role

  std::string ToString() const;  // "prefill" or "prefill/p0"
  bool operator==(const Identity& other) const = default;
};

// The peer of a call. Plain text, and TLS without client certificates, say
// nothing of it: not authenticated. An authenticated peer without identities
// is nobody.
struct PeerIdentity {
  bool authenticated = false;
  std::vector<Identity> identities = {};
};

// One URI, all of it. UNAUTHENTICATED, with what is wrong.
absl::StatusOr<Identity> ParseIdentity(std::string_view uri);

// What a certificate's URIs say. UNAUTHENTICATED where one of this trust domain
// does not parse, or there is none, with what to do about it.
absl::StatusOr<std::vector<Identity>> ParseIdentities(
    const std::vector<std::string>& uris);

// Whether `peer` may speak as the worker that it says it is. PERMISSION_DENIED,
// naming both, unless it is not authenticated (plain text: nothing is known).
absl::Status CheckClaim(const PeerIdentity& peer, PeerRole role,
                        std::string_view worker_id);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_IDENTITY_H_
