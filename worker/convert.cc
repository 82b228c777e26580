// SPDX-License-Identifier: Apache-2.0
#include "worker/convert.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace tandem::worker {

engine::Sampling ToEngine(const v1::SamplingParams& params,
                          uint32_t sequence_index) {
  engine::Sampling sampling;
  sampling.temperature = params.temperature();
  sampling.top_p = params.top_p();
  sampling.min_p = params.min_p();
  sampling.typical_p = params.typical_p() > 0 ? params.typical_p() : 1;
  sampling.top_k = params.top_k();
  sampling.seed = params.seed();
  sampling.sequence_index = sequence_index;
  sampling.logprobs = params.logprobs();
  return sampling;
}

engine::AttentionAsk ToEngine(const v1::AttentionParams& params) {
  engine::AttentionAsk ask;
  ask.layers.assign(params.layers().begin(), params.layers().end());
  ask.mean = params.mean();
  return ask;
}

engine::LogitRules ToEngine(const v1::LogitRules& rules) {
  engine::LogitRules result;
  if (rules.repetition_penalty() > 0) {
    result.repetition_penalty = rules.repetition_penalty();
  }
  result.presence_penalty = rules.presence_penalty();
  result.frequency_penalty = rules.frequency_penalty();
  for (const v1::TokenBias& bias : rules.logit_bias()) {
    result.logit_bias.push_back({bias.token_id(), bias.bias()});
  }
  result.allowed_ids.assign(rules.allowed_token_ids().begin(),
                            rules.allowed_token_ids().end());
  result.banned_ids.assign(rules.banned_token_ids().begin(),
                           rules.banned_token_ids().end());
  for (const v1::TokenSequence& word : rules.bad_words()) {
    result.bad_words.emplace_back(word.token_ids().begin(),
                                  word.token_ids().end());
  }
  return result;
}

engine::Stopping ToEngine(const v1::StoppingParams& params) {
  engine::Stopping stopping;
  stopping.max_tokens = params.max_tokens();
  stopping.min_tokens = params.min_tokens();
  stopping.stop_token_ids.assign(params.stop_token_ids().begin(),
                                 params.stop_token_ids().end());
  return stopping;
}

engine::BeamOptions ToEngine(const v1::BeamParams& params) {
  engine::BeamOptions beams;
  beams.width = params.width();
  beams.best = params.best();
  beams.length_penalty = static_cast<double>(params.length_penalty());
  beams.early_stopping = params.early_stopping() == v1::EARLY_STOPPING_TRUE
                             ? engine::EarlyStopping::kAlways
                         : params.early_stopping() == v1::EARLY_STOPPING_NEVER
                             ? engine::EarlyStopping::kNever
                             : engine::EarlyStopping::kHeuristic;
  return beams;
}

engine::Scoring ToEngine(const v1::ScoringParams& params) {
  return {.alternatives = params.alternatives(), .position = params.position()};
}

std::vector<v1::ScoredTokens> ToWire(
    int position, absl::Span<const engine::SampledToken> scores) {
  std::vector<v1::ScoredTokens> messages;
  for (size_t begin = 0; begin < scores.size(); begin += kTokensPerMessage) {
    v1::ScoredTokens& message = messages.emplace_back();
    message.set_position(position + static_cast<int>(begin));
    for (const engine::SampledToken& score :
         scores.subspan(begin, kTokensPerMessage)) {
      *message.add_tokens() = ToWire(score);
    }
  }
  return messages;
}

v1::Token ToWire(const engine::SampledToken& token) {
  v1::Token wire;
  wire.set_token_id(token.token_id);
  wire.set_logprob(token.logprob);
  wire.set_rank(token.rank);
  for (const engine::TopLogprob& top : token.top) {
    v1::TopLogprob* const entry = wire.add_top();
    entry->set_token_id(top.token_id);
    entry->set_logprob(top.logprob);
  }
  wire.mutable_attention()->Add(token.attention.begin(), token.attention.end());
  return wire;
}

v1::FinishReason ToWire(engine::Finish finish) {
  return finish == engine::Finish::kStop ? v1::FINISH_REASON_STOP
                                         : v1::FINISH_REASON_LENGTH;
}

v1::Work ToWire(const engine::Work& work) {
  v1::Work wire;
  wire.set_steps(work.steps);
  wire.set_positions_computed(work.positions_computed);
  wire.set_kv_rows(work.kv_rows);
  wire.set_positions_attended(work.positions_attended);
  wire.set_query_key_pairs(work.query_key_pairs);
  wire.set_weight_bytes_read(work.weight_bytes);
  wire.set_kv_bytes_read(work.kv_bytes_read);
  wire.set_kv_bytes_written(work.kv_bytes_written);
  wire.set_matrix_flops(work.matrix_flops);
  wire.set_attention_flops(work.attention_flops);
  return wire;
}

v1::WorkerLoad ToWire(const engine::EngineStats& stats,
                      const engine::KvPoolCounts& blocks,
                      const handoff::SlabCounts& slabs) {
  v1::WorkerLoad load;
  load.set_blocks_free(blocks.free);
  load.set_blocks_reserved(blocks.reserved);
  load.set_blocks_live(blocks.live);
  load.set_blocks_cached(blocks.cached);
  load.set_slabs_free(slabs.free);
  load.set_slabs_granted(slabs.granted);
  load.set_slabs_in_flight(slabs.in_flight);
  load.set_slabs_quarantined(slabs.quarantined);
  load.set_prefill_tokens_per_second(stats.tokens_per_second);
  load.set_step_seconds(stats.step_seconds);
  load.set_steps(stats.steps);
  return load;
}

int32_t StopTokenOf(const engine::Stopping& stopping, int32_t token_id) {
  const auto& ids = stopping.stop_token_ids;
  return std::find(ids.begin(), ids.end(), token_id) != ids.end() ? token_id
                                                                  : -1;
}

namespace {

// More than a config and a request may name together.
constexpr int kMaxStopIds = 512;

// INVALID_ARGUMENT names the field.
absl::Status CheckRules(const v1::LogitRules& rules) {
  const auto refuse = [](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.rules.", parts...));
  };
  if (!(rules.repetition_penalty() >= 0 && rules.repetition_penalty() <= 2)) {
    return refuse("repetition_penalty is ", rules.repetition_penalty(),
                  ", expected 0 to 2");
  }
  if (!(std::abs(rules.presence_penalty()) <= 2)) {
    return refuse("presence_penalty is ", rules.presence_penalty(),
                  ", expected -2 to 2");
  }
  if (!(std::abs(rules.frequency_penalty()) <= 2)) {
    return refuse("frequency_penalty is ", rules.frequency_penalty(),
                  ", expected -2 to 2");
  }
  for (const v1::TokenBias& bias : rules.logit_bias()) {
    if (!std::isfinite(bias.bias())) {
      return refuse("logit_bias is ", bias.bias(), " for token ",
                    bias.token_id(), ", expected a finite number");
    }
  }
  for (const v1::TokenSequence& word : rules.bad_words()) {
    if (word.token_ids().empty()) return refuse("bad_words holds an empty one");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckScoring(const v1::ScoringParams& scoring, int prompt_tokens,
                          int output_tokens, int beam_width) {
  const auto refuse = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("scoring", parts...));
  };
  if (scoring.alternatives() < 0 ||
      scoring.alternatives() > kernels::kMaxTopLogprobs) {
    return refuse(".alternatives is ", scoring.alternatives(),
                  ", expected 0 to ", kernels::kMaxTopLogprobs);
  }
  if (scoring.position() < 1 || scoring.position() >= prompt_tokens) {
    return refuse(".position is ", scoring.position(), ", expected 1 to ",
                  prompt_tokens - 1);
  }
  if (output_tokens > 0) {
    return refuse(" excludes output_token_ids, which hold ", output_tokens);
  }
  if (beam_width > 0) return refuse(" excludes sampling.beam");
  return absl::OkStatus();
}

absl::Status CheckOpen(std::string_view request_id, int prompt_tokens,
                       int output_tokens, const v1::SamplingParams& sampling,
                       const v1::StoppingParams& stopping,
                       const v1::ScoringParams* scoring, int64_t deadline_ms,
                       int max_model_len) {
  const auto refuse = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  if (request_id.size() != 16) {
    return refuse("request_id has ", request_id.size(), " bytes, expected 16");
  }
  if (prompt_tokens < 1) return refuse("prompt_token_ids is empty");
  if (scoring != nullptr) {
    const absl::Status status = CheckScoring(
        *scoring, prompt_tokens, output_tokens, sampling.beam().width());
    if (!status.ok()) return status;
  }
  // The last token of what is only scored is not computed.
  const bool only_scores = scoring != nullptr && stopping.max_tokens() == 0;
  const int most = max_model_len - (only_scores ? 0 : 1);
  if (output_tokens < 0 || prompt_tokens + output_tokens > most) {
    return refuse("prompt_token_ids and output_token_ids hold ",
                  prompt_tokens + output_tokens,
                  " tokens; this worker takes at most ", most);
  }
  if (!(sampling.temperature() >= 0 && sampling.temperature() <= 2)) {
    return refuse("sampling.temperature is ", sampling.temperature(),
                  ", expected 0 to 2");
  }
  if (!(sampling.top_p() > 0 && sampling.top_p() <= 1)) {
    return refuse("sampling.top_p is ", sampling.top_p(),
                  ", expected above 0, at most 1");
  }
  if (!(sampling.min_p() >= 0 && sampling.min_p() <= 1)) {
    return refuse("sampling.min_p is ", sampling.min_p(), ", expected 0 to 1");
  }
  if (!(sampling.typical_p() >= 0 && sampling.typical_p() <= 1)) {
    return refuse("sampling.typical_p is ", sampling.typical_p(),
                  ", expected 0 to 1");
  }
  absl::Status rules = CheckRules(sampling.rules());
  if (!rules.ok()) return rules;
  if (sampling.top_k() < 0) {
    return refuse("sampling.top_k is ", sampling.top_k(),
                  ", expected 0 (all) or more");
  }
  if (sampling.logprobs() < -1 ||
      sampling.logprobs() > kernels::kMaxTopLogprobs) {
    return refuse("sampling.logprobs is ", sampling.logprobs(),
                  ", expected -1 to ", kernels::kMaxTopLogprobs);
  }
  if (!only_scores && stopping.max_tokens() <= output_tokens) {
    return refuse("stopping.max_tokens is ", stopping.max_tokens(),
                  ", expected more than the ", output_tokens,
                  " tokens already there");
  }
  if (stopping.min_tokens() < 0 ||
      stopping.min_tokens() > stopping.max_tokens()) {
    return refuse("stopping.min_tokens is ", stopping.min_tokens(),
                  ", expected 0 to ", stopping.max_tokens());
  }
  if (stopping.stop_token_ids_size() > kMaxStopIds) {
    return refuse("stopping.stop_token_ids has ",
                  stopping.stop_token_ids_size(), " ids, expected ",
                  kMaxStopIds, " at most");
  }
  if (deadline_ms <= 0) return refuse("deadline_ms is ", deadline_ms);
  if (!sampling.has_beam()) return absl::OkStatus();
  if (output_tokens > 0) {
    return refuse("output_token_ids holds ", output_tokens,
                  " tokens: a beam search begins behind its prompt");
  }
  if (!v1::EarlyStopping_IsValid(sampling.beam().early_stopping())) {
    return refuse("sampling.beam.early_stopping is ",
                  static_cast<int>(sampling.beam().early_stopping()));
  }
  return engine::CheckBeams(ToEngine(sampling.beam()),
                            ToEngine(stopping).stop_token_ids);
}

absl::Status CheckAttention(const v1::SamplingParams& sampling, int layers,
                            int64_t positions) {
  if (!sampling.has_attention()) return absl::OkStatus();
  const auto refuse = [](auto... parts) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling.attention", parts...));
  };
  if (layers == 0) {
    return refuse(
        " is set; this worker was started without --enable-attention-output");
  }
  const v1::AttentionParams& attention = sampling.attention();
  if (attention.layers().empty()) return refuse(".layers is empty");
  int32_t least = 0;
  for (const int32_t layer : attention.layers()) {
    if (layer < least || layer >= layers) {
      return refuse(".layers holds ", layer, ", expected ascending layers of ",
                    layers);
    }
    least = layer + 1;
  }
  const int64_t rows = attention.mean() ? 1 : attention.layers_size();
  if (rows * positions > engine::kMaxAttentionWeights) {
    return refuse(" comes to ", rows, " times ", positions,
                  " weights with a token, of at most ",
                  engine::kMaxAttentionWeights);
  }
  return absl::OkStatus();
}

}  // namespace tandem::worker
