// SPDX-License-Identifier: Apache-2.0
// Accepts the TCP connections of a gRPC server and hands them to it. gRPC 1.51
// neither bounds their number, nor accepts again once the process has been out
// of descriptors (CVE-2023-4785); this does both.
//
//   auto listener = *Listener::Bind("0.0.0.0:50051", {.all = 1024});
//   auto acceptor = builder.experimental().AddExternalConnectionAcceptor(...);
//   auto server = builder.BuildAndStart();
//   listener->Start(std::move(acceptor));

#ifndef TANDEM_COMMON_RPC_LISTENER_H_
#define TANDEM_COMMON_RPC_LISTENER_H_

#include <grpcpp/server_builder.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem::rpc {

// Open at once; what comes beyond is closed before a byte is read. 0: any.
struct ConnectionLimits {
  int all = 0;
  int per_peer = 0;  // of one address, as all of a proxy's are
};

// Of the ports between routers and workers.
inline constexpr ConnectionLimits kClusterConnections = {.all = 4096,
                                                         .per_peer = 1024};

class Listener {
 public:
  // Takes all of what `address`, "host:port" with port 0 for a free one, means
  // on this host. UNAVAILABLE, where it is taken with `port_flag` to change. It
  // accepts from Start on; until then connections wait in the kernel.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(
      const std::string& address, ConnectionLimits limits,
      const std::string& port_flag);
  // Stop.
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Once, when the server of `acceptor` runs.
  void Start(
      std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);
  // Accepts no more; connections that the server has stay. Idempotent.
  void Stop();

  int port() const { return port_; }
  // From any thread: those open now, and those refused so far.
  int64_t open() const { return open_; }
  int64_t refused() const { return refused_; }

 private:
  Listener() = default;

  void Run();
  // One connection. False when none waits, or none can be had for now.
  bool Accept(int socket);
  bool HasRoom(const std::string& peer) const;
  // Counts the connection until it is shut. False without a descriptor for it.
  bool Watch(int connection, const std::string& peer);
  void Forget(int watched);
  void Listen(bool on);

  ConnectionLimits limits_;
  int port_ = 0;
  std::vector<int> sockets_;
  int epoll_ = -1;
  int stop_ = -1;  // an eventfd
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::thread thread_;
  std::atomic<int64_t> open_ = 0;
  std::atomic<int64_t> refused_ = 0;
  // The thread's: out of descriptors, it does not listen for a while.
  bool exhausted_ = false;
  // The thread's: by a second descriptor of the connection, whose it is.
  std::unordered_map<int, std::string> watched_;
  std::map<std::string, int> per_peer_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_LISTENER_H_
