// SPDX-License-Identifier: Apache-2.0
// Prompts scored by the engine over real devices against the log-softmax of
// `transformers` in float64 (tools/oracle/make_scoring_goldens.py), and against
// themselves bit for bit, whatever the chunks and who shares the steps: on a
// CPU, on one that finishes late, and on the CUDA backend.

#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
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

constexpr int kTop = 5;

struct Limits {
  int rows;      // of a step
  int draws;     // of a step
  bool company;  // others compute and draw beside them
  bool run_ahead;
};

// The scores of some prompts: half of them with a token behind, which must
// not matter.
class Scores final : public EngineListener {
 public:
  Scores(Rig* rig, const std::vector<std::vector<int32_t>>& prompts,
         const Limits& limits)
      : pool_(rig->executor().kv_shape().num_blocks,
              rig->executor().kv_shape().block_size) {
    rig->loop().RunSync([&] {
      engine_ = std::make_unique<Engine>(
          EngineOptions{.max_num_seqs = 4,
                        .max_num_batched_tokens = limits.rows,
                        .max_model_len = 64,
                        .run_ahead = limits.run_ahead,
                        .max_draws = limits.draws},
          &rig->loop(), &rig->executor(), &pool_, this);
      if (limits.company) Add(100, {3, 1, 4, 1, 5}, 12, -1);
      for (size_t i = 0; i < prompts.size(); ++i) {
        Add(i, prompts[i], static_cast<int>(i % 2) * 2, kTop);
      }
    });
    done_.WaitForNotification();
    rig->loop().RunSync([&] {
      EXPECT_TRUE(engine_->CheckInvariants().ok());
      engine_.reset();
      EXPECT_EQ(pool_.counts().live, 0);
    });
  }

  std::map<SequenceId, std::vector<SampledToken>> of;

 private:
  void Add(SequenceId id, const std::vector<int32_t>& ids, int max_tokens,
           int alternatives) {
    SequenceSpec spec;
    spec.history = ids;
    spec.prompt_tokens = static_cast<int>(ids.size());
    spec.stopping.max_tokens = max_tokens;
    spec.sampling = {.temperature = 1, .seed = id, .logprobs = 1};
    spec.scoring.alternatives = alternatives;
    spec.admitted = absl::FromUnixSeconds(static_cast<int64_t>(id));
    ++left_;
    const absl::Status status = engine_->Add(id, std::move(spec), {}, 0);
    EXPECT_TRUE(status.ok()) << status;
  }
  void OnScores(SequenceId id, int position,
                absl::Span<const SampledToken> scores,
                std::optional<Finish> finish) override {
    std::vector<SampledToken>& all = of[id];
    EXPECT_EQ(position, static_cast<int>(all.size()) + 1);
    all.insert(all.end(), scores.begin(), scores.end());
    if (finish.has_value()) End(id);
  }
  void OnToken(SequenceId id, int, const SampledToken&,
               std::optional<Finish> finish) override {
    if (finish.has_value()) End(id);
  }
  void End(SequenceId id) {
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
  int left_ = 0;
  Notification done_;
};

std::string Bits(const std::vector<SampledToken>& scores) {
  std::string bits;
  const auto add = [&](float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    absl::StrAppend(&bits, absl::Hex(word), " ");
  };
  for (const SampledToken& score : scores) {
    absl::StrAppend(&bits, score.token_id, " ", score.rank, " ");
    add(score.logprob);
    for (const TopLogprob& top : score.top) {
      absl::StrAppend(&bits, top.token_id, " ");
      add(top.logprob);
    }
  }
  return bits;
}

void ExpectGolden(const std::vector<SampledToken>& scores, const json& golden) {
  ASSERT_EQ(scores.size(), golden.size());
  for (size_t i = 0; i < scores.size(); ++i) {
    const json& expected = golden[i];
    EXPECT_NEAR(scores[i].logprob, expected["logprob"].get<double>(), 2e-5)
        << i + 1;
    EXPECT_EQ(scores[i].rank, expected["rank"].get<int>()) << i + 1;
    ASSERT_EQ(scores[i].top.size(), kTop) << i + 1;
    for (size_t j = 0; j < kTop; ++j) {
      EXPECT_EQ(scores[i].top[j].token_id, expected["top_ids"][j].get<int>())
          << i + 1 << ", " << j;
      EXPECT_NEAR(scores[i].top[j].logprob,
                  expected["top_logprobs"][j].get<double>(), 2e-5);
    }
  }
}

class ScoringGolden : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<kernels::Backend> NewBackend() {
    if (GetParam() == "cuda") return NewTestDevice(DType::kF32);
    if (GetParam() == "cpu") return NewCpu(2);
    auto late = kernels::testing::NewLateBackend({.cpu = {.threads = 2}});
    EXPECT_TRUE(late.ok()) << late.status();
    return *std::move(late);
  }
};

TEST_P(ScoringGolden, EqualTheLogSoftmaxOfTransformers) {
  std::ifstream stream(std::string(TANDEM_SOURCE_DIR) +
                       "/tests/golden/engine_scores.json");
  const json golden = json::parse(stream, nullptr, false);
  ASSERT_TRUE(golden.is_object());
  const bool emulated = GetParam() == "cuda" && !TestsRunOnGpu();
  const bool slow = emulated || GetParam() == "late";
  for (const auto& [name, cases] : golden["cases"].items()) {
    if (slow && name != "gemma2_f32") continue;
    SCOPED_TRACE(name);
    std::vector<std::vector<int32_t>> prompts;
    for (const json& one : cases) prompts.push_back(one["ids"]);
    if (!emulated) prompts.push_back(prompts.back());  // with tokens, without
    TempDir dir;
    WriteCheckpoint(LoadCases()[name], dir);
    const auto backend = NewBackend();
    RigOptions options;
    options.load.weight_dtype = DType::kF32;
    options.executor.max_rows = 64;
    options.executor.max_sequences = 4;
    options.executor.max_draws = 64;
    options.executor.num_blocks = 64;
    options.executor.kv_dtype = DType::kF32;
    Rig rig(dir.path(), backend.get(), options);
    const bool ahead = GetParam() != "cpu";
    const Scores whole(&rig, prompts, {64, 64, false, ahead});
    for (size_t i = 0; i < prompts.size(); ++i) {
      ExpectGolden(whole.of.at(i), cases[std::min<size_t>(i, 1)]["scores"]);
    }
    for (const Limits& limits :
         {Limits{64, 0, true, ahead}, Limits{7, 5, false, ahead},
          Limits{33, 20, true, ahead}}) {
      if (emulated && limits.company) continue;
      SCOPED_TRACE(
          absl::StrCat(limits.rows, " rows, ", limits.draws, " draws"));
      const Scores cut(&rig, prompts, limits);
      for (size_t i = 0; i < prompts.size(); ++i) {
        EXPECT_EQ(Bits(cut.of.at(i)), Bits(whole.of.at(i)));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, ScoringGolden,
                         testing::Values("cpu", "late", "cuda"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tandem::engine
