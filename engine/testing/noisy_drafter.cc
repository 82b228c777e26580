// SPDX-License-Identifier: Apache-2.0
#include "engine/testing/noisy_drafter.h"

#include <algorithm>

#include "engine/logit_edits.h"

namespace tandem::engine {
namespace {

class NoisyDrafter final : public Drafter {
 public:
  NoisyDrafter(const FakeModel& model, const SequenceSpec& spec, uint64_t seed,
               double right)
      : model_(model),
        prompt_tokens_(spec.prompt_tokens),
        sampling_(spec.sampling),
        rules_(spec.rules),
        stopping_(spec.stopping),
        random_(seed),
        right_(right) {}

  int Propose(absl::Span<const int32_t> history,
              absl::Span<int32_t> out) override {
    FakeHistory run(model_);
    run.Append(history);
    std::vector<int32_t> known(history.begin(), history.end());
    LogitEdits edits(&rules_, stopping_.stop_token_ids, known, prompt_tokens_);
    const auto count = static_cast<size_t>(random_.Below(out.size() + 1));
    for (size_t i = 0; i < count; ++i) {
      const bool owed = static_cast<int>(known.size()) - prompt_tokens_ <
                        stopping_.min_tokens;
      int32_t token =
          run.Next(sampling_, edits.Next(known, owed), edits.only_edited());
      if (random_.Uniform() >= right_) {
        token = static_cast<int32_t>(
            (static_cast<uint64_t>(token) + 1 +
             random_.Below(static_cast<uint64_t>(model_.vocab_size) - 1)) %
            static_cast<uint64_t>(model_.vocab_size));
      }
      out[i] = token;
      known.push_back(token);
      edits.Append(token);
      run.Append(absl::MakeConstSpan(&token, 1));
    }
    return static_cast<int>(count);
  }

 private:
  const FakeModel model_;
  const int prompt_tokens_;
  const Sampling sampling_;
  const LogitRules rules_;
  const Stopping stopping_;
  SeededRandom random_;
  const double right_;
};

}  // namespace

std::unique_ptr<Drafter> NoisyDrafters::New(const SequenceSpec& spec) {
  return std::make_unique<NoisyDrafter>(model_, spec, random_.Next(), right_);
}

}  // namespace tandem::engine
