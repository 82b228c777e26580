// SPDX-License-Identifier: Apache-2.0
// Client ends of calls as Streams. The opener runs once, at Start (bidi) or at
// the first Send (the others): the stub must live until then.
//
//   auto stream = rpc::OpenBidi<DecodeRequest, DecodeResponse>(
//       loop, {.timeout = absl::Minutes(10), .peer = address},
//       [this](auto* context, auto* reactor) {
//         stub_->async()->Decode(context, reactor);
//       });
//   stream->Start(this);
//   stream->Send(open);
//
// Headers travel with the first message, so a call whose client never sends
// does not exist on the wire.

#ifndef TANDEM_COMMON_RPC_CLIENT_STREAM_H_
#define TANDEM_COMMON_RPC_CLIENT_STREAM_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "common/rpc/call.h"
#include "common/rpc/status.h"

namespace tandem::rpc {

struct CallOptions {
  // From now; there is no default. absl::InfiniteDuration() is for streams
  // that live as long as their ends, and says so where it is written.
  absl::Duration timeout;
  std::string peer = "";  // the address dialled, for logs
  std::vector<std::pair<std::string, std::string>> metadata = {};
};

template <typename Out, typename In>
class ClientCall : public Call<Out, In> {
 public:
  ClientCall(Loop* loop, const CallOptions& options)
      : Call<Out, In>(Side::kClient, loop) {
    if (options.timeout != absl::InfiniteDuration()) {
      context_.set_deadline(std::chrono::system_clock::now() +
                            absl::ToChronoMicroseconds(options.timeout));
    }
    for (const auto& [key, value] : options.metadata) {
      context_.AddMetadata(key, value);
    }
  }

 protected:
  void Cancel() override { context_.TryCancel(); }
  void CancelLater() override { context_.TryCancel(); }
  // gRPC's last word; `this` may be gone afterwards.
  void Done(const grpc::Status& status) {
    this->Broken(FromGrpc(status, context_));
    this->DropRef();
  }

  grpc::ClientContext context_;
};

template <typename Out, typename In>
class ClientBidiCall final : public ClientCall<Out, In>,
                             public grpc::ClientBidiReactor<Out, In> {
 public:
  using Opener = absl::AnyInvocable<void(grpc::ClientContext*,
                                         grpc::ClientBidiReactor<Out, In>*)>;
  ClientBidiCall(Loop* loop, const CallOptions& options, Opener opener)
      : ClientCall<Out, In>(loop, options), opener_(std::move(opener)) {
    this->context_.set_initial_metadata_corked(true);
  }

  void OnReadDone(bool ok) override { this->ReadDone(ok); }
  void OnWriteDone(bool ok) override { this->WriteDone(ok); }
  void OnDone(const grpc::Status& status) override { this->Done(status); }

 private:
  void Bind() override {
    this->AddRef();  // gRPC's, until OnDone
    opener_(&this->context_, this);
    opener_ = nullptr;
    bound_ = true;
    this->AddHold();  // operations come from the loop: until End
    this->StartCall();
  }
  void ReadOp(In* message) override { this->StartRead(message); }
  void WriteOp(const Out* message) override { this->StartWrite(message); }
  void End() override {
    if (bound_) this->RemoveHold();
  }

  Opener opener_;
  bool bound_ = false;
};

// One request, many responses: the first Send opens the call, further ones
// are dropped.
template <typename Out, typename In>
class ClientServerStreamCall final : public ClientCall<Out, In>,
                                     public grpc::ClientReadReactor<In> {
 public:
  using Opener = absl::AnyInvocable<void(grpc::ClientContext*, const Out*,
                                         grpc::ClientReadReactor<In>*)>;
  ClientServerStreamCall(Loop* loop, const CallOptions& options, Opener opener)
      : ClientCall<Out, In>(loop, options), opener_(std::move(opener)) {}

  void OnReadDone(bool ok) override { this->ReadDone(ok); }
  void OnDone(const grpc::Status& status) override { this->Done(status); }

 private:
  void ReadOp(In* message) override {
    if (bound_) {
      this->StartRead(message);
    } else {
      early_read_ = message;  // there is no call yet to read from
    }
  }
  void WriteOp(const Out* message) override {
    if (!bound_) {
      this->AddRef();
      opener_(&this->context_, message, this);
      opener_ = nullptr;
      bound_ = true;
      this->AddHold();
      if (early_read_ != nullptr) this->StartRead(early_read_);
      this->StartCall();
    }
    this->WriteDone(true);
  }
  void End() override {
    if (bound_) this->RemoveHold();
  }
  void Cancel() override {
    if (bound_) {
      this->context_.TryCancel();
    } else if (early_read_ != nullptr) {
      this->ReadDone(false);
    }
  }

  Opener opener_;
  In* early_read_ = nullptr;
  bool bound_ = false;
};

template <typename Out, typename In>
class ClientUnaryCall final : public ClientCall<Out, In> {
 public:
  using Opener = absl::AnyInvocable<void(grpc::ClientContext*, const Out*, In*,
                                         std::function<void(grpc::Status)>)>;
  ClientUnaryCall(Loop* loop, const CallOptions& options, Opener opener)
      : ClientCall<Out, In>(loop, options), opener_(std::move(opener)) {}

 private:
  void ReadOp(In*) override {}
  void WriteOp(const Out* message) override {
    if (opener_) {
      this->AddRef();
      Opener opener = std::exchange(opener_, nullptr);
      opener(&this->context_, message, &response_, [this](grpc::Status status) {
        if (status.ok()) this->Receive(std::move(response_));
        this->Done(status);
      });
    }
    this->WriteDone(true);
  }
  void End() override {}

  Opener opener_;
  In response_;
};

template <typename Out, typename In>
std::unique_ptr<Stream<Out, In>> OpenBidi(
    Loop* loop, const CallOptions& options,
    typename ClientBidiCall<Out, In>::Opener opener) {
  return std::make_unique<CallStream<Out, In>>(
      new ClientBidiCall<Out, In>(loop, options, std::move(opener)),
      options.peer);
}

template <typename Out, typename In>
std::unique_ptr<Stream<Out, In>> OpenServerStream(
    Loop* loop, const CallOptions& options,
    typename ClientServerStreamCall<Out, In>::Opener opener) {
  return std::make_unique<CallStream<Out, In>>(
      new ClientServerStreamCall<Out, In>(loop, options, std::move(opener)),
      options.peer);
}

// The answer comes as OnMessage, then OnClosed(OK); or OnClosed(error) alone.
template <typename Out, typename In>
std::unique_ptr<Stream<Out, In>> OpenUnary(
    Loop* loop, const CallOptions& options,
    typename ClientUnaryCall<Out, In>::Opener opener) {
  return std::make_unique<CallStream<Out, In>>(
      new ClientUnaryCall<Out, In>(loop, options, std::move(opener)),
      options.peer);
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CLIENT_STREAM_H_
