// SPDX-License-Identifier: Apache-2.0
#include "cli/connect.h"

#include "common/rpc/channel.h"
#include "common/rpc/credentials.h"

namespace tandem::cli {

absl::StatusOr<std::shared_ptr<grpc::Channel>> Connect(
    const ConnectFlags& flags) {
  absl::StatusOr<rpc::Credentials> tls =
      rpc::LoadCredentials(flags.tls_cert, flags.tls_key, flags.tls_ca);
  if (!tls.ok()) return tls.status();
  return rpc::MakeChannel(flags.address, *tls);
}

}  // namespace tandem::cli
