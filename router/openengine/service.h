// SPDX-License-Identifier: Apache-2.0
// OpenEngine's services over the router's own intake and core, on the port of
// tandem.v1.InferenceService and with its keys, limits and metrics. What
// messages become is translate.h's business, what is told facts.h's.

#ifndef TANDEM_ROUTER_OPENENGINE_SERVICE_H_
#define TANDEM_ROUTER_OPENENGINE_SERVICE_H_

#include <functional>

#include "absl/status/status.h"
#include "common/loop.h"
#include "openengine/v1/control.grpc.pb.h"
#include "openengine/v1/inference.grpc.pb.h"
#include "router/core/core.h"
#include "router/grpc/grpc_calls.h"
#include "router/intake/intake.h"
#include "router/intake/structured_gate.h"
#include "router/openengine/facts.h"

namespace tandem::router {

// All that is pointed to outlives the services.
class OpenEngineInference final : public oe::Inference::CallbackService {
 public:
  OpenEngineInference(Loop* loop, StructuredGate* gate, const Intake* intake,
                      TextCodec* codec)
      : loop_(loop), gate_(gate), intake_(intake), codec_(codec) {}

  grpc::ServerWriteReactor<oe::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context,
      const oe::GenerateRequest* request) override;

 private:
  Loop* const loop_;
  StructuredGate* const gate_;
  const Intake* const intake_;
  TextCodec* const codec_;
};

struct OpenEngineOptions {
  bool lora_updating = false;  // clients may load and unload adapters
  // Of the loop, and of all that requests need. From any thread.
  std::function<absl::Status()> alive;
  std::function<absl::Status()> ready;
};

class OpenEngineControl final : public oe::Control::CallbackService {
 public:
  OpenEngineControl(Loop* loop, RouterCore* core, StructuredGate* gate,
                    const Intake* intake, OpenEngineOptions options)
      : loop_(loop),
        core_(core),
        gate_(gate),
        intake_(intake),
        options_(std::move(options)) {}

  grpc::ServerUnaryReactor* GetServerInfo(
      grpc::CallbackServerContext* context,
      const oe::GetServerInfoRequest* request,
      oe::ServerInfo* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const oe::GetModelInfoRequest* request,
                                         oe::ModelInfo* response) override;
  grpc::ServerUnaryReactor* GetLoad(grpc::CallbackServerContext* context,
                                    const oe::GetLoadRequest* request,
                                    oe::LoadInfo* response) override;
  grpc::ServerUnaryReactor* Health(grpc::CallbackServerContext* context,
                                   const oe::HealthRequest* request,
                                   oe::HealthResponse* response) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* context,
                                  const oe::AbortRequest* request,
                                  oe::AbortResponse* response) override;
  grpc::ServerUnaryReactor* LoadLora(grpc::CallbackServerContext* context,
                                     const oe::LoadLoraRequest* request,
                                     oe::LoadLoraResponse* response) override;
  grpc::ServerUnaryReactor* UnloadLora(
      grpc::CallbackServerContext* context,
      const oe::UnloadLoraRequest* request,
      oe::UnloadLoraResponse* response) override;
  grpc::ServerUnaryReactor* ListLoras(grpc::CallbackServerContext* context,
                                      const oe::ListLorasRequest* request,
                                      oe::ListLorasResponse* response) override;
  grpc::ServerUnaryReactor* GetKvEventSources(
      grpc::CallbackServerContext* context,
      const oe::GetKvEventSourcesRequest* request,
      oe::GetKvEventSourcesResponse* response) override;
  grpc::ServerWriteReactor<oe::SubscribeKvEventsResponse>* SubscribeKvEvents(
      grpc::CallbackServerContext* context,
      const oe::SubscribeKvEventsRequest* request) override;

 private:
  absl::StatusOr<std::string> Tenant(
      const grpc::CallbackServerContext& context) const {
    return Caller(*intake_, Api::kOpenEngine, context);
  }
  // Whether the caller may change what is served.
  absl::Status MayUpdate(const grpc::CallbackServerContext& context) const;
  // On the loop.
  void Load(const oe::LoraAdapter& asked, oe::LoadLoraResponse* response,
            LoopAnswer answer);
  void Describe(const v1::LoraAdapter& adapter, oe::LoraAdapter* to) const;

  Loop* const loop_;
  RouterCore* const core_;
  StructuredGate* const gate_;
  const Intake* const intake_;
  const OpenEngineOptions options_;
  AdapterIds adapter_ids_;  // the loop's
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_OPENENGINE_SERVICE_H_
