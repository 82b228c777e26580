// SPDX-License-Identifier: Apache-2.0
// The values in effect of a request whose fields were checked (see validate.h):
// the client's where it gave some, else the model's or the server's defaults.
// What its output must match may be made of its tools (forced_call.h), and
// whoever refuses that later tells it of what the client sent.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/error.h"
#include "router/text/tagged_calls.h"
#include "router/validate/errors.h"
#include "router/validate/forced_call.h"
#include "router/validate/validate.h"
#include "router/validate/validate_steps.h"

namespace tandem::router {

v1::SamplingOptions DefaultSampling(const ModelLimits& limits) {
  v1::SamplingOptions s;
  s.set_temperature(limits.temperature);
  s.set_top_p(limits.top_p);
  s.set_top_k(limits.top_k);
  s.set_min_p(limits.min_p);
  s.set_n(1);
  s.set_best_of(1);
  s.set_frequency_penalty(0);
  s.set_presence_penalty(0);
  s.set_repetition_penalty(limits.repetition_penalty);
  s.set_typical_p(1);
  return s;
}

v1::StoppingOptions DefaultStopping(const ModelLimits& limits) {
  v1::StoppingOptions s;
  s.set_max_tokens(limits.offers.default_max_tokens);
  s.set_min_tokens(0);
  s.set_ignore_eos(false);
  s.set_include_stop_str_in_output(false);
  return s;
}

namespace {

v1::SamplingOptions EffectiveSampling(const v1::SamplingOptions& asked,
                                      const ModelLimits& limits) {
  v1::SamplingOptions s = DefaultSampling(limits);
  if (asked.has_temperature()) s.set_temperature(asked.temperature());
  if (asked.has_top_p()) s.set_top_p(asked.top_p());
  if (asked.has_top_k()) s.set_top_k(std::max(0, asked.top_k()));
  if (asked.has_min_p()) s.set_min_p(asked.min_p());
  if (asked.has_seed()) s.set_seed(asked.seed());
  if (asked.has_n()) s.set_n(asked.n());
  s.set_best_of(asked.has_best_of() ? asked.best_of() : s.n());
  if (asked.has_frequency_penalty()) {
    s.set_frequency_penalty(asked.frequency_penalty());
  }
  if (asked.has_presence_penalty()) {
    s.set_presence_penalty(asked.presence_penalty());
  }
  if (asked.has_repetition_penalty()) {
    s.set_repetition_penalty(asked.repetition_penalty());
  }
  if (asked.has_typical_p()) s.set_typical_p(asked.typical_p());
  *s.mutable_logit_bias() = asked.logit_bias();
  *s.mutable_allowed_token_ids() = asked.allowed_token_ids();
  *s.mutable_banned_token_ids() = asked.banned_token_ids();
  *s.mutable_bad_words() = asked.bad_words();
  return s;
}

absl::Status CheckSequencesDiffer(const v1::SamplingOptions& s) {
  if (s.best_of() <= 1 || s.temperature() != 0) return absl::OkStatus();
  const bool by_n = s.n() > 1;
  return FieldInvalid(
      by_n ? "sampling.n" : "sampling.best_of",
      absl::StrCat(by_n ? s.n() : s.best_of()),
      "needs a sampling.temperature above 0: greedy sequences are all equal");
}

v1::BeamOptions EffectiveBeam(const v1::BeamOptions& asked) {
  v1::BeamOptions beam = asked;
  if (!beam.has_length_penalty()) beam.set_length_penalty(1);
  beam.set_early_stopping(asked.early_stopping());
  return beam;
}

// The model's own defaults are for sampling.
void DrawNothing(v1::SamplingOptions* sampling) {
  sampling->set_temperature(0);
  sampling->set_top_p(1);
  sampling->set_top_k(0);
  sampling->set_min_p(0);
}

v1::StoppingOptions EffectiveStopping(const v1::StoppingOptions& asked) {
  v1::StoppingOptions s = asked;
  s.set_min_tokens(asked.min_tokens());
  s.set_ignore_eos(asked.ignore_eos());
  s.set_include_stop_str_in_output(asked.include_stop_str_in_output());
  return s;
}

// The request's, and the model's.
std::vector<int32_t> EndTokenIds(const v1::StoppingOptions& stopping,
                                 const ModelLimits& limits) {
  std::vector<int32_t> ids(stopping.stop_token_ids().begin(),
                           stopping.stop_token_ids().end());
  if (stopping.ignore_eos()) return ids;
  for (int32_t id : limits.eos_token_ids) {
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  }
  return ids;
}

// With those that end it.
absl::Status CheckBeamWidth(const EffectiveRequest& effective) {
  const int ends = static_cast<int>(effective.end_token_ids.size());
  const int width = effective.beam->width();
  if (width <= kMaxBeamCandidates - ends) return absl::OkStatus();
  return FieldInvalid(
      "beam.width", absl::StrCat(width),
      absl::StrCat("with the ", ends, " tokens that end a sequence at most ",
                   kMaxBeamCandidates));
}

// Where no layer is named, of all.
v1::AttentionOptions EffectiveAttention(const v1::AttentionOptions& asked,
                                        int layers) {
  v1::AttentionOptions attention = asked;
  attention.set_mean(asked.mean());
  if (!asked.layers().empty()) return attention;
  for (int i = 0; i < layers; ++i) attention.add_layers(i);
  return attention;
}

v1::OutputOptions EffectiveOutput(const v1::OutputOptions& asked, int layers) {
  v1::OutputOptions o;
  if (asked.has_logprobs()) o.set_logprobs(asked.logprobs());
  if (asked.has_prompt_logprobs()) {
    o.set_prompt_logprobs(asked.prompt_logprobs());
  }
  o.set_echo(asked.echo());
  o.set_skip_special_tokens(!asked.has_skip_special_tokens() ||
                            asked.skip_special_tokens());
  o.set_text(!asked.has_text() || asked.text());
  o.set_return_token_ids(asked.return_token_ids() || !o.text());
  o.set_work(asked.work());
  if (asked.has_attention()) {
    *o.mutable_attention() = EffectiveAttention(asked.attention(), layers);
  }
  return o;
}

// A call that must be made is a text to match.
absl::Status CheckForcedCall(const v1::GenerateRequest& request) {
  const char* const field = request.chat().has_tool_choice()
                                ? "chat.tool_choice"
                                : "chat.tool_choice_function";
  const struct {
    const char* name;
    bool set;
  } kExcluded[] = {
      {"structured", request.has_structured()},
      {"beam", request.has_beam()},
      {"output.text = false",
       request.output().has_text() && !request.output().text()},
      {"stopping.max_tokens = 0", request.stopping().has_max_tokens() &&
                                      request.stopping().max_tokens() == 0},
  };
  for (const auto& [name, set] : kExcluded) {
    if (set) {
      return FieldInvalid(field, "(a call is forced)",
                          absl::StrCat("excludes ", name));
    }
  }
  return absl::OkStatus();
}

absl::Status ForceCall(const v1::GenerateRequest& request,
                       const ModelLimits& limits, EffectiveRequest* effective) {
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckForcedCall(request));
  if (effective->harmony && request.chat().continue_final_message()) {
    return FieldInvalid("chat.continue_final_message", "true",
                        "excludes a call that must be made: this model makes "
                        "it in a message of its own");
  }
  absl::StatusOr<std::string> tag = ForcedCallTag(request.chat(), limits);
  if (!tag.ok()) return tag.status();
  effective->structured.emplace().set_structural_tag(*std::move(tag));
  effective->constraint_of = ConstraintOf::kTools;
  effective->model_end_ids = limits.eos_token_ids;
  return absl::OkStatus();
}

// None where calls are text like any other.
std::optional<ToolCallOptions> EffectiveToolCalls(
    const v1::GenerateRequest& request, const ModelLimits& limits) {
  const ToolCallStyle style =
      limits.tool_call_style.value_or(ToolCallStyle::kNone);
  if (!WantsTools(request.chat()) || style == ToolCallStyle::kNone) return {};
  ToolCallOptions options;
  options.style = style;
  const bool tagged = CallTagsOf(style) != nullptr;
  for (const v1::Tool& tool : request.chat().tools()) {
    options.names.push_back(tool.name());
    if (!tagged) continue;
    std::set<std::string> json = DeclaredJson(tool.parameters_json_schema());
    if (!json.empty()) options.json_parameters[tool.name()] = std::move(json);
  }
  options.parallel = !request.chat().has_parallel_tool_calls() ||
                     request.chat().parallel_tool_calls();
  // Otherwise they are in the text.
  if (!request.output().has_skip_special_tokens() ||
      request.output().skip_special_tokens()) {
    options.markers = limits.tool_call_markers;
  }
  return options;
}

// Other text takes the place of the client's own constraint.
void NoteOwnField(EffectiveRequest* effective) {
  effective->constraint_field = absl::StrCat(
      "structured.",
      v1::StructuredOptions::descriptor()
          ->FindFieldByNumber(effective->structured->constraint_case())
          ->name());
}

// An answer that is asked for need not be all of the text: a call of the tools
// is as good, and of messages it is what the last one says.
absl::Status PlaceAnswer(const v1::GenerateRequest& request,
                         const ModelLimits& limits,
                         EffectiveRequest* effective) {
  const bool within =
      effective->harmony && request.chat().continue_final_message();
  if (within || (!effective->tool_calls && !effective->harmony)) {
    return absl::OkStatus();
  }
  absl::StatusOr<std::optional<std::string>> tag =
      effective->tool_calls
          ? CallOrAnswerTag(request.chat(), request.structured(), limits)
          : AnswerTag(request.structured(), limits);
  if (!tag.ok()) return tag.status();
  if (!*tag) return absl::OkStatus();
  NoteOwnField(effective);
  // Of others any object is a call, which is no schema of the client's.
  if (effective->tool_calls && HasStrictTool(request.chat())) {
    effective->constraint_of = ConstraintOf::kEither;
  }
  effective->structured->set_structural_tag(**std::move(tag));
  return absl::OkStatus();
}

// Where nothing else says what the calls are like.
absl::Status KeepToStrictTools(const v1::GenerateRequest& request,
                               const ModelLimits& limits,
                               EffectiveRequest* effective) {
  if (effective->structured || !effective->tool_calls ||
      !HasStrictTool(request.chat()) || effective->only_scores() ||
      (effective->harmony && request.chat().continue_final_message())) {
    return absl::OkStatus();
  }
  if (request.has_beam()) {
    return FieldInvalid("beam", "(set)", "excludes chat.tools with strict");
  }
  absl::StatusOr<std::string> tag = StrictCallsTag(request.chat(), limits);
  if (!tag.ok()) return tag.status();
  effective->structured.emplace().set_structural_tag(*std::move(tag));
  effective->constraint_of = ConstraintOf::kTools;
  effective->model_end_ids = limits.eos_token_ids;
  return absl::OkStatus();
}

// Of a model that may do without thoughts though it is told to think.
absl::Status LeavePlaceForThoughts(const v1::GenerateRequest& request,
                                   const ModelLimits& limits,
                                   EffectiveRequest* effective) {
  const bool thinks = effective->structured && limits.reasoning &&
                      limits.reasoning->style == ReasoningStyle::kGemma4 &&
                      AskedToThink(request.chat()).value_or(false);
  if (!thinks) return absl::OkStatus();
  absl::StatusOr<std::optional<std::string>> tag =
      BehindThoughtsTag(*effective->structured, *limits.reasoning);
  if (!tag.ok()) return tag.status();
  if (!*tag) return absl::OkStatus();
  const bool own = effective->constraint_of == ConstraintOf::kClient;
  if (own && effective->constraint_field.empty()) NoteOwnField(effective);
  effective->structured->set_structural_tag(**std::move(tag));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<EffectiveRequest> EffectiveValues(
    const v1::GenerateRequest& request, const ModelLimits& limits) {
  EffectiveRequest effective;
  effective.request_id = request.request_id();
  effective.chat = request.has_chat();
  if (effective.chat) effective.harmony = limits.harmony;
  effective.sampling = EffectiveSampling(request.sampling(), limits);
  if (request.has_beam()) {
    effective.beam = EffectiveBeam(request.beam());
    DrawNothing(&effective.sampling);
  } else {
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckSequencesDiffer(effective.sampling));
  }
  effective.stopping = EffectiveStopping(request.stopping());
  effective.output = EffectiveOutput(request.output(), limits.layers);
  effective.placement = request.placement() == v1::PLACEMENT_UNSPECIFIED
                            ? v1::PLACEMENT_AUTO
                            : request.placement();
  absl::StatusOr<std::string> adapter = AdapterOf(request, limits);
  if (!adapter.ok()) return adapter.status();
  effective.adapter = *std::move(adapter);
  effective.priority = request.priority();
  effective.cache_salt = request.cache().cache_salt();
  effective.no_kv_cache = request.cache().no_kv_cache();
  effective.bypass_prefix_cache =
      request.cache().bypass_prefix_cache() || effective.no_kv_cache;
  if (request.stopping().has_max_time()) {
    effective.max_time = *ReadMaxTime(request.stopping().max_time());
  }
  effective.end_token_ids = EndTokenIds(effective.stopping, limits);
  if (request.has_structured()) {
    effective.structured = request.structured();
    effective.model_end_ids = limits.eos_token_ids;
  }
  if (ForcesCall(request.chat())) {
    TANDEM_ROUTER_RETURN_IF_ERROR(ForceCall(request, limits, &effective));
  }
  if (effective.beam) TANDEM_ROUTER_RETURN_IF_ERROR(CheckBeamWidth(effective));
  effective.tool_calls = EffectiveToolCalls(request, limits);
  if (request.has_structured()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(PlaceAnswer(request, limits, &effective));
  }
  TANDEM_ROUTER_RETURN_IF_ERROR(KeepToStrictTools(request, limits, &effective));
  TANDEM_ROUTER_RETURN_IF_ERROR(
      LeavePlaceForThoughts(request, limits, &effective));
  NoteFeatures(&effective);
  return effective;
}

absl::Status InClientsTerms(const EffectiveRequest& effective,
                            const absl::Status& status) {
  const std::string& own = effective.constraint_field;
  const bool tools = effective.constraint_of != ConstraintOf::kClient;
  const std::string blamed = ErrorMetadata(status)["field"];
  if ((own.empty() && !tools) || !absl::StartsWith(blamed, "structured.")) {
    return status;
  }
  const std::string field = tools ? "chat.tools" : own;
  const std::optional<FieldViolation> wrong = ErrorViolation(status);
  if (!wrong) {  // it may compile another time
    absl::string_view message = status.message();
    absl::ConsumePrefix(&message, blamed);
    return MakeError(status.code(), ErrorReason(status),
                     absl::StrCat(field, message), {{"field", field}},
                     RetryAfter(status));
  }
  return FieldInvalid(field,
                      !tools ? (effective.tool_calls ? "(with chat.tools)"
                                : effective.harmony  ? "(in a message)"
                                                     : "(behind thoughts)")
                      : own.empty() ? "(schemas)"
                                    : absl::StrCat("(schemas, or ", own, ")"),
                      wrong->description, ErrorReason(status));
}

}  // namespace tandem::router
