// SPDX-License-Identifier: Apache-2.0
// A language model made of hashes. The "KV" of a position is one 64-bit word
// per layer: the hash of the word before it, the token, the position and the
// layer. The next token is a hash over the words of all positions and layers.
// So whatever is wrong anywhere in a sequence's KV (a stale block, a foreign
// one, a slice that never landed) changes all tokens that follow; and
// Expected() tells the right ones from the tokens alone, knowing no blocks.

#ifndef TANDEM_ENGINE_TESTING_FAKE_MODEL_H_
#define TANDEM_ENGINE_TESTING_FAKE_MODEL_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "engine/engine.h"
#include "engine/executor.h"

namespace tandem::engine {

// A good mixer (that of SplitMix64): every bit of the result depends on all.
uint64_t Mix64(uint64_t value);

struct FakeModel {
  int num_layers = 4;
  int vocab_size = 500;
  uint64_t weights = 1;  // other weights, other tokens
  // Positions on which a draw depends, that of the token before included; 0:
  // all. At least 2.
  int window = 0;
  int full_layers = 0;  // the first ones, which see all in any case

  bool windowed(int layer) const { return window > 0 && layer >= full_layers; }

  // What stands for weights [rows][positions]: something that names its row's
  // layer (or, of a mean, the number of layers) and its position.
  static std::vector<float> Attention(const AttentionAsk& ask, int positions);

  // What stands before position 0.
  uint64_t RootWord(int layer) const;
  uint64_t Word(uint64_t previous, int32_t token, int position,
                int layer) const;
  // One position's and layer's share of the sum that a draw depends on.
  static uint64_t Fold(uint64_t word, int position, int layer);
  // The token at `position`, given the sum (xor) of all shares before it.
  // Temperature 0 ignores the seed, as sampling does. Ids that may not be drawn
  // give way to the next one; all other edits change the token at random. Of a
  // mask, if there is one, as kernels/sampling.h has it.
  int32_t Draw(uint64_t fold, const Sampling& sampling, int position,
               absl::Span<const kernels::LogitEdit> edits,
               bool only_edited = false,
               absl::Span<const uint32_t> mask = {}) const;
  // The `count` most probable ids at `position` of those that may be drawn, in
  // this order, as beam searches want them. Edits but bans do not matter.
  std::vector<TopLogprob> Candidates(
      uint64_t fold, int position, int count,
      absl::Span<const kernels::LogitEdit> edits = {},
      bool only_edited = false) const;
  // How probable `token` is where the shares before it sum to `fold`, and what
  // stands for the most probable ones.
  SampledToken Score(uint64_t fold, int32_t token, int alternatives) const;
};

// The model run over a history, token by token.
class FakeHistory {
 public:
  explicit FakeHistory(const FakeModel& model);
  void Append(absl::Span<const int32_t> tokens);
  int32_t Next(const Sampling& sampling,
               absl::Span<const kernels::LogitEdit> edits = {},
               bool only_edited = false,
               absl::Span<const uint32_t> mask = {}) const {
    return model_.Draw(fold_, sampling, position_, edits, only_edited, mask);
  }
  std::vector<TopLogprob> Candidates(
      int count, absl::Span<const kernels::LogitEdit> edits = {}) const {
    return model_.Candidates(fold_, position_, count, edits);
  }
  SampledToken Score(int32_t token, int alternatives) const {
    return model_.Score(fold_, token, alternatives);
  }

 private:
  FakeModel model_;
  int position_ = 0;
  uint64_t fold_ = 0;
  std::vector<uint64_t> words_;  // [num_layers], of the last position
  std::vector<uint64_t> folds_;  // by position: of all layers
};

// The `count` tokens that follow `history`.
std::vector<int32_t> Expected(const FakeModel& model,
                              absl::Span<const int32_t> history, int count,
                              const Sampling& sampling);
// The scores of `prompt` from position 1 on.
std::vector<SampledToken> ExpectedScores(const FakeModel& model,
                                         absl::Span<const int32_t> prompt,
                                         int alternatives);
// What a beam search behind `prompt` comes to, run without blocks or lanes.
BeamResult ExpectedBeams(const FakeModel& model,
                         absl::Span<const int32_t> prompt,
                         const BeamOptions& beams, const Stopping& stopping,
                         int max_model_len, int top = -1);
// The tokens that follow until a rule stops them.
std::vector<int32_t> ExpectedUntilStop(const FakeModel& model,
                                       absl::Span<const int32_t> history,
                                       int prompt_tokens,
                                       const Sampling& sampling,
                                       const Stopping& stopping,
                                       int max_model_len);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TESTING_FAKE_MODEL_H_
