// SPDX-License-Identifier: Apache-2.0
// Running ahead over real devices: the engine, its executor and the model on
// a CPU, on one that finishes late and hides its memory, and on the CUDA
// backend with recorded decodes. The tokens are those of step by step.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/late_backend.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/engine_harness.h"
#include "tests/engine/notification.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"

namespace tandem::engine {
namespace {

using kernels::DType;

// Generates for all sequences, then says that it is done. Notes the steps.
class NotedGeneration final : public EngineListener {
 public:
  static constexpr int kSequences = 3;
  static constexpr int kTokens = 10;

  NotedGeneration(Rig* rig, const nlohmann::json& spec, bool run_ahead)
      : rig_(rig),
        noting_(&rig->executor()),
        pool_(rig->executor().kv_shape().num_blocks,
              rig->executor().kv_shape().block_size) {
    rig_->loop().RunSync([&] {
      engine_ =
          std::make_unique<Engine>(EngineOptions{.max_num_seqs = kSequences,
                                                 .max_num_batched_tokens = 32,
                                                 .max_model_len = 64,
                                                 .run_ahead = run_ahead},
                                   &rig_->loop(), &noting_, &pool_, this);
      for (SequenceId id = 1; id <= kSequences; ++id) Add(id, spec);
    });
    done_.WaitForNotification();
    rig_->loop().RunSync([&] {
      EXPECT_EQ(pool_.counts().live, 0);
      EXPECT_TRUE(engine_->CheckInvariants().ok());
      engine_.reset();
    });
  }

  std::map<SequenceId, std::vector<int32_t>> tokens;
  int64_t fed() const { return noting_.fed; }

 private:
  void Add(SequenceId id, const nlohmann::json& spec) {
    SequenceSpec sequence;
    sequence.history = PromptIds(spec, 2 + 3 * static_cast<int>(id));
    sequence.prompt_tokens = static_cast<int>(sequence.history.size());
    sequence.sampling.temperature = id == 2 ? 0.8f : 0.0f;
    sequence.sampling.seed = id;
    // Lengths differ; one is barred from a stop token for a while.
    sequence.stopping.max_tokens = kTokens - static_cast<int>(id);
    if (id == 1) {
      sequence.stopping.min_tokens = 4;
      sequence.stopping.stop_token_ids = {7};
    }
    const absl::Status status = engine_->Add(id, std::move(sequence), {}, 0);
    EXPECT_TRUE(status.ok()) << status;
  }

  void OnToken(SequenceId id, int, const SampledToken& token,
               std::optional<Finish> finish) override {
    tokens[id].push_back(token.token_id);
    if (!finish.has_value()) return;
    engine_->Retire(id);
    // After the step that is still in flight, if there is one.
    if (++finished_ == kSequences) WaitUntilIdle();
  }
  void WaitUntilIdle() {
    rig_->loop().After(absl::Milliseconds(1), [this] {
      if (engine_->stats().step_in_flight) return WaitUntilIdle();
      done_.Notify();
    });
  }
  void OnComputed(SequenceId, int, int, int) override {}
  void OnPreempted(SequenceId) override { ADD_FAILURE(); }
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<SequenceId>&,
                    const absl::Status& status) override {
    ADD_FAILURE() << status;
    done_.Notify();
  }

  Rig* const rig_;
  NotingExecutor noting_;
  KvPool pool_;
  std::unique_ptr<Engine> engine_;
  int finished_ = 0;
  Notification done_;
};

class RunAheadTest : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<kernels::Backend> NewBackend() {
    if (GetParam() == "cuda") return NewTestDevice(DType::kF32);
    if (GetParam() == "cpu") return NewCpu(2);
    auto late = kernels::testing::NewLateBackend({.cpu = {.threads = 2}});
    EXPECT_TRUE(late.ok()) << late.status();
    return *std::move(late);
  }
};

TEST_P(RunAheadTest, ChangesNoToken) {
  const nlohmann::json spec = LoadCases()["llama_biases_f32"];
  TempDir dir;
  WriteCheckpoint(spec, dir);
  const auto backend = NewBackend();
  RigOptions options;
  options.load.weight_dtype = DType::kF32;
  options.executor.max_rows = 32;
  options.executor.max_sequences = NotedGeneration::kSequences;
  options.executor.num_blocks = 32;
  Rig rig(dir.path(), backend.get(), options);
  const NotedGeneration plain(&rig, spec, false);
  if (GetParam() == "cuda") {
    rig.loop().RunSync([&] {
      const absl::Status status = rig.executor().RecordDecodes([](int, int) {});
      EXPECT_TRUE(status.ok()) << status;
    });
  }
  const NotedGeneration ahead(&rig, spec, true);
  EXPECT_EQ(plain.fed(), 0);
  EXPECT_GT(ahead.fed(),
            NotedGeneration::kSequences * (NotedGeneration::kTokens - 5));
  EXPECT_EQ(plain.tokens, ahead.tokens);
  for (const auto& [id, tokens] : plain.tokens) EXPECT_GE(tokens.size(), 4u);
}

INSTANTIATE_TEST_SUITE_P(, RunAheadTest, testing::Values("cpu", "late", "cuda"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tandem::engine
