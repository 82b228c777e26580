// SPDX-License-Identifier: Apache-2.0
#include "engine/testing/fake_grammar.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "kernels/types.h"

namespace tandem::engine {

uint64_t FakeGrammar::Next(uint64_t state, int32_t token) {
  return Mix64(state ^ Mix64(static_cast<uint64_t>(token) + 1));
}

uint64_t FakeGrammar::Behind(absl::Span<const int32_t> tokens) const {
  uint64_t state = Start();
  for (const int32_t token : tokens) state = Next(state, token);
  return state;
}

bool FakeGrammar::Allows(uint64_t state, int32_t token) const {
  if (absl::c_linear_search(ends, token)) return !ends_ignored && MayEnd(state);
  const auto id = static_cast<uint64_t>(token);
  return Mix64(state ^ (id << 32)) % 3 == 0 ||
         Mix64(state) % static_cast<uint64_t>(vocab_size) == id;
}

void FakeGrammar::FillMask(uint64_t state, absl::Span<uint32_t> mask) const {
  for (int32_t id = 0; id < vocab_size; ++id) {
    if (Allows(state, id)) mask[static_cast<size_t>(id / 32)] |= 1u << id % 32;
  }
}

FakeConstraint::FakeConstraint(const FakeGrammar& grammar,
                               absl::Span<const int32_t> output, Loop* loop,
                               absl::Duration delay)
    : grammar_(grammar), state_(grammar.Behind(output)) {
  if (delay <= absl::ZeroDuration()) return;
  ready_ = false;
  timer_ = std::make_unique<Timer>(loop);
  timer_->Start(delay, [this] {
    ready_ = true;
    if (on_ready_) on_ready_();
  });
}

void FakeConstraint::FillMasks(absl::Span<const int32_t> guesses,
                               absl::Span<uint32_t> masks) {
  if (!ready_) status_ = absl::InternalError("asked before it was ready");
  const auto words =
      static_cast<size_t>(kernels::MaskWords(grammar_.vocab_size));
  uint64_t state = state_;
  guessed_ = 0;
  for (size_t i = 0;; ++i) {
    grammar_.FillMask(state, masks.subspan(i * words, words));
    if (i == guesses.size() || !grammar_.Allows(state, guesses[i])) return;
    if (absl::c_linear_search(grammar_.ends, guesses[i])) return;
    state = FakeGrammar::Next(state, guesses[i]);
    if (grammar_.Whole(state) || Mix64(state ^ 7) % 5 == 0) return;
    ++guessed_;
  }
}

bool FakeConstraint::Append(int32_t token) {
  if (!status_.ok()) return false;
  if (!grammar_.Allows(state_, token)) {
    status_ = absl::InternalError(absl::StrCat("drew ", token));
    return false;
  }
  if (absl::c_linear_search(grammar_.ends, token)) return true;
  state_ = FakeGrammar::Next(state_, token);
  return grammar_.Whole(state_);
}

std::vector<int32_t> ExpectedByGrammar(const FakeModel& model,
                                       absl::Span<const int32_t> prompt,
                                       const FakeGrammar& grammar,
                                       const Sampling& sampling,
                                       const Stopping& stopping,
                                       int max_model_len) {
  FakeHistory run(model);
  run.Append(prompt);
  std::vector<int32_t> tokens;
  uint64_t state = grammar.Start();
  const auto room = static_cast<size_t>(std::min(
      stopping.max_tokens, max_model_len - static_cast<int>(prompt.size())));
  std::vector<uint32_t> mask(
      static_cast<size_t>(kernels::MaskWords(grammar.vocab_size)));
  std::vector<kernels::LogitEdit> banned;
  for (const int32_t id : stopping.stop_token_ids) {
    banned.push_back({.token_id = id, .bias = -INFINITY});
  }
  while (tokens.size() < room) {
    std::fill(mask.begin(), mask.end(), 0);
    grammar.FillMask(state, absl::MakeSpan(mask));
    const bool may_stop =
        tokens.size() >= static_cast<size_t>(stopping.min_tokens);
    tokens.push_back(run.Next(sampling,
                              may_stop ? absl::Span<const kernels::LogitEdit>()
                                       : absl::MakeConstSpan(banned),
                              /*only_edited=*/false, mask));
    if (may_stop &&
        absl::c_linear_search(stopping.stop_token_ids, tokens.back())) {
      break;
    }
    if (absl::c_linear_search(grammar.ends, tokens.back())) break;
    run.Append(absl::MakeConstSpan(&tokens.back(), 1));
    state = FakeGrammar::Next(state, tokens.back());
    if (grammar.Whole(state)) break;
  }
  return tokens;
}

}  // namespace tandem::engine
