// SPDX-License-Identifier: Apache-2.0
// Server ends of calls as Streams. A generated callback service forwards each
// method to one of the Serve functions, and its core gets the stream on its
// loop:
//
//   class DecodeServer final : public DecodeService::CallbackService {
//     grpc::ServerBidiReactor<DecodeRequest, DecodeResponse>* Decode(
//         grpc::CallbackServerContext* context) override {
//       return rpc::ServeBidi<DecodeResponse, DecodeRequest>(loop_, context,
//                                                            &accept_);
//     }
//     const rpc::Accept<DecodeResponse, DecodeRequest> accept_;
//   };
//
// The accept function starts the stream, or closes it with the reason why not.
// No header is sent before the first message, so a refusal is a trailers-only
// answer that a client may retry. Loop and service outlive the server.

#ifndef TANDEM_COMMON_RPC_SERVER_STREAM_H_
#define TANDEM_COMMON_RPC_SERVER_STREAM_H_

#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/rpc/call.h"
#include "common/rpc/identity.h"
#include "common/rpc/status.h"

namespace tandem::rpc {

// What came with a call besides its messages.
struct CallInfo {
  std::string peer;
  absl::Duration time_left;  // until the caller's deadline; may be infinite
  // Lower-case keys; values of "-bin" keys are bytes.
  std::vector<std::pair<std::string, std::string>> metadata;
  PeerIdentity identity;

  // The first value of `key`, or "".
  std::string_view Find(std::string_view key) const;
};

inline constexpr char kRequestId[] = "x-request-id";

CallInfo MakeCallInfo(const grpc::CallbackServerContext& context);
// The caller's x-request-id, which it gets back: in the headers of what has
// begun, and in the trailers of what failed (ToGrpc). Empty if none came, or
// one too long.
std::string RequestIdToEcho(const grpc::CallbackServerContext& context);
absl::Status CancelReason(const grpc::CallbackServerContext& context);

template <typename Out, typename In>
using Accept = std::function<void(std::unique_ptr<Stream<Out, In>>, CallInfo)>;

// A closed call whose peer does not read what is still queued is cancelled
// after this long.
inline constexpr absl::Duration kCloseLinger = absl::Seconds(10);

template <typename Out, typename In>
class ServerCall : public Call<Out, In> {
 public:
  ServerCall(Loop* loop, grpc::CallbackServerContext* context)
      : Call<Out, In>(Side::kServer, loop), context_(context) {
    this->AddRef();  // gRPC's, until OnDone
  }

 protected:
  // Before each message: whether it is the first, which has the headers. What
  // is set of them earlier would go with a refusal too, and gRPC's own retries
  // repeat only one without any.
  bool Begin() {
    if (std::exchange(begun_, true)) return false;
    const std::string id = RequestIdToEcho(*context_);
    if (!id.empty()) context_->AddInitialMetadata(kRequestId, id);
    return true;
  }
  void Cancelled() { this->Broken(CancelReason(*context_)); }
  grpc::Status FinalStatus() {
    return ToGrpc(this->TakeFinalStatus(), context_);
  }
  void Done() {
    {
      MutexLock lock(&context_mutex_);
      done_ = true;
      if (alarm_.has_value()) alarm_->Cancel();
    }
    this->DropRef();
  }

  void Cancel() override {
    MutexLock lock(&context_mutex_);
    if (!done_) context_->TryCancel();
  }
  void CancelLater() override {
    MutexLock lock(&context_mutex_);
    if (done_) return;
    this->AddRef();  // the alarm's
    alarm_.emplace();
    alarm_->Set(gpr_time_from_millis(absl::ToInt64Milliseconds(kCloseLinger),
                                     GPR_TIMESPAN),
                [this](bool expired) {
                  if (expired) Cancel();
                  this->DropRef();
                });
  }

 private:
  grpc::CallbackServerContext* const context_;  // gRPC's, valid until OnDone
  bool begun_ = false;
  Mutex context_mutex_;
  bool done_ ABSL_GUARDED_BY(context_mutex_) = false;
  std::optional<grpc::Alarm> alarm_ ABSL_GUARDED_BY(context_mutex_);
};

template <typename Out, typename In>
class ServerBidiCall final : public ServerCall<Out, In>,
                             public grpc::ServerBidiReactor<In, Out> {
 public:
  using ServerCall<Out, In>::ServerCall;
  void OnReadDone(bool ok) override { this->ReadDone(ok); }
  void OnWriteDone(bool ok) override { this->WriteDone(ok); }
  void OnCancel() override { this->Cancelled(); }
  void OnDone() override { this->Done(); }

 private:
  void ReadOp(In* message) override { this->StartRead(message); }
  void WriteOp(const Out* message) override {
    this->Begin();
    this->StartWrite(message);
  }
  void End() override { this->Finish(this->FinalStatus()); }
};

template <typename Out, typename In>
class ServerStreamCall final : public ServerCall<Out, In>,
                               public grpc::ServerWriteReactor<Out> {
 public:
  ServerStreamCall(Loop* loop, grpc::CallbackServerContext* context,
                   const In& request)
      : ServerCall<Out, In>(loop, context) {
    this->Receive(request);
  }
  void OnWriteDone(bool ok) override { this->WriteDone(ok); }
  void OnCancel() override { this->Cancelled(); }
  void OnDone() override { this->Done(); }

 private:
  void ReadOp(In*) override {}
  void WriteOp(const Out* message) override {
    this->Begin();
    this->StartWrite(message);
  }
  void End() override { this->Finish(this->FinalStatus()); }
};

// The first Send sends the headers: from then on the call has begun, and a
// client does not repeat it by itself. Send sets the response, Close(OK) sends
// the last one.
template <typename Out, typename In>
class ServerUnaryCall final : public ServerCall<Out, In>,
                              public grpc::ServerUnaryReactor {
 public:
  ServerUnaryCall(Loop* loop, grpc::CallbackServerContext* context,
                  const In& request, Out* response)
      : ServerCall<Out, In>(loop, context), response_(response) {
    this->Receive(request);
  }
  void OnSendInitialMetadataDone(bool ok) override { this->WriteDone(ok); }
  void OnCancel() override { this->Cancelled(); }
  void OnDone() override { this->Done(); }

 private:
  void ReadOp(In*) override {}
  void WriteOp(const Out* message) override {
    *response_ = *message;
    if (this->Begin()) {
      this->StartSendInitialMetadata();
    } else {
      this->WriteDone(true);
    }
  }
  void End() override { this->Finish(this->FinalStatus()); }

  Out* const response_;
};

template <typename Out, typename In>
void PostAccept(Loop* loop, Call<Out, In>* call,
                grpc::CallbackServerContext* context,
                const Accept<Out, In>* accept) {
  CallInfo info = MakeCallInfo(*context);
  auto stream = std::make_unique<CallStream<Out, In>>(call, info.peer);
  // A loop that has stopped destroys the task, and the stream with it: the
  // call ends as cancelled.
  loop->Post(
      [accept, stream = std::move(stream), info = std::move(info)]() mutable {
        (*accept)(std::move(stream), std::move(info));
      });
}

template <typename Out, typename In>
grpc::ServerBidiReactor<In, Out>* ServeBidi(
    Loop* loop, grpc::CallbackServerContext* context,
    const Accept<Out, In>* accept) {
  auto* call = new ServerBidiCall<Out, In>(loop, context);
  PostAccept<Out, In>(loop, call, context, accept);
  return call;
}

template <typename Out, typename In>
grpc::ServerWriteReactor<Out>* ServeStream(Loop* loop,
                                           grpc::CallbackServerContext* context,
                                           const In* request,
                                           const Accept<Out, In>* accept) {
  auto* call = new ServerStreamCall<Out, In>(loop, context, *request);
  PostAccept<Out, In>(loop, call, context, accept);
  return call;
}

template <typename Out, typename In>
grpc::ServerUnaryReactor* ServeUnary(Loop* loop,
                                     grpc::CallbackServerContext* context,
                                     const In* request, Out* response,
                                     const Accept<Out, In>* accept) {
  auto* call = new ServerUnaryCall<Out, In>(loop, context, *request, response);
  PostAccept<Out, In>(loop, call, context, accept);
  return call;
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_STREAM_H_
