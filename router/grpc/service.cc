// SPDX-License-Identifier: Apache-2.0
#include "router/grpc/service.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rpc/client_stream.h"
#include "router/grpc/fold.h"
#include "router/grpc/grpc_calls.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

// The router ends calls itself; gRPC's deadline is only the backstop.
constexpr absl::Duration kDeadlineSlack = absl::Seconds(1);

rpc::CallOptions Options(const v1::WorkerRef& worker, absl::Duration deadline,
                         const TraceContext& trace) {
  rpc::CallOptions options{.timeout = deadline + kDeadlineSlack,
                           .peer = worker.endpoint()};
  std::string parent = trace.Traceparent();
  if (!parent.empty()) {
    options.metadata.emplace_back("traceparent", std::move(parent));
    if (!trace.state.empty()) {
      options.metadata.emplace_back("tracestate", trace.state);
    }
  }
  return options;
}

// Response: with a field `adapter`.
template <typename Response>
AdapterControl::Done Answering(Response* response, LoopAnswer answer) {
  return [response, answer = std::move(answer)](
             absl::StatusOr<v1::LoraAdapter> adapter) mutable {
    if (adapter.ok()) response->mutable_adapter()->Swap(&*adapter);
    answer.Finish(adapter.status());
  };
}

}  // namespace

std::unique_ptr<DecodeStream> RpcDialer::DialDecode(const v1::WorkerRef& worker,
                                                    absl::Duration deadline,
                                                    const TraceContext& trace) {
  if (worker.shared_decode()) return OpenShared(worker);
  auto stub = std::make_shared<v1::DecodeService::Stub>(
      channels_.Get(rpc::PeerRole::kDecode, worker));
  return rpc::OpenBidi<v1::DecodeRequest, v1::DecodeResponse>(
      loop_, Options(worker, deadline, trace),
      [stub](auto* context, auto* reactor) {
        stub->async()->Decode(context, reactor);
      });
}

std::unique_ptr<DecodeStream> RpcDialer::OpenShared(
    const v1::WorkerRef& worker) {
  std::erase_if(shared_, [](const auto& s) { return s.second->ended(); });
  std::shared_ptr<SharedDecode>& shared = shared_[worker.incarnation()];
  if (shared == nullptr) {
    auto stub = std::make_shared<v1::DecodeService::Stub>(
        channels_.Get(rpc::PeerRole::kDecode, worker));
    // As long as the worker; each call on it has its deadline.
    const rpc::CallOptions options{.timeout = absl::InfiniteDuration(),
                                   .peer = worker.endpoint()};
    shared = SharedDecode::Start(
        loop_, rpc::OpenBidi<v1::DecodeSharedRequest, v1::DecodeSharedResponse>(
                   loop_, options, [stub](auto* context, auto* reactor) {
                     stub->async()->DecodeShared(context, reactor);
                   }));
  }
  return shared->Open();
}

std::unique_ptr<PrefillStream> RpcDialer::DialPrefill(
    const v1::WorkerRef& worker, absl::Duration deadline,
    const TraceContext& trace) {
  auto stub = std::make_shared<v1::PrefillService::Stub>(
      channels_.Get(rpc::PeerRole::kPrefill, worker));
  return rpc::OpenBidi<v1::PrefillRequest, v1::PrefillResponse>(
      loop_, Options(worker, deadline, trace),
      [stub](auto* context, auto* reactor) {
        stub->async()->Prefill(context, reactor);
      });
}

grpc::ServerWriteReactor<v1::GenerateResponse>* InferenceServer::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  const absl::StatusOr<std::string> caller =
      Caller(*intake_, Api::kGrpc, *context);
  if (!caller.ok()) {
    return new RefusedStream<v1::GenerateResponse>(
        rpc::ToGrpc(caller.status(), context));
  }
  const rpc::CallInfo info = rpc::MakeCallInfo(*context);
  absl::StatusOr<AdmittedRequest> admitted = intake_->Prepare(
      Api::kGrpc, *request, Headers(info, *caller), info.time_left);
  if (!admitted.ok()) {
    return new RefusedStream<v1::GenerateResponse>(
        rpc::ToGrpc(admitted.status(), context));
  }
  auto* call =
      new rpc::ServerStreamCall<v1::GenerateResponse, v1::GenerateRequest>(
          loop_, context, {});
  std::unique_ptr<ClientStream> stream = std::make_unique<
      rpc::CallStream<v1::GenerateResponse, v1::GenerateRequest>>(call,
                                                                  info.peer);
  EnterGate(loop_, gate_, *std::move(admitted), std::move(stream));
  return call;
}

grpc::ServerUnaryReactor* InferenceServer::GenerateOnce(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request,
    v1::GenerateOnceResponse* response) {
  const absl::StatusOr<std::string> caller =
      Caller(*intake_, Api::kGrpc, *context);
  if (!caller.ok()) return Answer(context, caller.status());
  const rpc::CallInfo info = rpc::MakeCallInfo(*context);
  const auto refuse = [&](const absl::Status& status) {
    intake_->CountRefused(Api::kGrpc, status);
    return Answer(context, status);
  };
  if (request->output().has_attention()) {  // too much for one message
    return refuse(FieldInvalid("output.attention", "(set)",
                               "is of Generate, which streams"));
  }
  absl::StatusOr<AdmittedRequest> admitted = intake_->Prepare(
      Api::kGrpc, *request, Headers(info, *caller), info.time_left);
  if (!admitted.ok()) return Answer(context, admitted.status());
  if (const absl::Status fits = FitsOneMessage(*admitted); !fits.ok()) {
    return refuse(fits);
  }
  auto* call =
      new rpc::ServerUnaryCall<v1::GenerateOnceResponse, v1::GenerateRequest>(
          loop_, context, {}, response);
  std::unique_ptr<ClientStream> stream = std::make_unique<FoldingStream>(
      loop_,
      std::make_unique<
          rpc::CallStream<v1::GenerateOnceResponse, v1::GenerateRequest>>(
          call, info.peer),
      max_once_bytes_);
  EnterGate(loop_, gate_, *std::move(admitted), std::move(stream));
  return call;
}

grpc::ServerUnaryReactor* InferenceServer::Tokenize(
    grpc::CallbackServerContext* context, const v1::TokenizeRequest* request,
    v1::TokenizeResponse* response) {
  const absl::StatusOr<std::string> caller =
      Caller(*intake_, Api::kGrpc, *context);
  absl::Status status = caller.status();
  if (status.ok()) status = intake_->AdmitCall(*caller);
  if (!status.ok()) return Answer(context, status);
  absl::StatusOr<v1::TokenizeResponse> answer = intake_->Tokenize(*request);
  if (!answer.ok()) return Answer(context, answer.status());
  *response = *std::move(answer);
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* InferenceServer::Detokenize(
    grpc::CallbackServerContext* context, const v1::DetokenizeRequest* request,
    v1::DetokenizeResponse* response) {
  const absl::StatusOr<std::string> caller =
      Caller(*intake_, Api::kGrpc, *context);
  absl::Status status = caller.status();
  if (status.ok()) status = intake_->AdmitCall(*caller);
  if (!status.ok()) return Answer(context, status);
  absl::StatusOr<v1::DetokenizeResponse> answer = intake_->Detokenize(*request);
  if (!answer.ok()) return Answer(context, answer.status());
  *response = *std::move(answer);
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* InferenceServer::ListModels(
    grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
    v1::ListModelsResponse* response) {
  if (const auto caller = Caller(*intake_, Api::kGrpc, *context);
      !caller.ok()) {
    return Answer(context, caller.status());
  }
  for (v1::ModelInfo& info : intake_->Infos()) {
    *response->add_models() = std::move(info);
  }
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* InferenceServer::GetModel(
    grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
    v1::GetModelResponse* response) {
  if (const auto caller = Caller(*intake_, Api::kGrpc, *context);
      !caller.ok()) {
    return Answer(context, caller.status());
  }
  absl::StatusOr<v1::ModelInfo> info = intake_->Find(request->model());
  if (!info.ok()) return Answer(context, info.status());
  *response->mutable_model() = *std::move(info);
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* AdminServer::GetClusterState(
    grpc::CallbackServerContext* context,
    const v1::GetClusterStateRequest* request,
    v1::GetClusterStateResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, tenants = tenants_,
               all = request->include_requests(), response,
               answer = std::move(answer)]() mutable {
    *response = core->State(all);
    for (v1::TenantStatus& tenant : tenants->Describe()) {
      *response->add_tenants() = std::move(tenant);
    }
    answer.Finish(absl::OkStatus());
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServer::Abort(
    grpc::CallbackServerContext* context, const v1::AbortRequest* request,
    v1::AbortResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, gate = gate_, id = request->request_id(), response,
               answer = std::move(answer)]() mutable {
    const absl::StatusOr<int> tokens = AbortRequest(core, gate, id);
    if (tokens.ok()) response->set_output_tokens(*tokens);
    answer.Finish(tokens.status());
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServer::SetWorkerState(
    grpc::CallbackServerContext* context,
    const v1::SetWorkerStateRequest* request,
    v1::SetWorkerStateResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, id = request->worker_id(),
               cordoned = request->cordoned(), response,
               answer = std::move(answer)]() mutable {
    const absl::StatusOr<int> requests = core->Cordon(id, cordoned);
    if (requests.ok()) response->set_requests(*requests);
    answer.Finish(requests.status());
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServer::LoadLoraAdapter(
    grpc::CallbackServerContext* context,
    const v1::LoadLoraAdapterRequest* request,
    v1::LoadLoraAdapterResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, name = request->lora_name(),
               path = request->lora_path(), response,
               answer = std::move(answer)]() mutable {
    core->LoadAdapter(name, path, Answering(response, std::move(answer)));
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServer::UnloadLoraAdapter(
    grpc::CallbackServerContext* context,
    const v1::UnloadLoraAdapterRequest* request,
    v1::UnloadLoraAdapterResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, name = request->lora_name(), response,
               answer = std::move(answer)]() mutable {
    core->UnloadAdapter(name, Answering(response, std::move(answer)));
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServer::ListLoraAdapters(
    grpc::CallbackServerContext* context,
    const v1::ListLoraAdaptersRequest* /*request*/,
    v1::ListLoraAdaptersResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, response, answer = std::move(answer)]() mutable {
    for (v1::LoraAdapter& adapter : core->adapter_control().List()) {
      *response->add_adapters() = std::move(adapter);
    }
    answer.Finish(absl::OkStatus());
  });
  return reactor;
}

}  // namespace tandem::router
