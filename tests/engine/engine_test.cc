// SPDX-License-Identifier: Apache-2.0
// What steps hold, and what becomes of sequences. Blocks are plenty here;
// engine_blocks_test.cc has what happens when they are not.

#include "engine/engine.h"

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

HarnessOptions Limits(int max_num_seqs, int max_num_batched_tokens) {
  HarnessOptions options;
  options.engine.max_num_seqs = max_num_seqs;
  options.engine.max_num_batched_tokens = max_num_batched_tokens;
  return options;
}

// ---- What steps hold

TEST(EngineTest, TokensAreTheSameUnderEveryBudgetAndLimitOfSequences) {
  for (const int budget : {1, 7, 64}) {
    for (const int max_num_seqs : {1, 3, 64}) {
      for (const int block_size : {1, 4, 16}) {
        HarnessOptions options = Limits(max_num_seqs, budget);
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
        harness.ExpectAllFinishedRight();
        harness.ExpectNothingLeft();
        EXPECT_LE(harness.executor.most_rows, budget);
        EXPECT_LE(harness.executor.most_sequences, max_num_seqs);
        EXPECT_EQ(harness.engine->stats().preemptions, 0);
      }
    }
  }
}

struct Arrival {
  SequenceId id;
  int prompt;
  int max_tokens;
};

TEST(EngineTest, StepsTakeDecodesThenChunksOldestFirst) {
  struct Case {
    std::string why;
    int seqs;
    int budget;
    std::vector<Arrival> arrivals;
    std::vector<std::string> steps;
  };
  const std::vector<Case> cases = {
      {"a prompt is cut to the budget, its last token draws",
       8,
       4,
       {{1, 10, 2}},
       {"1@0+4", "1@4+4", "1@8+2*", "1@10+1*"}},
      {"the older prompt first; the rest of the budget to the next",
       8,
       4,
       {{2, 3, 1}, {1, 3, 1}},
       {"1@0+3* 2@0+1", "2@1+2*"}},
      {"a decode goes before the chunk, however old the chunk",
       8,
       4,
       {{1, 9, 1}, {2, 1, 3}},
       {"2@0+1* 1@0+3", "2@1+1* 1@3+3", "2@2+1* 1@6+3*"}},
      {"but a place is kept for the oldest: rows",
       8,
       2,
       {{1, 4, 1}, {2, 1, 2}, {3, 1, 2}},
       {"2@0+1* 1@0+1", "2@1+1* 1@1+1", "3@0+1* 1@2+1", "1@3+1* 3@1+1*"}},
      {"and sequences",
       2,
       64,
       {{1, 70, 1}, {2, 1, 2}, {3, 1, 2}},
       {"2@0+1* 1@0+63", "2@1+1* 1@63+7*", "3@0+1*", "3@1+1*"}},
      {"and for the oldest prompt, once a step has places for it and all "
       "older ones",
       3,
       64,
       {{1, 1, 3}, {2, 5, 2}, {3, 1, 2}, {4, 1, 2}, {5, 5, 1}},
       {"1@0+1* 3@0+1* 2@0+5*", "1@1+1* 2@5+1* 3@1+1*", "1@2+1* 4@0+1* 5@0+5*",
        "4@1+1*"}},
      {"one at a time, the oldest",
       1,
       64,
       {{2, 2, 2}, {1, 2, 2}},
       {"1@0+2*", "1@2+1*", "2@0+2*", "2@2+1*"}},
  };
  for (const Case& c : cases) {
    Harness harness(Limits(c.seqs, c.budget));
    for (const Arrival& arrival : c.arrivals) {
      harness.Add(arrival.id, arrival.prompt, arrival.max_tokens);
    }
    harness.RunUntilIdle();
    EXPECT_EQ(harness.executor.steps, c.steps) << c.why;
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

TEST(EngineTest, EqualAgesGoByOrderOfAdding) {
  Harness harness(Limits(1, 64));
  for (const SequenceId id : {3, 1, 2}) {
    SequenceSpec spec = harness.Spec(id, 2, 1);
    spec.admitted = absl::FromUnixSeconds(9);
    harness.Add(id, std::move(spec));
  }
  harness.RunUntilIdle();
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("3@0+2*", "1@0+2*", "2@0+2*"));
}

TEST(EngineTest, SequencesJoinAndLeaveAtAnyStepAndDisturbNobody) {
  for (int step = 0; step <= 12; ++step) {
    Harness harness(Limits(8, 5));
    harness.Add(1, 12, 9);
    harness.Add(2, 6, 9);
    harness.RunSteps(step);
    harness.Add(3, 9, 4);  // joins here
    harness.Retire(2);     // leaves here, the step that uses it in flight
    harness.RunUntilIdle();
    SCOPED_TRACE(absl::StrCat("at step ", step));
    harness.ExpectAllFinishedRight();
    EXPECT_TRUE(harness.told[1].finish.has_value());
    EXPECT_TRUE(harness.told[3].finish.has_value());
    harness.ExpectNothingLeft();
  }
}

TEST(EngineTest, PausedSequencesComputeNothing) {
  Harness harness(Limits(8, 4));
  harness.Add(1, 6, 3);
  harness.Add(2, 2, 3);
  harness.RunSteps(1);
  harness.engine->Pause(1, true);
  harness.engine->Pause(1, true);
  EXPECT_EQ(harness.engine->stats().paused, 1);
  EXPECT_EQ(harness.engine->stats().running, 1);
  harness.RunUntilIdle();
  // Only the step that ran already still has it.
  EXPECT_EQ(harness.executor.steps.size(), 4);
  EXPECT_FALSE(harness.told[1].finish.has_value());
  EXPECT_TRUE(harness.told[2].finish.has_value());
  EXPECT_TRUE(harness.engine->contains(1));
  harness.engine->Pause(1, false);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineTest, SuspectsHaveStepsOfTheirOwnAndTakeTurns) {
  Harness harness(Limits(8, 4));
  harness.Add(1, 2, 3);
  for (const SequenceId id : {2, 3}) {
    SequenceSpec spec = harness.Spec(id, 5, 1);
    spec.alone = true;
    harness.Add(id, std::move(spec));
  }
  harness.Add(4, 2, 2);
  harness.RunUntilIdle();
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("1@0+2* 4@0+2*", "2@0+4", "1@2+1* 4@2+1*", "2@4+1*",
                          "1@3+1*", "3@0+4", "3@4+1*"));
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineTest, ASuspectThatProvedHarmlessSharesSteps) {
  Harness harness(Limits(8, 4));
  harness.Add(1, 2, 4);
  SequenceSpec spec = harness.Spec(2, 4, 3);
  spec.alone = true;
  harness.Add(2, std::move(spec));
  harness.RunSteps(2);
  harness.engine->ShareSteps(2);
  harness.engine->ShareSteps(99);  // unknown: nothing
  harness.RunUntilIdle();
  EXPECT_THAT(harness.executor.steps,
              // The third step was under way when it proved harmless.
              ElementsAre("1@0+2*", "2@0+4*", "1@2+1*", "1@3+1* 2@4+1*",
                          "1@4+1* 2@5+1*"));
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

// ---- Ends

TEST(EngineTest, SequencesEndByTheRules) {
  Harness probe;
  const std::vector<int32_t> run =
      Expected(probe.options.model, Harness::Prompt(1, 10), 8, {});
  struct Case {
    std::string why;
    Stopping stopping;
    bool first_token_only;
    int max_model_len;
    size_t tokens;
    std::optional<Finish> finish;
  };
  const std::vector<Case> cases = {
      {"max_tokens", {3, 0, {}}, false, 200, 3, Finish::kLength},
      {"one token", {1, 0, {}}, false, 200, 1, Finish::kLength},
      {"a stop token", {8, 0, {run[4]}}, false, 200, 5, Finish::kStop},
      {"the first of two",
       {8, 0, {run[5], run[2]}},
       false,
       200,
       3,
       Finish::kStop},
      {"a stop token as the last one",
       {5, 0, {run[4]}},
       false,
       200,
       5,
       Finish::kStop},
      {"min_tokens reached just before",
       {8, 4, {run[4]}},
       false,
       200,
       5,
       Finish::kStop},
      {"the model's length", {8, 0, {}}, false, 14, 4, Finish::kLength},
      {"first token only", {8, 0, {}}, true, 200, 1, std::nullopt},
      {"which is a stop token", {8, 0, {run[0]}}, true, 200, 1, Finish::kStop},
      {"which is all", {1, 0, {}}, true, 200, 1, Finish::kLength},
      {"there is no more room here", {8, 0, {}}, true, 11, 1, std::nullopt},
  };
  for (const Case& c : cases) {
    HarnessOptions options;
    options.engine.max_model_len = c.max_model_len;
    Harness harness(options);
    SequenceSpec spec = harness.Spec(1, 10, 1);
    spec.stopping = c.stopping;
    spec.first_token_only = c.first_token_only;
    harness.Add(1, std::move(spec));
    harness.RunUntilIdle();
    EXPECT_EQ(harness.told[1].tokens,
              std::vector<int32_t>(run.begin(),
                                   run.begin() + static_cast<int>(c.tokens)))
        << c.why;
    EXPECT_EQ(harness.told[1].finish, c.finish) << c.why;
    // It stays, with its blocks, and computes nothing more.
    EXPECT_TRUE(harness.engine->contains(1)) << c.why;
    EXPECT_EQ(harness.engine->computed(1), 9 + static_cast<int>(c.tokens));
    EXPECT_EQ(harness.engine->stats().running, 0) << c.why;
    EXPECT_GE(harness.pool.counts().live, 3) << c.why;
    harness.ExpectNothingLeft();
  }
}

TEST(EngineTest, StopTokensAreBannedUntilMinTokens) {
  Harness harness;
  const std::vector<int32_t> run =
      Expected(harness.options.model, Harness::Prompt(1, 10), 8, {});
  SequenceSpec spec = harness.Spec(1, 10, 8);
  spec.stopping.min_tokens = 3;
  spec.stopping.stop_token_ids = {run[0]};
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_EQ(harness.told[1].tokens[0], (run[0] + 1) % 100);
  EXPECT_GE(harness.told[1].tokens.size(), 3);
}

TEST(EngineTest, OutputSoFarIsInputAndNeverDrawnAgain) {
  Harness harness;
  const std::vector<int32_t> run =
      Expected(harness.options.model, Harness::Prompt(1, 10), 6, {});
  SequenceSpec spec = harness.Spec(1, 10, 6);
  spec.history.insert(spec.history.end(), run.begin(), run.begin() + 4);
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  EXPECT_THAT(harness.events, ElementsAre("token 1@14", "token 1@15"));
  EXPECT_EQ(harness.told[1].tokens, run);
  EXPECT_EQ(harness.told[1].finish, Finish::kLength);
}

// What a failover does: the history comes back and the rules are counted anew.
TEST(EngineTest, RulesGoOnFromAnyHistory) {
  constexpr int kPrompt = 10, kNew = 16;
  LogitRules rules;
  rules.repetition_penalty = 1.5f;
  rules.frequency_penalty = 0.5f;
  for (int32_t id = 0; id < 40; ++id) rules.bad_words.push_back({id, id + 1});
  const auto run = [&](std::vector<int32_t> output, bool run_ahead) {
    HarnessOptions options;
    options.engine.run_ahead = run_ahead;
    options.model.vocab_size = 12;  // so that tokens come again
    Harness harness(options);
    SequenceSpec spec = harness.Spec(1, kPrompt, kNew);
    for (int32_t& id : spec.history) id %= 12;
    spec.history.insert(spec.history.end(), output.begin(), output.end());
    spec.rules = rules;
    spec.stopping.min_tokens = 5;
    spec.stopping.stop_token_ids = {3};
    harness.Add(1, std::move(spec));
    harness.RunUntilIdle();
    return harness.told[1].tokens;
  };
  const std::vector<int32_t> undisturbed = run({}, false);
  ASSERT_GT(undisturbed.size(), 5u);
  for (size_t i = 0; i < undisturbed.size(); ++i) {
    for (const bool run_ahead : {false, true}) {
      EXPECT_EQ(run({undisturbed.begin(),
                     undisturbed.begin() + static_cast<std::ptrdiff_t>(i)},
                    run_ahead),
                undisturbed)
          << "from " << i;
    }
  }
  for (size_t i = 1; i < undisturbed.size(); ++i) {
    EXPECT_NE(undisturbed[i], undisturbed[i - 1] + 1);
  }
  rules = {};
  EXPECT_NE(run({}, false), undisturbed);
}

TEST(EngineTest, RetireEndsASequenceInEveryState) {
  struct Case {
    std::string state;
    std::function<void(Harness&)> reach;
  };
  const std::vector<Case> cases = {
      {"just added", [](Harness& h) {}},
      {"in the first chunk's step", [](Harness& h) { h.loop.RunNext(); }},
      {"between two layers",
       [](Harness& h) {
         h.loop.RunNext();
         h.loop.RunNext();
         EXPECT_THAT(h.layers, SizeIs(1));
       }},
      {"all layers done, the step not",
       [](Harness& h) {
         for (int i = 0; i < 3; ++i) h.loop.RunNext();
         EXPECT_THAT(h.layers, SizeIs(2));
       }},
      {"mid-chunk", [](Harness& h) { h.RunSteps(1); }},
      {"decoding", [](Harness& h) { h.RunSteps(4); }},
      {"finished", [](Harness& h) { h.RunUntilIdle(); }},
      {"paused in a step",
       [](Harness& h) {
         h.RunSteps(2);
         h.engine->Pause(1, true);
       }},
      {"paused",
       [](Harness& h) {
         h.engine->Pause(1, true);
         h.RunUntilIdle();
       }},
  };
  for (const Case& c : cases) {
    Harness harness(Limits(8, 6));
    harness.Add(1, 11, 5);
    harness.Add(2, 3, 5);
    c.reach(harness);
    SCOPED_TRACE(c.state);
    const bool in_flight = harness.engine->stats().step_in_flight;
    const int live = harness.pool.counts().live;
    harness.Retire(1);
    harness.Retire(1);
    EXPECT_FALSE(harness.engine->contains(1));
    EXPECT_THAT(harness.engine->block_table(1), IsEmpty());
    // A step in flight keeps its blocks.
    if (in_flight) {
      EXPECT_EQ(harness.pool.counts().live, live);
    }
    harness.CheckInvariants();
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    EXPECT_TRUE(harness.told[2].finish.has_value());
    harness.ExpectNothingLeft();
  }
}

TEST(EngineTest, AnIdMayBeUsedAgainWhileTheStepOfItsOldSequenceRuns) {
  Harness harness;
  harness.Add(1, 10, 3);
  harness.loop.RunNext();
  ASSERT_TRUE(harness.engine->stats().step_in_flight);
  harness.Retire(1);
  SequenceSpec other = harness.Spec(7, 9, 3);
  harness.Add(1, std::move(other));
  harness.RunUntilIdle();
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("1@0+10*", "1@0+9*", "1@9+1*", "1@10+1*"));
  harness.ExpectAllFinishedRight();
  EXPECT_THAT(harness.events,
              ElementsAre("token 1@9", "token 1@10", "token 1@11"));
  harness.ExpectNothingLeft();
}

TEST(EngineTest, AFailedStepTakesItsSequencesAndNoOthers) {
  Harness harness(Limits(2, 64));
  harness.Add(1, 10, 4);
  harness.Add(2, 10, 4);
  harness.Add(3, 10, 4);
  harness.RunSteps(1);
  harness.Retire(2);  // while the second step runs: it is not told
  harness.device.FailNextStep(absl::InternalError("device lost"));
  harness.RunSteps(2);
  EXPECT_THAT(harness.events,
              ElementsAre("token 1@10", "token 2@10", "failed 1"));
  harness.CheckInvariants();
  EXPECT_EQ(harness.engine->stats().steps, 1);
  harness.RunUntilIdle();
  EXPECT_TRUE(harness.told[3].finish.has_value());
  harness.Resume(1, /*match_cache=*/true);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineTest, CallbacksMayAddRetireAndPause) {
  // Every callback takes some sequence away, brings one, pauses one.
  for (int seed = 0; seed < 40; ++seed) {
    HarnessOptions options = Limits(4, 6);
    options.num_blocks = 50;
    Harness harness(options);
    SeededRandom random(static_cast<uint64_t>(seed));
    SequenceId next = 9;
    const auto meddle = [&](SequenceId id) {
      const SequenceId other = 1 + random.Below(next);
      switch (random.Below(8)) {
        case 0:
          harness.Retire(id);
          break;
        case 1:
          if (harness.told.contains(other)) harness.Retire(other);
          break;
        case 2:
          if (next < 30) {
            ++next;
            harness.Add(next, 1 + static_cast<int>(random.Below(9)), 4);
          }
          break;
        case 3:
          harness.engine->Pause(other, true);
          break;
        case 4:
          harness.engine->Pause(other, false);
          break;
        default:
          break;
      }
    };
    harness.on_token = meddle;
    harness.on_computed = [&](SequenceId id, int) { meddle(id); };
    for (SequenceId id = 1; id <= 8; ++id) harness.Add(id, 9, 5);
    for (int i = 0; i < 20; ++i) {
      harness.RunUntilIdle();
      harness.CheckInvariants();
      for (const auto& [id, entry] : std::map(harness.told)) {
        harness.engine->Pause(id, false);
      }
    }
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    harness.ExpectAllFinishedRight();
    harness.on_token = nullptr;
    harness.on_computed = nullptr;
    harness.ExpectNothingLeft();
  }
}

// ---- What is told and counted

TEST(EngineTest, ComputedLayersAreReportedPerSequence) {
  Harness harness(Limits(8, 6));
  harness.Add(1, 7, 2);
  harness.Add(2, 1, 1);
  harness.RunUntilIdle();
  EXPECT_THAT(
      harness.layers,
      ElementsAre("2 [0, 1) layer 1", "1 [0, 5) layer 1", "2 [0, 1) layer 2",
                  "1 [0, 5) layer 2", "1 [5, 7) layer 1", "1 [5, 7) layer 2",
                  "1 [7, 8) layer 1", "1 [7, 8) layer 2"));
}

TEST(EngineTest, StatsCountWhatWasComputed) {
  Harness harness(Limits(8, 6));
  harness.Add(1, 10, 3);
  harness.Add(2, 4, 2);
  harness.engine->Pause(2, true);
  const EngineStats& stats = harness.engine->stats();
  EXPECT_EQ(stats.running, 1);
  EXPECT_EQ(stats.paused, 1);
  EXPECT_EQ(stats.pending_tokens, 10);
  harness.loop.RunNext();
  EXPECT_TRUE(stats.step_in_flight);
  EXPECT_EQ(stats.step_started, harness.loop.Now());
  harness.RunSteps(1);
  EXPECT_EQ(stats.pending_tokens, 4);
  EXPECT_EQ(stats.prefill_tokens, 6);
  // 1 ms and 6 rows of 20 us, on virtual time.
  EXPECT_NEAR(stats.step_seconds, 1.12e-3, 1e-8);
  EXPECT_NEAR(stats.tokens_per_second, 6 / 1.12e-3, 1);
  harness.RunUntilIdle();
  EXPECT_EQ(stats.steps, 4);
  EXPECT_EQ(stats.prefill_tokens, 9);
  EXPECT_EQ(stats.decode_tokens, 3);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.paused, 1);
  EXPECT_EQ(stats.pending_tokens, 0);
  EXPECT_FALSE(stats.step_in_flight);
  const double rate = (0.9 * 6 + 0.1 * 4) /
                      (0.9 * 1.12e-3 + 0.1 * 1.08e-3);  // decodes do not count
  EXPECT_NEAR(stats.tokens_per_second, rate, 1);
}

// Whose process stood still for a while is not taken for a thousand times as
// slow; who is, is known for that a few steps later.
TEST(EngineTest, OneStepThatWasHeldUpSaysLittleOfTheRate) {
  Harness harness(Limits(8, 6));
  harness.Add(1, 60, 1);
  const EngineStats& stats = harness.engine->stats();
  harness.RunSteps(3);
  EXPECT_NEAR(stats.tokens_per_second, 6 / 1.12e-3, 1);
  for (int held_up = 1; held_up <= 5; ++held_up) {
    harness.device.HoldUpNextStep(absl::Seconds(6));
    harness.RunSteps(3 + held_up);
    // A tenth of it is four times as slow.
    EXPECT_NEAR(stats.tokens_per_second,
                6 / 1.12e-3 / std::pow(1.3, held_up - 1), 1);
  }
}

TEST(EngineTest, RefusesWhatCannotRunAndChangesNothing) {
  struct Case {
    std::string message;
    std::function<void(SequenceSpec&, int&)> spoil;
  };
  const std::vector<Case> cases = {
      {"history is empty", [](auto& s, int&) { s.history.clear(); }},
      {"max_model_len", [](auto& s, int&) { s.history.resize(200); }},
      {"prompt_tokens is -1", [](auto& s, int&) { s.prompt_tokens = -1; }},
      {"prompt_tokens is 11", [](auto& s, int&) { s.prompt_tokens = 11; }},
      {"max_tokens is 0", [](auto& s, int&) { s.stopping.max_tokens = 0; }},
      {"max_tokens is 2",
       [](auto& s, int&) {
         s.prompt_tokens = 8;
         s.stopping.max_tokens = 2;
       }},
      {"computed is 10", [](auto&, int& computed) { computed = 10; }},
      {"computed is -1", [](auto&, int& computed) { computed = -1; }},
      {"0 blocks for 5", [](auto&, int& computed) { computed = 5; }},
      {"history has token id 100", [](auto& s, int&) { s.history[3] = 100; }},
      {"history has token id -1", [](auto& s, int&) { s.history[9] = -1; }},
      {"logit_bias has token id 100",
       [](auto& s, int&) {
         s.rules.logit_bias = {{99, 1}, {100, 1}};
       }},
      {"stop_token_ids has token id 100",
       [](auto& s, int&) {
         s.stopping.stop_token_ids = {2, 100};
       }},
      {"allowed_ids has token id -1",
       [](auto& s, int&) { s.rules.allowed_ids = {-1}; }},
      {"banned_ids has token id 2147483647",
       [](auto& s, int&) { s.rules.banned_ids = {2147483647}; }},
      {"bad_words has token id 100",
       [](auto& s, int&) {
         s.rules.bad_words = {{1, 2}, {99, 100}};
       }},
  };
  HarnessOptions options;
  options.engine.vocab_size = 100;
  for (const Case& c : cases) {
    Harness harness(options);
    SequenceSpec spec = harness.Spec(1, 10, 5);
    int computed = 0;
    c.spoil(spec, computed);
    const absl::Status status =
        harness.engine->Add(1, std::move(spec), {}, computed);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    EXPECT_FALSE(harness.engine->contains(1));
    EXPECT_EQ(harness.engine->stats().running, 0);
  }
  Harness harness;
  harness.Add(1, 10, 5);
  EXPECT_THAT(
      std::string(
          harness.engine->Add(1, harness.Spec(1, 9, 5), {}, 0).message()),
      HasSubstr("there already"));
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
}

TEST(EngineTest, RefusesAPoolThatCannotHoldOneSequence) {
  struct Case {
    EngineOptions options;
    std::string message;  // empty: fine
  };
  for (const Case& c : std::vector<Case>{
           {{1, 1, 32, true}, ""},
           {{1, 1, 33, true}, "takes 9 KV blocks of 4, but the pool has 8"},
           {{0, 1, 32, true}, "max_num_seqs is 0"},
           {{1, 0, 32, true}, "max_num_batched_tokens is 0"},
           {{1, 1, 1, true}, "max_model_len is 1"},
       }) {
    const KvPool pool(8, 4);
    const absl::Status status = Engine::Validate(c.options, pool);
    EXPECT_EQ(status.ok(), c.message.empty()) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
}

}  // namespace
}  // namespace tandem::engine
