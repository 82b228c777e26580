// SPDX-License-Identifier: Apache-2.0
// What router/validate/validate.h says of how tokens are chosen: drawn one by
// one, or by a beam search.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "router/validate/errors.h"
#include "router/validate/validate.h"
#include "router/validate/validate_steps.h"

namespace tandem::router {
namespace {

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
  return ValidateTokenIds("sampling.banned_token_ids", banned, limits);
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

}  // namespace

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

absl::Status CheckBeam(const v1::GenerateRequest& request, int widest) {
  const v1::BeamOptions& beam = request.beam();
  if (!beam.has_width()) {
    return FieldInvalid("beam.width", "(not set)",
                        "is needed for a beam search");
  }
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

}  // namespace tandem::router
