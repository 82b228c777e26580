// SPDX-License-Identifier: Apache-2.0
#include "router/validate.h"

#include <algorithm>
#include <limits>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/error.h"
#include "common/features.h"
#include "common/utf8.h"
#include "router/errors.h"
#include "router/forced_call.h"

namespace tandem::router {
namespace {

// Returns from the enclosing function on an error.
#define TANDEM_ROUTER_RETURN_IF_ERROR(expression)                           \
  do {                                                                      \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

// False for NaN.
template <typename T>
bool Between(T value, T low, T high) {
  return value >= low && value <= high;
}

template <typename T>
absl::Status CheckRange(const char* field, T value, T low, T high) {
  if (Between(value, low, high)) return absl::OkStatus();
  return FieldInvalid(field, absl::StrCat(value),
                      absl::StrCat("must be in ", low, "..", high));
}

absl::Status CheckPrompt(const v1::GenerateRequest& request,
                         const ModelLimits& limits) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      return absl::OkStatus();
    case v1::GenerateRequest::kTokenIds:
      if (request.token_ids().ids().empty()) {
        return FieldInvalid("token_ids.ids", "(empty)",
                            "at least one token is needed");
      }
      if (request.has_add_special_tokens()) {
        return FieldInvalid("add_special_tokens", "(set)",
                            "excludes token_ids, which are used as they are");
      }
      return ValidateTokenIds("token_ids.ids", request.token_ids().ids(),
                              limits);
    case v1::GenerateRequest::kChat:
      return ValidateChat(request.chat(), limits);
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return FieldInvalid("prompt", "(not set)",
                      "one of text, token_ids or chat is needed");
}

// (0, high].
absl::Status CheckShare(const char* field, float value, float high) {
  if (value > 0 && value <= high) return absl::OkStatus();
  return FieldInvalid(field, absl::StrCat(value),
                      absl::StrCat("must be above 0 and at most ", high));
}

// What `things` at most there may be.
absl::Status CheckCount(const char* field, int count, const char* things,
                        int most) {
  if (count <= most) return absl::OkStatus();
  return FieldInvalid(field, absl::StrCat(count, " ", things),
                      absl::StrCat("at most ", most));
}

absl::Status CheckPenalties(const v1::SamplingOptions& s) {
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckRange("sampling.frequency_penalty",
                                           s.frequency_penalty(), -kMaxPenalty,
                                           kMaxPenalty));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckRange("sampling.presence_penalty",
                                           s.presence_penalty(), -kMaxPenalty,
                                           kMaxPenalty));
  if (!s.has_repetition_penalty()) return absl::OkStatus();
  return CheckShare("sampling.repetition_penalty", s.repetition_penalty(),
                    kMaxPenalty);
}

absl::Status CheckLogitBias(const v1::SamplingOptions& s,
                            const ModelLimits& limits) {
  constexpr char kField[] = "sampling.logit_bias";
  TANDEM_ROUTER_RETURN_IF_ERROR(
      CheckCount(kField, s.logit_bias_size(), "ids", limits.offers.logit_bias));
  for (const auto& [id, bias] : s.logit_bias()) {
    if (id >= static_cast<uint32_t>(limits.vocabulary_size)) {
      return TokenIdOutOfRange(kField, id, limits);
    }
    if (!Between(bias, -kMaxLogitBias, kMaxLogitBias)) {
      return FieldInvalid(
          kField, absl::StrCat(bias, " for id ", id),
          absl::StrCat("must be in ", -kMaxLogitBias, "..", kMaxLogitBias));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTokenLists(const v1::SamplingOptions& s,
                             const ModelLimits& limits) {
  const auto& allowed = s.allowed_token_ids();
  const auto& banned = s.banned_token_ids();
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckCount(
      "sampling.allowed_token_ids", allowed.size(), "ids", kMaxListedTokenIds));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckCount(
      "sampling.banned_token_ids", banned.size(), "ids", kMaxListedTokenIds));
  TANDEM_ROUTER_RETURN_IF_ERROR(
      ValidateTokenIds("sampling.allowed_token_ids", allowed, limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(
      ValidateTokenIds("sampling.banned_token_ids", banned, limits));
  const std::set<uint32_t> without(banned.begin(), banned.end());
  const auto is_banned = [&](uint32_t id) { return without.contains(id); };
  const bool none_left =
      allowed.empty()
          ? without.size() == static_cast<size_t>(limits.vocabulary_size)
          : std::all_of(allowed.begin(), allowed.end(), is_banned);
  if (!none_left) return absl::OkStatus();
  return FieldInvalid("sampling.banned_token_ids", "(ids)",
                      allowed.empty()
                          ? "all ids are banned"
                          : "sampling.allowed_token_ids allows no other");
}

absl::Status CheckBadWords(const v1::SamplingOptions& s) {
  constexpr char kField[] = "sampling.bad_words";
  TANDEM_ROUTER_RETURN_IF_ERROR(
      CheckCount(kField, s.bad_words_size(), "words", kMaxBadWords));
  for (const std::string& word : s.bad_words()) {
    if (word.empty() || word.size() > kMaxBadWordBytes) {
      return FieldInvalid(
          kField, absl::StrCat("a word of ", word.size(), " bytes"),
          absl::StrCat("each must have 1..", kMaxBadWordBytes, " bytes"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSampling(const v1::SamplingOptions& s,
                           const ModelLimits& limits) {
  if (s.has_temperature()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckRange(
        "sampling.temperature", s.temperature(), 0.0f, kMaxTemperature));
  }
  if (s.has_top_p()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckShare("sampling.top_p", s.top_p(), 1.0f));
  }
  if (s.has_typical_p()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckShare("sampling.typical_p", s.typical_p(), 1.0f));
  }
  if (s.has_top_k()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckRange("sampling.top_k", s.top_k(), -1, limits.vocabulary_size));
  }
  if (s.has_min_p()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckRange("sampling.min_p", s.min_p(), 0.0f, 1.0f));
  }
  const int n = s.has_n() ? s.n() : 1;
  TANDEM_ROUTER_RETURN_IF_ERROR(
      CheckRange("sampling.n", n, 1, limits.offers.n));
  if (s.has_best_of()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckRange("sampling.best_of", s.best_of(), n, limits.offers.n));
  }
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckPenalties(s));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckLogitBias(s, limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckTokenLists(s, limits));
  return CheckBadWords(s);
}

absl::StatusOr<absl::Duration> ReadMaxTime(
    const google::protobuf::Duration& value) {
  const absl::Duration time =
      absl::Seconds(value.seconds()) + absl::Nanoseconds(value.nanos());
  const bool canonical = Between(value.nanos(), -999'999'999, 999'999'999) &&
                         (value.seconds() == 0 || value.nanos() == 0 ||
                          (value.seconds() < 0) == (value.nanos() < 0));
  if (!canonical || time <= absl::ZeroDuration() || time > absl::Hours(1)) {
    return FieldInvalid("stopping.max_time", absl::FormatDuration(time),
                        "must be above 0 s and at most 1 h");
  }
  return time;
}

// 0 only where the prompt's scores are wanted, and nothing else.
absl::Status CheckMaxTokens(const v1::GenerateRequest& request,
                            const ModelLimits& limits) {
  constexpr char kField[] = "stopping.max_tokens";
  constexpr int kMax = std::numeric_limits<int>::max();
  const int max_tokens = request.stopping().max_tokens();
  if (max_tokens == 0 && request.output().has_prompt_logprobs()) {
    const v1::SamplingOptions& s = request.sampling();
    if (s.n() <= 1 && s.best_of() <= 1) return absl::OkStatus();
    return FieldInvalid(kField, "0",
                        absl::StrCat("excludes a sampling.",
                                     s.n() > 1 ? "n" : "best_of", " above 1"));
  }
  if (max_tokens == 0) {
    return FieldInvalid(kField, "0",
                        "must be at least 1 without output.prompt_logprobs");
  }
  return CheckRange(kField, max_tokens, 1,
                    limits.context_length > 0 ? limits.context_length : kMax);
}

absl::Status CheckStopping(const v1::GenerateRequest& request,
                           const ModelLimits& limits) {
  const v1::StoppingOptions& s = request.stopping();
  if (s.has_max_tokens()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckMaxTokens(request, limits));
  }
  if (s.has_min_tokens() && s.min_tokens() < 0) {
    return FieldInvalid("stopping.min_tokens", absl::StrCat(s.min_tokens()),
                        "must be in 0..max_tokens");
  }
  if (s.stop_size() > limits.offers.stop_strings) {
    return FieldInvalid("stopping.stop",
                        absl::StrCat(s.stop_size(), " strings"),
                        absl::StrCat("at most ", limits.offers.stop_strings));
  }
  const int stop_bytes = limits.offers.stop_bytes;
  for (const std::string& stop : s.stop()) {
    if (stop.empty() || static_cast<int>(stop.size()) > stop_bytes) {
      return FieldInvalid(
          "stopping.stop", absl::StrCat("a string of ", stop.size(), " bytes"),
          absl::StrCat("each must have 1..", stop_bytes, " bytes"));
    }
  }
  if (s.stop_token_ids_size() > kMaxStopTokenIds) {
    return FieldInvalid("stopping.stop_token_ids",
                        absl::StrCat(s.stop_token_ids_size(), " ids"),
                        absl::StrCat("at most ", kMaxStopTokenIds));
  }
  TANDEM_ROUTER_RETURN_IF_ERROR(
      ValidateTokenIds("stopping.stop_token_ids", s.stop_token_ids(), limits));
  if (s.has_max_time()) return ReadMaxTime(s.max_time()).status();
  return absl::OkStatus();
}

absl::Status CheckOutput(const v1::GenerateRequest& request, int logprobs) {
  const v1::OutputOptions& o = request.output();
  if (o.has_logprobs()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckRange("output.logprobs", o.logprobs(), 0, logprobs));
  }
  if (o.has_prompt_logprobs()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(
        CheckRange("output.prompt_logprobs", o.prompt_logprobs(), 0, logprobs));
  }
  if (o.echo() && o.has_text() && !o.text()) {
    return FieldInvalid("output.echo", "true", "excludes output.text = false");
  }
  if (o.has_text() && !o.text() && !request.stopping().stop().empty()) {
    return FieldInvalid("output.text", "false",
                        "stopping.stop needs text; use stop_token_ids");
  }
  return absl::OkStatus();
}

absl::Status CheckAttention(const v1::GenerateRequest& request,
                            const ModelLimits& limits) {
  if (!request.output().has_attention()) return absl::OkStatus();
  if (!limits.offers.attention) {
    return FieldInvalid(
        "output.attention", "(set)",
        "this server was started without --enable-attention-output");
  }
  if (request.has_beam()) {
    return FieldInvalid("output.attention", "(set)", "excludes beam");
  }
  // Tokens whose text may begin one are held back, with all their weights.
  if (!request.stopping().stop().empty()) {
    return FieldInvalid("output.attention", "(set)",
                        "excludes strings in stopping.stop");
  }
  const v1::SamplingOptions& s = request.sampling();
  if (s.has_best_of() && s.best_of() != (s.has_n() ? s.n() : 1)) {
    return FieldInvalid("output.attention", "(set)",
                        "excludes a sampling.best_of above sampling.n");
  }
  int32_t least = 0;
  for (const int32_t layer : request.output().attention().layers()) {
    if (layer < least || layer >= limits.layers) {
      return FieldInvalid(
          "output.attention.layers", absl::StrCat(layer),
          absl::StrCat("must ascend, each in 0..", limits.layers - 1));
    }
    least = layer + 1;
  }
  return absl::OkStatus();
}

// Rows of weights with a token.
int AttentionRows(const v1::AttentionOptions& attention) {
  return attention.mean() ? 1 : attention.layers_size();
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

// What excludes it, and that it is there; what it says, the compiler judges.
absl::Status CheckStructured(const v1::GenerateRequest& request) {
  if (!request.has_structured()) return absl::OkStatus();
  const v1::StructuredOptions& structured = request.structured();
  if (request.has_beam()) {
    return FieldInvalid("structured", "(set)", "excludes beam");
  }
  if (request.stopping().has_max_tokens() &&
      request.stopping().max_tokens() == 0) {
    return FieldInvalid("structured", "(set)",
                        "excludes stopping.max_tokens = 0");
  }
  switch (structured.constraint_case()) {
    case v1::StructuredOptions::CONSTRAINT_NOT_SET:
      return FieldInvalid("structured", "(empty)",
                          "one of json_schema, json_object, regex, grammar, "
                          "choice and structural_tag is needed");
    case v1::StructuredOptions::kJsonObject:
      if (structured.json_object()) return absl::OkStatus();
      return FieldInvalid("structured.json_object", "false",
                          "true is the only value");
    default:
      return absl::OkStatus();
  }
}

absl::Status CheckRest(const v1::GenerateRequest& request,
                       const ModelLimits& limits) {
  if (request.cache().no_kv_cache() && !limits.offers.no_kv_cache) {
    return FieldInvalid("cache.no_kv_cache", "true",
                        "this server was started without --enable-no-kv-cache");
  }
  if (!v1::Placement_IsValid(request.placement())) {
    return FieldInvalid("placement",
                        absl::StrCat(static_cast<int>(request.placement())),
                        "must be AUTO, SPLIT or LOCAL");
  }
  if (request.cache().cache_salt().size() > kMaxCacheSaltBytes) {
    return FieldInvalid(
        "cache.cache_salt",
        absl::StrCat(request.cache().cache_salt().size(), " bytes"),
        absl::StrCat("at most ", kMaxCacheSaltBytes));
  }
  return absl::OkStatus();
}

// What excludes each other: by name, whatever the values.
absl::Status CheckBeam(const v1::GenerateRequest& request, int widest) {
  const v1::BeamOptions& beam = request.beam();
  TANDEM_ROUTER_RETURN_IF_ERROR(
      CheckRange("beam.width", beam.width(), 1, widest));
  TANDEM_ROUTER_RETURN_IF_ERROR(
      CheckRange("beam.length_penalty", beam.length_penalty(),
                 -kMaxLengthPenalty, kMaxLengthPenalty));
  if (!v1::EarlyStopping_IsValid(beam.early_stopping())) {
    return FieldInvalid("beam.early_stopping",
                        absl::StrCat(static_cast<int>(beam.early_stopping())),
                        "must be FALSE, TRUE or NEVER");
  }
  const v1::SamplingOptions& s = request.sampling();
  const struct {
    const char* field;
    bool set;
  } kExcluded[] = {
      {"sampling.temperature", s.temperature() != 0},
      {"sampling.top_p", s.has_top_p() && s.top_p() != 1},
      {"sampling.top_k", s.top_k() > 0},
      {"sampling.min_p", s.min_p() != 0},
      {"sampling.typical_p", s.has_typical_p() && s.typical_p() != 1},
      {"sampling.best_of", s.has_best_of()},
      {"stopping.stop", !request.stopping().stop().empty()},
      {"cache.no_kv_cache", request.cache().no_kv_cache()},
      {"output.attention", request.output().has_attention()},
      {"output.prompt_logprobs", request.output().has_prompt_logprobs()},
  };
  for (const auto& [field, set] : kExcluded) {
    if (set) return FieldInvalid(field, "(set)", "excludes beam");
  }
  const int n = s.has_n() ? s.n() : 1;
  if (n <= beam.width()) return absl::OkStatus();
  return FieldInvalid("sampling.n", absl::StrCat(n),
                      absl::StrCat("at most beam.width, ", beam.width()));
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

v1::BeamOptions EffectiveBeam(const v1::BeamOptions& asked) {
  v1::BeamOptions beam = asked;
  if (!beam.has_length_penalty()) beam.set_length_penalty(1);
  beam.set_early_stopping(asked.early_stopping());
  return beam;
}

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

v1::OutputOptions EffectiveOutput(const v1::OutputOptions& asked) {
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
  return o;
}

}  // namespace

absl::Status ValidateRequestId(std::string_view id) {
  if (id.size() > kMaxRequestIdBytes) {
    return FieldInvalid("request_id", absl::StrCat(id.size(), " bytes"),
                        absl::StrCat("at most ", kMaxRequestIdBytes));
  }
  for (char c : id) {
    if (c < 0x20 || c > 0x7e) {
      return FieldInvalid("request_id", "(bytes)",
                          "must be printable ASCII characters");
    }
  }
  return absl::OkStatus();
}

absl::Status TokenIdOutOfRange(const char* field, uint32_t id,
                               const ModelLimits& limits) {
  return FieldInvalid(field, absl::StrCat(id),
                      absl::StrCat("ids must be below the vocabulary size, ",
                                   limits.vocabulary_size));
}

namespace {

bool HasAdapter(const ModelLimits& limits, const std::string& name) {
  return limits.adapters.has_value() &&
         std::find(limits.adapters->begin(), limits.adapters->end(), name) !=
             limits.adapters->end();
}

// The adapter that the request names, in its own field or as the model.
absl::StatusOr<std::string> AdapterOf(const v1::GenerateRequest& request,
                                      const ModelLimits& limits) {
  const std::string& named = request.adapter();
  const bool by_model =
      !request.model().empty() && request.model() != limits.model;
  if (named.empty()) return by_model ? request.model() : "";
  if (named.size() > kMaxAdapterName) {
    return FieldInvalid("adapter", absl::StrCat(named.size(), " bytes"),
                        absl::StrCat("at most ", kMaxAdapterName));
  }
  if (by_model && request.model() != named) {
    return FieldInvalid(
        "adapter", named,
        absl::StrCat("model names another one, ", request.model()));
  }
  if (!limits.adapters.has_value() || HasAdapter(limits, named)) return named;
  return MakeError(
      absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
      absl::StrCat("adapter = ", named, ": ",
                   limits.adapters->empty()
                       ? "there are none here"
                       : absl::StrCat("there are ",
                                      absl::StrJoin(*limits.adapters, ", "))),
      {{"adapter", named}});
}

}  // namespace

absl::Status ValidateModel(const std::string& model,
                           const ModelLimits& limits) {
  if (model.empty() || model == limits.model || HasAdapter(limits, model)) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
                   absl::StrCat("model = ", std::string(Utf8Head(model, 128)),
                                ": served here is ", limits.model),
                   {{"served", limits.model}});
}

namespace {

// Most requests have none, and the message goes to two workers.
bool HasLogitRules(const EffectiveRequest& effective) {
  const v1::SamplingOptions& s = effective.sampling;
  return s.repetition_penalty() != 1 || s.presence_penalty() != 0 ||
         s.frequency_penalty() != 0 || !s.logit_bias().empty() ||
         !s.allowed_token_ids().empty() || !s.banned_token_ids().empty() ||
         !s.bad_words().empty();
}

// None where calls are text like any other.
std::optional<ToolCallOptions> EffectiveToolCalls(
    const v1::GenerateRequest& request, const ModelLimits& limits) {
  const ToolCallStyle style =
      limits.tool_call_style.value_or(ToolCallStyle::kNone);
  if (!WantsTools(request.chat()) || style == ToolCallStyle::kNone) return {};
  ToolCallOptions options;
  options.style = style;
  for (const v1::Tool& tool : request.chat().tools()) {
    options.names.push_back(tool.name());
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

void NoteFeatures(EffectiveRequest* effective) {
  if (effective->sampling.typical_p() != 1) {
    effective->features.emplace_back(kFeatureTypicalP);
  }
  if (HasLogitRules(*effective)) {
    effective->features.emplace_back(kFeatureLogitRules);
  }
  if (effective->output.has_attention()) {
    effective->features.emplace_back(kFeatureAttention);
  }
  if (effective->output.has_prompt_logprobs()) {
    effective->features.emplace_back(kFeaturePromptLogprobs);
  }
  if (effective->beam) {
    effective->features.emplace_back(kFeatureBeamSearch);
  }
  if (effective->structured) {
    effective->features.emplace_back(kFeatureStructured);
  }
  if (effective->no_kv_cache) {
    effective->decode_features.emplace_back(kFeatureNoKvCache);
  }
}

// A call of the tools is as good as an answer that is asked for.
void JoinTools(const v1::Chat& chat, std::string tag,
               EffectiveRequest* effective) {
  v1::StructuredOptions& structured = *effective->structured;
  effective->constraint_field = absl::StrCat(
      "structured.", v1::StructuredOptions::descriptor()
                         ->FindFieldByNumber(structured.constraint_case())
                         ->name());
  // Of others any object is a call, which is no schema of the client's.
  if (HasStrictTool(chat)) {
    effective->constraint_of = ConstraintOf::kEither;
  }
  structured.set_structural_tag(std::move(tag));
}

// Where nothing else says what the calls are like.
absl::Status KeepToStrictTools(const v1::GenerateRequest& request,
                               const ModelLimits& limits,
                               EffectiveRequest* effective) {
  if (effective->structured || !effective->tool_calls ||
      !HasStrictTool(request.chat()) || effective->only_scores()) {
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

}  // namespace

absl::StatusOr<EffectiveRequest> Validate(const v1::GenerateRequest& request,
                                          const ModelLimits& limits) {
  TANDEM_ROUTER_RETURN_IF_ERROR(ValidateRequestId(request.request_id()));
  TANDEM_ROUTER_RETURN_IF_ERROR(ValidateModel(request.model(), limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckPrompt(request, limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckSampling(request.sampling(), limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckStopping(request, limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckOutput(request, limits.offers.logprobs));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckAttention(request, limits));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckStructured(request));
  TANDEM_ROUTER_RETURN_IF_ERROR(CheckRest(request, limits));

  if (request.has_beam()) {
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckBeam(request, limits.offers.n));
  }

  EffectiveRequest effective;
  effective.request_id = request.request_id();
  effective.chat = request.has_chat();
  effective.sampling = EffectiveSampling(request.sampling(), limits);
  if (request.has_beam()) {
    effective.beam = EffectiveBeam(request.beam());
    DrawNothing(&effective.sampling);
  } else if (effective.sampling.best_of() > 1 &&
             effective.sampling.temperature() == 0) {
    const bool by_n = effective.sampling.n() > 1;
    return FieldInvalid(
        by_n ? "sampling.n" : "sampling.best_of",
        absl::StrCat(by_n ? effective.sampling.n()
                          : effective.sampling.best_of()),
        "needs a sampling.temperature above 0: greedy sequences are all equal");
  }
  effective.stopping = EffectiveStopping(request.stopping());
  effective.output = EffectiveOutput(request.output());
  if (request.output().has_attention()) {
    v1::AttentionOptions* const attention =
        effective.output.mutable_attention();
    *attention = request.output().attention();
    attention->set_mean(attention->mean());
    for (int i = 0; attention->layers_size() < limits.layers &&
                    request.output().attention().layers().empty();
         ++i) {
      attention->add_layers(i);
    }
  }
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
  effective.end_token_ids.assign(effective.stopping.stop_token_ids().begin(),
                                 effective.stopping.stop_token_ids().end());
  if (!effective.stopping.ignore_eos()) {
    for (int32_t id : limits.eos_token_ids) {
      if (std::find(effective.end_token_ids.begin(),
                    effective.end_token_ids.end(),
                    id) == effective.end_token_ids.end()) {
        effective.end_token_ids.push_back(id);
      }
    }
  }
  if (request.has_structured()) {
    effective.structured = request.structured();
    effective.model_end_ids = limits.eos_token_ids;
  }
  if (ForcesCall(request.chat())) {
    TANDEM_ROUTER_RETURN_IF_ERROR(CheckForcedCall(request));
    absl::StatusOr<std::string> tag = ForcedCallTag(request.chat(), limits);
    if (!tag.ok()) return tag.status();
    effective.structured.emplace().set_structural_tag(*std::move(tag));
    effective.constraint_of = ConstraintOf::kTools;
    effective.model_end_ids = limits.eos_token_ids;
  }
  if (effective.beam) TANDEM_ROUTER_RETURN_IF_ERROR(CheckBeamWidth(effective));
  effective.tool_calls = EffectiveToolCalls(request, limits);
  if (request.has_structured() && effective.tool_calls) {
    absl::StatusOr<std::optional<std::string>> tag =
        CallOrAnswerTag(request.chat(), request.structured(), limits);
    if (!tag.ok()) return tag.status();
    if (*tag) {
      JoinTools(request.chat(), **std::move(tag), &effective);
    }
  }
  TANDEM_ROUTER_RETURN_IF_ERROR(KeepToStrictTools(request, limits, &effective));
  NoteFeatures(&effective);
  return effective;
}

namespace {

// New tokens that the beams of a search may have, whatever they come to: they
// share full blocks of the prompt and nothing else for certain.
int BeamRoom(int prompt_tokens, int width, const ModelLimits& limits) {
  const int size = limits.kv_block_size;
  const int shared = prompt_tokens / size;
  const int own = (limits.kv_blocks - shared) / width;
  return (shared + own) * size - prompt_tokens;
}

}  // namespace

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
                      !tools        ? "(with chat.tools)"
                      : own.empty() ? "(schemas)"
                                    : absl::StrCat("(schemas, or ", own, ")"),
                      wrong->description, ErrorReason(status));
}

absl::Status FitToContext(int prompt_tokens, const ModelLimits& limits,
                          EffectiveRequest* effective) {
  if (prompt_tokens < 1) {
    return FieldInvalid("prompt", "(empty)",
                        "this model's tokenizer makes no token of it");
  }
  v1::StoppingOptions& stopping = effective->stopping;
  int room = std::numeric_limits<int>::max();
  if (limits.context_length > 0) {
    room = limits.context_length - prompt_tokens;
    const int wanted = stopping.has_max_tokens() ? stopping.max_tokens() : 1;
    if (wanted > room) {
      // In OpenAI's words, by which clients know that a shorter prompt helps.
      const char* const part = effective->chat ? "messages" : "prompt";
      return MakeError(
          absl::StatusCode::kInvalidArgument, "CONTEXT_LENGTH_EXCEEDED",
          absl::StrCat("This model's maximum context length is ",
                       limits.context_length,
                       " tokens. However, you requested ",
                       int64_t{prompt_tokens} + wanted, " tokens (",
                       prompt_tokens, " in the ", part, ", ", wanted,
                       " in the completion). Please reduce the length of the ",
                       part, " or completion."),
          {{"field", effective->chat ? "chat.messages" : "prompt"},
           {"prompt_tokens", absl::StrCat(prompt_tokens)},
           {"max_tokens", absl::StrCat(wanted)},
           {"context_length", absl::StrCat(limits.context_length)}});
    }
  }
  if (effective->output.has_attention()) {
    const int rows = AttentionRows(effective->output.attention());
    const int most = kMaxAttentionWeights / rows - prompt_tokens;
    if (most < (stopping.has_max_tokens() ? stopping.max_tokens() : 1)) {
      return FieldInvalid(
          "output.attention", absl::StrCat(rows, " layers"),
          absl::StrCat("layers times (prompt + max_tokens) is at most ",
                       kMaxAttentionWeights,
                       ": ask for fewer layers, their mean, or less tokens"));
    }
    room = std::min(room, most);
  }
  if (effective->beam && limits.kv_blocks > 0) {
    const int width = effective->beam->width();
    const int beam_room = BeamRoom(prompt_tokens, width, limits);
    const int wanted = stopping.has_max_tokens() ? stopping.max_tokens() : 1;
    if (wanted > beam_room) {
      return FieldInvalid(
          "beam.width", absl::StrCat(width),
          absl::StrCat("behind a prompt of ", prompt_tokens,
                       " tokens, so many beams of max_tokens = ", wanted,
                       " may not fit a decode worker's KV cache, which has "
                       "room for ",
                       std::max(0, beam_room), " tokens of each"));
    }
    room = std::min(room, beam_room);
  }
  if (!stopping.has_max_tokens()) {
    stopping.set_max_tokens(std::min(room, limits.offers.default_max_tokens));
  }
  return CheckRange("stopping.min_tokens", stopping.min_tokens(), 0,
                    stopping.max_tokens());
}

namespace {

v1::LogitRules ToLogitRules(const EffectiveRequest& effective) {
  const v1::SamplingOptions& s = effective.sampling;
  v1::LogitRules rules;
  rules.set_repetition_penalty(s.repetition_penalty());
  rules.set_presence_penalty(s.presence_penalty());
  rules.set_frequency_penalty(s.frequency_penalty());
  for (const auto& [id, bias] : s.logit_bias()) {
    v1::TokenBias* const entry = rules.add_logit_bias();
    entry->set_token_id(static_cast<int32_t>(id));
    entry->set_bias(bias);
  }
  rules.mutable_allowed_token_ids()->Add(s.allowed_token_ids().begin(),
                                         s.allowed_token_ids().end());
  rules.mutable_banned_token_ids()->Add(s.banned_token_ids().begin(),
                                        s.banned_token_ids().end());
  for (const std::vector<int32_t>& word : effective.bad_word_ids) {
    rules.add_bad_words()->mutable_token_ids()->Add(word.begin(), word.end());
  }
  return rules;
}

// With ignore_eos none of the model's ends is drawn, but those that the request
// names itself.
void AddStructuredEnds(const EffectiveRequest& effective,
                       v1::StructuredParams* structured) {
  const v1::StoppingOptions& stopping = effective.stopping;
  for (const int32_t id : effective.model_end_ids) {
    const bool named =
        std::find(stopping.stop_token_ids().begin(),
                  stopping.stop_token_ids().end(),
                  static_cast<uint32_t>(id)) != stopping.stop_token_ids().end();
    if (!stopping.ignore_eos() || named) structured->add_end_token_ids(id);
  }
  if (!structured->end_token_ids().empty()) return;
  structured->mutable_end_token_ids()->Add(effective.model_end_ids.begin(),
                                           effective.model_end_ids.end());
  structured->set_ignore_end(stopping.ignore_eos());
}

}  // namespace

v1::SamplingParams ToSamplingParams(const EffectiveRequest& effective) {
  v1::SamplingParams params;
  params.set_temperature(effective.sampling.temperature());
  params.set_top_k(effective.sampling.top_k());
  params.set_top_p(effective.sampling.top_p());
  params.set_min_p(effective.sampling.min_p());
  params.set_typical_p(effective.sampling.typical_p());
  params.set_seed(effective.sampling.seed());
  if (HasLogitRules(effective)) {
    *params.mutable_rules() = ToLogitRules(effective);
  }
  if (effective.output.has_attention()) {
    const v1::AttentionOptions& asked = effective.output.attention();
    v1::AttentionParams* const attention = params.mutable_attention();
    *attention->mutable_layers() = asked.layers();
    attention->set_mean(asked.mean());
  }
  params.set_report_work(effective.output.work());
  if (effective.structured) {
    v1::StructuredParams* const structured = params.mutable_structured();
    *structured->mutable_options() = *effective.structured;
    AddStructuredEnds(effective, structured);
    if (effective.reasoning) {
      structured->set_after_token_id(effective.reasoning->end_id);
    }
  }
  params.set_logprobs(
      effective.output.has_logprobs() ? effective.output.logprobs() : -1);
  if (effective.beam) {
    v1::BeamParams* const beam = params.mutable_beam();
    beam->set_width(effective.beam->width());
    beam->set_best(effective.sampling.n());
    beam->set_length_penalty(effective.beam->length_penalty());
    beam->set_early_stopping(effective.beam->early_stopping());
  }
  return params;
}

v1::StoppingParams ToStoppingParams(const EffectiveRequest& effective) {
  v1::StoppingParams params;
  params.set_max_tokens(effective.stopping.max_tokens());
  params.set_min_tokens(effective.stopping.min_tokens());
  params.mutable_stop_token_ids()->Add(effective.end_token_ids.begin(),
                                       effective.end_token_ids.end());
  return params;
}

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

}  // namespace tandem::router
