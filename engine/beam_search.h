// SPDX-License-Identifier: Apache-2.0
// Which continuations of a beam search live on, and which are finished: what
// `transformers` (5.x, GenerationMixin._beam_search) decides, without tensors,
// blocks or time.
//
// Of all continuations of all beams, by the sum of their log probabilities, the
// first `width` that do not end go on; of the first `width`, those that end are
// hypotheses, of which the best `width` are kept by sum / length ^
// length_penalty. `transformers` looks at (end tokens + 1) * width
// continuations; since a beam ends in as many ways as there are end tokens, the
// first width + end tokens of each beam hold all that can be chosen
// (CandidatesPerBeam). Sums are in f64, ties go to the better beam and then to
// the lowest id.

#ifndef TANDEM_ENGINE_BEAM_SEARCH_H_
#define TANDEM_ENGINE_BEAM_SEARCH_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/executor.h"

namespace tandem::engine {

// When a search with `width` hypotheses ends: as soon as it has them; when the
// best beam is worse than the worst of them, taken at its own length
// (kHeuristic), or at the length that would be best for it (kNever).
enum class EarlyStopping { kHeuristic, kAlways, kNever };

// Either sign: with more, lengths' powers would leave what a double holds.
inline constexpr double kMaxLengthPenalty = 10;

struct BeamOptions {
  int width = 0;              // 0: no beam search
  int best = 1;               // hypotheses wanted, at most `width`
  double length_penalty = 1;  // at most kMaxLengthPenalty, either sign
  EarlyStopping early_stopping = EarlyStopping::kHeuristic;
};

// INVALID_ARGUMENT names what is out of range. Each beam's candidates must fit
// among those that a step reports (kernels::kMaxTopLogprobs).
absl::Status CheckBeams(const BeamOptions& options,
                        absl::Span<const int32_t> stop_token_ids);

// Candidates that each beam must bring to a step.
int CandidatesPerBeam(int width, absl::Span<const int32_t> stop_token_ids);

// A finished beam.
struct Hypothesis {
  std::vector<SampledToken> tokens;  // the end token included
  double score = 0;                  // sum / length ^ length_penalty
  bool stopped = false;              // by an end token, else by length
};

class BeamSearch {
 public:
  // Of at most `max_tokens` new tokens. `top`: alternatives reported per token.
  // REQUIRES: CheckBeams is OK, max_tokens >= 1.
  BeamSearch(const BeamOptions& options, std::vector<int32_t> stop_token_ids,
             int max_tokens, int top);

  // A beam that goes on: that of the step before, and its next token.
  struct Next {
    int parent;
    int32_t token_id;
  };

  // Takes what each beam may go on with, most probable first; of -inf: may not.
  // The beams of the next step, best first; none: the search is over.
  // REQUIRES: as many as the step before returned, one at first; !done().
  const std::vector<Next>& Step(
      absl::Span<const absl::Span<const TopLogprob>> candidates);

  bool done() const { return done_; }
  // The best hypotheses, best first; fewer where so few exist.
  // REQUIRES: done().
  std::vector<Hypothesis> Best() const;
  // Of all hypotheses kept.
  int tokens() const;

 private:
  // A token of some beams, and the one before it.
  struct Node {
    int before;  // in nodes_; -1: the first
    SampledToken token;
  };
  struct Beam {
    int node;
    double sum;
  };
  struct Finished {
    int node;
    double score;
    int length;
    bool stopped;
  };
  struct Continuation {
    double sum;
    int beam;
    int rank;  // among its beam's candidates
    TopLogprob candidate;
  };

  int AddNode(const Continuation& continuation,
              absl::Span<const TopLogprob> candidates);
  bool Ends(int32_t token_id) const;
  void Keep(const Finished& finished);
  double Penalised(double sum, int length) const;
  bool CanImprove(double best_sum) const;

  const BeamOptions options_;
  const std::vector<int32_t> stop_token_ids_;
  const int max_tokens_;
  const int top_;
  int length_ = 0;  // tokens of each beam
  bool done_ = false;
  std::vector<Node> nodes_;
  std::vector<Beam> beams_;         // best first
  std::vector<Finished> finished_;  // best first, at most `width`
  std::vector<Continuation> continuations_;
  std::vector<Next> next_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_BEAM_SEARCH_H_
