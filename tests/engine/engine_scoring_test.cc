// SPDX-License-Identifier: Apache-2.0
// Prompts that are scored: which rows of which steps, and that the scores are
// those of the model whatever the budget, the neighbours and the blocks.

#include <string>
#include <utility>
#include <vector>

#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

HarnessOptions LimitsWithDraws(int max_num_seqs, int max_num_batched_tokens,
                               int max_draws) {
  HarnessOptions options;
  options.engine.max_num_seqs = max_num_seqs;
  options.engine.max_num_batched_tokens = max_num_batched_tokens;
  options.engine.max_draws = max_draws;
  return options;
}

SequenceSpec Scored(const Harness& harness, SequenceId id, int prompt,
                    int max_tokens, int alternatives = 2) {
  SequenceSpec spec = harness.Spec(id, prompt, max_tokens);
  spec.scoring = {.alternatives = alternatives};
  return spec;
}

TEST(EngineScoringTest, ChunksAreCutSoThatEverybodyMayDraw) {
  struct Case {
    std::string why;
    int seqs;
    int budget;
    int draws;
    int decodes;  // sequences that decode beside it
    int max_tokens;
    std::vector<std::string> steps;
  };
  const std::vector<Case> cases = {
      {"alone it has all draws, the last one draws",
       4,
       64,
       0,
       0,
       1,
       {"1@0+4****", "1@4+4****", "1@8+2**"}},
      {"a draw in hand beyond one per sequence",
       4,
       64,
       7,
       0,
       1,
       {"1@0+7*******", "1@7+3***"}},
      {"never more than the budget",
       4,
       5,
       64,
       0,
       1,
       {"1@0+5*****", "1@5+5*****"}},
      {"only scores: the last token is not computed",
       4,
       64,
       0,
       0,
       0,
       {"1@0+4****", "1@4+4****", "1@8+1*"}},
      {"one decode keeps its draw",
       4,
       64,
       0,
       1,
       1,
       {"2@0+1*", "2@1+1*", "2@2+1* 1@0+3***", "2@3+1* 1@3+3***",
        "2@4+1* 1@6+3***", "1@9+1*"}},
      {"no draw to spare: a row at a time",
       2,
       64,
       0,
       1,
       0,
       {"2@0+1*", "2@1+1*", "2@2+1* 1@0+1*", "2@3+1* 1@1+1*", "2@4+1* 1@2+1*",
        "1@3+1*"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.why);
    Harness harness(LimitsWithDraws(c.seqs, c.budget, c.draws));
    if (c.decodes > 0) {
      harness.Add(2, 1, 5);
      harness.RunSteps(1);
    }
    harness.Add(1, Scored(harness, 1, c.seqs == 2 ? 5 : 10, c.max_tokens));
    harness.RunUntilIdle();
    EXPECT_EQ(harness.executor.steps, c.steps);
    harness.ExpectScoresRight(1);
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

// A device of `draws` fails nothing here, so the sum is looked at.
TEST(EngineScoringTest, ScoresAreTheSameUnderEveryBudgetAndNeighbour) {
  for (const int budget : {1, 5, 64}) {
    for (const int seqs : {1, 3, 16}) {
      for (const int extra : {0, 6}) {
        for (const bool ahead : {false, true}) {
          HarnessOptions options = LimitsWithDraws(seqs, budget, seqs + extra);
          options.engine.run_ahead = ahead;
          options.num_blocks = 256;
          Harness harness(options);
          for (SequenceId id = 1; id <= 8; ++id) {
            const int prompt = static_cast<int>(2 + id * 5);
            if (id % 3 == 0) {
              harness.Add(id, prompt, 7);
            } else {
              SequenceSpec spec =
                  Scored(harness, id, prompt, id % 2 == 0 ? 0 : 6,
                         static_cast<int>(id % 4));
              spec.sampling = {.temperature = 1, .seed = id, .logprobs = 1};
              harness.Add(id, std::move(spec));
            }
          }
          harness.RunUntilIdle();
          SCOPED_TRACE(absl::StrCat("budget ", budget, " sequences ", seqs,
                                    " draws ", seqs + extra, " ahead ", ahead));
          for (SequenceId id = 1; id <= 8; ++id) {
            if (id % 3 != 0) harness.ExpectScoresRight(id);
          }
          harness.ExpectAllFinishedRight();
          harness.ExpectNothingLeft();
          EXPECT_LE(harness.executor.most_draws,
                    std::max(seqs, options.engine.max_draws));
          EXPECT_LE(harness.executor.most_rows, budget);
        }
      }
    }
  }
}

TEST(EngineScoringTest, ThoseToldBeforeAreNotToldAgain) {
  Harness harness(LimitsWithDraws(8, 64, 0));
  SequenceSpec spec = Scored(harness, 1, 12, 3);
  harness.Add(1, spec);
  harness.RunUntilIdle();
  const std::vector<SampledToken> all = harness.told[1].scores;
  harness.Retire(1);

  // The first two blocks of four hold positions 0 to 7; the ninth token's
  // score needs the row before it.
  for (const int position : {5, 9, 11}) {
    spec.scoring.position = position;
    Harness again(LimitsWithDraws(8, 64, 0));
    again.told[1].scores.assign(all.begin(), all.begin() + position - 1);
    again.Add(1, spec);
    again.RunUntilIdle();
    again.ExpectScoresRight(1);
    again.ExpectAllFinishedRight();
    again.ExpectNothingLeft();
  }
}

TEST(EngineScoringTest, APrefixMayBeCachedUpToTheFirstScore) {
  Harness harness(LimitsWithDraws(8, 64, 0));
  SequenceSpec spec = Scored(harness, 1, 13, 2);
  harness.Add(1, spec);
  harness.RunUntilIdle();
  harness.ExpectScoresRight(1);
  const std::vector<SampledToken> all = harness.told[1].scores;
  harness.Retire(1);
  harness.RunUntilIdle();
  const auto hashes =
      HashBlocks(spec.root, absl::MakeConstSpan(spec.history).first(8), 4);
  CachedPrefix found = harness.cache.Find(hashes);
  ASSERT_EQ(found.size(), 2);
  harness.cache.Restore(hashes, &found, /*owner=*/0);
  spec.scoring.position = 8;
  const absl::Status early =
      harness.engine->Add(2, spec, std::vector<BlockRef>(), 8);
  EXPECT_THAT(std::string(early.message()), HasSubstr("computed is 8"));
  spec.scoring.position = 9;
  Harness::Told& entry = harness.told[2];
  entry.prompt = spec.history;
  entry.spec = spec;
  entry.scores.assign(all.begin(), all.begin() + 8);
  harness.executor.steps.clear();
  ASSERT_TRUE(harness.engine->Add(2, spec, std::move(found.blocks), 8).ok());
  harness.RunUntilIdle();
  EXPECT_EQ(harness.executor.steps[0], "2@8+5*****");
  harness.ExpectScoresRight(2);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineScoringTest, WithoutACacheAPromptIsScoredOnce) {
  Harness harness(LimitsWithDraws(8, 64, 0));
  SequenceSpec spec = Scored(harness, 1, 12, 4);
  spec.kv_cache = false;
  harness.Add(1, std::move(spec));
  harness.RunUntilIdle();
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("1@0+8********", "1@8+4****", "1@0+13*", "1@0+14*",
                          "1@0+15*"));
  harness.ExpectScoresRight(1);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineScoringTest, APreemptedOneGoesOnWhereItWas) {
  HarnessOptions options = LimitsWithDraws(4, 8, 0);
  options.num_blocks = 11;
  options.engine.max_model_len = 40;
  Harness harness(options);
  harness.on_preempted = [&](SequenceId id) { harness.Resume(id, true); };
  harness.on_scores = harness.on_token = [&](SequenceId id) {
    if (harness.told[id].finish.has_value()) harness.Retire(id);
  };
  harness.Add(1, 22, 12);
  harness.RunSteps(2);
  harness.Add(2, Scored(harness, 2, 24, 0));
  harness.RunUntilIdle();
  EXPECT_GT(harness.told[2].preempted, 0);
  harness.ExpectScoresRight(2);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineScoringTest, TheListenerMayRetireItAtAnyScore) {
  for (const int max_tokens : {0, 3}) {
    Harness harness(LimitsWithDraws(4, 64, 0));
    harness.on_scores = [&](SequenceId id) { harness.Retire(id); };
    harness.Add(1, Scored(harness, 1, 10, max_tokens));
    harness.Add(2, 6, 3);
    harness.RunUntilIdle();
    EXPECT_THAT(harness.told[1].scores, SizeIs(3));
    EXPECT_TRUE(harness.told[1].tokens.empty());
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

TEST(EngineScoringTest, AWholeContextMayBeScored) {
  HarnessOptions options = LimitsWithDraws(4, 64, 0);
  options.engine.max_model_len = 16;
  Harness harness(options);
  harness.Add(1, Scored(harness, 1, 16, 0));
  harness.RunUntilIdle();
  EXPECT_EQ(harness.told[1].finish, Finish::kLength);
  EXPECT_EQ(harness.engine->stats().prefill_tokens, 15);
  EXPECT_EQ(harness.engine->stats().decode_tokens, 0);
  harness.ExpectScoresRight(1);
  harness.ExpectNothingLeft();
}

TEST(EngineScoringTest, WhatMakesNoSenseIsRefused) {
  Harness harness;
  const struct {
    const char* complaint;
    void (*change)(SequenceSpec*);
  } kCases[] = {
      {"position is 0", [](SequenceSpec* s) { s->scoring.position = 0; }},
      {"position is 5", [](SequenceSpec* s) { s->scoring.position = 5; }},
      {"alternatives is 21",
       [](SequenceSpec* s) { s->scoring.alternatives = 21; }},
      {"with 1 tokens behind", [](SequenceSpec* s) { s->prompt_tokens = 4; }},
      {"beam search", [](SequenceSpec* s) { s->beams.width = 2; }},
      {"max_tokens is 0",
       [](SequenceSpec* s) {
         s->scoring = {};
         s->stopping.max_tokens = 0;
       }},
  };
  for (const auto& c : kCases) {
    SequenceSpec spec = Scored(harness, 1, 5, 4);
    c.change(&spec);
    const absl::Status status = harness.engine->Add(1, std::move(spec), {}, 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.complaint));
  }
  harness.ExpectNothingLeft();
}

}  // namespace
}  // namespace tandem::engine
