// SPDX-License-Identifier: Apache-2.0
// Beam searches of the engine over real devices against those of
// `transformers` on the tiny checkpoints: on a CPU, on one that finishes late
// and hides its memory, and on the CUDA backend. All searches of a model run at
// once, so lanes of several share steps.

#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gtest/gtest.h"
#include "kernels/testing/late_backend.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/notification.h"
#include "tests/engine/rig.h"
#include "tests/engine/test_device.h"

namespace tandem::engine {
namespace {

using kernels::DType;
using nlohmann::json;

class Searches final : public EngineListener {
 public:
  Searches(Rig* rig, const json& spec, const json& cases, bool run_ahead)
      : pool_(rig->executor().kv_shape().num_blocks,
              rig->executor().kv_shape().block_size),
        left_(cases.size()) {
    rig->loop().RunSync([&] {
      engine_ = std::make_unique<Engine>(
          EngineOptions{.max_num_seqs = 12,
                        .max_num_batched_tokens = 40,
                        .max_model_len = 64,
                        .run_ahead = run_ahead},
          &rig->loop(), &rig->executor(), &pool_, this);
      for (size_t i = 0; i < cases.size(); ++i) Add(i + 1, spec, cases[i]);
    });
    done_.WaitForNotification();
    rig->loop().RunSync([&] {
      EXPECT_TRUE(engine_->CheckInvariants().ok());
      engine_.reset();
      EXPECT_EQ(pool_.counts().live, 0);
    });
  }

  std::map<SequenceId, BeamResult> results;

 private:
  void Add(SequenceId id, const json& spec, const json& one) {
    SequenceSpec search;
    search.history = PromptIds(spec, one["length"].get<int>());
    search.prompt_tokens = static_cast<int>(search.history.size());
    search.stopping.max_tokens = one["max_tokens"];
    search.stopping.stop_token_ids = one["ends"].get<std::vector<int32_t>>();
    search.rules.repetition_penalty = one.value("repetition_penalty", 1.0f);
    search.beams.width = one["width"];
    search.beams.best = one["best"];
    search.beams.length_penalty = one["length_penalty"];
    search.beams.early_stopping =
        one["early_stopping"] == "never"    ? EarlyStopping::kNever
        : one["early_stopping"].get<bool>() ? EarlyStopping::kAlways
                                            : EarlyStopping::kHeuristic;
    const absl::Status status = engine_->Add(id, std::move(search), {}, 0);
    EXPECT_TRUE(status.ok()) << status;
  }
  void OnToken(SequenceId, int, const SampledToken&,
               std::optional<Finish>) override {
    ADD_FAILURE();
  }
  void OnBeams(SequenceId id, const BeamResult& result) override {
    results[id] = result;
    engine_->Retire(id);
    if (--left_ == 0) done_.Notify();
  }
  void OnComputed(SequenceId, int, int, int) override {}
  void OnPreempted(SequenceId) override { ADD_FAILURE(); }
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<SequenceId>&,
                    const absl::Status& status) override {
    ADD_FAILURE() << status;
    done_.Notify();
  }

  KvPool pool_;
  std::unique_ptr<Engine> engine_;
  size_t left_;
  Notification done_;
};

class BeamsGolden : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<kernels::Backend> NewBackend() {
    if (GetParam() == "cuda") return NewTestDevice(DType::kF32);
    if (GetParam() == "cpu") return NewCpu(2);
    auto late = kernels::testing::NewLateBackend({.cpu = {.threads = 2}});
    EXPECT_TRUE(late.ok()) << late.status();
    return *std::move(late);
  }
};

TEST_P(BeamsGolden, EqualThoseOfTransformers) {
  std::ifstream stream(std::string(TANDEM_SOURCE_DIR) +
                       "/tests/golden/beams/checkpoints.json");
  const json golden = json::parse(stream, nullptr, false);
  ASSERT_TRUE(golden.is_object());
  for (const auto& [name, cases] : golden["cases"].items()) {
    const bool emulated = GetParam() == "cuda" && !TestsRunOnGpu();
    const bool slow = emulated || GetParam() == "late";
    if (slow && name != "llama_biases_f32") continue;
    SCOPED_TRACE(name);
    const json some = emulated ? json::array({cases[0]}) : cases;
    const json spec = LoadCases()[name];
    TempDir dir;
    WriteCheckpoint(spec, dir);
    const auto backend = NewBackend();
    RigOptions options;
    options.load.weight_dtype = DType::kF32;
    options.load.max_positions = spec.value("served", 0);
    options.executor.max_rows = 40;
    options.executor.max_sequences = 12;
    options.executor.num_blocks = 128;
    options.executor.kv_dtype = DType::kF32;
    Rig rig(dir.path(), backend.get(), options);
    const Searches searches(&rig, spec, some, GetParam() != "cpu");
    for (size_t i = 0; i < some.size(); ++i) {
      const auto it = searches.results.find(i + 1);
      ASSERT_NE(it, searches.results.end());
      const json& expected = some[i]["hypotheses"];
      ASSERT_EQ(it->second.best.size(), expected.size());
      for (size_t h = 0; h < expected.size(); ++h) {
        const Hypothesis& hypothesis = it->second.best[h];
        std::vector<int32_t> ids;
        for (const SampledToken& token : hypothesis.tokens) {
          ids.push_back(token.token_id);
        }
        EXPECT_EQ(ids, expected[h]["ids"].get<std::vector<int32_t>>())
            << "search " << i << ", hypothesis " << h;
        EXPECT_NEAR(hypothesis.score, expected[h]["score"].get<double>(), 2e-3);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, BeamsGolden,
                         testing::Values("cpu", "late", "cuda"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tandem::engine
