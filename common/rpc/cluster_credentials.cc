// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/cluster_credentials.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "common/rpc/certificate.h"

namespace tandem::rpc {
namespace {

// The others would refuse it, with each call and less plainly.
absl::Status CheckOwn(const Credentials& tls, const Identity& own) {
  if (!tls.mutual()) return absl::OkStatus();
  const auto identities = IdentitiesIn(tls.cert);
  absl::Status status = identities.status();
  if (status.ok()) {
    status = CheckClaim({.authenticated = true, .identities = *identities},
                        own.role, own.worker_id);
  }
  if (status.ok()) return status;
  return MakeError(absl::StatusCode::kInvalidArgument, ErrorReason(status),
                   absl::StrCat("--tls-cert: ", std::string(status.message())));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ClusterCredentials>> ClusterCredentials::Load(
    const TlsFlags& flags, PeerRole role, const std::string& worker_id,
    FileWatcher* watcher, std::function<void(Credentials)> changed) {
  std::unique_ptr<ClusterCredentials> made(
      new ClusterCredentials(flags, role, worker_id));
  // Watched before they are read: no change is missed.
  if (!flags.cert.empty()) {
    std::vector<std::string> paths = {flags.cert, flags.key};
    if (!flags.ca.empty()) paths.push_back(flags.ca);
    watcher->Watch(std::move(paths),
                   [self = made.get(), changed = std::move(changed)] {
                     self->Reload(changed);
                   });
  }
  absl::StatusOr<Credentials> tls = made->Read();
  if (!tls.ok()) return tls.status();
  made->first_ = *std::move(tls);
  if (!made->first_.cert.empty()) {
    auto rotating = RotatingCredentials::Create(made->first_);
    if (!rotating.ok()) return rotating.status();
    made->rotating_ = *std::move(rotating);
  }
  return made;
}

absl::StatusOr<Credentials> ClusterCredentials::Read() const {
  absl::StatusOr<Credentials> tls =
      LoadCredentials(flags_.cert, flags_.key, flags_.ca);
  if (!tls.ok()) return tls;
  if (tls->cert.empty() && !tls->ca.empty()) {
    return UsageError(
        "--tls-ca alone would dial with TLS and listen without: give "
        "--tls-cert and --tls-key, too");
  }
  const absl::Status own = CheckOwn(*tls, own_);
  if (!own.ok()) return own;
  return tls;
}

void ClusterCredentials::Reload(
    const std::function<void(Credentials)>& changed) {
  absl::StatusOr<Credentials> tls = Read();
  absl::Status status = tls.status();
  if (status.ok()) status = CheckNotExpired(tls->cert, "--tls-cert");
  if (status.ok()) status = rotating_->Replace(*tls);
  {
    const MutexLock lock(&mutex_);
    ++(status.ok() ? reloads_.ok : reloads_.failed);
    if (status.ok()) reloads_.cert = tls->cert;
  }
  if (!status.ok()) {
    LogError("certificate not reloaded: the one before stays",
             {{"status", status}});
    return;
  }
  LogInfo("certificate reloaded", {{"file", flags_.cert}});
  changed(*std::move(tls));
}

}  // namespace tandem::rpc
