// SPDX-License-Identifier: Apache-2.0
#include "router/intake/intake.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/failpoint.h"
#include "common/random.h"
#include "common/trace_context.h"
#include "router/validate/errors.h"

namespace tandem::router {

ModelLimits Intake::Limits() const {
  ModelLimits limits = model_->limits();
  limits.offers = offers_;
  // What every decode worker can hold; the model's own while there is none.
  if (const int length = facts_->context_length; length > 0) {
    limits.context_length = length;
  }
  limits.kv_blocks = facts_->kv_blocks;
  limits.kv_block_size = facts_->kv_block_size;
  limits.kv_bytes_per_token = facts_->kv_bytes_per_token;
  limits.kv_sequences = facts_->kv_sequences;
  // One that is away, or gets nothing for a while, may have others.
  if (facts_->ready_decode > 0) limits.adapters = facts_->adapters();
  return limits;
}

absl::StatusOr<AdmittedRequest> Intake::Prepare(
    Api api, const v1::GenerateRequest& request, const CallHeaders& headers,
    absl::Duration time_left) const {
  absl::StatusOr<AdmittedRequest> admitted =
      PrepareUncharged(api, request, headers, time_left);
  if (!admitted.ok()) return admitted;
  const absl::Status charged = Charge(api, request.stopping().has_max_tokens(),
                                      absl::MakeSpan(&*admitted, 1));
  if (!charged.ok()) return charged;
  return admitted;
}

absl::StatusOr<AdmittedRequest> Intake::PrepareUncharged(
    Api api, const v1::GenerateRequest& request, const CallHeaders& headers,
    absl::Duration time_left) const {
  if (TANDEM_FAILPOINT("router.admit", "crash fail stall")) {
    return failpoint::Error();
  }
  const std::string tenant(headers.tenant);
  absl::Status room = HasRoom(api, tenant, request.priority());
  if (!room.ok()) return room;
  absl::StatusOr<AdmittedRequest> admitted =
      !tenant.empty() && request.priority() < 0
          ? FieldInvalid("priority", absl::StrCat(request.priority()),
                         "of a tenant with a key 0 or more")
          : Admit(request);
  if (!admitted.ok()) {
    metrics_->OnInvalid(api, admitted.status());
    return admitted;
  }
  admitted->api = api;
  if (!tenant.empty()) {
    EffectiveRequest& effective = admitted->effective;
    effective.cache_salt = TenantSalt(tenant, effective.cache_salt);
    effective.cache_owner = CacheOwner(tenant);
    admitted->tenant = tenant;
  }
  admitted->trace = TraceOf(headers);
  if (admitted->effective.request_id.empty() &&
      ValidateRequestId(headers.request_id).ok()) {
    admitted->effective.request_id = std::string(headers.request_id);
    admitted->id_from_header = true;
  }
  if (time_left != absl::InfiniteDuration()) {
    admitted->deadline = std::max(time_left, absl::Milliseconds(1));
  }
  return admitted;
}

absl::Status Intake::HasRoom(Api api, const std::string& tenant,
                             int priority) const {
  absl::Status room = room_(priority);
  if (room.ok() && !tenant.empty()) room = access_->tenants().HasRoom(tenant);
  if (!room.ok()) metrics_->OnInvalid(api, room);
  return room;
}

// As its caller decided, and where there is none, by the ratio.
TraceContext Intake::TraceOf(const CallHeaders& headers) const {
  if (const std::optional<TraceContext> caller =
          ParseTraceContext(headers.traceparent, headers.tracestate)) {
    return *caller;
  }
  TraceContext trace;
  if (trace_ratio_ <= 0) return trace;
  SystemRandom random;
  trace.sampled = random.Uniform() < trace_ratio_;
  if (trace.sampled) trace.trace_id = random.Bytes(16);
  return trace;
}

absl::StatusOr<AdmittedRequest> Intake::Admit(
    const v1::GenerateRequest& request) const {
  const ModelLimits limits = Limits();
  const absl::Time begun = absl::Now();
  if (request.has_structured()) {  // before anything is made of it
    const absl::Status size =
        ModelText::CheckStructuredSize(request.structured(), structured_);
    if (!size.ok()) return size;
  }
  absl::StatusOr<EffectiveRequest> effective = Validate(request, limits);
  if (!effective.ok()) return effective.status();
  absl::StatusOr<ModelText::Prompt> prompt = model_->Encode(request);
  if (!prompt.ok()) return prompt.status();
  metrics_->OnStage(Stage::kTokenise, absl::Now() - begun - prompt->rendering);
  if (request.has_chat()) {
    metrics_->OnStage(Stage::kTemplate, prompt->rendering);
  }
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
  const absl::Status left = CheckTokensLeft(*effective, limits);
  if (!left.ok()) return left;
  if (effective->structured) {
    const absl::Status size =
        ModelText::CheckStructuredSize(*effective->structured, structured_);
    if (!size.ok()) return InClientsTerms(*effective, size);
  }
  AdmittedRequest admitted;
  admitted.effective = *std::move(effective);
  admitted.prompt = std::move(prompt->token_ids);
  if (request.has_chat()) {
    NoteReasoning(request.chat(), admitted.prompt, limits, &admitted.effective);
  }
  const absl::Status fits = FitToContext(
      static_cast<int>(admitted.prompt.size()), limits, &admitted.effective);
  if (!fits.ok()) return fits;
  return admitted;
}

absl::Status Intake::Charge(Api api, bool bounded,
                            absl::Span<AdmittedRequest> admitted) const {
  const std::string& tenant = admitted.front().tenant;
  if (tenant.empty()) return absl::OkStatus();
  std::vector<TenantAsk> asks;
  for (const AdmittedRequest& one : admitted) {
    const EffectiveRequest& effective = one.effective;
    const int64_t sequences =
        effective.beam ? int64_t{effective.beam->width()}
                       : std::max<int64_t>(1, effective.sampling.best_of());
    asks.push_back(
        {.prompt_tokens = static_cast<int64_t>(one.prompt.size()),
         .completion_tokens = sequences * effective.stopping.max_tokens(),
         .bounded = bounded,
         .sequences = effective.beam ? 1 : sequences,
         .told_at_end = effective.beam.has_value()});
  }
  auto charges = access_->tenants().AdmitAll(tenant, asks);
  if (!charges.ok()) {
    metrics_->OnInvalid(api, charges.status());
    return charges.status();
  }
  for (size_t i = 0; i < admitted.size(); ++i) {
    admitted[i].charge = std::move((*charges)[i]);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::TokenizeResponse> Intake::Tokenize(
    const v1::TokenizeRequest& request) const {
  const ModelLimits limits = Limits();
  absl::Status status = ValidateModel(request.model(), limits);
  if (!status.ok()) return status;
  absl::StatusOr<ModelText::Prompt> prompt =
      FieldInvalid("prompt", "(not set)", "one of text or chat is needed");
  if (request.has_text()) {
    prompt = model_->Encode(request.text(), !request.has_add_special_tokens() ||
                                                request.add_special_tokens());
  } else if (request.has_chat()) {
    status = ValidateChat(request.chat(), limits);
    if (!status.ok()) return status;
    prompt = model_->Encode(request.chat(), request.add_special_tokens());
  }
  if (!prompt.ok()) return prompt.status();
  v1::TokenizeResponse response;
  response.mutable_token_ids()->Add(prompt->token_ids.begin(),
                                    prompt->token_ids.end());
  if (request.return_tokens()) {
    for (int32_t id : prompt->token_ids) {
      response.add_tokens(model_->TokenText(id));
    }
  }
  response.set_rendered_prompt(prompt->rendered);
  return response;
}

absl::StatusOr<v1::DetokenizeResponse> Intake::Detokenize(
    const v1::DetokenizeRequest& request) const {
  const ModelLimits limits = Limits();
  absl::Status status = ValidateModel(request.model(), limits);
  if (status.ok()) {
    status = ValidateTokenIds("token_ids", request.token_ids(), limits);
  }
  if (!status.ok()) return status;
  const std::vector<int32_t> ids(request.token_ids().begin(),
                                 request.token_ids().end());
  absl::StatusOr<std::string> text = model_->Decode(
      ids, !request.has_skip_special_tokens() || request.skip_special_tokens());
  if (!text.ok()) {
    return FieldInvalid("token_ids", "(ids)",
                        std::string(text.status().message()));
  }
  v1::DetokenizeResponse response;
  response.set_text(*std::move(text));
  return response;
}

v1::ModelInfo Intake::Info(const std::string& name) const {
  const ModelLimits& limits = model_->limits();
  v1::ModelInfo info;
  info.set_model(name.empty() ? limits.model : name);
  if (info.model() != limits.model) info.set_parent(limits.model);
  info.set_context_length(facts_->context_length);
  info.set_vocabulary_size(limits.vocabulary_size);
  info.set_has_chat_template(limits.has_chat_template);
  info.mutable_eos_token_ids()->Add(limits.eos_token_ids.begin(),
                                    limits.eos_token_ids.end());
  *info.mutable_default_sampling() = DefaultSampling(limits);
  *info.mutable_default_stopping() = DefaultStopping(limits);
  if (limits.has_chat_template) info.add_capabilities("chat");
  if (limits.template_has_tools &&
      limits.tool_call_style.value_or(ToolCallStyle::kNone) !=
          ToolCallStyle::kNone) {
    info.add_capabilities("tools");
  }
  if (offers_.attention) info.add_capabilities("attention");
  if (offers_.no_kv_cache) info.add_capabilities("no_kv_cache");
  info.set_ready_decode_workers(facts_->ready_decode);
  info.set_ready_prefill_workers(facts_->ready_prefill);
  return info;
}

absl::StatusOr<v1::ModelInfo> Intake::Find(const std::string& name) const {
  ModelLimits limits = Limits();
  limits.adapters = facts_->adapters();
  const absl::Status status = ValidateModel(name, limits);
  if (!status.ok()) return status;
  return Info(name);
}

std::vector<v1::ModelInfo> Intake::Infos() const {
  std::vector<v1::ModelInfo> infos = {Info()};
  for (const std::string& adapter : facts_->adapters()) {
    infos.push_back(Info(adapter));
  }
  return infos;
}

}  // namespace tandem::router
