// SPDX-License-Identifier: Apache-2.0
// An echo server and recording handlers on loops of their own: what the tests
// and the benchmark of common/rpc share.

#ifndef TANDEM_TESTS_COMMON_RPC_ECHO_H_
#define TANDEM_TESTS_COMMON_RPC_ECHO_H_

#include <grpcpp/create_channel.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/mutex.h"
#include "common/rpc/channel.h"
#include "common/rpc/client_stream.h"
#include "common/rpc/server.h"
#include "common/rpc/server_stream.h"
#include "common/thread_loop.h"
#include "echo.grpc.pb.h"

namespace tandem::rpc {

using testing::EchoRequest;
using testing::EchoResponse;
using testing::EchoService;
using ServerSideStream = Stream<EchoResponse, EchoRequest>;
using ClientSideStream = Stream<EchoRequest, EchoResponse>;
using EchoAccept = Accept<EchoResponse, EchoRequest>;

// Waits for what other threads bring about; false after 20 s.
inline bool Eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 4000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

inline EchoRequest Request(int64_t number, size_t bytes = 0) {
  EchoRequest request;
  request.set_number(number);
  request.set_payload(std::string(bytes, 'x'));
  return request;
}

inline EchoResponse Response(int64_t number, size_t bytes = 0) {
  EchoResponse response;
  response.set_number(number);
  response.set_payload(std::string(bytes, 'y'));
  return response;
}

// One whose calls gRPC tries three times, as the client libraries in sdk/ do.
inline std::shared_ptr<grpc::Channel> RetryingChannel(
    const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetServiceConfigJSON(R"({"methodConfig": [{"name": [{}],
      "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s",
                      "maxBackoff": "0.01s", "backoffMultiplier": 1,
                      "retryableStatusCodes": ["UNAVAILABLE"]}}]})");
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(),
                                   arguments);
}

class EchoServer final : public EchoService::CallbackService {
 public:
  EchoServer(Loop* loop, EchoAccept accept)
      : loop_(loop), accept_(std::move(accept)) {}

 private:
  grpc::ServerBidiReactor<EchoRequest, EchoResponse>* Chat(
      grpc::CallbackServerContext* context) override {
    return ServeBidi<EchoResponse, EchoRequest>(loop_, context, &accept_);
  }
  grpc::ServerWriteReactor<EchoResponse>* Count(
      grpc::CallbackServerContext* context,
      const EchoRequest* request) override {
    return ServeStream<EchoResponse, EchoRequest>(loop_, context, request,
                                                  &accept_);
  }
  grpc::ServerUnaryReactor* Once(grpc::CallbackServerContext* context,
                                 const EchoRequest* request,
                                 EchoResponse* response) override {
    return ServeUnary<EchoResponse, EchoRequest>(loop_, context, request,
                                                 response, &accept_);
  }

  Loop* const loop_;
  const EchoAccept accept_;
};

// Records what it hears; readable from any thread. `on_message` runs on the
// loop, without the lock.
template <typename Out, typename In>
class Recorder final : public StreamHandler<In> {
 public:
  std::unique_ptr<Stream<Out, In>> stream;  // the loop's
  std::function<void(Recorder*, const In&)> on_message;
  std::function<void(Recorder*)> on_drained;
  std::function<void(Recorder*)> on_closed;

  void OnMessage(In message) override {
    {
      MutexLock lock(&mutex_);
      numbers_.push_back(message.number());
      if (closed_ > 0) late_ = true;
    }
    if (on_message) on_message(this, message);
  }
  void OnDrained() override {
    {
      MutexLock lock(&mutex_);
      ++drained_;
      if (closed_ > 0) late_ = true;
    }
    if (on_drained) on_drained(this);
  }
  void OnClosed(absl::Status status) override {
    {
      MutexLock lock(&mutex_);
      ++closed_;
      status_ = std::move(status);
    }
    if (on_closed) on_closed(this);
  }

  std::vector<int64_t> numbers() {
    MutexLock lock(&mutex_);
    return numbers_;
  }
  int drained() {
    MutexLock lock(&mutex_);
    return drained_;
  }
  int closed() {
    MutexLock lock(&mutex_);
    return closed_;
  }
  bool late() {  // heard something after its end
    MutexLock lock(&mutex_);
    return late_;
  }
  absl::Status status() {
    MutexLock lock(&mutex_);
    return status_;
  }

 private:
  Mutex mutex_;
  std::vector<int64_t> numbers_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int drained_ ABSL_GUARDED_BY(mutex_) = 0;
  int closed_ ABSL_GUARDED_BY(mutex_) = 0;
  bool late_ ABSL_GUARDED_BY(mutex_) = false;
};

using ServerRecorder = Recorder<EchoResponse, EchoRequest>;
using ClientRecorder = Recorder<EchoRequest, EchoResponse>;

inline std::unique_ptr<ClientSideStream> OpenChat(
    Loop* loop, const std::shared_ptr<grpc::Channel>& channel,
    absl::Duration timeout = absl::Seconds(60)) {
  auto stub = EchoService::NewStub(channel);
  return OpenBidi<EchoRequest, EchoResponse>(
      loop, {.timeout = timeout, .peer = "server"},
      [stub = std::move(stub)](auto* context, auto* reactor) {
        stub->async()->Chat(context, reactor);
      });
}

}  // namespace tandem::rpc

#endif  // TANDEM_TESTS_COMMON_RPC_ECHO_H_
