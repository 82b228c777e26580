// SPDX-License-Identifier: Apache-2.0
#include "router/service.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "common/rpc/client_stream.h"
#include "common/rpc/status.h"
#include "router/errors.h"
#include "router/fold.h"

namespace tandem::router {
namespace {

// The router ends calls itself; gRPC's deadline is only the backstop.
constexpr absl::Duration kDeadlineSlack = absl::Seconds(1);

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                 const absl::Status& status) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(rpc::ToGrpc(status, context));
  return reactor;
}

// Refuses a call that will never reach the core.
class RefusedStream final
    : public grpc::ServerWriteReactor<v1::GenerateResponse> {
 public:
  explicit RefusedStream(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

// Runs on the loop what a default reactor waits for. A reactor must be
// finished even where a stopped loop drops the task.
class LoopAnswer {
 public:
  explicit LoopAnswer(grpc::CallbackServerContext* context)
      : context_(context), reactor_(context->DefaultReactor()) {}
  LoopAnswer(LoopAnswer&& other) noexcept
      : context_(other.context_),
        reactor_(std::exchange(other.reactor_, nullptr)) {}
  LoopAnswer& operator=(LoopAnswer&&) = delete;
  ~LoopAnswer() {
    if (reactor_ != nullptr) Finish(Draining());
  }
  void Finish(const absl::Status& status) {
    std::exchange(reactor_, nullptr)->Finish(rpc::ToGrpc(status, context_));
  }
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }

 private:
  grpc::CallbackServerContext* const context_;
  grpc::ServerUnaryReactor* reactor_;
};

}  // namespace

std::unique_ptr<DecodeStream> RpcDialer::DialDecode(const v1::WorkerRef& worker,
                                                    absl::Duration deadline) {
  auto stub = std::make_shared<v1::DecodeService::Stub>(channels_.Get(worker));
  return rpc::OpenBidi<v1::DecodeRequest, v1::DecodeResponse>(
      loop_, {.timeout = deadline + kDeadlineSlack, .peer = worker.endpoint()},
      [stub](auto* context, auto* reactor) {
        stub->async()->Decode(context, reactor);
      });
}

std::unique_ptr<PrefillStream> RpcDialer::DialPrefill(
    const v1::WorkerRef& worker, absl::Duration deadline) {
  auto stub = std::make_shared<v1::PrefillService::Stub>(channels_.Get(worker));
  return rpc::OpenBidi<v1::PrefillRequest, v1::PrefillResponse>(
      loop_, {.timeout = deadline + kDeadlineSlack, .peer = worker.endpoint()},
      [stub](auto* context, auto* reactor) {
        stub->async()->Prefill(context, reactor);
      });
}

ModelLimits InferenceServer::Limits() const {
  ModelLimits limits = model_->limits();
  // What every decode worker can hold; the model's own while there is none.
  if (const int length = facts_->context_length; length > 0) {
    limits.context_length = length;
  }
  return limits;
}

absl::StatusOr<AdmittedRequest> InferenceServer::Prepare(
    const rpc::CallInfo& info, const v1::GenerateRequest& request) const {
  const ModelLimits limits = Limits();
  const absl::Time begun = absl::Now();
  absl::StatusOr<EffectiveRequest> effective = Validate(request, limits);
  if (!effective.ok()) return effective.status();
  absl::StatusOr<ModelText::Prompt> prompt = model_->Encode(request);
  if (!prompt.ok()) return prompt.status();
  metrics_->OnStage(Stage::kTokenise, absl::Now() - begun);
  // Tokenizers may know tokens that the model has no rows for.
  const absl::Status known =
      ValidateTokenIds("prompt", prompt->token_ids, limits);
  if (!known.ok()) return known;
  absl::StatusOr<std::vector<std::vector<int32_t>>> bad_words =
      model_->EncodeBadWords(effective->sampling.bad_words());
  if (!bad_words.ok()) return bad_words.status();
  for (const std::vector<int32_t>& word : *bad_words) {
    const absl::Status valid =
        ValidateTokenIds("sampling.bad_words", word, limits);
    if (!valid.ok()) return valid;
  }
  effective->bad_word_ids = *std::move(bad_words);
  AdmittedRequest admitted;
  admitted.effective = *std::move(effective);
  admitted.prompt = std::move(prompt->token_ids);
  const absl::Status fits = FitToContext(
      static_cast<int>(admitted.prompt.size()), limits, &admitted.effective);
  if (!fits.ok()) return fits;
  const std::string_view header_id = info.Find("x-request-id");
  if (admitted.effective.request_id.empty() &&
      ValidateRequestId(header_id).ok()) {
    admitted.effective.request_id = std::string(header_id);
  }
  if (info.time_left != absl::InfiniteDuration()) {
    admitted.deadline = std::max(info.time_left, absl::Milliseconds(1));
  }
  return admitted;
}

grpc::ServerWriteReactor<v1::GenerateResponse>* InferenceServer::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  const rpc::CallInfo info = rpc::MakeCallInfo(*context);
  absl::StatusOr<AdmittedRequest> admitted = Prepare(info, *request);
  if (!admitted.ok()) {
    metrics_->OnInvalid(admitted.status());
    return new RefusedStream(rpc::ToGrpc(admitted.status(), context));
  }
  rpc::EchoRequestId(info, context);
  auto* call =
      new rpc::ServerStreamCall<v1::GenerateResponse, v1::GenerateRequest>(
          loop_, context, {});
  std::unique_ptr<ClientStream> stream = std::make_unique<
      rpc::CallStream<v1::GenerateResponse, v1::GenerateRequest>>(call,
                                                                  info.peer);
  loop_->Post([core = core_, admitted = *std::move(admitted),
               stream = std::move(stream)]() mutable {
    core->Submit(std::move(admitted), std::move(stream));
  });
  return call;
}

grpc::ServerUnaryReactor* InferenceServer::GenerateOnce(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request,
    v1::GenerateOnceResponse* response) {
  const rpc::CallInfo info = rpc::MakeCallInfo(*context);
  absl::StatusOr<AdmittedRequest> admitted = Prepare(info, *request);
  if (!admitted.ok()) {
    metrics_->OnInvalid(admitted.status());
    return Answer(context, admitted.status());
  }
  rpc::EchoRequestId(info, context);
  auto* call =
      new rpc::ServerUnaryCall<v1::GenerateOnceResponse, v1::GenerateRequest>(
          loop_, context, {}, response);
  std::unique_ptr<ClientStream> stream = std::make_unique<FoldingStream>(
      std::make_unique<
          rpc::CallStream<v1::GenerateOnceResponse, v1::GenerateRequest>>(
          call, info.peer));
  loop_->Post([core = core_, admitted = *std::move(admitted),
               stream = std::move(stream)]() mutable {
    core->Submit(std::move(admitted), std::move(stream));
  });
  return call;
}

grpc::ServerUnaryReactor* InferenceServer::Tokenize(
    grpc::CallbackServerContext* context, const v1::TokenizeRequest* request,
    v1::TokenizeResponse* response) {
  const ModelLimits limits = Limits();
  absl::Status status = ValidateModel(request->model(), limits);
  if (!status.ok()) return Answer(context, status);
  absl::StatusOr<ModelText::Prompt> prompt =
      FieldInvalid("prompt", "(not set)", "one of text or chat is needed");
  if (request->has_text()) {
    prompt =
        model_->Encode(request->text(), !request->has_add_special_tokens() ||
                                            request->add_special_tokens());
  } else if (request->has_chat()) {
    status = ValidateChat(request->chat(), limits);
    if (!status.ok()) return Answer(context, status);
    prompt = model_->Encode(request->chat(), request->add_special_tokens());
  }
  if (!prompt.ok()) return Answer(context, prompt.status());
  response->mutable_token_ids()->Add(prompt->token_ids.begin(),
                                     prompt->token_ids.end());
  if (request->return_tokens()) {
    for (int32_t id : prompt->token_ids) {
      response->add_tokens(model_->TokenText(id));
    }
  }
  response->set_rendered_prompt(prompt->rendered);
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* InferenceServer::Detokenize(
    grpc::CallbackServerContext* context, const v1::DetokenizeRequest* request,
    v1::DetokenizeResponse* response) {
  const ModelLimits& limits = model_->limits();
  absl::Status status = ValidateModel(request->model(), limits);
  if (status.ok()) {
    status = ValidateTokenIds("token_ids", request->token_ids(), limits);
  }
  if (!status.ok()) return Answer(context, status);
  const std::vector<int32_t> ids(request->token_ids().begin(),
                                 request->token_ids().end());
  absl::StatusOr<std::string> text =
      model_->Decode(ids, !request->has_skip_special_tokens() ||
                              request->skip_special_tokens());
  if (!text.ok()) {
    return Answer(context, FieldInvalid("token_ids", "(ids)",
                                        std::string(text.status().message())));
  }
  response->set_text(*std::move(text));
  return Answer(context, absl::OkStatus());
}

v1::ModelInfo InferenceServer::Info() const {
  const ModelLimits& limits = model_->limits();
  v1::ModelInfo info;
  info.set_model(limits.model);
  info.set_context_length(facts_->context_length);
  info.set_vocabulary_size(limits.vocabulary_size);
  info.set_has_chat_template(limits.has_chat_template);
  info.mutable_eos_token_ids()->Add(limits.eos_token_ids.begin(),
                                    limits.eos_token_ids.end());
  *info.mutable_default_sampling() = DefaultSampling(limits);
  *info.mutable_default_stopping() = DefaultStopping(limits);
  info.set_ready_decode_workers(facts_->ready_decode);
  info.set_ready_prefill_workers(facts_->ready_prefill);
  return info;
}

grpc::ServerUnaryReactor* InferenceServer::ListModels(
    grpc::CallbackServerContext* context, const v1::ListModelsRequest* request,
    v1::ListModelsResponse* response) {
  *response->add_models() = Info();
  return Answer(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* InferenceServer::GetModel(
    grpc::CallbackServerContext* context, const v1::GetModelRequest* request,
    v1::GetModelResponse* response) {
  const absl::Status status = ValidateModel(request->model(), model_->limits());
  if (status.ok()) *response->mutable_model() = Info();
  return Answer(context, status);
}

grpc::ServerUnaryReactor* AdminServer::GetClusterState(
    grpc::CallbackServerContext* context,
    const v1::GetClusterStateRequest* request,
    v1::GetClusterStateResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, all = request->include_requests(), response,
               answer = std::move(answer)]() mutable {
    *response = core->State(all);
    answer.Finish(absl::OkStatus());
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminServer::Abort(
    grpc::CallbackServerContext* context, const v1::AbortRequest* request,
    v1::AbortResponse* response) {
  LoopAnswer answer(context);
  grpc::ServerUnaryReactor* const reactor = answer.reactor();
  loop_->Post([core = core_, id = request->request_id(), response,
               answer = std::move(answer)]() mutable {
    const absl::StatusOr<int> tokens = core->Abort(id);
    if (tokens.ok()) response->set_output_tokens(*tokens);
    answer.Finish(tokens.status());
  });
  return reactor;
}

}  // namespace tandem::router
