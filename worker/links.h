// SPDX-License-Identifier: Apache-2.0
// A link of the handoff as a gRPC call: the decode worker's end serves it, the
// prefill worker's opens it.

#ifndef TANDEM_WORKER_LINKS_H_
#define TANDEM_WORKER_LINKS_H_

#include <grpcpp/channel.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "common/loop.h"
#include "common/rpc/client_stream.h"
#include "common/rpc/server_stream.h"
#include "common/stream.h"
#include "tandem/v1/handoff.grpc.pb.h"

namespace tandem::worker {

// Links are accepted on `loop`, which outlives the server.
class LinkServer final : public v1::HandoffService::CallbackService {
 public:
  using Accept = rpc::Accept<v1::LinkResponse, v1::LinkRequest>;

  LinkServer(Loop* loop, Accept accept)
      : loop_(loop), accept_(std::move(accept)) {}

  grpc::ServerBidiReactor<v1::LinkRequest, v1::LinkResponse>* Link(
      grpc::CallbackServerContext* context) override {
    return rpc::ServeBidi<v1::LinkResponse, v1::LinkRequest>(loop_, context,
                                                             &accept_);
  }

 private:
  Loop* const loop_;
  const Accept accept_;
};

// A link lives as long as both ends: its own beats judge it, so the call has no
// deadline.
inline std::unique_ptr<Stream<v1::LinkRequest, v1::LinkResponse>> OpenLink(
    Loop* loop, const std::shared_ptr<grpc::Channel>& channel,
    std::string peer) {
  auto stub = std::make_shared<v1::HandoffService::Stub>(channel);
  return rpc::OpenBidi<v1::LinkRequest, v1::LinkResponse>(
      loop, {.timeout = absl::InfiniteDuration(), .peer = std::move(peer)},
      [stub](auto* context, auto* reactor) {
        stub->async()->Link(context, reactor);
      });
}

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_LINKS_H_
