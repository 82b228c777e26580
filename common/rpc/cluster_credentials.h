// SPDX-License-Identifier: Apache-2.0
// The certificates with which a process speaks to its cluster: --tls-cert,
// --tls-key, --tls-ca. Read at the start, and again whenever the files change;
// what cannot be used, or names another role, leaves those before in place.
// Connections that are open keep theirs. A new authority comes in three steps:
// bundles of both, certificates of the new one, the new one alone.

#ifndef TANDEM_COMMON_RPC_CLUSTER_CREDENTIALS_H_
#define TANDEM_COMMON_RPC_CLUSTER_CREDENTIALS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/file_watcher.h"
#include "common/flags.h"
#include "common/mutex.h"
#include "common/rpc/credentials.h"
#include "common/rpc/identity.h"
#include "common/rpc/rotating_credentials.h"

namespace tandem::rpc {

class ClusterCredentials {
 public:
  // Where TLS is mutual the certificate must be of `role` and, where it names a
  // worker, of `worker_id`. `changed` gets what clients use from then on, on
  // the watcher's thread; `watcher` starts later. INVALID_ARGUMENT, naming the
  // flag.
  static absl::StatusOr<std::unique_ptr<ClusterCredentials>> Load(
      const TlsFlags& flags, PeerRole role, const std::string& worker_id,
      FileWatcher* watcher, std::function<void(Credentials)> changed);

  // Of the files, since the start.
  struct Reloads {
    int64_t ok = 0;
    int64_t failed = 0;  // those before stayed
    std::string cert;    // in use after the last one that was ok
  };
  // Thread-safe.
  Reloads reloads() const {
    const MutexLock lock(&mutex_);
    return reloads_;
  }

  // As of the start.
  const Credentials& first() const { return first_; }
  // For servers, which it outlives; null: plain text.
  const RotatingCredentials* rotating() const { return rotating_.get(); }

 private:
  ClusterCredentials(TlsFlags flags, PeerRole role, std::string worker_id)
      : flags_(std::move(flags)), own_{role, std::move(worker_id)} {}
  absl::StatusOr<Credentials> Read() const;
  void Reload(const std::function<void(Credentials)>& changed);

  const TlsFlags flags_;
  const Identity own_;
  Credentials first_;
  std::unique_ptr<RotatingCredentials> rotating_;
  mutable Mutex mutex_;
  Reloads reloads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CLUSTER_CREDENTIALS_H_
