// SPDX-License-Identifier: Apache-2.0
// The one place that makes gRPC servers: limits, keepalive, health (v1) and
// reflection are the same everywhere.
//
//   ServerOptions options;
//   options.address = "127.0.0.1:0";
//   auto server = Server::Start(options, {&decode_service});
//   Announce(server->address());
//   server->SetServing("tandem.v1.DecodeService", true);
//   ...
//   server->Shutdown(absl::Seconds(30));
//
// Order at the end of a process: close or hand back the streams, Shutdown,
// stop the loop, destroy the services.

#ifndef TANDEM_COMMON_RPC_SERVER_H_
#define TANDEM_COMMON_RPC_SERVER_H_

#include <grpcpp/server.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/rpc/authorization.h"
#include "common/rpc/call_metrics.h"
#include "common/rpc/credentials.h"
#include "common/rpc/listener.h"
#include "common/rpc/rotating_credentials.h"

namespace tandem::rpc {

struct ServerOptions {
  std::string address = "127.0.0.1:0";  // host:port (0: a free one) or unix:
  std::string port_flag = "grpc-port";  // the port's, for who must change it
  Credentials tls;
  // Instead of `tls`; outlives the server.
  const RotatingCredentials* rotating = nullptr;
  // Asked for each call where clients show certificates; outlive the server.
  // None where those are not of the cluster, and name no roles.
  std::optional<absl::Span<const MethodRule>> rules = ClusterRules();
  int max_receive_bytes = 4 << 20;
  int max_metadata_bytes = 8 << 10;  // of a call, by HTTP/2's count
  ConnectionLimits connections;      // not of a unix socket
  // Beyond it clients queue silently, with their deadlines running: at least
  // what the service admits plus some.
  int max_concurrent_streams = 1024;
  CallMetrics* metrics = nullptr;  // null: calls are not counted
  // What gRPC's buffers may hold, all connections together.
  size_t memory_bytes = size_t{256} << 20;
  int max_threads = 64;
  // Infinite: never. Else connections are asked to move on at this age, +-10 %,
  // so that a balancer in front spreads them anew. Calls under way end as they
  // would: each has a deadline.
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration handshake_timeout = absl::Seconds(10);
};

class Server {
 public:
  // `services` must outlive the server. UNAVAILABLE if the address cannot be
  // had. `bound`: to the address, before it could be served. Every service
  // starts as SERVING for health checks of "" only; see SetServing.
  static absl::StatusOr<std::unique_ptr<Server>> Start(
      const ServerOptions& options, const std::vector<grpc::Service*>& services,
      std::unique_ptr<Listener> bound = nullptr);
  // Shutdown with no grace.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const;  // 0 for a unix socket
  // What peers dial: the address with the real port.
  const std::string& address() const { return address_; }

  // From any thread; 0 for a unix socket.
  int64_t connections() const;
  int64_t refused_connections() const;

  // Health of `service` ("tandem.v1.DecodeService"), or of the whole server
  // for "". Watchers hear of it at once.
  void SetServing(const std::string& service, bool serving);

  // Refuses new calls, gives those that run `grace` to end, cancels the rest,
  // waits for their reactors. Blocks; not from a gRPC callback. Idempotent.
  void Shutdown(absl::Duration grace);

 private:
  Server() = default;

  std::unique_ptr<Listener> listener_;  // null: a unix socket
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  bool shut_down_ = false;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_H_
