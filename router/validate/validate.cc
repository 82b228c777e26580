// SPDX-License-Identifier: Apache-2.0
// The order in which a request is checked, and each of its fields by itself;
// then, once the prompt's tokens are known, whether they fit. Chats are
// validate_chat.cc's, sampling is validate_sampling.cc's, and values that the
// client left out are effective_request.cc's.

#include "router/validate/validate.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "common/utf8.h"
#include "router/validate/errors.h"
#include "router/validate/validate_steps.h"

namespace tandem::router {

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

// Where they are not known it may be any.
bool MayBeAdapter(const ModelLimits& limits, const std::string& name) {
  if (!limits.adapters.has_value()) return name.size() <= kMaxAdapterName;
  return std::find(limits.adapters->begin(), limits.adapters->end(), name) !=
         limits.adapters->end();
}

// Of a thousand the first few.
std::string Listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 20;
  const size_t shown = std::min(names.size(), kMost);
  std::string text = absl::StrJoin(names.begin(), names.begin() + shown, ", ");
  if (names.size() > shown) {
    absl::StrAppend(&text, " and ", names.size() - shown, " more");
  }
  return text;
}

}  // namespace

absl::Status ValidateModel(const std::string& model,
                           const ModelLimits& limits) {
  if (model.empty() || model == limits.model || MayBeAdapter(limits, model)) {
    return absl::OkStatus();
  }
  std::string served = limits.model;
  if (limits.adapters && !limits.adapters->empty()) {
    absl::StrAppend(&served, ", with the adapters ", Listed(*limits.adapters));
  }
  return MakeError(absl::StatusCode::kNotFound, "MODEL_NOT_FOUND",
                   absl::StrCat("model = ", std::string(Utf8Head(model, 128)),
                                ": served here is ", served),
                   {{"served", limits.model}});
}

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
  if (MayBeAdapter(limits, named)) return named;
  return MakeError(
      absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
      absl::StrCat("adapter = ", named, ": ",
                   limits.adapters->empty()
                       ? "there are none here"
                       : absl::StrCat("there are ", Listed(*limits.adapters))),
      {{"adapter", named}});
}

absl::StatusOr<absl::Duration> ReadMaxTime(
    const google::protobuf::Duration& value) {
  const absl::Duration time =
      absl::Seconds(value.seconds()) + absl::Nanoseconds(value.nanos());
  const bool canonical = Between(value.nanos(), -999'999'999, 999'999'999) &&
                         (value.seconds() == 0 || value.nanos() == 0 ||
                          (value.seconds() < 0) == (value.nanos() < 0));
  if (!canonical) {
    return FieldInvalid(
        "stopping.max_time",
        absl::StrCat(value.seconds(), " s and ", value.nanos(), " ns"),
        "nanos must be below a second, and have the sign of seconds");
  }
  if (time <= absl::ZeroDuration() || time > absl::Hours(1)) {
    return FieldInvalid("stopping.max_time", absl::FormatDuration(time),
                        "must be above 0 s and at most 1 h");
  }
  return time;
}

namespace {

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

// 0 only where the prompt's scores are wanted, and nothing else.
absl::Status CheckMaxTokens(const v1::GenerateRequest& request,
                            const ModelLimits& limits) {
  constexpr char kField[] = "stopping.max_tokens";
  constexpr int kMax = std::numeric_limits<int>::max();
  const int max_tokens = request.stopping().max_tokens();
  if (max_tokens == 0 && request.has_beam()) {
    return FieldInvalid(kField, "0", "must be at least 1 with beam");
  }
  if (max_tokens == 0 && request.output().has_prompt_logprobs()) {
    if (request.output().has_attention()) {
      return FieldInvalid(kField, "0", "excludes output.attention");
    }
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

}  // namespace

absl::Status CheckTokensLeft(const EffectiveRequest& request,
                             const ModelLimits& limits) {
  const auto& allowed = request.sampling.allowed_token_ids();
  const auto& banned = request.sampling.banned_token_ids();
  std::set<uint32_t> without(banned.begin(), banned.end());
  for (const std::vector<int32_t>& word : request.bad_word_ids) {
    if (word.size() == 1) without.insert(static_cast<uint32_t>(word[0]));
  }
  const bool no_ends = request.stopping.min_tokens() > 0;
  if (no_ends) {
    without.insert(request.end_token_ids.begin(), request.end_token_ids.end());
  }
  const bool left =
      allowed.empty()
          ? without.size() < static_cast<size_t>(limits.vocabulary_size)
          : std::any_of(allowed.begin(), allowed.end(),
                        [&](uint32_t id) { return !without.contains(id); });
  if (left) return absl::OkStatus();
  std::vector<std::string> by;
  if (!banned.empty()) by.emplace_back("sampling.banned_token_ids");
  if (!request.bad_word_ids.empty()) by.emplace_back("sampling.bad_words");
  if (no_ends) by.emplace_back("stopping.min_tokens, before which none ends");
  return FieldInvalid(
      allowed.empty() ? "sampling.banned_token_ids"
                      : "sampling.allowed_token_ids",
      "(ids)",
      absl::StrCat("no token is left by ", absl::StrJoin(by, " and ")));
}

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
  return EffectiveValues(request, limits);
}

namespace {

// In OpenAI's words, by which clients know that a shorter prompt helps.
absl::Status ContextExceeded(int prompt_tokens, int wanted, int context_length,
                             bool chat) {
  const char* const part = chat ? "messages" : "prompt";
  return MakeError(
      absl::StatusCode::kInvalidArgument, "CONTEXT_LENGTH_EXCEEDED",
      absl::StrCat("This model's maximum context length is ", context_length,
                   " tokens. However, you requested ",
                   int64_t{prompt_tokens} + wanted, " tokens (", prompt_tokens,
                   " in the ", part, ", ", wanted,
                   " in the completion). Please reduce the length of the ",
                   part, " or completion."),
      {{"field", chat ? "chat.messages" : "prompt"},
       {"prompt_tokens", absl::StrCat(prompt_tokens)},
       {"max_tokens", absl::StrCat(wanted)},
       {"context_length", absl::StrCat(context_length)}});
}

// Rows of weights with a token.
int AttentionRows(const v1::AttentionOptions& attention) {
  return attention.mean() ? 1 : attention.layers_size();
}

// New tokens that the beams of a search may have, whatever they come to: they
// share full blocks of the prompt and nothing else for certain, and none has
// more than a sequence has at once.
int BeamRoom(int prompt_tokens, int width, const ModelLimits& limits) {
  if (width <= limits.kv_sequences) return std::numeric_limits<int>::max();
  const int size = limits.kv_block_size;
  const int shared = prompt_tokens / size;
  const int own = (limits.kv_blocks - shared) / width;
  return (shared + own) * size - prompt_tokens;
}

}  // namespace

absl::Status FitToContext(int prompt_tokens, const ModelLimits& limits,
                          EffectiveRequest* effective) {
  if (prompt_tokens < 1) {
    return FieldInvalid("prompt", "(empty)",
                        "this model's tokenizer makes no token of it");
  }
  v1::StoppingOptions& stopping = effective->stopping;
  const int wanted = stopping.has_max_tokens() ? stopping.max_tokens() : 1;
  int room = std::numeric_limits<int>::max();
  if (limits.context_length > 0) {
    room = limits.context_length - prompt_tokens;
    if (wanted > room) {
      return ContextExceeded(prompt_tokens, wanted, limits.context_length,
                             effective->chat);
    }
  }
  if (effective->output.has_attention()) {
    const int rows = AttentionRows(effective->output.attention());
    const int most = kMaxAttentionWeights / rows - prompt_tokens;
    if (most < wanted) {
      return FieldInvalid(
          "output.attention", absl::StrCat(rows, " layers"),
          absl::StrCat("layers times (prompt + max_tokens) is at most ",
                       kMaxAttentionWeights,
                       ": ask for fewer layers, their mean, or less tokens"));
    }
    room = std::min(room, most);
  }
  // Either may be published before the other.
  if (effective->beam && limits.kv_blocks > 0 && limits.kv_block_size > 0) {
    const int width = effective->beam->width();
    const int beam_room = BeamRoom(prompt_tokens, width, limits);
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

}  // namespace tandem::router
