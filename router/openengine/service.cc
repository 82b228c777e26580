// SPDX-License-Identifier: Apache-2.0
#include "router/openengine/service.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/error.h"
#include "common/rpc/server_stream.h"
#include "router/intake/charged_stream.h"
#include "router/openengine/stream.h"
#include "router/openengine/translate.h"

namespace tandem::router {
namespace {

// A request of one token that nobody reads.
class Probe final : public ClientStream {
 public:
  // Health's answer, and where to.
  Probe(oe::HealthResponse* response, LoopAnswer answer)
      : response_(response), answer_(std::move(answer)) {}
  ~Probe() override { Close(absl::CancelledError("given up")); }

  void Start(StreamHandler<v1::GenerateRequest>*) override {}
  void Send(v1::GenerateResponse) override {}
  size_t unsent() const override { return 0; }
  void PauseReading(bool) override {}
  void Close(absl::Status status) override {
    if (std::exchange(closed_, true)) return;
    AddCheck("inference_probe", status, response_);
    answer_.Finish(absl::OkStatus());
  }
  std::string peer() const override { return "probe"; }

 private:
  oe::HealthResponse* const response_;
  LoopAnswer answer_;
  bool closed_ = false;
};

v1::GenerateRequest ProbeRequest(const std::string& model,
                                 const ModelLimits& limits) {
  v1::GenerateRequest request;
  request.set_model(model);
  // Every model has one, and embeds it.
  request.mutable_token_ids()->add_ids(
      limits.eos_token_ids.empty()
          ? 0
          : static_cast<uint32_t>(limits.eos_token_ids.front()));
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(1);
  request.mutable_cache()->set_bypass_prefix_cache(true);
  return request;
}

}  // namespace

grpc::ServerWriteReactor<oe::GenerateResponse>* OpenEngineInference::Generate(
    grpc::CallbackServerContext* context, const oe::GenerateRequest* request) {
  const auto refuse = [context](const absl::Status& status) {
    return new RefusedStream<oe::GenerateResponse>(
        rpc::ToGrpc(InOpenEngineTerms(status), context));
  };
  const absl::StatusOr<std::string> caller =
      Caller(*intake_, Api::kOpenEngine, *context);
  if (!caller.ok()) return refuse(caller.status());
  const rpc::CallInfo info = rpc::MakeCallInfo(*context);
  absl::StatusOr<v1::GenerateRequest> ours = FromOpenEngine(*request);
  if (ours.ok()) {
    const absl::Status metadata = CheckOpenEngineMetadata(info.metadata);
    if (!metadata.ok()) ours = metadata;
  }
  if (!ours.ok()) {
    intake_->CountRefused(Api::kOpenEngine, ours.status());
    return refuse(ours.status());
  }
  absl::StatusOr<AdmittedRequest> admitted = intake_->Prepare(
      Api::kOpenEngine, *ours, Headers(info, *caller), info.time_left);
  absl::Status status = admitted.status();
  if (status.ok()) {
    status = FitsOneMessage(*admitted);
    if (!status.ok()) intake_->CountRefused(Api::kOpenEngine, status);
  }
  if (!status.ok()) return refuse(status);
  auto* call =
      new rpc::ServerStreamCall<oe::GenerateResponse, v1::GenerateRequest>(
          loop_, context, {});
  std::unique_ptr<ClientStream> stream = std::make_unique<OpenEngineStream>(
      std::make_unique<
          rpc::CallStream<oe::GenerateResponse, v1::GenerateRequest>>(
          call, info.peer),
      codec_);
  EnterGate(loop_, gate_, *std::move(admitted), std::move(stream));
  return call;
}

grpc::ServerUnaryReactor* OpenEngineControl::GetServerInfo(
    grpc::CallbackServerContext* context,
    const oe::GetServerInfoRequest* /*request*/, oe::ServerInfo* response) {
  if (const auto tenant = Tenant(*context); !tenant.ok()) {
    return Answer(context, tenant.status());
  }
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, response, answer = std::move(answer)]() mutable {
    *response = MakeServerInfo(core->State(/*include_requests=*/false));
    answer.Finish(absl::OkStatus());
  });
  return reactor;
}

grpc::ServerUnaryReactor* OpenEngineControl::GetModelInfo(
    grpc::CallbackServerContext* context,
    const oe::GetModelInfoRequest* request, oe::ModelInfo* response) {
  if (const auto tenant = Tenant(*context); !tenant.ok()) {
    return Answer(context, tenant.status());
  }
  ModelLimits limits = intake_->Limits();
  limits.adapters.emplace();  // no models of their own here
  const absl::Status status =
      request->model().empty() ? FieldInvalid("model", "(empty)", "is needed")
                               : ValidateModel(request->model(), limits);
  if (status.ok()) *response = MakeModelInfo(limits, options_.lora_updating);
  return Answer(context, status);
}

grpc::ServerUnaryReactor* OpenEngineControl::GetLoad(
    grpc::CallbackServerContext* context, const oe::GetLoadRequest* request,
    oe::LoadInfo* response) {
  if (const auto tenant = Tenant(*context); !tenant.ok()) {
    return Answer(context, tenant.status());
  }
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, per_rank = request->include_per_rank(), response,
               answer = std::move(answer)]() mutable {
    *response = MakeLoadInfo(core->State(/*include_requests=*/false),
                             absl::Now(), per_rank);
    answer.Finish(absl::OkStatus());
  });
  return reactor;
}

grpc::ServerUnaryReactor* OpenEngineControl::Health(
    grpc::CallbackServerContext* context, const oe::HealthRequest* request,
    oe::HealthResponse* response) {
  const absl::StatusOr<std::string> tenant = Tenant(*context);
  if (!tenant.ok()) return Answer(context, tenant.status());
  AddCheck("grpc", absl::OkStatus(), response);
  AddCheck("scheduler", options_.alive(), response);
  AddCheck("model", options_.ready(), response);
  if (request->role() != oe::ENGINE_ROLE_UNSPECIFIED) {
    AddCheck("role",
             request->role() == oe::ENGINE_ROLE_AGGREGATED
                 ? absl::OkStatus()
                 : absl::FailedPreconditionError(
                       "this engine is of the aggregated role"),
             response);
  }
  if (!request->include_inference_probe()) {
    return Answer(context, absl::OkStatus());
  }
  const rpc::CallInfo info = rpc::MakeCallInfo(*context);
  absl::StatusOr<AdmittedRequest> admitted = intake_->Prepare(
      Api::kOpenEngine, ProbeRequest(request->model(), intake_->Limits()),
      Headers(info, *tenant), info.time_left);
  if (!admitted.ok()) return Answer(context, admitted.status());
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  std::unique_ptr<ClientStream> stream =
      std::make_unique<Probe>(response, std::move(answer));
  stream = Charged(std::move(stream), admitted->charge);
  loop_->Post([core = core_, admitted = *std::move(admitted),
               stream = std::move(stream)]() mutable {
    core->Submit(std::move(admitted), std::move(stream));
  });
  return reactor;
}

grpc::ServerUnaryReactor* OpenEngineControl::Abort(
    grpc::CallbackServerContext* context, const oe::AbortRequest* request,
    oe::AbortResponse* response) {
  const absl::StatusOr<std::string> tenant = Tenant(*context);
  if (!tenant.ok()) return Answer(context, tenant.status());
  switch (request->target_case()) {
    case oe::AbortRequest::kKvSession:
      return Answer(context, MakeError(absl::StatusCode::kNotFound,
                                       "KV_SESSION_NOT_FOUND",
                                       "there are no KV sessions here"));
    case oe::AbortRequest::TARGET_NOT_SET:
      return Answer(
          context, FieldInvalid("target", "(not set)",
                                "one of request_id or all_requests is needed"));
    case oe::AbortRequest::kRequestId:
    case oe::AbortRequest::kAllRequests:
      break;
  }
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, gate = gate_, tenant = *tenant, request = *request,
               response, answer = std::move(answer)]() mutable {
    if (request.has_all_requests()) {
      response->set_message(absl::StrCat(AbortAllRequests(core, gate, tenant),
                                         " requests aborted"));
    } else if (const auto tokens =
                   AbortRequest(core, gate, request.request_id(), tenant);
               !tokens.ok()) {
      return answer.Finish(tokens.status());
    }
    response->set_status(oe::ABORT_STATUS_ABORTED);
    answer.Finish(absl::OkStatus());
  });
  return reactor;
}

absl::Status OpenEngineControl::MayUpdate(
    const grpc::CallbackServerContext& context) const {
  const absl::StatusOr<std::string> tenant = Tenant(context);
  if (!tenant.ok() || options_.lora_updating) return tenant.status();
  return MakeError(absl::StatusCode::kFailedPrecondition, "LORA_UPDATING_OFF",
                   "clients may not load and unload adapters: the router was "
                   "started without --allow-runtime-lora-updating");
}

void OpenEngineControl::Describe(const v1::LoraAdapter& adapter,
                                 oe::LoraAdapter* to) const {
  to->set_lora_id(adapter_ids_.Of(adapter.lora_name()));
  to->set_lora_name(adapter.lora_name());
  to->set_source_path(adapter.lora_path());
}

grpc::ServerUnaryReactor* OpenEngineControl::LoadLora(
    grpc::CallbackServerContext* context, const oe::LoadLoraRequest* request,
    oe::LoadLoraResponse* response) {
  absl::Status status = MayUpdate(*context);
  if (status.ok() && request->adapter().lora_id() <= 0) {
    status = FieldInvalid("adapter.lora_id",
                          absl::StrCat(request->adapter().lora_id()),
                          "must be positive");
  }
  if (!status.ok()) return Answer(context, status);
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([this, asked = request->adapter(), response,
               answer = std::move(answer)]() mutable {
    Load(asked, response, std::move(answer));
  });
  return reactor;
}

void OpenEngineControl::Load(const oe::LoraAdapter& asked,
                             oe::LoadLoraResponse* response,
                             LoopAnswer answer) {
  const std::string& name = asked.lora_name();
  const std::vector<v1::LoraAdapter> adapters = core_->adapter_control().List();
  const auto there = std::find_if(
      adapters.begin(), adapters.end(),
      [&](const v1::LoraAdapter& one) { return one.lora_name() == name; });
  const bool known = there != adapters.end();
  if (known && !there->lora_path().empty() &&
      there->lora_path() != asked.source_path()) {
    return answer.Finish(MakeError(
        absl::StatusCode::kAlreadyExists, "ADAPTER_EXISTS",
        absl::StrCat("adapter.source_path = ", asked.source_path(),
                     ": adapter ", name, " is of ", there->lora_path()),
        {{"adapter", name}}));
  }
  const absl::Status taken = adapter_ids_.Take(name, asked.lora_id(), adapters);
  if (!taken.ok()) return answer.Finish(taken);
  response->set_already_loaded(known && there->state() == "ready");
  core_->LoadAdapter(name, asked.source_path(),
                     [this, known, name, response, answer = std::move(answer)](
                         absl::StatusOr<v1::LoraAdapter> adapter) mutable {
                       if (adapter.ok()) {
                         Describe(*adapter, response->mutable_adapter());
                       } else if (!known) {
                         adapter_ids_.Drop(name);
                       }
                       answer.Finish(InOpenEngineTerms(adapter.status()));
                     });
}

grpc::ServerUnaryReactor* OpenEngineControl::UnloadLora(
    grpc::CallbackServerContext* context, const oe::UnloadLoraRequest* request,
    oe::UnloadLoraResponse* response) {
  const absl::Status status = MayUpdate(*context);
  if (!status.ok()) return Answer(context, status);
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([this, name = request->lora_name(), response,
               answer = std::move(answer)]() mutable {
    core_->UnloadAdapter(name,
                         [this, name, response, answer = std::move(answer)](
                             absl::StatusOr<v1::LoraAdapter> adapter) mutable {
                           if (adapter.ok()) {
                             Describe(*adapter, response->mutable_adapter());
                             adapter_ids_.Drop(name);
                           }
                           answer.Finish(adapter.status());
                         });
  });
  return reactor;
}

grpc::ServerUnaryReactor* OpenEngineControl::ListLoras(
    grpc::CallbackServerContext* context,
    const oe::ListLorasRequest* /*request*/, oe::ListLorasResponse* response) {
  const absl::Status status = MayUpdate(*context);
  if (!status.ok()) return Answer(context, status);
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([this, response, answer = std::move(answer)]() mutable {
    const std::vector<v1::LoraAdapter> adapters =
        core_->adapter_control().List();
    adapter_ids_.Keep(adapters);
    for (const v1::LoraAdapter& adapter : adapters) {
      Describe(adapter, response->add_adapters());
    }
    answer.Finish(absl::OkStatus());
  });
  return reactor;
}

grpc::ServerUnaryReactor* OpenEngineControl::GetKvEventSources(
    grpc::CallbackServerContext* context,
    const oe::GetKvEventSourcesRequest* /*request*/,
    oe::GetKvEventSourcesResponse* /*response*/) {
  return Answer(context, Tenant(*context).status());
}

grpc::ServerWriteReactor<oe::SubscribeKvEventsResponse>*
OpenEngineControl::SubscribeKvEvents(
    grpc::CallbackServerContext* context,
    const oe::SubscribeKvEventsRequest* /*request*/) {
  absl::Status status = Tenant(*context).status();
  if (status.ok()) {
    status = MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_FEATURE",
                       "events of KV caches are not sent");
  }
  return new RefusedStream<oe::SubscribeKvEventsResponse>(
      rpc::ToGrpc(status, context));
}

}  // namespace tandem::router
