// SPDX-License-Identifier: Apache-2.0
#include "router/openengine/translate.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <string_view>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/utf8.h"
#include "google/rpc/error_details.pb.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

absl::Status Unsupported(std::string_view field, std::string_view what) {
  return MakeError(absl::StatusCode::kUnimplemented, "UNSUPPORTED_FEATURE",
                   absl::StrCat(std::string(field), ": ", std::string(what)),
                   {{"field", field}});
}

// Beyond the range it is out of every field's range all the same.
int32_t Narrow(uint32_t value) {
  return static_cast<int32_t>(
      std::min<uint32_t>(value, std::numeric_limits<int32_t>::max()));
}
float Narrow(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (value > kLargest) return std::numeric_limits<float>::infinity();
  if (value < -kLargest) return -std::numeric_limits<float>::infinity();
  return static_cast<float>(value);
}

void TakeSampling(const oe::SamplingParams& from, v1::SamplingOptions* to) {
  if (from.has_temperature()) to->set_temperature(Narrow(from.temperature()));
  if (from.has_top_p()) to->set_top_p(Narrow(from.top_p()));
  if (from.has_top_k()) to->set_top_k(from.top_k());
  if (from.has_min_p()) to->set_min_p(Narrow(from.min_p()));
  if (from.has_frequency_penalty()) {
    to->set_frequency_penalty(Narrow(from.frequency_penalty()));
  }
  if (from.has_presence_penalty()) {
    to->set_presence_penalty(Narrow(from.presence_penalty()));
  }
  if (from.has_repetition_penalty()) {
    to->set_repetition_penalty(Narrow(from.repetition_penalty()));
  }
  if (from.has_seed()) to->set_seed(from.seed());
  if (from.has_num_sequences()) to->set_n(Narrow(from.num_sequences()));
}

absl::Status TakeStopping(const oe::StoppingOptions& from,
                          v1::StoppingOptions* to) {
  if (from.has_max_tokens()) to->set_max_tokens(Narrow(from.max_tokens()));
  if (from.has_min_tokens()) to->set_min_tokens(Narrow(from.min_tokens()));
  for (const oe::StopCondition& condition : from.conditions()) {
    switch (condition.condition_case()) {
      case oe::StopCondition::kStopText:
        to->add_stop(condition.stop_text());
        break;
      case oe::StopCondition::kStopTokenId:
        to->add_stop_token_ids(condition.stop_token_id());
        break;
      case oe::StopCondition::CONDITION_NOT_SET:
        return FieldInvalid("stopping.conditions", "(empty)",
                            "one of stop_text or stop_token_id is needed");
    }
  }
  if (from.has_ignore_eos()) to->set_ignore_eos(from.ignore_eos());
  if (from.has_include_stop_in_output()) {
    to->set_include_stop_str_in_output(from.include_stop_in_output());
  }
  return absl::OkStatus();
}

// How many alternatives are wanted; none: no log probabilities at all.
absl::StatusOr<std::optional<int32_t>> Alternatives(
    std::string_view which, std::optional<bool> wanted,
    const oe::CandidateTokenSelection* candidates) {
  const std::string field =
      absl::StrCat("response.", std::string(which), "_candidates");
  if (candidates == nullptr) {
    return wanted.value_or(false) ? std::make_optional(0) : std::nullopt;
  }
  if (!wanted.value_or(true)) {
    return FieldInvalid(field, "(set)",
                        absl::StrCat("excludes return_", std::string(which),
                                     "_logprobs = false"));
  }
  switch (candidates->selection_case()) {
    case oe::CandidateTokenSelection::kTokenIds:
    case oe::CandidateTokenSelection::kAll:
      return Unsupported(field, "only the top_n candidates are reported");
    case oe::CandidateTokenSelection::kTopN:
    case oe::CandidateTokenSelection::SELECTION_NOT_SET:
      break;
  }
  return std::make_optional(Narrow(candidates->top_n()));
}

absl::Status TakeResponse(const oe::ResponseOptions& from,
                          v1::OutputOptions* to) {
  if (from.prompt_logprob_start() != 0) {
    return Unsupported("response.prompt_logprob_start",
                       "log probabilities begin with the prompt");
  }
  const auto prompt = Alternatives(
      "prompt",
      from.has_return_prompt_logprobs()
          ? std::make_optional(from.return_prompt_logprobs())
          : std::nullopt,
      from.has_prompt_candidates() ? &from.prompt_candidates() : nullptr);
  if (!prompt.ok()) return prompt.status();
  if (prompt->has_value()) to->set_prompt_logprobs(**prompt);
  const auto output = Alternatives(
      "output",
      from.has_return_output_logprobs()
          ? std::make_optional(from.return_output_logprobs())
          : std::nullopt,
      from.has_output_candidates() ? &from.output_candidates() : nullptr);
  if (!output.ok()) return output.status();
  if (output->has_value()) to->set_logprobs(**output);
  return absl::OkStatus();
}

absl::Status TakeGuided(const oe::GuidedDecoding& from,
                        v1::GenerateRequest* to) {
  if (!from.backend().empty() && from.backend() != "llguidance") {
    return Unsupported("guided.backend", "llguidance is the only one");
  }
  if (from.guide_case() == oe::GuidedDecoding::GUIDE_NOT_SET) {
    return absl::OkStatus();
  }
  v1::StructuredOptions* const structured = to->mutable_structured();
  switch (from.guide_case()) {
    case oe::GuidedDecoding::kJsonSchema:
      structured->set_json_schema(from.json_schema());
      break;
    case oe::GuidedDecoding::kRegex:
      structured->set_regex(from.regex());
      break;
    case oe::GuidedDecoding::kEbnfGrammar:
      structured->set_grammar(from.ebnf_grammar());
      break;
    case oe::GuidedDecoding::kStructuralTag:
      structured->set_structural_tag(from.structural_tag());
      break;
    case oe::GuidedDecoding::kChoice:
      *structured->mutable_choice()->mutable_values() = from.choice().choices();
      break;
    case oe::GuidedDecoding::kJsonObject:
      structured->set_json_object(true);
      break;
    case oe::GuidedDecoding::GUIDE_NOT_SET:
      break;
  }
  return absl::OkStatus();
}

// Ours, theirs; others are the same.
constexpr std::pair<std::string_view, std::string_view> kFields[] = {
    {"prompt", "input"},
    {"text", "prompt"},
    {"sampling.n", "sampling.num_sequences"},
    {"sampling.best_of", "sampling.num_sequences"},
    {"stopping.stop", "stopping.conditions"},
    {"stopping.stop_token_ids", "stopping.conditions"},
    {"stopping.include_stop_str_in_output", "stopping.include_stop_in_output"},
    {"output.logprobs", "response.output_candidates"},
    {"output.prompt_logprobs", "response.prompt_candidates"},
    {"structured", "guided"},
    {"structured.grammar", "guided.ebnf_grammar"},
    {"structured.json_schema", "guided.json_schema"},
    {"structured.json_object", "guided.json_object"},
    {"structured.regex", "guided.regex"},
    {"structured.choice", "guided.choice"},
    {"structured.structural_tag", "guided.structural_tag"},
    {"cache.cache_salt", "kv.cache_salt"},
    {"adapter", "lora_name"},
    {"lora_name", "adapter.lora_name"},
    {"lora_path", "adapter.source_path"},
};

template <typename Number>
bool IsNumber(std::string_view text) {
  Number value;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Of requests that bring no time limit and no tools.
oe::FinishReason ToReason(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
    case v1::FINISH_REASON_TOOL_CALLS:
      return oe::FINISH_REASON_STOP;
    case v1::FINISH_REASON_LENGTH:
    case v1::FINISH_REASON_TIME_LIMIT:
      return oe::FINISH_REASON_LENGTH;
    case v1::FINISH_REASON_CANCELLED:
      return oe::FINISH_REASON_CANCELLED;
    default:
      return oe::FINISH_REASON_UNSPECIFIED;
  }
}

oe::GenerationFinished ToFinished(const v1::GenerateFinished& from) {
  oe::GenerationFinished to;
  to.set_output_index(static_cast<uint32_t>(from.index()));
  to.set_reason(ToReason(from.finish_reason()));
  switch (from.stop_match_case()) {
    case v1::GenerateFinished::kStopString:
      to.mutable_stop_match()->set_stop_text(from.stop_string());
      break;
    case v1::GenerateFinished::kStopTokenId:
      to.mutable_stop_match()->set_stop_token_id(from.stop_token_id());
      break;
    case v1::GenerateFinished::kEosTokenId:
      to.mutable_stop_match()->set_eos_token_id(from.eos_token_id());
      break;
    case v1::GenerateFinished::STOP_MATCH_NOT_SET:
      break;
  }
  return to;
}

}  // namespace

absl::StatusOr<v1::GenerateRequest> FromOpenEngine(
    const oe::GenerateRequest& request) {
  if (request.kv().has_session()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "ROLE_MISMATCH",
                     "kv.session: this engine is of the aggregated role and "
                     "takes no KV cache of another",
                     {{"field", "kv.session"}});
  }
  if (!request.media().empty()) {
    return Unsupported("media", "the model reads text alone");
  }
  v1::GenerateRequest ours;
  ours.set_request_id(request.request_id());
  ours.set_model(request.model());
  switch (request.input_case()) {
    case oe::GenerateRequest::kPrompt:
      ours.set_text(request.prompt());
      break;
    case oe::GenerateRequest::kTokenIds:
      *ours.mutable_token_ids()->mutable_ids() = request.token_ids().ids();
      break;
    case oe::GenerateRequest::INPUT_NOT_SET:
      return FieldInvalid("input", "(not set)",
                          "one of prompt or token_ids is needed");
  }
  TakeSampling(request.sampling(), ours.mutable_sampling());
  absl::Status status =
      TakeStopping(request.stopping(), ours.mutable_stopping());
  if (status.ok()) {
    status = TakeResponse(request.response(), ours.mutable_output());
  }
  if (status.ok()) status = TakeGuided(request.guided(), &ours);
  if (!status.ok()) return status;
  ours.mutable_output()->set_return_token_ids(true);
  if (request.kv().has_cache_salt()) {
    ours.mutable_cache()->set_cache_salt(request.kv().cache_salt());
  }
  if (request.kv().has_bypass_prefix_cache()) {
    ours.mutable_cache()->set_bypass_prefix_cache(
        request.kv().bypass_prefix_cache());
  }
  ours.set_adapter(request.lora_name());
  return ours;
}

namespace {

// The same status, of another field.
absl::Status WithField(absl::Status status, std::string_view field) {
  constexpr absl::string_view kUrl(kErrorInfoUrl.data(), kErrorInfoUrl.size());
  google::rpc::ErrorInfo info;
  const auto payload = status.GetPayload(kUrl);
  if (payload && info.ParseFromString(std::string(*payload))) {
    (*info.mutable_metadata())["field"] = std::string(field);
    status.SetPayload(kUrl, absl::Cord(info.SerializeAsString()));
  }
  if (const auto violation = ErrorViolation(status)) {
    SetViolation(&status, field, violation->description);
  }
  return status;
}

}  // namespace

absl::Status InOpenEngineTerms(const absl::Status& status) {
  const std::map<std::string, std::string> metadata = ErrorMetadata(status);
  const auto field = metadata.find("field");
  if (field == metadata.end()) return status;
  for (const auto& [ours, theirs] : kFields) {
    if (field->second != ours) continue;
    std::string message(status.message());
    if (absl::StartsWith(message, field->second)) {
      message = absl::StrCat(std::string(theirs), message.substr(ours.size()));
    }
    return WithField(WithMessage(status, message), theirs);
  }
  return status;
}

absl::Status CheckOpenEngineMetadata(
    const std::vector<std::pair<std::string, std::string>>& metadata) {
  std::vector<std::string_view> seen;
  for (const auto& [key, value] : metadata) {
    if (!absl::StartsWith(key, "openengine-")) continue;
    if (std::find(seen.begin(), seen.end(), key) != seen.end()) {
      return FieldInvalid(key, value, "is given twice");
    }
    seen.push_back(key);
    if (key == "openengine-routing-key" && value.empty()) {
      return FieldInvalid(key, "(empty)", "must not be empty");
    }
    if (key == "openengine-priority" && !IsNumber<int32_t>(value)) {
      return FieldInvalid(key, value, "must be an int32");
    }
    if (key != "openengine-target-dp-rank") continue;
    if (!IsNumber<uint32_t>(value)) {
      return FieldInvalid(key, value, "must be a uint32");
    }
    if (value.find_first_not_of('0') != std::string::npos) {
      return FieldInvalid(key, value, "rank 0 is the only one");
    }
  }
  return absl::OkStatus();
}

oe::EngineError ToEngineError(const absl::Status& status) {
  oe::EngineError error;
  error.set_message(ValidUtf8(std::string(status.message())));
  const std::string reason = ErrorReason(status);
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
      error.set_code(oe::ERROR_CODE_INVALID_ARGUMENT);
      break;
    case absl::StatusCode::kUnimplemented:
      error.set_code(oe::ERROR_CODE_UNSUPPORTED_FEATURE);
      break;
    case absl::StatusCode::kNotFound:
      error.set_code(oe::ERROR_CODE_MODEL_NOT_FOUND);
      break;
    case absl::StatusCode::kAlreadyExists:
      error.set_code(oe::ERROR_CODE_DUPLICATE_REQUEST);
      break;
    case absl::StatusCode::kResourceExhausted:
      error.set_code(oe::ERROR_CODE_OVERLOADED);
      error.set_retryable(true);
      break;
    case absl::StatusCode::kUnavailable:
      error.set_code(reason == "HANDOFF_FAILED"
                         ? oe::ERROR_CODE_KV_TRANSFER_FAILED
                         : oe::ERROR_CODE_INTERNAL);
      error.set_retryable(true);
      break;
    case absl::StatusCode::kCancelled:
      error.set_code(oe::ERROR_CODE_CANCELLED);
      break;
    default:
      error.set_code(oe::ERROR_CODE_INTERNAL);
  }
  return error;
}

oe::GenerateResponse OpenEngineAnswer::Event() const {
  oe::GenerateResponse event;
  event.set_request_id(request_id_);
  return event;
}

std::optional<oe::GenerateResponse> OpenEngineAnswer::Add(
    v1::GenerateResponse event) {
  switch (event.event_case()) {
    case v1::GenerateResponse::kStarted:
      started_ = true;
      request_id_ = event.request_id();
      prompt_tokens_ = static_cast<uint32_t>(event.started().prompt_tokens());
      cached_tokens_ = static_cast<uint32_t>(event.started().cached_tokens());
      open_ = std::max(1, event.started().sampling().n());
      return std::nullopt;
    case v1::GenerateResponse::kPromptLogprobs:
      return AddScores(event.prompt_logprobs());
    case v1::GenerateResponse::kDelta:
      return AddDelta(event.mutable_delta());
    case v1::GenerateResponse::kFinished: {
      oe::GenerateResponse end = Event();
      *end.mutable_finished() = ToFinished(event.finished());
      if (--open_ > 0) return end;
      last_ = std::move(end);
      return std::nullopt;
    }
    case v1::GenerateResponse::kDone: {
      if (!last_) return std::nullopt;
      const v1::Usage& usage = event.done().usage();
      oe::Usage* const told = last_->mutable_usage();
      told->set_prompt_tokens(static_cast<uint32_t>(usage.prompt_tokens()));
      told->set_completion_tokens(
          static_cast<uint32_t>(usage.completion_tokens()));
      told->set_total_tokens(static_cast<uint32_t>(usage.total_tokens()));
      told->set_cached_prompt_tokens(
          static_cast<uint32_t>(usage.cached_tokens()));
      return std::exchange(last_, std::nullopt);
    }
    case v1::GenerateResponse::EVENT_NOT_SET:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<oe::GenerateResponse> OpenEngineAnswer::AddScores(
    const v1::PromptLogprobs& scores) {
  for (const v1::TokenLogprob& record : scores.tokens()) {
    Fill(record, prompt_.add_tokens());
  }
  if (static_cast<uint32_t>(prompt_.tokens_size()) < prompt_tokens_) {
    return std::nullopt;
  }
  oe::GenerateResponse event = Event();
  event.mutable_prompt()->Swap(&prompt_);
  return event;
}

oe::GenerateResponse OpenEngineAnswer::AddDelta(v1::GenerateDelta* delta) {
  oe::GenerateResponse event = Event();
  oe::TokenOutput* const output = event.mutable_token();
  output->set_output_index(static_cast<uint32_t>(delta->index()));
  output->mutable_text()->swap(*delta->mutable_text());
  const bool scored = !delta->logprobs().empty();
  for (const v1::TokenLogprob& record : delta->logprobs()) {
    Fill(record, output->add_tokens());
  }
  for (const uint32_t id : delta->token_ids()) {
    ++generated_;
    if (scored) continue;
    oe::TokenInfo* const token = output->add_tokens();
    token->set_token_id(id);
    token->set_token(TokenText(id));
  }
  return event;
}

void OpenEngineAnswer::Fill(const v1::TokenLogprob& record,
                            oe::TokenInfo* token) const {
  token->set_token_id(record.token_id());
  token->set_token(ValidUtf8(record.token()));
  if (record.rank() == 0) return;  // the first one of a prompt
  token->set_logprob(double{record.logprob()});
  token->set_rank(static_cast<uint32_t>(record.rank()));
  uint32_t rank = 0;
  for (const v1::TokenAlternative& top : record.top()) {
    oe::LogProb* const candidate = token->add_candidates();
    candidate->set_token_id(top.token_id());
    candidate->set_token(ValidUtf8(top.token()));
    candidate->set_logprob(double{top.logprob()});
    candidate->set_rank(++rank);
  }
}

std::string OpenEngineAnswer::TokenText(uint32_t id) const {
  return ValidUtf8(codec_->TokenBytes(static_cast<int32_t>(id)));
}

std::optional<oe::GenerateResponse> OpenEngineAnswer::Fail(
    const absl::Status& status) const {
  // Its caller's doing, and known to it.
  if (!started_ || absl::IsDeadlineExceeded(status) ||
      absl::IsCancelled(status)) {
    return std::nullopt;
  }
  oe::GenerateResponse event = Event();
  *event.mutable_error() = ToEngineError(status);
  oe::Usage* const usage = event.mutable_usage();
  usage->set_prompt_tokens(prompt_tokens_);
  usage->set_completion_tokens(generated_);
  usage->set_total_tokens(prompt_tokens_ + generated_);
  usage->set_cached_prompt_tokens(cached_tokens_);
  return event;
}

}  // namespace tandem::router
