// SPDX-License-Identifier: Apache-2.0

#include "engine/testing/fake_model.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "absl/algorithm/container.h"

namespace tandem::engine {
namespace {

bool Bans(const kernels::LogitEdit& edit) { return std::isinf(edit.bias); }
bool IsNeutral(const kernels::LogitEdit& edit) {
  return edit.bias == 0 && edit.repetition == 1 && edit.penalty == 0;
}

bool MayBeDrawn(int32_t token, absl::Span<const kernels::LogitEdit> edits,
                bool only_edited) {
  const auto edit =
      std::find_if(edits.begin(), edits.end(),
                   [token](const auto& e) { return e.token_id == token; });
  return edit == edits.end() ? !only_edited : !Bans(*edit);
}

uint64_t Pack(int high, int low) {
  return static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 |
         static_cast<uint32_t>(low);
}

}  // namespace

uint64_t Mix64(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

std::vector<float> FakeModel::Attention(const AttentionAsk& ask,
                                        int positions) {
  std::vector<float> weights;
  for (int row = 0; row < ask.rows(); ++row) {
    const auto at = static_cast<size_t>(row);
    const int name =
        ask.mean ? -static_cast<int>(ask.layers.size()) : ask.layers[at];
    for (int position = 0; position < positions; ++position) {
      weights.push_back(static_cast<float>(1000 * name + position));
    }
  }
  return weights;
}

uint64_t FakeModel::RootWord(int layer) const {
  return Mix64(weights ^ Mix64(static_cast<uint64_t>(layer)));
}

uint64_t FakeModel::Word(uint64_t previous, int32_t token, int position,
                         int layer) const {
  return Mix64(previous ^ Mix64(Pack(token, position) ^
                                Mix64(weights + static_cast<uint64_t>(layer))));
}

uint64_t FakeModel::Fold(uint64_t word, int position, int layer) {
  return Mix64(word ^ Pack(layer, position));
}

int32_t FakeModel::Draw(uint64_t fold, const Sampling& sampling, int position,
                        absl::Span<const kernels::LogitEdit> edits,
                        bool only_edited,
                        absl::Span<const uint32_t> mask) const {
  uint64_t state = fold ^ Mix64(static_cast<uint64_t>(position));
  if (sampling.temperature > 0) {
    state ^= Mix64(sampling.seed ^ Mix64(sampling.sequence_index));
  }
  for (const kernels::LogitEdit& edit : edits) {
    if (Bans(edit) || IsNeutral(edit)) continue;
    state ^= Mix64(Pack(edit.token_id, std::bit_cast<int>(edit.bias)) ^
                   Mix64(Pack(std::bit_cast<int>(edit.repetition),
                              std::bit_cast<int>(edit.penalty))));
  }
  const uint64_t drawn = Mix64(state) % static_cast<uint64_t>(vocab_size);
  const auto named = [mask](int32_t id) {
    return mask.empty() ||
           (mask[static_cast<size_t>(id / 32)] >> (id % 32) & 1) != 0;
  };
  const auto next = [&](const auto& may_be_drawn) {
    for (int i = 0; i < vocab_size; ++i) {
      const auto id = static_cast<int32_t>((drawn + static_cast<uint64_t>(i)) %
                                           static_cast<uint64_t>(vocab_size));
      if (may_be_drawn(id)) return id;
    }
    return -1;
  };
  const int32_t token = next([&](int32_t id) {
    return named(id) && MayBeDrawn(id, edits, only_edited);
  });
  if (token >= 0) return token;
  const int32_t masked = next(named);
  return masked >= 0 ? masked : static_cast<int32_t>(drawn);
}

std::vector<TopLogprob> FakeModel::Candidates(
    uint64_t fold, int position, int count,
    absl::Span<const kernels::LogitEdit> edits, bool only_edited) const {
  const uint64_t state = fold ^ Mix64(static_cast<uint64_t>(position));
  const auto size = static_cast<uint64_t>(vocab_size);
  std::vector<TopLogprob> candidates;
  float logprob = 0;
  for (uint64_t i = 0; i < size && std::ssize(candidates) < count; ++i) {
    const auto token = static_cast<int32_t>((Mix64(state) + i) % size);
    logprob -= static_cast<float>(Mix64(state + i) % 64 + 1) / 64;
    if (MayBeDrawn(token, edits, only_edited)) {
      candidates.push_back({token, logprob});
    }
  }
  return candidates;
}

SampledToken FakeModel::Score(uint64_t fold, int32_t token,
                              int alternatives) const {
  const uint64_t own = Mix64(fold ^ Mix64(static_cast<uint64_t>(token) + 1));
  SampledToken score;
  score.token_id = token;
  score.logprob = -static_cast<float>(own % 4096) / 256;
  score.rank =
      static_cast<int32_t>(own % static_cast<uint64_t>(vocab_size)) + 1;
  for (int i = 0; i < alternatives; ++i) {
    const auto place = static_cast<uint64_t>(i);
    score.top.push_back(
        {static_cast<int32_t>((Mix64(fold) + place) %
                              static_cast<uint64_t>(vocab_size)),
         -static_cast<float>(Mix64(fold) % 64 + place) / 64});
  }
  return score;
}

FakeHistory::FakeHistory(const FakeModel& model) : model_(model) {
  for (int layer = 0; layer < model_.num_layers; ++layer) {
    words_.push_back(model_.RootWord(layer));
  }
}

void FakeHistory::Append(absl::Span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    uint64_t passing = 0;  // what falls behind the window some day
    for (int layer = 0; layer < model_.num_layers; ++layer) {
      uint64_t& word = words_[static_cast<size_t>(layer)];
      word = model_.Word(word, token, position_, layer);
      const uint64_t fold = FakeModel::Fold(word, position_, layer);
      fold_ ^= fold;
      if (model_.windowed(layer)) passing ^= fold;
    }
    folds_.push_back(passing);
    ++position_;
    if (model_.window > 0 && position_ > model_.window) {
      fold_ ^= folds_[static_cast<size_t>(position_ - model_.window - 1)];
    }
  }
}

std::vector<SampledToken> ExpectedScores(const FakeModel& model,
                                         absl::Span<const int32_t> prompt,
                                         int alternatives) {
  FakeHistory history(model);
  std::vector<SampledToken> scores;
  for (size_t i = 1; i < prompt.size(); ++i) {
    history.Append(prompt.subspan(i - 1, 1));
    scores.push_back(history.Score(prompt[i], alternatives));
  }
  return scores;
}

std::vector<int32_t> Expected(const FakeModel& model,
                              absl::Span<const int32_t> history, int count,
                              const Sampling& sampling) {
  FakeHistory run(model);
  run.Append(history);
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) {
    tokens.push_back(run.Next(sampling));
    run.Append(absl::MakeConstSpan(&tokens.back(), 1));
  }
  return tokens;
}

BeamResult ExpectedBeams(const FakeModel& model,
                         absl::Span<const int32_t> prompt,
                         const BeamOptions& beams, const Stopping& stopping,
                         int max_model_len, int top) {
  const int prompt_tokens = static_cast<int>(prompt.size());
  BeamSearch search(
      beams, stopping.stop_token_ids,
      std::min(stopping.max_tokens, max_model_len - prompt_tokens), top);
  std::vector<kernels::LogitEdit> banned;
  for (const int32_t id : stopping.stop_token_ids) {
    banned.push_back({.token_id = id, .bias = -INFINITY});
  }
  FakeHistory begin(model);
  begin.Append(prompt);
  std::vector<FakeHistory> runs = {begin};
  const int count =
      std::max(top, CandidatesPerBeam(beams.width, stopping.stop_token_ids));
  for (int length = 0; !search.done(); ++length) {
    std::vector<std::vector<TopLogprob>> candidates;
    candidates.reserve(runs.size());
    for (const FakeHistory& run : runs) {
      candidates.push_back(
          run.Candidates(count, length < stopping.min_tokens
                                    ? absl::MakeConstSpan(banned)
                                    : absl::Span<const kernels::LogitEdit>()));
    }
    std::vector<FakeHistory> next;
    for (const BeamSearch::Next& beam :
         search.Step(std::vector<absl::Span<const TopLogprob>>(
             candidates.begin(), candidates.end()))) {
      next.push_back(runs[static_cast<size_t>(beam.parent)]);
      next.back().Append(absl::MakeConstSpan(&beam.token_id, 1));
    }
    runs = std::move(next);
  }
  return {search.Best(), search.tokens()};
}

std::vector<int32_t> ExpectedUntilStop(const FakeModel& model,
                                       absl::Span<const int32_t> history,
                                       int prompt_tokens,
                                       const Sampling& sampling,
                                       const Stopping& stopping,
                                       int max_model_len) {
  FakeHistory run(model);
  run.Append(history);
  std::vector<int32_t> tokens;
  const int before = static_cast<int>(history.size());
  std::vector<kernels::LogitEdit> banned;
  for (const int32_t id : stopping.stop_token_ids) {
    banned.push_back({.token_id = id, .bias = -INFINITY});
  }
  for (int length = before;
       length < max_model_len && length - prompt_tokens < stopping.max_tokens;
       ++length) {
    const bool may_stop = length - prompt_tokens >= stopping.min_tokens;
    tokens.push_back(
        run.Next(sampling, may_stop ? absl::Span<const kernels::LogitEdit>()
                                    : absl::MakeConstSpan(banned)));
    run.Append(absl::MakeConstSpan(&tokens.back(), 1));
    if (may_stop &&
        absl::c_linear_search(stopping.stop_token_ids, tokens.back())) {
      break;
    }
  }
  return tokens;
}

}  // namespace tandem::engine
