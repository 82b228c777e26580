// SPDX-License-Identifier: Apache-2.0
// The one place that makes channels, so that all share the settings that keep
// long silent calls alive and find dead peers.

#ifndef TANDEM_COMMON_RPC_CHANNEL_H_
#define TANDEM_COMMON_RPC_CHANNEL_H_

#include <grpcpp/channel.h>

#include <memory>
#include <optional>
#include <string>

#include "common/rpc/credentials.h"

namespace tandem::rpc {

struct ChannelOptions {
  int max_receive_bytes = 4 << 20;
  // For a certificate made out to a name that is not the address's host.
  std::string tls_server_name = "";
  // Who must be there, where TLS is mutual; see ClientSide().
  std::optional<Identity> server = std::nullopt;
  // Every call brings it as `authorization: Bearer ...`; empty: none does.
  std::string bearer = "";
  // For servers that are not ours, which may hang up on who pings that often.
  bool keepalive = true;
};

// Connects lazily. Keepalive 30 s / 10 s, back-off 100 ms to 5 s, 5 s to
// connect, no retries of gRPC's (a request is retried with its state, by the
// role that owns it), no HTTP proxy, a connection of its own. Keep the channel
// until its calls ended; never drop the last reference inside a gRPC callback.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const Credentials& tls,
                                           const ChannelOptions& options = {});

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CHANNEL_H_
