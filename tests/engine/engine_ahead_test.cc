// SPDX-License-Identifier: Apache-2.0
// Running ahead: a step of decodes is submitted while the one before runs.

#include <string>
#include <vector>

#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

HarnessOptions Ahead(int max_num_seqs = 8, int max_num_batched_tokens = 64) {
  HarnessOptions options;
  options.engine.max_num_seqs = max_num_seqs;
  options.engine.max_num_batched_tokens = max_num_batched_tokens;
  options.engine.run_ahead = true;
  return options;
}

int64_t Waiting(const Harness& harness) {
  return static_cast<int64_t>(harness.executor.steps.size()) -
         harness.device.steps();
}

TEST(EngineAheadTest, DecodesAreFedByTheStepBefore) {
  Harness harness(Ahead());
  harness.Add(1, 5, 4);
  harness.Add(2, 3, 3);
  harness.RunUntilIdle();
  // Who ends by length is left out of the step that would be too many.
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("1@0+5* 2@0+3*", "~1@5+1* ~2@3+1*", "~1@6+1* ~2@4+1*",
                          "~1@7+1*"));
  EXPECT_EQ(harness.engine->stats().surplus_tokens, 0);
  EXPECT_EQ(harness.engine->stats().decode_tokens, 7);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, NoStepGoesBeyondTheContext) {
  HarnessOptions options = Ahead();
  options.engine.max_model_len = 8;
  Harness harness(options);
  harness.Add(1, 5, 20);
  harness.RunUntilIdle();
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("1@0+5*", "~1@5+1*", "~1@6+1*"));
  EXPECT_EQ(harness.told[1].finish, Finish::kLength);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, TheDeviceHasAStepWhenTokensAreReported) {
  Harness harness(Ahead());
  harness.Add(1, 5, 20);
  std::vector<int64_t> waiting;
  harness.on_token = [&](SequenceId) { waiting.push_back(Waiting(harness)); };
  harness.RunUntilIdle();
  ASSERT_EQ(waiting.size(), 20u);
  for (size_t i = 0; i + 1 < waiting.size(); ++i) EXPECT_EQ(waiting[i], 1) << i;
  EXPECT_EQ(waiting.back(), 0);
}

TEST(EngineAheadTest, TokensAreTheSameUnderEveryBudgetAndLimitOfSequences) {
  for (const int budget : {1, 7, 64}) {
    for (const int max_num_seqs : {1, 3, 64}) {
      for (const int block_size : {1, 4, 16}) {
        HarnessOptions options = Ahead(max_num_seqs, budget);
        options.block_size = block_size;
        options.num_blocks = 400 / block_size;
        Harness harness(options);
        for (SequenceId id = 1; id <= 6; ++id) {
          SequenceSpec spec = harness.Spec(id, static_cast<int>(id * 7), 8);
          spec.sampling = {.temperature = id % 2 == 0 ? 0.0f : 1.0f,
                           .seed = id,
                           .sequence_index = 1};
          harness.Add(id, std::move(spec));
        }
        harness.RunUntilIdle();
        SCOPED_TRACE(absl::StrCat("budget ", budget, " sequences ",
                                  max_num_seqs, " block ", block_size));
        EXPECT_GT(harness.executor.fed, 0);
        EXPECT_LE(harness.executor.most_rows, budget);
        EXPECT_LE(harness.executor.most_sequences, max_num_seqs);
        harness.ExpectAllFinishedRight();
        harness.ExpectNothingLeft();
      }
    }
  }
}

TEST(EngineAheadTest, AStepAheadHasNoMoreSequencesThanAnother) {
  Harness harness(Ahead(/*max_num_seqs=*/2));
  for (const SequenceId id : {1, 2}) harness.Add(id, 5, 20);
  harness.RunSteps(2);
  for (const SequenceId id : {1, 2}) harness.engine->Pause(id, true);
  for (const SequenceId id : {3, 4}) harness.Add(id, 5, 20);
  harness.RunSteps(8);
  for (const SequenceId id : {1, 2}) harness.engine->Pause(id, false);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.executor.most_sequences, 2);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, OfAStepTooManyNothingIsHeard) {
  Harness harness(Ahead());
  SequenceSpec spec = harness.Spec(1, 5, 20);
  harness.Add(2, 5, 20);
  // The fourth token of the undisturbed run, and not one of the first three.
  const std::vector<int32_t> tokens =
      Expected(harness.options.model, spec.history, 4, spec.sampling);
  ASSERT_THAT(std::vector(tokens.begin(), tokens.begin() + 3),
              Not(::testing::Contains(tokens[3])));
  spec.stopping.stop_token_ids = {tokens[3]};
  harness.Add(1, spec);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.told[1].finish, Finish::kStop);
  EXPECT_EQ(harness.told[1].tokens, tokens);
  EXPECT_EQ(harness.engine->stats().surplus_tokens, 1);
  EXPECT_EQ(harness.engine->stats().decode_tokens, 4 + 20);
  // The stop token's KV was computed, and counts.
  EXPECT_EQ(harness.engine->computed(1), 5 + 4);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, APromptWaitsForTheStepsInFlightAndForNoMore) {
  Harness harness(Ahead());
  harness.Add(1, 3, 12);
  harness.RunSteps(3);
  ASSERT_EQ(Waiting(harness), 2);
  const size_t before = harness.executor.steps.size();
  harness.Add(2, 6, 3);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.executor.steps[before], "1@7+1* 2@0+6*");
  EXPECT_EQ(harness.executor.steps[before + 1], "~1@8+1* ~2@6+1*");
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, ASuspectGoesStepByStep) {
  Harness harness(Ahead());
  SequenceSpec spec = harness.Spec(1, 3, 6);
  spec.alone = true;
  harness.Add(1, std::move(spec));
  harness.Add(2, 3, 6);
  harness.RunUntilIdle();
  for (const std::string& step : harness.executor.steps) {
    const bool with_suspect = step[0] == '1' || step[1] == '1';
    if (with_suspect) {
      EXPECT_THAT(step, Not(HasSubstr("~")));
      EXPECT_THAT(step, Not(HasSubstr(" ")));
    }
  }
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, WithoutABlockNobodyIsPreemptedBeforeTheStepEnds) {
  HarnessOptions options = Ahead();
  options.num_blocks = 6;
  options.engine.max_model_len = 24;
  Harness harness(options);
  harness.on_preempted = [&](SequenceId id) {
    // Not while a step that uses its blocks runs.
    EXPECT_EQ(Waiting(harness), 1);
    harness.loop.After(absl::Milliseconds(40),
                       [&harness, id] { harness.Resume(id, true); });
  };
  harness.on_token = [&](SequenceId id) {
    if (harness.told[id].finish.has_value()) harness.Retire(id);
  };
  harness.Add(1, 6, 16);
  harness.Add(2, 6, 16);
  harness.RunUntilIdle();
  EXPECT_GT(harness.engine->stats().preemptions, 0);
  EXPECT_GT(harness.executor.fed, 0);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, BlocksOfARetiredSequenceWaitForBothSteps) {
  Harness harness(Ahead());
  harness.Add(1, 5, 40);
  harness.Add(2, 5, 10);
  harness.RunSteps(3);
  ASSERT_EQ(Waiting(harness), 2);
  const int live = harness.pool.counts().live;
  harness.Retire(1);
  harness.Add(1, harness.Spec(7, 9, 3));  // the id, at once
  EXPECT_EQ(harness.pool.counts().live, live);
  harness.RunSteps(4);
  EXPECT_EQ(Waiting(harness), 1);
  EXPECT_GE(harness.pool.counts().live, live);
  EXPECT_EQ(harness.blocks_freed, 0);
  harness.CheckInvariants();
  harness.RunSteps(5);
  EXPECT_EQ(harness.blocks_freed, 1);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, ABlockWithATokenThatNobodyToldIsNotCached) {
  Harness harness(Ahead());
  harness.Add(1, 5, 40);
  harness.RunSteps(2);
  ASSERT_EQ(harness.executor.steps.back(), "~1@7+1*");
  harness.Retire(1);  // before the token of position 7 is heard
  harness.RunUntilIdle();
  EXPECT_EQ(harness.pool.counts().cached, 1);
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, AFailedStepSpoilsWhatItFedAndNothingElse) {
  Harness harness(Ahead());
  harness.Add(1, 5, 12);
  harness.Add(2, 5, 12);
  harness.engine->Pause(2, true);
  harness.RunSteps(3);
  ASSERT_EQ(Waiting(harness), 2);
  harness.device.FailNextStep(absl::InternalError("device lost"));
  harness.RunSteps(4);
  EXPECT_THAT(harness.events, ::testing::Contains("failed 1"));
  harness.engine->Pause(2, false);
  harness.CheckInvariants();
  harness.RunUntilIdle();
  EXPECT_TRUE(harness.told[2].finish.has_value());
  // Nothing of what the next step made of it may be found in the cache.
  std::vector<int32_t> known = harness.told[1].prompt;
  known.insert(known.end(), harness.told[1].tokens.begin(),
               harness.told[1].tokens.end());
  ASSERT_EQ(known.size(), 8u);
  EXPECT_EQ(harness.pool.Lookup(HashBlocks(RootHash("", 4, ""), known, 4)), 1)
      << "position 7 was computed by the step that failed";
  harness.Resume(1, /*match_cache=*/true);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, APausedSequenceIsToldOfWhatWasUnderWay) {
  Harness harness(Ahead());
  harness.Add(1, 5, 12);
  harness.RunSteps(3);
  ASSERT_EQ(Waiting(harness), 2);
  harness.engine->Pause(1, true);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.told[1].tokens.size(), 5u);
  harness.CheckInvariants();
  harness.engine->Pause(1, false);
  harness.RunUntilIdle();
  EXPECT_EQ(harness.engine->stats().surplus_tokens, 0);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineAheadTest, StopTokensAreBannedUntilMinTokens) {
  for (int min_tokens = 0; min_tokens < 8; ++min_tokens) {
    Harness harness(Ahead());
    SequenceSpec spec = harness.Spec(1, 5, 12);
    spec.stopping.min_tokens = min_tokens;
    for (int32_t id = 0; id < 90; ++id) {
      spec.stopping.stop_token_ids.push_back(id);
    }
    harness.Add(1, std::move(spec));
    harness.RunUntilIdle();
    EXPECT_GE(static_cast<int>(harness.told[1].tokens.size()), min_tokens);
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

TEST(EngineAheadTest, RulesThatDependOnTheTokenWaitForIt) {
  std::vector<std::vector<int32_t>> tokens;
  for (const bool run_ahead : {false, true}) {
    HarnessOptions options = Ahead();
    options.engine.run_ahead = run_ahead;
    Harness harness(options);
    SequenceSpec spec = harness.Spec(1, 3, 8);
    spec.rules.frequency_penalty = 0.5f;
    harness.Add(1, std::move(spec));
    spec = harness.Spec(2, 3, 16);
    spec.rules.banned_ids = {5, 6, 7, 8, 9};  // of every token
    harness.Add(2, std::move(spec));
    harness.RunUntilIdle();
    for (const std::string& step : harness.executor.steps) {
      if (step.find("1@") == std::string::npos) continue;
      EXPECT_THAT(step, Not(HasSubstr("~")));
    }
    // The second alone.
    EXPECT_EQ(harness.executor.fed > 6, run_ahead);
    for (const SequenceId id : {1, 2}) {
      tokens.push_back(harness.told[id].tokens);
    }
    harness.ExpectNothingLeft();
  }
  EXPECT_EQ(tokens[0], tokens[2]);
  EXPECT_EQ(tokens[1], tokens[3]);
}

TEST(EngineAheadTest, APrefillWorkersSequencesEndWithTheirFirstToken) {
  Harness harness(Ahead());
  SequenceSpec spec = harness.Spec(1, 5, 12);
  spec.first_token_only = true;
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  EXPECT_THAT(harness.executor.steps, ElementsAre("1@0+5*"));
  EXPECT_THAT(harness.device.violations(), IsEmpty());
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::engine
