// SPDX-License-Identifier: Apache-2.0
// The router's gRPC faces: the public service, the workers' registration, and
// the operators' service. Validation and tokenisation run on gRPC's threads,
// before a request enters the core's loop.

#ifndef TANDEM_ROUTER_GRPC_SERVICE_H_
#define TANDEM_ROUTER_GRPC_SERVICE_H_

#include <cstddef>
#include <map>
#include <memory>
#include <string>

#include "common/loop.h"
#include "common/rpc/credentials.h"
#include "common/rpc/server_stream.h"
#include "common/shared_stream.h"
#include "router/core/core.h"
#include "router/intake/intake.h"
#include "router/intake/structured_gate.h"
#include "tandem/v1/admin.grpc.pb.h"
#include "tandem/v1/decode.grpc.pb.h"
#include "tandem/v1/inference.grpc.pb.h"
#include "tandem/v1/prefill.grpc.pb.h"
#include "tandem/v1/registry.grpc.pb.h"
#include "worker/channels.h"

namespace tandem::router {

// Calls to workers, over channels that are kept; those of one decode worker
// share one stream. On the loop.
class RpcDialer final : public Dialer {
 public:
  RpcDialer(Loop* loop, rpc::Credentials tls)
      : loop_(loop), channels_(std::move(tls)) {}
  std::unique_ptr<DecodeStream> DialDecode(const v1::WorkerRef& worker,
                                           absl::Duration deadline,
                                           const TraceContext& trace) override;
  std::unique_ptr<PrefillStream> DialPrefill(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext& trace) override;
  // For calls from now on.
  void Replace(rpc::Credentials tls) {
    channels_.Replace(std::move(tls));
    shared_.clear();
  }

 private:
  using SharedDecode =
      SharedStream<v1::DecodeSharedRequest, v1::DecodeSharedResponse>;

  std::unique_ptr<DecodeStream> OpenShared(const v1::WorkerRef& worker);

  Loop* const loop_;
  worker::Channels channels_;
  // By incarnation. Those that were dropped live until their calls ended.
  std::map<std::string, std::shared_ptr<SharedDecode>> shared_;
};

class InferenceServer final : public v1::InferenceService::CallbackService {
 public:
  // `max_once_bytes`: of GenerateOnce's answers.
  InferenceServer(Loop* loop, StructuredGate* gate, const Intake* intake,
                  size_t max_once_bytes)
      : loop_(loop),
        gate_(gate),
        intake_(intake),
        max_once_bytes_(max_once_bytes) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context,
      const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* GenerateOnce(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request,
      v1::GenerateOnceResponse* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(
      grpc::CallbackServerContext* context,
      const v1::DetokenizeRequest* request,
      v1::DetokenizeResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(
      grpc::CallbackServerContext* context,
      const v1::ListModelsRequest* request,
      v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* GetModel(grpc::CallbackServerContext* context,
                                     const v1::GetModelRequest* request,
                                     v1::GetModelResponse* response) override;

 private:
  Loop* const loop_;
  StructuredGate* const gate_;
  const Intake* const intake_;
  const size_t max_once_bytes_;
};

class RegistryServer final : public v1::RegistryService::CallbackService {
 public:
  RegistryServer(Loop* loop, RouterCore* core)
      : loop_(loop), accept_([core](auto stream, const rpc::CallInfo& info) {
          core->AddRegistration(std::move(stream), info.identity);
        }) {}
  grpc::ServerBidiReactor<v1::RegisterRequest, v1::RegisterResponse>* Register(
      grpc::CallbackServerContext* context) override {
    return rpc::ServeBidi<v1::RegisterResponse, v1::RegisterRequest>(
        loop_, context, &accept_);
  }

 private:
  Loop* const loop_;
  const rpc::Accept<v1::RegisterResponse, v1::RegisterRequest> accept_;
};

class AdminServer final : public v1::AdminService::CallbackService {
 public:
  AdminServer(Loop* loop, RouterCore* core, StructuredGate* gate,
              Tenants* tenants)
      : loop_(loop), core_(core), gate_(gate), tenants_(tenants) {}
  grpc::ServerUnaryReactor* GetClusterState(
      grpc::CallbackServerContext* context,
      const v1::GetClusterStateRequest* request,
      v1::GetClusterStateResponse* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;
  grpc::ServerUnaryReactor* SetWorkerState(
      grpc::CallbackServerContext* context,
      const v1::SetWorkerStateRequest* request,
      v1::SetWorkerStateResponse* response) override;
  grpc::ServerUnaryReactor* LoadLoraAdapter(
      grpc::CallbackServerContext* context,
      const v1::LoadLoraAdapterRequest* request,
      v1::LoadLoraAdapterResponse* response) override;
  grpc::ServerUnaryReactor* UnloadLoraAdapter(
      grpc::CallbackServerContext* context,
      const v1::UnloadLoraAdapterRequest* request,
      v1::UnloadLoraAdapterResponse* response) override;
  grpc::ServerUnaryReactor* ListLoraAdapters(
      grpc::CallbackServerContext* context,
      const v1::ListLoraAdaptersRequest* request,
      v1::ListLoraAdaptersResponse* response) override;

 private:
  Loop* const loop_;
  RouterCore* const core_;
  StructuredGate* const gate_;
  Tenants* const tenants_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_GRPC_SERVICE_H_
