// SPDX-License-Identifier: Apache-2.0
// Speculation over real devices: the engine, its executor and the model on a
// CPU, on one that finishes late and hides its memory, and on the CUDA
// backend. Whatever is guessed, ids and log probabilities are those of steps
// of one token, by greedy and sampled draws, with all rules, in batches, in
// chunks of any size and after preemptions.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "kernels/testing/late_backend.h"
#include "tests/engine/checkpoint_maker.h"
#include "tests/engine/notification.h"
#include "tests/engine/rig.h"
#include "tests/engine/temp_dir.h"
#include "tests/engine/test_device.h"

namespace tandem::engine {
namespace {

using kernels::DType;

constexpr int kSequences = 6;

// Of each sequence: ids with their log probabilities.
using Tokens = std::map<SequenceId, std::vector<std::pair<int32_t, float>>>;

// What came without guesses, with mistakes in it. Sequences are told apart by
// their seeds.
class Recalling final : public DrafterFactory {
 public:
  explicit Recalling(const Tokens* tokens) : tokens_(tokens) {}
  std::unique_ptr<Drafter> New(const SequenceSpec& spec) override {
    class Recalled final : public Drafter {
     public:
      Recalled(const std::vector<std::pair<int32_t, float>>* tokens,
               int prompt_tokens)
          : tokens_(tokens), prompt_(static_cast<size_t>(prompt_tokens)) {}
      int Propose(absl::Span<const int32_t> history,
                  absl::Span<int32_t> out) override {
        const size_t known = history.size() - prompt_;
        const size_t count = std::min(out.size(), tokens_->size() - known);
        for (size_t i = 0; i < count; ++i) {
          const bool wrong = random_.Below(5) == 0;
          out[i] = wrong ? static_cast<int32_t>(random_.Below(40))
                         : (*tokens_)[known + i].first;
        }
        return static_cast<int>(count);
      }

     private:
      const std::vector<std::pair<int32_t, float>>* const tokens_;
      const size_t prompt_;
      SeededRandom random_{5};
    };
    return std::make_unique<Recalled>(&tokens_->at(spec.sampling.seed),
                                      spec.prompt_tokens);
  }

 private:
  const Tokens* const tokens_;
};

SequenceSpec SpecOf(const nlohmann::json& model, SequenceId id, int tokens) {
  SequenceSpec spec;
  spec.history = PromptIds(model, 2 + 3 * static_cast<int>(id));
  spec.prompt_tokens = static_cast<int>(spec.history.size());
  spec.admitted = absl::FromUnixSeconds(static_cast<int64_t>(id));
  spec.sampling.seed = id;
  spec.sampling.logprobs = 0;
  spec.stopping.max_tokens = tokens - static_cast<int>(id);
  switch (id) {
    case 1:
      break;  // greedy
    case 2:
      spec.sampling.temperature = 0.9f;
      spec.sampling.top_p = 0.9f;
      break;
    case 3:
      spec.rules.repetition_penalty = 1.4f;
      spec.rules.frequency_penalty = 0.3f;
      break;
    case 4:
      spec.sampling.temperature = 1;
      spec.sampling.top_k = 20;
      spec.rules.presence_penalty = 0.5f;
      break;
    case 5:
      spec.rules.logit_bias = {{.token_id = 9, .bias = 3}};
      spec.rules.banned_ids = {4, 5};
      break;
    default:
      spec.sampling.temperature = 0.7f;
      spec.stopping.min_tokens = 5;
      for (int32_t stop = 0; stop < 30; ++stop) {
        spec.stopping.stop_token_ids.push_back(stop);
      }
  }
  return spec;
}

// Generates for all sequences, then says that it is done.
class Generation final : public EngineListener {
 public:
  Generation(Rig* rig, const nlohmann::json& model, int most_tokens,
             EngineOptions options, int num_blocks,
             const DraftModelOptions& draft = {})
      : rig_(rig), pool_(num_blocks, rig->executor().kv_shape().block_size) {
    options.max_num_seqs = kSequences;
    options.max_model_len = 64;
    options.speculation.draft_model = draft;
    rig_->loop().RunSync([&] {
      engine_ = std::make_unique<Engine>(options, &rig_->loop(),
                                         &rig_->executor(), &pool_, this);
      for (SequenceId id = 1; id <= kSequences; ++id) {
        specs_[id] = SpecOf(model, id, most_tokens);
        EXPECT_TRUE(engine_->Add(id, specs_[id], {}, 0).ok());
      }
    });
    done_.WaitForNotification();
    rig_->loop().RunSync([&] {
      EXPECT_EQ(pool_.counts().live, 0);
      EXPECT_TRUE(engine_->CheckInvariants().ok());
      EXPECT_TRUE(pool_.CheckInvariants().ok());
      stats = engine_->stats();
      engine_.reset();
    });
  }

  Tokens tokens;
  EngineStats stats;

 private:
  void OnToken(SequenceId id, int position, const SampledToken& token,
               std::optional<Finish> finish) override {
    std::vector<int32_t>& history = specs_[id].history;
    EXPECT_EQ(position, static_cast<int>(history.size()));
    history.push_back(token.token_id);
    tokens[id].push_back({token.token_id, token.logprob});
    if (!finish.has_value()) return;
    engine_->Retire(id);
    if (++finished_ == kSequences) WaitUntilIdle();
  }
  void WaitUntilIdle() {
    rig_->loop().After(absl::Milliseconds(1), [this] {
      if (engine_->stats().step_in_flight) return WaitUntilIdle();
      done_.Notify();
    });
  }
  void OnComputed(SequenceId, int, int, int) override {}
  void OnPreempted(SequenceId id) override {
    rig_->loop().After(absl::Milliseconds(2), [this, id] {
      EXPECT_TRUE(engine_->Add(id, specs_[id], {}, 0).ok());
    });
  }
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<SequenceId>&,
                    const absl::Status& status) override {
    ADD_FAILURE() << status;
    done_.Notify();
  }

  Rig* const rig_;
  KvPool pool_;
  std::unique_ptr<Engine> engine_;
  std::map<SequenceId, SequenceSpec> specs_;
  int finished_ = 0;
  Notification done_;
};

class DeviceSpeculationTest : public testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<kernels::Backend> NewBackend() {
    if (GetParam() == "cuda") return NewTestDevice(DType::kF32);
    if (GetParam() == "cpu") return NewCpu(2);
    auto late = kernels::testing::NewLateBackend({.cpu = {.threads = 2}});
    EXPECT_TRUE(late.ok()) << late.status();
    return *std::move(late);
  }
};

TEST_P(DeviceSpeculationTest, ChangesNoTokenAndNoLogprob) {
  const nlohmann::json model = LoadCases()["llama_biases_f32"];
  TempDir dir;
  WriteCheckpoint(model, dir);
  const auto backend = NewBackend();
  const int tokens = GetParam() == "cuda" ? 12 : 36;
  RigOptions rig_options;
  rig_options.load.weight_dtype = DType::kF32;
  rig_options.executor.max_rows = 64;
  rig_options.executor.max_sequences = kSequences;
  rig_options.executor.max_draws = 40;
  rig_options.executor.num_blocks = 64;
  rig_options.executor.block_size = 8;
  Rig rig(dir.path(), backend.get(), rig_options);
  const EngineOptions plain{.max_num_batched_tokens = 64};
  const Generation expected(&rig, model, tokens, plain, 64);
  for (const auto& [id, ids] : expected.tokens) EXPECT_GE(ids.size(), 5u);
  if (GetParam() == "cuda") {
    rig.loop().RunSync([&] {
      const absl::Status status = rig.executor().RecordDecodes([](int, int) {});
      EXPECT_TRUE(status.ok()) << status;
    });
  }

  Recalling drafters(&expected.tokens);
  const struct {
    int rows;
    int guesses;
    bool ahead;
    int blocks;  // few: sequences are preempted
  } kRuns[] = {{64, 4, false, 64},
               {64, 7, true, 64},
               {9, 2, false, 64},
               {40, 5, true, GetParam() == "cuda" ? 10 : 16}};
  int64_t accepted = 0, rejected = 0, preemptions = 0;
  for (const auto& run : kRuns) {
    SCOPED_TRACE(run.guesses);
    // Emulated steps take long.
    if (GetParam() != "cpu" && !run.ahead) continue;
    EngineOptions options{.max_num_batched_tokens = run.rows,
                          .run_ahead = run.ahead,
                          .max_draws = 40};
    options.speculation = {
        .num_tokens = run.guesses, .adapt = false, .drafters = &drafters};
    const Generation got(&rig, model, tokens, options, run.blocks);
    EXPECT_EQ(got.tokens, expected.tokens);
    accepted += got.stats.drafts.accepted;
    rejected += got.stats.drafts.verified - got.stats.drafts.accepted;
    preemptions += got.stats.preemptions;
  }
  EXPECT_GT(accepted, tokens / 2);
  EXPECT_GT(rejected, 0);
  if (GetParam() != "cuda") {  // too short to run out of blocks
    EXPECT_GT(preemptions, 0);
  }
}

// A model behind the rig's, on its backend and loop.
class DraftRig {
 public:
  DraftRig(const std::string& directory, kernels::Backend* backend, Rig* rig)
      : pool_(64, 8) {
    const absl::StatusOr<ModelSpec> spec = LoadModelSpec(directory);
    EXPECT_TRUE(spec.ok()) << spec.status();
    const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(directory);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto model =
        Model::Load(*spec, *checkpoint, {.weight_dtype = DType::kF32}, backend);
    EXPECT_TRUE(model.ok()) << model.status();
    model_ = *std::move(model);
    auto executor = DeviceExecutor::Create({.max_rows = 24,
                                            .max_sequences = kSequences,
                                            .block_size = 8,
                                            .num_blocks = 64},
                                           model_.get(), backend, &rig->loop());
    EXPECT_TRUE(executor.ok()) << executor.status();
    executor_ = *std::move(executor);
  }
  DraftModelOptions options() {
    return {.executor = executor_.get(),
            .pool = &pool_,
            .max_positions = 60,
            .max_rows = 24,
            .max_sequences = kSequences};
  }
  const KvPool& pool() const { return pool_; }

 private:
  std::unique_ptr<Model> model_;
  KvPool pool_;
  std::unique_ptr<DeviceExecutor> executor_;
};

// The model itself is right whenever its cache, positions, rules and random
// numbers are; another one seldom is, and changes nothing.
TEST_P(DeviceSpeculationTest, ADraftModelGuessesAndChangesNothing) {
  const nlohmann::json cases = LoadCases();
  const nlohmann::json model = cases["llama_biases_f32"];
  nlohmann::json another = model;
  another["seed"] = 4711;
  TempDir dir, other_dir;
  WriteCheckpoint(model, dir);
  WriteCheckpoint(another, other_dir);
  const auto backend = NewBackend();
  const int tokens = GetParam() == "cpu" ? 36 : 12;
  RigOptions rig_options;
  rig_options.load.weight_dtype = DType::kF32;
  rig_options.executor.max_rows = 64;
  rig_options.executor.max_sequences = kSequences;
  rig_options.executor.max_draws = 40;
  rig_options.executor.num_blocks = 64;
  rig_options.executor.block_size = 8;
  Rig rig(dir.path(), backend.get(), rig_options);
  const EngineOptions plain{.max_num_batched_tokens = 64};
  const Generation expected(&rig, model, tokens, plain, 64);
  DraftRig same(dir.path(), backend.get(), &rig);
  DraftRig other(other_dir.path(), backend.get(), &rig);
  const struct {
    DraftRig* draft;
    int rows;
    int guesses;
    bool ahead;
    int blocks;  // few: sequences are preempted
  } kRuns[] = {{&same, 64, 3, true, 64},
               {&same, 9, 5, false, 64},
               {&same, 40, 4, false, 16},
               {&other, 64, 4, true, 64}};
  for (const auto& run : kRuns) {
    SCOPED_TRACE(absl::StrCat(run.guesses, " ", run.rows));
    // Steps of the others take long.
    if (GetParam() != "cpu" && run.guesses != 3) continue;
    EngineOptions options{.max_num_batched_tokens = run.rows,
                          .run_ahead = run.ahead,
                          .max_draws = 40};
    options.speculation = {.num_tokens = run.guesses, .adapt = false};
    const Generation got(&rig, model, tokens, options, run.blocks,
                         run.draft->options());
    EXPECT_EQ(got.tokens, expected.tokens);
    const KvPoolCounts blocks = run.draft->pool().counts();
    EXPECT_EQ(blocks.free + blocks.cached, 64);
    EXPECT_TRUE(run.draft->pool().CheckInvariants().ok());
    const DraftCounts& drafts = got.stats.drafts;
    EXPECT_GT(drafts.verified, tokens / 2);
    if (run.draft == &same) {
      // One sequence stops, maybe within its guesses.
      EXPECT_GE(drafts.accepted, drafts.verified - run.guesses);
    } else {
      EXPECT_LT(drafts.accepted, drafts.verified / 2);
    }
    if (run.blocks == 16) {
      EXPECT_GT(got.stats.preemptions, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, DeviceSpeculationTest,
                         testing::Values("cpu", "late", "cuda"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tandem::engine
