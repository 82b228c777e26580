// SPDX-License-Identifier: Apache-2.0
// Grammars for tests and the simulation, made of hashes as FakeModel is: a
// state is a hash of the tokens so far, and says which ids may come next. So
// whoever forgets a token, or has one too many, or another sequence's, comes to
// other masks; and ExpectedByGrammar tells the right tokens from these alone.

#ifndef TANDEM_ENGINE_TESTING_FAKE_GRAMMAR_H_
#define TANDEM_ENGINE_TESTING_FAKE_GRAMMAR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "common/loop.h"
#include "engine/testing/fake_model.h"
#include "engine/token_constraint.h"

namespace tandem::engine {

struct FakeGrammar {
  uint64_t seed = 1;
  int vocab_size = 100;
  std::vector<int32_t> ends;  // drawn only where the text may end
  bool ends_ignored = false;  // and never then

  uint64_t Start() const { return Mix64(seed); }
  static uint64_t Next(uint64_t state, int32_t token);
  uint64_t Behind(absl::Span<const int32_t> tokens) const;
  // Some third of all, never none.
  bool Allows(uint64_t state, int32_t token) const;
  static bool MayEnd(uint64_t state) { return Mix64(state ^ 5) % 8 == 0; }
  // Nothing may come: one of forty.
  bool Whole(uint64_t state) const {
    return state != Start() && Mix64(state ^ 6) % 40 == 0;
  }
  void FillMask(uint64_t state, absl::Span<uint32_t> mask) const;
};

// Follows one. Speaks up (its status) when what was drawn was not allowed.
class FakeConstraint final : public TokenConstraint {
 public:
  // Behind `output`, `delay` from now.
  FakeConstraint(const FakeGrammar& grammar, absl::Span<const int32_t> output,
                 Loop* loop = nullptr,
                 absl::Duration delay = absl::ZeroDuration());

  bool ready() const override { return ready_; }
  void OnReady(std::function<void()> ready) override {
    on_ready_ = std::move(ready);
  }
  // Stops behind some guess, now and then, as one that came to too much does.
  void FillMasks(absl::Span<const int32_t> guesses,
                 absl::Span<uint32_t> masks) override;
  int guessed() const override { return guessed_; }
  bool Append(int32_t token) override;
  absl::Status status() const override { return status_; }

 private:
  const FakeGrammar grammar_;
  uint64_t state_;
  int guessed_ = 0;
  bool ready_ = true;
  std::function<void()> on_ready_;
  std::unique_ptr<Timer> timer_;
  absl::Status status_;
};

// The tokens that follow `prompt` until the grammar or a rule ends them.
std::vector<int32_t> ExpectedByGrammar(const FakeModel& model,
                                       absl::Span<const int32_t> prompt,
                                       const FakeGrammar& grammar,
                                       const Sampling& sampling,
                                       const Stopping& stopping,
                                       int max_model_len);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TESTING_FAKE_GRAMMAR_H_
