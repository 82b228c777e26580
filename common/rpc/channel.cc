// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/channel.h"

#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_interceptor.h>

#include <memory>
#include <utility>
#include <vector>

#include "common/rpc/grpc_process.h"

namespace tandem::rpc {
namespace {

// gRPC runs callbacks on threads that all channels of the process share, and
// joins them when the last channel with a callback call goes. If it goes in a
// callback (a call's context holds its channel until the very end), a thread
// would join itself, which aborts. One channel that never goes, and one call
// on it, keep those threads for good.
void KeepCallbackThreads() {
  struct Pin {
    // Without credentials the channel leads nowhere and never connects.
    std::shared_ptr<grpc::Channel> channel =
        grpc::CreateChannel("", std::shared_ptr<grpc::ChannelCredentials>());
    grpc::GenericStub stub{channel};
    grpc::ClientContext context;
    grpc::Slice nothing;
    grpc::ByteBuffer request{&nothing, 1};
    grpc::ByteBuffer response;
  };
  static Pin* const pin = [] {
    auto* made = new Pin;
    made->stub.UnaryCall(&made->context, "/pin", {}, &made->request,
                         &made->response, [](const grpc::Status&) {});
    return made;
  }();
  (void)pin;
}

// Call credentials would do this, but not over plain text on loopback.
class AddBearer final : public grpc::experimental::Interceptor {
 public:
  explicit AddBearer(const std::string& value) : value_(value) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (batch->QueryInterceptionHookPoint(Point::PRE_SEND_INITIAL_METADATA)) {
      batch->GetSendInitialMetadata()->emplace("authorization", value_);
    }
    batch->Proceed();
  }

 private:
  const std::string& value_;
};

class AddBearerFactory final
    : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit AddBearerFactory(const std::string& key) : value_("Bearer " + key) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo* /*info*/) override {
    return new AddBearer(value_);
  }

 private:
  const std::string value_;  // lives with the channel, as calls do
};

}  // namespace

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address,
                                           const Credentials& tls,
                                           const ChannelOptions& options) {
  PrepareGrpc();
  KeepCallbackThreads();
  grpc::ChannelArguments arguments;
  // Off by default on clients. Every server here accepts a ping each 10 s; a
  // server with gRPC's own default (5 min) would hang up on us.
  if (options.keepalive) {
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  }
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 5'000);
  // In spite of its name: how long one attempt to connect may take, TLS and
  // HTTP/2 handshakes included.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  // http_proxy in the environment must not catch a cluster's own links.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Else channels to one address share a connection and its back-off.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(options.max_receive_bytes);
  arguments.SetMaxSendMessageSize(-1);  // the receiver's limit decides
  if (!options.tls_server_name.empty()) {
    arguments.SetSslTargetNameOverride(options.tls_server_name);
  }
  if (options.bearer.empty()) {
    return grpc::CreateCustomChannel(address, ClientSide(tls, options.server),
                                     arguments);
  }
  std::vector<
      std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>>
      interceptors;
  interceptors.push_back(std::make_unique<AddBearerFactory>(options.bearer));
  return grpc::experimental::CreateCustomChannelWithInterceptors(
      address, ClientSide(tls, options.server), arguments,
      std::move(interceptors));
}

}  // namespace tandem::rpc
