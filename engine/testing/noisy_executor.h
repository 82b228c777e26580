// SPDX-License-Identifier: Apache-2.0
// An Executor that draws other tokens now and then: of a draft model that is
// right so often.

#ifndef TANDEM_ENGINE_TESTING_NOISY_EXECUTOR_H_
#define TANDEM_ENGINE_TESTING_NOISY_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "common/random.h"
#include "engine/executor.h"

namespace tandem::engine {

class NoisyExecutor final : public Executor, private StepListener {
 public:
  // `right`: the share of tokens that it leaves as they are.
  NoisyExecutor(Executor* inner, int vocab_size, uint64_t seed, double right)
      : inner_(inner),
        vocab_size_(static_cast<uint64_t>(vocab_size)),
        random_(seed),
        right_(right) {}

  void Submit(const Step* step, StepListener* listener) override {
    listeners_.push_back(listener);
    inner_->Submit(step, this);
  }
  void Gather(const KvPart& part, kernels::DType wire, uint64_t key,
              std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    inner_->Gather(part, wire, key, staging, std::move(done));
  }
  void Scatter(const KvPart& part, kernels::DType wire,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override {
    inner_->Scatter(part, wire, staging, std::move(done));
  }
  void Digest(const KvPart& part, kernels::DType wire, uint64_t key,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    inner_->Digest(part, wire, key, std::move(done));
  }
  const kernels::KvShape& kv_shape() const override {
    return inner_->kv_shape();
  }
  void set_right(double right) { right_ = right; }

 private:
  void OnLayersDone(uint64_t step_id, int layers_done) override {
    listeners_.front()->OnLayersDone(step_id, layers_done);
  }
  void OnStepDone(uint64_t step_id,
                  absl::StatusOr<StepResult> result) override {
    StepListener* const listener = listeners_.front();
    listeners_.pop_front();
    if (result.ok()) {
      for (SampledToken& token : result->tokens) {
        if (random_.Uniform() < right_) continue;
        token.token_id =
            static_cast<int32_t>((static_cast<uint64_t>(token.token_id) + 1 +
                                  random_.Below(vocab_size_ - 1)) %
                                 vocab_size_);
      }
    }
    listener->OnStepDone(step_id, std::move(result));
  }

  Executor* const inner_;
  const uint64_t vocab_size_;
  SeededRandom random_;
  double right_;
  std::deque<StepListener*> listeners_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TESTING_NOISY_EXECUTOR_H_
