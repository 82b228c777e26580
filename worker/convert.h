// SPDX-License-Identifier: Apache-2.0
// Between the wire's messages and the engine's structs, for both workers.

#ifndef TANDEM_WORKER_CONVERT_H_
#define TANDEM_WORKER_CONVERT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "engine/kv/kv_pool.h"
#include "handoff/handoff.h"
#include "tandem/v1/generation.pb.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::worker {

engine::Sampling ToEngine(const v1::SamplingParams& params,
                          uint32_t sequence_index);
engine::LogitRules ToEngine(const v1::LogitRules& rules);
engine::Stopping ToEngine(const v1::StoppingParams& params);
engine::AttentionAsk ToEngine(const v1::AttentionParams& params);
engine::BeamOptions ToEngine(const v1::BeamParams& params);
engine::Scoring ToEngine(const v1::ScoringParams& params);
v1::Token ToWire(const engine::SampledToken& token);
v1::FinishReason ToWire(engine::Finish finish);
v1::Work ToWire(const engine::Work& work);
// What both workers report alike.
v1::WorkerLoad ToWire(const engine::EngineStats& stats,
                      const engine::KvPoolCounts& blocks,
                      const handoff::SlabCounts& slabs);

// Tokens in one message at most: 100 KB with all alternatives.
inline constexpr size_t kTokensPerMessage = 256;
// Of a prompt's tokens from `position` on, in messages of so many.
std::vector<v1::ScoredTokens> ToWire(
    int position, absl::Span<const engine::SampledToken> scores);

// The token's id if it is one of the request's stop tokens, else -1.
int32_t StopTokenOf(const engine::Stopping& stopping, int32_t token_id);

// Prompt and output as one history.
template <typename Repeated>
std::vector<int32_t> Join(const Repeated& prompt, const Repeated& output) {
  std::vector<int32_t> history;
  history.reserve(prompt.size() + output.size());
  history.insert(history.end(), prompt.begin(), prompt.end());
  history.insert(history.end(), output.begin(), output.end());
  return history;
}

// What every open message must satisfy, whichever worker it reaches: lengths,
// ids, ranges. `scoring` is null where the prompt is not scored.
// INVALID_ARGUMENT names the field.
absl::Status CheckOpen(std::string_view request_id, int prompt_tokens,
                       int output_tokens, const v1::SamplingParams& sampling,
                       const v1::StoppingParams& stopping,
                       const v1::ScoringParams* scoring, int64_t deadline_ms,
                       int max_model_len);

// What may be asked of a prompt's scores; CheckOpen asks it too.
absl::Status CheckScoring(const v1::ScoringParams& scoring, int prompt_tokens,
                          int output_tokens, int beam_width);

// What a request may ask of attention weights, of a sequence that may come to
// `positions`. `layers` is the model's number; 0: this worker offers none.
absl::Status CheckAttention(const v1::SamplingParams& sampling, int layers,
                            int64_t positions);

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_CONVERT_H_
