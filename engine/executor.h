// SPDX-License-Identifier: Apache-2.0
// The line between deciding and computing. The scheduler (engine/engine.h)
// decides what a step holds and hands it to an Executor, which runs it on a
// device and reports back on the scheduler's Loop. The simulation has an
// executor of its own whose "KV" is a hash of history, so that every wrong,
// stale or foreign block shows as a wrong token.

#ifndef TANDEM_ENGINE_EXECUTOR_H_
#define TANDEM_ENGINE_EXECUTOR_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/token_constraint.h"
#include "kernels/backend.h"

namespace tandem::engine {

// Effective sampling values of one sequence; see generation.proto.
struct Sampling {
  float temperature = 0;
  float top_p = 1;
  float min_p = 0;
  float typical_p = 1;
  int32_t top_k = 0;
  uint64_t seed = 0;
  uint32_t sequence_index = 0;
  int32_t logprobs = -1;
  // Nothing is drawn: `logprobs` candidates, with the edits made to their log
  // probabilities, and the most probable of them as the token.
  bool edited_logprobs = false;
};

// Attention weights that tokens bring along.
struct AttentionAsk {
  std::vector<int32_t> layers;  // ascending; none: nothing is asked for
  bool mean = false;            // of these layers: one row instead of each

  int rows() const {
    return mean && !layers.empty() ? 1 : static_cast<int>(layers.size());
  }
};
// Numbers that one token may bring: rows times its position. 64 KiB.
inline constexpr int64_t kMaxAttentionWeights = 16384;

struct TopLogprob {
  int32_t token_id;
  float logprob;
};

struct SampledToken {
  int32_t token_id = 0;
  float logprob = 0;
  int32_t rank = 0;
  std::vector<TopLogprob> top;  // empty unless asked for
  // [AttentionAsk::rows()][position of the token]: how much the row that it
  // was drawn from looked at each position, averaged over heads.
  std::vector<float> attention = {};
};

// The token that follows one row.
struct RowDraw {
  // Of the row's logits, as kernels/sampling.h says: of different ids,
  // ascending where only ids with an edit may be drawn.
  absl::Span<const kernels::LogitEdit> edits = {};
  // Not negative: nothing is drawn, the token is this one, and what is reported
  // of it is as Sampling::logprobs says, by the next field.
  int32_t given = -1;
  int32_t given_logprobs = -1;
  // The entry's constraint says what may be drawn.
  bool constrained = false;
};
inline constexpr RowDraw kOneDraw[1] = {};  // without edits

// One sequence's part of a step: positions [position, position + tokens).
struct StepEntry {
  uint64_t sequence = 0;  // the scheduler's tag
  int position = 0;
  absl::Span<const int32_t> tokens;  // ids at those positions
  // Not negative: its one token is the fed-th that the step before draws, and
  // what `tokens` says is not looked at.
  int fed = -1;
  // Covers [0, position + tokens). -1: wholly behind the window of `position`,
  // where all layers have one.
  absl::Span<const int32_t> block_table;
  int adapter = -1;  // slot of the LoRA adapter that it is computed with
  // What follows each of its last rows, of as many as there are draws. Each
  // has its own position, and so its own random number.
  absl::Span<const RowDraw> draws;
  Sampling sampling;         // of all draws
  bool only_edited = false;  // only ids with an edit may be drawn
  // Of the last draw; null: not asked for.
  const AttentionAsk* attention = nullptr;
  // Of the constrained draws, which are the last ones; null if there are none.
  // `tokens` end with the guesses that all but the first of them stand behind.
  TokenConstraint* constraint = nullptr;

  int constrained() const {
    return static_cast<int>(
        std::count_if(draws.begin(), draws.end(),
                      [](const RowDraw& draw) { return draw.constrained; }));
  }
  // Room for all their masks; on any thread before the draws.
  void FillMasks(absl::Span<uint32_t> masks) const {
    const auto guesses = static_cast<size_t>(constrained() - 1);
    constraint->FillMasks(tokens.subspan(tokens.size() - guesses), masks);
  }
};

// All of a block, in every layer: a fork's own copy of what it will write.
struct BlockCopy {
  int32_t from = 0;
  int32_t to = 0;
};

// A mixed batch: prefill chunks and decodes are the same thing with other
// ranges. Entries of one step never share a block that one of them writes.
struct Step {
  uint64_t id = 0;  // ascending
  std::vector<StepEntry> entries;
  // Before all else; to different blocks.
  std::vector<BlockCopy> copies = {};
};

// Tokens in the order of the entries, and of their draws.
struct StepResult {
  std::vector<SampledToken> tokens;
};

class StepListener {
 public:
  virtual ~StepListener() = default;
  // KV of the step's positions is written for layers [0, layers_done), and
  // may be gathered. Ascending; the last one comes before OnStepDone.
  virtual void OnLayersDone(uint64_t step_id, int layers_done) = 0;
  virtual void OnStepDone(uint64_t step_id,
                          absl::StatusOr<StepResult> result) = 0;
};

// Where KV is read from or written to, for a handoff.
struct KvPart {
  absl::Span<const int32_t> block_table;  // valid until `done` runs
  int position_begin = 0;
  int position_end = 0;
  int layer_begin = 0;
  int layer_end = 0;
  int head_begin = 0;
  int head_end = 0;
  // Where blocks have parts: of windowed ones nothing before this position.
  int windowed_begin = 0;
};

// Called on the loop, and calls back there; never inside the call.
class Executor {
 public:
  virtual ~Executor() = default;

  // `step` and all that it points to live until OnStepDone. Steps run in
  // order; a second may be submitted while one runs. Blocks named by a step
  // that has not finished are held by it: they are neither freed nor reused.
  // REQUIRES of a step with fed entries: the one before was not reported yet.
  virtual void Submit(const Step* step, StepListener* listener) = 0;

  // Puts the part's bytes, as wire elements, into `staging`, and digests
  // them. Reads only what OnLayersDone has reported.
  virtual void Gather(const KvPart& part, kernels::DType wire,
                      uint64_t digest_key, std::byte* staging,
                      absl::AnyInvocable<void(kernels::KvDigest)> done) = 0;
  virtual void Scatter(const KvPart& part, kernels::DType wire,
                       const std::byte* staging,
                       absl::AnyInvocable<void()> done) = 0;
  virtual void Digest(const KvPart& part, kernels::DType wire,
                      uint64_t digest_key,
                      absl::AnyInvocable<void(kernels::KvDigest)> done) = 0;

  virtual const kernels::KvShape& kv_shape() const = 0;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_EXECUTOR_H_
