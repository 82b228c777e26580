// SPDX-License-Identifier: Apache-2.0
// Guesses for tests: of FakeModel's tokens, right ones, wrong ones, and right
// ones up to somewhere, in all lengths. Whatever it says, no token may change.

#ifndef TANDEM_ENGINE_TESTING_NOISY_DRAFTER_H_
#define TANDEM_ENGINE_TESTING_NOISY_DRAFTER_H_

#include <cstdint>
#include <memory>

#include "common/random.h"
#include "engine/drafter.h"
#include "engine/engine.h"
#include "engine/testing/fake_model.h"

namespace tandem::engine {

class NoisyDrafters final : public DrafterFactory {
 public:
  // `right` of the guesses are, on average.
  NoisyDrafters(const FakeModel& model, uint64_t seed, double right = 0.7)
      : model_(model), random_(seed), right_(right) {}
  std::unique_ptr<Drafter> New(const SequenceSpec& spec) override;

 private:
  const FakeModel model_;
  SeededRandom random_;
  const double right_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TESTING_NOISY_DRAFTER_H_
