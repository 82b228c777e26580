// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/rpc/grpc_process.h"
#include "common/rpc/unreadable.h"
#include "grpc/health/v1/health.pb.h"

namespace tandem::rpc {
namespace {

// Both are switches of the whole process that must come before the first
// Build.
void EnableStandardServices() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    // Links the description in, where reflection looks for it.
    (void)grpc::health::v1::HealthCheckRequest::descriptor();
  });
}

std::shared_ptr<grpc::ServerCredentials> CredentialsOf(
    const ServerOptions& options) {
  const RotatingCredentials* const rotating = options.rotating;
  std::shared_ptr<grpc::ServerCredentials> made =
      rotating != nullptr ? rotating->MakeServerSide()
                          : ServerSide(options.tls);
  const bool mutual =
      rotating != nullptr ? rotating->mutual() : options.tls.mutual();
  if (mutual && options.rules.has_value()) {
    made->SetAuthMetadataProcessor(MakeAuthorizer(*options.rules));
  }
  return made;
}

void SetLimits(const ServerOptions& options, grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Clients ping every 30 s through silent prefills; the default would answer
  // that with GOAWAY too_many_pings.
  builder->AddChannelArgument(
      GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10'000);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                              options.max_concurrent_streams);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE,
                              options.max_metadata_bytes);
  // Two minutes by default.
  builder->AddChannelArgument(
      GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
      static_cast<int>(std::min<int64_t>(
          absl::ToInt64Milliseconds(options.handshake_timeout), INT_MAX)));
  if (options.max_connection_age != absl::InfiniteDuration()) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                                static_cast<int>(absl::ToInt64Milliseconds(
                                    options.max_connection_age)));
  }
  builder->SetMaxReceiveMessageSize(options.max_receive_bytes);
  builder->SetMaxSendMessageSize(-1);
  grpc::ResourceQuota quota("tandem");
  quota.Resize(options.memory_bytes).SetMaxThreads(options.max_threads);
  builder->SetResourceQuota(quota);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(
    const ServerOptions& options, const std::vector<grpc::Service*>& services,
    std::unique_ptr<Listener> bound) {
  PrepareGrpc();
  EnableStandardServices();
  std::unique_ptr<Server> server(new Server());
  server->address_ = options.address;
  grpc::ServerBuilder builder;
  using Connections = grpc::ServerBuilder::experimental_type;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  if (options.address.rfind("unix:", 0) == 0) {
    builder.AddListeningPort(options.address, CredentialsOf(options));
  } else {
    if (bound == nullptr) {
      auto listener = Listener::Bind(options.address, options.connections,
                                     options.port_flag);
      if (!listener.ok()) return listener.status();
      bound = *std::move(listener);
    }
    server->listener_ = std::move(bound);
    server->address_ =
        absl::StrCat(options.address.substr(0, options.address.rfind(':')), ":",
                     server->port());
    acceptor = builder.experimental().AddExternalConnectionAcceptor(
        Connections::ExternalConnectionType::FROM_FD, CredentialsOf(options));
  }
  SetLimits(options, &builder);
  std::vector<
      std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
      interceptors;
  interceptors.push_back(NewUnreadableInterceptors());
  if (options.metrics != nullptr) {
    interceptors.push_back(options.metrics->NewInterceptors());
  }
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  for (grpc::Service* service : services) builder.RegisterService(service);

  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) {
    return MakeError(absl::StatusCode::kUnavailable, "CANNOT_LISTEN",
                     absl::StrCat("cannot serve on ", options.address,
                                  ": in use, or its certificate and key do "
                                  "not fit"));
  }
  if (acceptor != nullptr) server->listener_->Start(std::move(acceptor));
  return server;
}

Server::~Server() { Shutdown(absl::ZeroDuration()); }

int Server::port() const {
  return listener_ == nullptr ? 0 : listener_->port();
}

int64_t Server::connections() const {
  return listener_ == nullptr ? 0 : listener_->open();
}

int64_t Server::refused_connections() const {
  return listener_ == nullptr ? 0 : listener_->refused();
}

void Server::SetServing(const std::string& service, bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(service, serving);
}

void Server::Shutdown(absl::Duration grace) {
  if (server_ == nullptr || std::exchange(shut_down_, true)) return;
  if (listener_ != nullptr) listener_->Stop();
  server_->GetHealthCheckService()->Shutdown();
  server_->Shutdown(std::chrono::system_clock::now() +
                    absl::ToChronoMilliseconds(grace));
  server_->Wait();
}

}  // namespace tandem::rpc
