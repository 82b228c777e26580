// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/identity.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"

namespace tandem::rpc {
namespace {

constexpr std::string_view kTrustDomain = "spiffe://tandem";
constexpr size_t kMaxIdBytes = 256;  // as of a worker's hello

constexpr std::array<std::pair<PeerRole, std::string_view>, 5> kRoles = {{
    {PeerRole::kRouter, "router"},
    {PeerRole::kPrefill, "prefill"},
    {PeerRole::kDecode, "decode"},
    {PeerRole::kOperator, "operator"},
    {PeerRole::kClient, "client"},
}};

// The characters of a SPIFFE path segment: nothing that could be read twice.
bool IsId(std::string_view id) {
  return !id.empty() && id.size() <= kMaxIdBytes && id != "." && id != ".." &&
         std::all_of(id.begin(), id.end(), [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.';
         });
}

bool OfTrustDomain(std::string_view uri) {
  if (uri.substr(0, kTrustDomain.size()) != kTrustDomain) return false;
  uri.remove_prefix(kTrustDomain.size());
  return uri.empty() || uri[0] == '/';
}

absl::Status Unreadable(std::string_view uri, std::string_view why) {
  // It may be anything: of a certificate's text no more than this is shown.
  std::string shown(uri.substr(0, 128));
  std::replace_if(
      shown.begin(), shown.end(),
      [](unsigned char c) { return !absl::ascii_isgraph(c); }, '?');
  return MakeError(
      absl::StatusCode::kUnauthenticated, "CERTIFICATE_ROLE",
      absl::StrCat("the certificate's URI ", shown, ": ", std::string(why)));
}

}  // namespace

std::string_view RoleName(PeerRole role) {
  return kRoles[static_cast<size_t>(role)].second;
}

std::string Identity::ToString() const {
  const std::string name(RoleName(role));
  return worker_id.empty() ? name : absl::StrCat(name, "/", worker_id);
}

absl::StatusOr<Identity> ParseIdentity(std::string_view uri) {
  if (!OfTrustDomain(uri)) {
    return Unreadable(uri, "spiffe://tandem/<role> is expected");
  }
  std::string_view path = uri.substr(kTrustDomain.size());
  if (!path.empty()) path.remove_prefix(1);
  const size_t slash = path.find('/');
  const std::string_view name = path.substr(0, slash);
  const auto* const found =
      std::find_if(kRoles.begin(), kRoles.end(),
                   [&](const auto& role) { return role.second == name; });
  if (found == kRoles.end()) {
    return Unreadable(
        uri, "its role is none of router, prefill, decode, operator, client");
  }
  Identity identity{.role = found->first};
  if (slash == std::string_view::npos) return identity;
  if (identity.role != PeerRole::kPrefill &&
      identity.role != PeerRole::kDecode) {
    return Unreadable(uri, "only prefill and decode are followed by an id");
  }
  const std::string_view id = path.substr(slash + 1);
  if (!IsId(id)) {
    return Unreadable(uri,
                      "a worker's id is 1 to 256 of A-Z a-z 0-9 '.' '-' '_'");
  }
  identity.worker_id = std::string(id);
  return identity;
}

absl::StatusOr<std::vector<Identity>> ParseIdentities(
    const std::vector<std::string>& uris) {
  std::vector<Identity> identities;
  for (const std::string& uri : uris) {
    if (!OfTrustDomain(uri)) continue;
    absl::StatusOr<Identity> identity = ParseIdentity(uri);
    if (!identity.ok()) return identity.status();
    identities.push_back(*std::move(identity));
  }
  if (identities.empty()) {
    return MakeError(
        absl::StatusCode::kUnauthenticated, "CERTIFICATE_ROLE",
        "the certificate names no role: issue one with the subject alternative "
        "name URI:spiffe://tandem/ROLE, where ROLE is router, prefill, decode, "
        "operator or client (scripts/dev-ca.sh does)");
  }
  return identities;
}

absl::Status CheckClaim(const PeerIdentity& peer, PeerRole role,
                        std::string_view worker_id) {
  if (!peer.authenticated) return absl::OkStatus();
  for (const Identity& identity : peer.identities) {
    if (identity.role == role &&
        (identity.worker_id.empty() || identity.worker_id == worker_id)) {
      return absl::OkStatus();
    }
  }
  const std::string names = absl::StrJoin(
      peer.identities, ", ", [](std::string* out, const Identity& identity) {
        absl::StrAppend(out, identity.ToString());
      });
  const Identity claimed{.role = role,
                         .worker_id = std::string(worker_id.substr(0, 256))};
  return MakeError(
      absl::StatusCode::kPermissionDenied, "IDENTITY_MISMATCH",
      absl::StrCat("the certificate is ",
                   names.empty() ? "nobody's" : absl::StrCat("of ", names),
                   ", its bearer says it is ", claimed.ToString(),
                   ": give it a certificate of its own, or its --worker-id"));
}

}  // namespace tandem::rpc
