// SPDX-License-Identifier: Apache-2.0
// An effective request as workers have it: the features of it that they must
// heed, and their parameters. See validate.h.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/features.h"
#include "router/validate/validate.h"
#include "router/validate/validate_steps.h"

namespace tandem::router {
namespace {

// Most requests have none, and the message goes to two workers.
bool HasLogitRules(const EffectiveRequest& effective) {
  const v1::SamplingOptions& s = effective.sampling;
  return s.repetition_penalty() != 1 || s.presence_penalty() != 0 ||
         s.frequency_penalty() != 0 || !s.logit_bias().empty() ||
         !s.allowed_token_ids().empty() || !s.banned_token_ids().empty() ||
         !s.bad_words().empty();
}

}  // namespace

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
    if (effective.reasoning && !effective.reasoning->content_first) {
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

}  // namespace tandem::router
