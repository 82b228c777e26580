// SPDX-License-Identifier: Apache-2.0
// The prefill worker's gRPC face: calls become streams of its core, and the
// core's links are dialled here.

#ifndef TANDEM_PREFILL_WORKER_SERVICE_H_
#define TANDEM_PREFILL_WORKER_SERVICE_H_

#include "common/loop.h"
#include "common/rpc/server_stream.h"
#include "prefill_worker/core.h"
#include "tandem/v1/prefill.grpc.pb.h"
#include "worker/channels.h"
#include "worker/links.h"

namespace tandem::prefill_worker {

// `core` is used on `loop` only; both outlive the server.
class PrefillServer final : public v1::PrefillService::CallbackService {
 public:
  PrefillServer(Loop* loop, PrefillCore* core)
      : loop_(loop), accept_([core](auto stream, const rpc::CallInfo&) {
          core->AddCall(std::move(stream));
        }) {}

  grpc::ServerBidiReactor<v1::PrefillRequest, v1::PrefillResponse>* Prefill(
      grpc::CallbackServerContext* context) override {
    return rpc::ServeBidi<v1::PrefillResponse, v1::PrefillRequest>(
        loop_, context, &accept_);
  }

 private:
  Loop* const loop_;
  const rpc::Accept<v1::PrefillResponse, v1::PrefillRequest> accept_;
};

// Opens links to decode workers.
inline handoff::Sender::Dial LinkDialer(Loop* loop,
                                        worker::Channels* channels) {
  return [loop, channels](const v1::WorkerRef& receiver) {
    return worker::OpenLink(loop,
                            channels->Get(rpc::PeerRole::kDecode, receiver),
                            receiver.endpoint());
  };
}

}  // namespace tandem::prefill_worker

#endif  // TANDEM_PREFILL_WORKER_SERVICE_H_
