// SPDX-License-Identifier: Apache-2.0
// Guesses of a draft model: it guesses what the model draws, by all rules and
// whatever came before; no token changes; its blocks are where they belong; and
// it runs where that pays.

#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;

HarnessOptions WithDraft(double right, int num_tokens = 4, bool adapt = false) {
  HarnessOptions options;
  options.num_blocks = 200;
  options.engine.max_draws = 64;
  options.engine.speculation = {.num_tokens = num_tokens, .adapt = adapt};
  options.draft = {.num_blocks = 150, .right = right};
  return options;
}

DraftCounts Drafts(const Harness& harness) {
  return harness.engine->stats().drafts;
}

TEST(EngineDraftModelTest, ARoundFeedsWhatIsMissingAndEachGuess) {
  Harness harness(WithDraft(1, 3));
  harness.Add(1, 5, 10);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  // The prompt and its first token, and where all guesses were right, the last
  // of them, which nobody fed, and the draw behind.
  EXPECT_THAT(harness.draft_executor.steps,
              ElementsAre("1@0+6*", "1@6+1*", "1@7+1*", "1@8+2*", "1@10+1*",
                          "1@11+1*"));
  EXPECT_THAT(harness.executor.steps,
              ElementsAre("1@0+5*", "1@5+4****", "1@9+4****", "1@13+1*"));
  EXPECT_EQ(Drafts(harness).verified, 6);
  EXPECT_EQ(Drafts(harness).accepted, 6);
  harness.ExpectNothingLeft();
}

TEST(EngineDraftModelTest, AWrongGuessIsWrittenOver) {
  Harness harness(WithDraft(0, 3));
  harness.Add(1, 5, 5);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_THAT(harness.draft_executor.steps,
              ElementsAre("1@0+6*", "1@6+1*", "1@7+1*",  // 1 of 3 is judged
                          "1@6+1*", "1@7+1*", "1@7+1*"));
  EXPECT_EQ(Drafts(harness).accepted, 0);
  harness.ExpectNothingLeft();
}

// Several tokens may come between two rounds.
TEST(EngineDraftModelTest, WhatWasWrongIsFedAgainHoweverLate) {
  const FakeModel model = HarnessOptions().model;
  VirtualLoop loop;
  KvPool pool(16, 4);
  FakeExecutor device({.model = model, .num_blocks = 16, .block_size = 4},
                      &loop);
  NoisyExecutor executor(&device, model.vocab_size, 1, 0);
  DraftModel drafts({.executor = &executor, .pool = &pool, .max_positions = 60},
                    &loop);
  const Sampling sampling;
  const LogitRules rules;
  std::vector<int32_t> history = Harness::Prompt(1, 10);
  const auto right = Expected(model, history, 20, sampling);
  LogitEdits edits(&rules, {}, history, 10);
  std::vector<int32_t> guesses;
  const BlockHash root = RootHash("", 4, "");
  const DraftWish wish = {.id = 1,
                          .root = &root,
                          .history = &history,
                          .edits = &edits,
                          .sampling = &sampling,
                          .length = 4,
                          .guesses = &guesses};
  for (const double share : {0.0, 1.0}) {
    executor.set_right(share);
    guesses.clear();
    ASSERT_TRUE(drafts.Reserve(wish));
    int done = 0;
    drafts.Start({wish}, 1, [&] { ++done; });
    loop.RunUntilIdle();
    EXPECT_EQ(done, 1);
    EXPECT_TRUE(drafts.CheckInvariants().ok()) << drafts.CheckInvariants();
    ASSERT_EQ(guesses.size(), 4u);
    if (share == 0) {
      EXPECT_NE(guesses[0], right[0]);
      history.insert(history.end(), right.begin(), right.begin() + 6);
    }
  }
  EXPECT_THAT(guesses, ElementsAre(right[6], right[7], right[8], right[9]));
  EXPECT_TRUE(device.violations().empty());
  drafts.Forget(1);
  EXPECT_EQ(pool.available(), 16);
}

TEST(EngineDraftModelTest, TheModelItselfIsRightUnderAllRules) {
  Harness without(HarnessOptions{.num_blocks = 200});
  auto specs = RuledSpecs(without, 7);
  for (SequenceSpec& spec : specs) {
    spec.sampling.sequence_index =
        static_cast<uint32_t>(spec.sampling.seed % 3);
    spec.sampling.logprobs = 2;
  }
  for (int32_t id = 0; id < 50; ++id) {
    specs[5].stopping.stop_token_ids.push_back(id);
  }
  specs[5].stopping.min_tokens = 17;
  for (size_t i = 0; i < specs.size(); ++i) without.Add(i + 1, specs[i]);
  without.RunUntilIdle();
  for (const double right : {1.0, 0.7}) {
    for (const int num_tokens : {1, 4, 9}) {
      for (const bool ahead : {false, true}) {
        SCOPED_TRACE(absl::StrCat(right, " ", num_tokens, " ", ahead));
        HarnessOptions options = WithDraft(right, num_tokens);
        options.engine.run_ahead = ahead;
        options.engine.max_draws = 7 + 5 * num_tokens;
        Harness with(options);
        for (size_t i = 0; i < specs.size(); ++i) with.Add(i + 1, specs[i]);
        with.RunUntilIdle();
        for (size_t i = 1; i <= specs.size(); ++i) {
          EXPECT_EQ(with.told[i].tokens, without.told[i].tokens) << i;
          EXPECT_EQ(with.told[i].finish, without.told[i].finish) << i;
        }
        EXPECT_GT(Drafts(with).verified, 100);
        // No more is guessed than a step has room to verify.
        int64_t guessed = 0;
        for (const std::string& step : with.draft_executor.steps) {
          guessed += std::count(step.begin(), step.end(), '*');
        }
        EXPECT_EQ(guessed, Drafts(with).verified);
        // A sequence may stop within what was guessed for it.
        if (right == 1) {
          EXPECT_GE(Drafts(with).accepted, Drafts(with).verified - num_tokens);
        } else {
          EXPECT_LT(Drafts(with).accepted, Drafts(with).verified * 9 / 10);
        }
        with.ExpectNothingLeft();
      }
    }
  }
}

TEST(EngineDraftModelTest, ACacheThatIsBehindCatchesUpInChunks) {
  HarnessOptions options = WithDraft(1, 4);
  Harness harness(options);
  harness.Add(1, 10, 150);
  harness.RunSteps(4);
  // As if it came by a handoff: all but the last position is there.
  harness.Add(2, 150, 20);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  int chunks = 0;
  for (const std::string& step : harness.draft_executor.steps) {
    const size_t at = step.find("2@");
    if (at == std::string::npos) continue;
    const int rows = std::atoi(step.c_str() + step.find('+', at) + 1);
    EXPECT_LE(rows, 40) << step;
    chunks += rows > 8 ? 1 : 0;
    // The other one goes on meanwhile.
    if (rows > 8) {
      EXPECT_NE(step.find("1@"), std::string::npos) << step;
    }
  }
  EXPECT_GE(chunks, 4);
  EXPECT_EQ(Drafts(harness).accepted, Drafts(harness).verified);
  EXPECT_GT(harness.engine->drafts(2).verified, 0);
  harness.ExpectNothingLeft();
}

// Positions of a sequence that the draft model was fed, from which on, and in
// how many rows.
struct Fed {
  int first = -1;
  int rows = 0;
};
Fed FedOf(const Harness& harness, SequenceId id) {
  Fed fed;
  for (const std::string& step : harness.draft_executor.steps) {
    for (const absl::string_view text : absl::StrSplit(step, ' ')) {
      const std::string entry(text);
      if (entry.substr(0, entry.find('@')) != absl::StrCat(id)) continue;
      const int at = std::atoi(entry.c_str() + entry.find('@') + 1);
      if (fed.first < 0) fed.first = at;
      fed.rows += std::atoi(entry.c_str() + entry.find('+') + 1);
    }
  }
  return fed;
}

TEST(EngineDraftModelTest, WhatWasComputedIsFoundAgain) {
  const auto again = [](Harness& harness, SequenceId id) {
    SequenceSpec spec = harness.Spec(id, 62, 20);
    spec.history = Harness::Prompt(1, 62);
    return spec;
  };
  Harness harness(WithDraft(1, 4));
  harness.Add(1, again(harness, 1));
  harness.RunUntilIdle();
  EXPECT_EQ(FedOf(harness, 1).first, 0);
  harness.Retire(1);

  // 15 blocks of 4 are before the prompt's last token.
  harness.Add(2, again(harness, 2));
  // The same up to the third block.
  SequenceSpec other = again(harness, 3);
  other.history[11] ^= 1;
  harness.Add(3, other);
  // Of another tenant, and of a request whose blocks are not to be shared.
  SequenceSpec foreign = again(harness, 4);
  foreign.root = RootHash("salt", 4, "");
  harness.Add(4, foreign);
  SequenceSpec secret = again(harness, 5);
  secret.cache_blocks = false;
  harness.Add(5, secret);
  harness.RunUntilIdle();
  // Or later: it had tokens already when all prompts were computed.
  EXPECT_GE(FedOf(harness, 2).first, 60);
  EXPECT_EQ(FedOf(harness, 3).first, 8);
  EXPECT_EQ(FedOf(harness, 4).first, 0);
  EXPECT_EQ(FedOf(harness, 5).first, 0);

  // A request that is tried again here brings its output along, which was sure
  // before the last guesses.
  harness.Retire(2);
  SequenceSpec retried = again(harness, 6);
  retried.history.insert(retried.history.end(), harness.told[2].tokens.begin(),
                         harness.told[2].tokens.begin() + 12);
  harness.Add(6, retried);
  harness.RunUntilIdle();
  EXPECT_GE(FedOf(harness, 6).first, 68);
  harness.ExpectAllFinishedRight();
  EXPECT_EQ(Drafts(harness).accepted, Drafts(harness).verified);
  harness.ExpectNothingLeft();
}

TEST(EngineDraftModelTest, WithoutPrefixCachingNothingIsFoundAgain) {
  HarnessOptions options = WithDraft(1, 4);
  options.engine.prefix_caching = false;
  Harness harness(options);
  for (SequenceId id = 1; id <= 2; ++id) {
    SequenceSpec spec = harness.Spec(id, 40, 10);
    spec.history = Harness::Prompt(1, 40);
    harness.Add(id, spec);
    harness.RunUntilIdle();
    EXPECT_EQ(FedOf(harness, id).first, 0);
    harness.Retire(id);
  }
  EXPECT_EQ(harness.draft_pool.counts().cached, 0);
  harness.ExpectNothingLeft();
}

// As the sequences of one request: who comes first computes for the others.
TEST(EngineDraftModelTest, OnePromptOfSeveralIsComputedOnce) {
  Harness harness(WithDraft(1, 4));
  for (SequenceId id = 1; id <= 4; ++id) {
    SequenceSpec spec = harness.Spec(id, 122, 40);
    spec.history = Harness::Prompt(1, 122);
    spec.sampling = {.temperature = 1,
                     .seed = 1,
                     .sequence_index = static_cast<uint32_t>(id)};
    harness.Add(id, spec);
  }
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  int rows = 0;
  for (SequenceId id = 1; id <= 4; ++id) rows += FedOf(harness, id).rows;
  // Alone each has its prompt, 40 tokens and a few more.
  EXPECT_LT(rows, 122 + 4 * 60);
  harness.ExpectNothingLeft();
}

TEST(EngineDraftModelTest, WhatWasEvictedIsComputedAgain) {
  HarnessOptions options = WithDraft(1, 4);
  options.draft.num_blocks = 24;
  Harness harness(options);
  const auto run = [&](SequenceId id, SequenceId prompt) {
    SequenceSpec spec = harness.Spec(id, 60, 10);
    spec.history = Harness::Prompt(prompt, 60);
    harness.Add(id, spec);
    harness.RunUntilIdle();
    harness.Retire(id);
    return FedOf(harness, id).first;
  };
  EXPECT_EQ(run(1, 1), 0);
  EXPECT_EQ(run(2, 1), 60);
  EXPECT_EQ(run(3, 3), 0);
  const int found = run(4, 1);  // the deepest blocks went first
  EXPECT_LT(found, 60);
  EXPECT_GT(found, 0);
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

TEST(EngineDraftModelTest, WhoFindsNoBlocksHasNoGuesses) {
  HarnessOptions options = WithDraft(1, 4);
  options.draft.num_blocks = 10;  // of 4 positions
  Harness harness(options);
  for (SequenceId id = 1; id <= 4; ++id) harness.Add(id, 12, 30);
  bool full = false;
  harness.on_token = [&](SequenceId) {
    full |= harness.draft_pool.available() <= 2;
    harness.CheckInvariants();
  };
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_TRUE(full);
  EXPECT_GT(Drafts(harness).accepted, 10);
  harness.ExpectNothingLeft();
}

TEST(EngineDraftModelTest, TheDraftModelsContextMayEndFirst) {
  HarnessOptions options = WithDraft(1, 4);
  options.draft.max_positions = 28;
  Harness harness(options);
  harness.Add(1, 10, 60);
  harness.Add(2, 40, 20);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_GT(harness.engine->drafts(1).verified, 8);
  EXPECT_EQ(harness.engine->drafts(2).verified, 0);
  for (const std::string& step : harness.draft_executor.steps) {
    EXPECT_LT(std::atoi(step.c_str() + 2), 28) << step;
  }
  // Its blocks came back when it could not go on.
  EXPECT_EQ(harness.draft_pool.counts().live, 0);
  harness.ExpectNothingLeft();
}

TEST(EngineDraftModelTest, WhatComesAndGoesWithinARoundHarmsNobody) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    HarnessOptions options = WithDraft(0.8, 5);
    options.engine.run_ahead = seed % 2 == 0;
    options.seed = seed;
    options.num_blocks = 40;
    options.engine.max_model_len = 100;
    options.draft.num_blocks = 30;
    Harness harness(options);
    SeededRandom random(seed);
    SequenceId last = 0;
    harness.on_preempted = [&](SequenceId id) {
      harness.loop.After(absl::Milliseconds(3),
                         [&harness, id] { harness.Resume(id, true); });
    };
    harness.on_token = [&](SequenceId id) {
      if (harness.told[id].finish.has_value()) harness.Retire(id);
    };
    for (int i = 0; i < 300; ++i) {
      harness.loop.RunNext();
      const auto any = [&] { return 1 + random.Below(last); };
      switch (random.Below(20)) {
        case 0:
          if (last < 12) {
            ++last;
            SequenceSpec spec = harness.Spec(last, 3 + last % 9, 25);
            if (seed % 3 > 0) {  // some begin alike
              const int length = 8 + static_cast<int>(last) % 9;
              spec.history = Harness::Prompt(1 + last % 2, length);
              spec.prompt_tokens = length;
            }
            spec.sampling = {.temperature = 1, .seed = last};
            spec.alone = last % 7 == 0;
            harness.Add(last, std::move(spec));
          }
          break;
        case 1:
          if (last > 0) harness.engine->Pause(any(), random.Below(2) == 0);
          break;
        case 2:
          if (last > 0 && random.Below(4) == 0) harness.Retire(any());
          break;
        case 3:
          if (random.Below(3) == 0) {
            harness.draft_device.FailNextStep(absl::InternalError("device"));
          }
          break;
        default:
          break;
      }
      harness.CheckInvariants();
    }
    for (SequenceId id = 1; id <= last; ++id) harness.engine->Pause(id, false);
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

TEST(EngineDraftModelTest, ADeviceThatFailsGuessesNoMore) {
  Harness harness(WithDraft(1, 4));
  harness.on_token = [&](SequenceId) {
    harness.draft_device.FailNextStep(absl::InternalError("device"));
  };
  harness.Add(1, 10, 60);
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  EXPECT_LE(harness.draft_device.steps(), 3);
  EXPECT_EQ(Drafts(harness).verified, 0);
  harness.ExpectNothingLeft();
}

TEST(EngineDraftModelTest, ItRunsWhereItPays) {
  for (const bool ahead : {false, true}) {
    // Steps of 1 ms, of its own a tenth.
    HarnessOptions options = WithDraft(1, 4, /*adapt=*/true);
    options.engine.run_ahead = ahead;
    {
      Harness harness(options);
      harness.Add(1, 20, 150);
      harness.RunUntilIdle();
      harness.ExpectAllFinishedRight();
      EXPECT_LT(harness.device.steps(), 60);
      harness.ExpectNothingLeft();
    }
    // As slow as what it guesses for.
    options.draft.step_base = absl::Milliseconds(1);
    {
      Harness harness(options);
      harness.Add(1, 20, 150);
      harness.RunUntilIdle();
      harness.ExpectAllFinishedRight();
      EXPECT_GT(harness.device.steps(), 120);
      EXPECT_LT(harness.draft_device.steps(), 30);
      harness.ExpectNothingLeft();
    }
  }
}

TEST(EngineDraftModelTest, MoreSequencesThanAStepTakesHaveGuessesToo) {
  for (const int seqs : {1, 3}) {
    HarnessOptions options = WithDraft(1, 4, /*adapt=*/true);
    options.engine.max_num_seqs = seqs;
    Harness harness(options);
    for (int id = 1; id <= seqs + 1; ++id) {
      harness.Add(static_cast<SequenceId>(id), 10, 150);
    }
    uint64_t together = 0;  // while all were there
    bool ended = false;
    harness.on_token = [&](SequenceId id) {
      if (!std::exchange(ended, ended || harness.told[id].finish.has_value())) {
        together = static_cast<uint64_t>(Drafts(harness).verified);
      }
    };
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    EXPECT_GT(together, 0u) << seqs;
    harness.ExpectNothingLeft();
  }
}

TEST(EngineDraftModelTest, LongPromptsAreCaughtUpForManyTokensAlone) {
  for (const int tokens : {8, 40}) {
    Harness harness(WithDraft(1, 4, /*adapt=*/true));
    harness.Add(1, 150, tokens);
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    EXPECT_EQ(harness.draft_device.steps() > 0, tokens == 40);
    harness.ExpectNothingLeft();
  }
}

// Time of a run beside that of one without: many requests, one after the other.
TEST(EngineDraftModelTest, GuessesThatAreWrongCostLittle) {
  const auto run = [](const HarnessOptions& options, int side_by_side) {
    Harness harness(options);
    SequenceId next = 1;
    const auto add = [&] {
      if (next <= 60) {
        const SequenceId id = next++;
        harness.Add(id, 60, 100);
      }
    };
    harness.on_token = [&](SequenceId id) {
      if (!harness.told[id].finish.has_value()) return;
      harness.Retire(id);
      add();
    };
    for (int i = 0; i < side_by_side; ++i) add();
    const absl::Time start = harness.loop.Now();
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    const double seconds = absl::ToDoubleSeconds(harness.loop.Now() - start);
    // Most of those that come late are not tried.
    std::set<std::string> late;
    for (const std::string& step : harness.draft_executor.steps) {
      for (const absl::string_view entry : absl::StrSplit(step, ' ')) {
        const std::string id(entry.substr(0, entry.find('@')));
        if (std::atoi(id.c_str()) > 20) late.insert(id);
      }
    }
    EXPECT_LE(late.size(), 8u);
    harness.ExpectNothingLeft();
    return seconds;
  };
  for (const int side_by_side : {1, 8}) {
    HarnessOptions options = WithDraft(0.02, 4, /*adapt=*/true);
    options.num_blocks = options.draft.num_blocks = 500;
    options.engine.max_num_batched_tokens = 512;
    const double with = run(options, side_by_side);
    options.draft = {};
    options.engine.speculation = {};
    const double without = run(options, side_by_side);
    EXPECT_LT(with, 1.03 * without) << side_by_side;
  }
}

}  // namespace
}  // namespace tandem::engine
