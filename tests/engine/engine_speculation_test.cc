// SPDX-License-Identifier: Apache-2.0
// Guesses of tokens, right and wrong ones: no token changes, and no block, no
// counter and no hash ever knows of one that was wrong.

#include <memory>

#include "engine/testing/noisy_drafter.h"
#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;

// Says what it was told to, whatever the history.
class FixedDrafter final : public Drafter {
 public:
  explicit FixedDrafter(const std::vector<std::vector<int32_t>>* guesses)
      : guesses_(guesses) {}
  int Propose(absl::Span<const int32_t>, absl::Span<int32_t> out) override {
    if (next_ == guesses_->size()) return 0;
    const std::vector<int32_t>& guesses = (*guesses_)[next_++];
    const size_t count = std::min(out.size(), guesses.size());
    std::copy_n(guesses.begin(), count, out.begin());
    return static_cast<int>(count);
  }

 private:
  const std::vector<std::vector<int32_t>>* const guesses_;
  size_t next_ = 0;
};

class FixedDrafters final : public DrafterFactory {
 public:
  std::unique_ptr<Drafter> New(const SequenceSpec&) override {
    return std::make_unique<FixedDrafter>(&guesses);
  }
  std::vector<std::vector<int32_t>> guesses;
};

HarnessOptions WithDrafters(DrafterFactory* drafters, int num_tokens = 4) {
  HarnessOptions options;
  options.engine.max_draws = 64;
  options.engine.speculation = {
      .num_tokens = num_tokens, .adapt = false, .drafters = drafters};
  return options;
}

TEST(EngineSpeculationTest, AStepGivesTheRightGuessesAndOneTokenMore) {
  FixedDrafters drafters;
  Harness harness(WithDrafters(&drafters));
  SequenceSpec spec = harness.Spec(1, 5, 12);
  const auto right = Expected(harness.options.model, spec.history, 12, {});
  const int32_t wrong = (right[4] + 1) % 100;
  drafters.guesses = {{right[1], right[2], right[3], wrong},  // three
                      {wrong},                                // none
                      {},
                      {right[7], right[8], right[9]}};
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  // Steps begin behind what was accepted: KV of wrong guesses is overwritten.
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("1@0+5*", "1@5+5*****", "1@9+2**", "1@10+1*",
                          "1@11+4****", "1@15+1*"));
  EXPECT_EQ(harness.told[1].tokens, right);
  EXPECT_EQ(harness.engine->stats().drafts.verified, 8);
  EXPECT_EQ(harness.engine->stats().drafts.accepted, 6);
  EXPECT_EQ(harness.engine->stats().draft_steps, 3);
  EXPECT_EQ(harness.engine->stats().decode_tokens, 12);
  EXPECT_EQ(harness.engine->stats().prefill_tokens, 4);
  const DraftCounts counts = harness.engine->drafts(1);
  EXPECT_EQ(counts.verified, 8);
  EXPECT_EQ(counts.accepted, 6);
  // Listeners hear of KV of known tokens alone.
  EXPECT_THAT(harness.layers, testing::Contains("1 [5, 6) layer 2"));
  harness.ExpectNothingLeft();
}

TEST(EngineSpeculationTest, ARunThatIsRightEndsWhereItMust) {
  FixedDrafters drafters;
  const struct {
    const char* why;
    int max_tokens;
    int stop_at;  // of the tokens, -1: none
    int min_tokens;
    int max_model_len;
    size_t tokens;
    Finish finish;
  } kCases[] = {
      {"max_tokens within the run", 4, -1, 0, 200, 4, Finish::kLength},
      {"max_tokens at its start", 2, -1, 0, 200, 2, Finish::kLength},
      {"a stop token within the run", 20, 3, 0, 200, 4, Finish::kStop},
      {"a stop token drawn behind the run", 20, 5, 0, 200, 6, Finish::kStop},
      {"a stop token as min_tokens allows", 20, 3, 3, 200, 4, Finish::kStop},
      {"the context ends", 20, -1, 0, 9, 4, Finish::kLength}};
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.why);
    HarnessOptions options = WithDrafters(&drafters);
    options.engine.max_model_len = c.max_model_len;
    Harness harness(options);
    SequenceSpec spec = harness.Spec(3, 5, c.max_tokens);
    const auto right = Expected(options.model, spec.history, 12, {});
    drafters.guesses = {{right[1], right[2], right[3], right[4]}};
    spec.stopping.min_tokens = c.min_tokens;
    if (c.stop_at >= 0) {
      spec.stopping.stop_token_ids = {right[static_cast<size_t>(c.stop_at)]};
    }
    harness.Add(3, std::move(spec));
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    EXPECT_EQ(harness.told[3].tokens.size(), c.tokens);
    EXPECT_EQ(harness.told[3].finish, c.finish);
    harness.ExpectNothingLeft();
  }
}

TEST(EngineSpeculationTest, MinTokensBanStopsAmongGuessesToo) {
  // Whatever is guessed, the stop tokens among it, nothing stops too early.
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    FakeModel model = HarnessOptions().model;
    NoisyDrafters drafters(model, seed);
    Harness harness(WithDrafters(&drafters));
    SequenceSpec spec = harness.Spec(seed, 6, 30);
    spec.stopping.min_tokens = 12;
    for (int32_t id = 0; id < 40; ++id) {
      spec.stopping.stop_token_ids.push_back(id);
    }
    harness.Add(seed, std::move(spec));
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    EXPECT_GE(harness.told[seed].tokens.size(), 12u);
  }
}

// All rules at once, beside each other in a batch.
TEST(EngineSpeculationTest, RulesSeeTheGuessesBeforeEachRow) {
  Harness without;
  auto specs = RuledSpecs(without, 6);
  specs[5].stopping.stop_token_ids = {5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
  specs[5].stopping.min_tokens = 9;
  for (size_t i = 0; i < specs.size(); ++i) without.Add(i + 1, specs[i]);
  without.RunUntilIdle();
  int64_t accepted = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    NoisyDrafters drafters(without.options.model, seed, 0.8);
    HarnessOptions options =
        WithDrafters(&drafters, 1 + static_cast<int>(seed));
    options.engine.max_draws = 6 + 4 * static_cast<int>(seed);
    options.engine.run_ahead = seed % 2 == 0;
    Harness with(options);
    for (size_t i = 0; i < specs.size(); ++i) with.Add(i + 1, specs[i]);
    with.RunUntilIdle();
    for (size_t i = 1; i <= specs.size(); ++i) {
      EXPECT_EQ(with.told[i].tokens, without.told[i].tokens) << i;
      EXPECT_EQ(with.told[i].finish, without.told[i].finish) << i;
    }
    accepted += with.engine->stats().drafts.accepted;
    with.ExpectNothingLeft();
  }
  EXPECT_GT(accepted, 300);
}

TEST(EngineSpeculationTest, HashesCoverAcceptedTokensAlone) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(seed);
    FakeModel model = HarnessOptions().model;
    NoisyDrafters drafters(model, seed, 0.6);
    HarnessOptions options = WithDrafters(&drafters, 8);
    options.block_size = 2;
    options.engine.max_model_len = 100;
    Harness harness(options);
    harness.Add(1, harness.Spec(1, 7, 50));
    harness.RunUntilIdle();
    // Each full block of what came is found again, and gives what follows.
    std::vector<int32_t> all = harness.told[1].prompt;
    all.insert(all.end(), harness.told[1].tokens.begin(),
               harness.told[1].tokens.end());
    const auto hashes = HashBlocks(RootHash("", 2, ""), all, 2);
    EXPECT_EQ(harness.pool.Lookup(hashes), (7 + 50 - 1) / 2);
    harness.Retire(1);
    SequenceSpec again = harness.Spec(2, 7, 60);
    again.history = all;
    again.prompt_tokens = static_cast<int>(all.size());
    again.stopping.max_tokens = 10;
    harness.Add(2, std::move(again), /*match_cache=*/true);
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

TEST(EngineSpeculationTest, BlocksOfWrongGuessesComeBackAndThatIsTold) {
  FixedDrafters drafters;
  Harness harness(WithDrafters(&drafters));
  SequenceSpec spec = harness.Spec(1, 5, 7);
  const auto right = Expected(harness.options.model, spec.history, 2, {});
  const int32_t wrong = (right[1] + 1) % 100;
  drafters.guesses = {{wrong, wrong, wrong, wrong}};
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  EXPECT_EQ(harness.executor.steps[1], "1@5+5*****");  // the third block
  EXPECT_EQ(harness.blocks_freed, 1);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

// Each running one may need a block for its next token.
TEST(EngineSpeculationTest, ABlockForEachRunningSequenceIsLeft) {
  for (const int blocks : {3, 4}) {
    FixedDrafters drafters;
    HarnessOptions options = WithDrafters(&drafters);
    options.num_blocks = blocks;
    options.engine.max_model_len = 12;
    Harness harness(options);
    SequenceSpec spec = harness.Spec(1, 5, 7);
    const auto right = Expected(options.model, spec.history, 7, {});
    drafters.guesses = {{right[1], right[2], right[3], right[4]}};
    harness.Add(1, std::move(spec));
    harness.RunUntilIdle();
    EXPECT_EQ(harness.executor.steps[1],
              blocks == 3 ? "1@5+3***" : "1@5+5*****");
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

TEST(EngineSpeculationTest, GuessesTakeNoBlockThatOthersNeed) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(seed);
    FakeModel model = HarnessOptions().model;
    NoisyDrafters drafters(model, seed, 0.5);
    HarnessOptions with = WithDrafters(&drafters, 8);
    with.num_blocks = 24;
    with.block_size = 4;
    with.engine.max_model_len = 48;
    HarnessOptions without = with;
    without.engine.speculation = {};
    int64_t preemptions[2];
    int i = 0;
    for (const HarnessOptions& options : {without, with}) {
      Harness harness(options);
      harness.on_preempted = [&](SequenceId id) {
        harness.loop.After(absl::Milliseconds(50),
                           [&harness, id] { harness.Resume(id, false); });
      };
      harness.on_token = [&](SequenceId id) {
        if (harness.told[id].finish.has_value()) harness.Retire(id);
      };
      for (SequenceId id = 1; id <= 3; ++id) harness.Add(id, 4, 40);
      harness.RunUntilIdle();
      harness.ExpectAllFinishedRight();
      preemptions[i++] = harness.engine->stats().preemptions;
      harness.ExpectNothingLeft();
    }
    EXPECT_LE(preemptions[1], preemptions[0] + 1);
  }
}

TEST(EngineSpeculationTest, ARetiredSequenceIsHeardNoMoreWithinItsRun) {
  FixedDrafters drafters;
  Harness harness(WithDrafters(&drafters));
  SequenceSpec spec = harness.Spec(1, 5, 12);
  const auto right = Expected(harness.options.model, spec.history, 12, {});
  drafters.guesses = {{right[1], right[2], right[3], right[4]}};
  harness.on_token = [&](SequenceId id) {
    if (harness.told[id].tokens.size() == 3) harness.Retire(id);
  };
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  EXPECT_EQ(harness.told[1].tokens.size(), 3u);
  harness.ExpectNothingLeft();
}

TEST(EngineSpeculationTest, StepsWithPromptsDraftNothingAndBudgetsHold) {
  FakeModel model = HarnessOptions().model;
  NoisyDrafters drafters(model, 1, 1.0);
  HarnessOptions options = WithDrafters(&drafters, 6);
  options.engine.max_num_batched_tokens = 16;
  options.engine.max_draws = 9;
  Harness harness(options);
  for (SequenceId id = 1; id <= 3; ++id) harness.Add(id, 30, 30);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_LE(harness.executor.most_rows, 16);
  for (const std::string& step : harness.executor.steps) {
    const auto draws = std::count(step.begin(), step.end(), '*');
    EXPECT_LE(draws, 64) << step;
    if (draws > 3) {
      EXPECT_EQ(step.find("+1 "), std::string::npos) << step;
    }
  }
  harness.ExpectNothingLeft();
}

TEST(EngineSpeculationTest, RunsAheadUntilGuessesPay) {
  for (const double right : {0.0, 1.0}) {
    FakeModel model = HarnessOptions().model;
    NoisyDrafters drafters(model, 1, right);
    HarnessOptions options = WithDrafters(&drafters);
    options.engine.run_ahead = true;
    options.engine.speculation.adapt = true;
    Harness harness(options);
    harness.Add(1, 20, 150);
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    if (right == 0) {
      EXPECT_GT(harness.executor.fed, 100);
      EXPECT_LT(harness.engine->stats().drafts.verified, 50);
    } else {
      EXPECT_LT(harness.device.steps(), 90);
    }
  }
}

}  // namespace
}  // namespace tandem::engine
