// SPDX-License-Identifier: Apache-2.0
// The decode worker's gRPC face: calls become streams of its core, as links do
// by worker/links.h.

#ifndef TANDEM_DECODE_WORKER_SERVICE_H_
#define TANDEM_DECODE_WORKER_SERVICE_H_

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "common/loop.h"
#include "common/rpc/server_stream.h"
#include "common/shared_stream.h"
#include "decode_worker/core.h"
#include "tandem/v1/decode.grpc.pb.h"

namespace tandem::decode_worker {

// `core` is used on `loop` only; both outlive the server.
class DecodeServer final : public v1::DecodeService::CallbackService {
 public:
  DecodeServer(Loop* loop, DecodeCore* core)
      : loop_(loop),
        accept_([core](auto stream, const rpc::CallInfo&) {
          core->AddCall(std::move(stream));
        }),
        accept_shared_([this, core](auto stream, const rpc::CallInfo&) {
          std::erase_if(shared_, [](const auto& s) { return s->ended(); });
          shared_.push_back(Shared::Start(
              loop_, std::move(stream),
              [core](auto call) { core->AddCall(std::move(call)); }));
        }) {}

  // On the loop: whether shared streams have said all that they had to.
  bool idle() const {
    return std::all_of(shared_.begin(), shared_.end(),
                       [](const auto& shared) { return shared->idle(); });
  }
  // On the loop: no call is left that goes over a shared stream.
  void CloseShared(const absl::Status& status) {
    for (const auto& shared : shared_) shared->Close(status);
    shared_.clear();
  }

  grpc::ServerBidiReactor<v1::DecodeRequest, v1::DecodeResponse>* Decode(
      grpc::CallbackServerContext* context) override {
    return rpc::ServeBidi<v1::DecodeResponse, v1::DecodeRequest>(loop_, context,
                                                                 &accept_);
  }
  grpc::ServerBidiReactor<v1::DecodeSharedRequest, v1::DecodeSharedResponse>*
  DecodeShared(grpc::CallbackServerContext* context) override {
    return rpc::ServeBidi<v1::DecodeSharedResponse, v1::DecodeSharedRequest>(
        loop_, context, &accept_shared_);
  }

 private:
  using Shared =
      SharedStream<v1::DecodeSharedResponse, v1::DecodeSharedRequest>;

  Loop* const loop_;
  const rpc::Accept<v1::DecodeResponse, v1::DecodeRequest> accept_;
  const rpc::Accept<v1::DecodeSharedResponse, v1::DecodeSharedRequest>
      accept_shared_;
  std::vector<std::shared_ptr<Shared>> shared_;  // one a router; on the loop
};

}  // namespace tandem::decode_worker

#endif  // TANDEM_DECODE_WORKER_SERVICE_H_
