// SPDX-License-Identifier: Apache-2.0
// Grammars: the tokens are those that the grammar and the model give alone,
// whatever else is in a step, however prompts are cut, whatever is guessed,
// and wherever a sequence goes on.

#include <map>
#include <memory>

#include "engine/drafter.h"
#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

// Guesses of what comes, right by three of four.
class Oracle final : public DrafterFactory {
 public:
  explicit Oracle(uint64_t seed) : random_(seed) {}
  void Learn(std::vector<int32_t> prompt, const std::vector<int32_t>& tokens) {
    prompt.insert(prompt.end(), tokens.begin(), tokens.end());
    all_.push_back(std::move(prompt));
  }
  std::unique_ptr<Drafter> New(const SequenceSpec&) override {
    return std::make_unique<Guesser>(this);
  }

 private:
  class Guesser final : public Drafter {
   public:
    explicit Guesser(Oracle* oracle) : oracle_(oracle) {}
    int Propose(absl::Span<const int32_t> history,
                absl::Span<int32_t> out) override {
      return oracle_->Propose(history, out);
    }

   private:
    Oracle* const oracle_;
  };

  int Propose(absl::Span<const int32_t> history, absl::Span<int32_t> out) {
    for (const std::vector<int32_t>& known : all_) {
      if (known.size() < history.size() ||
          !std::equal(history.begin(), history.end(), known.begin())) {
        continue;
      }
      size_t count = 0;
      for (size_t i = history.size(); i < known.size() && count < out.size();
           ++i) {
        out[count++] = random_.Below(4) == 0 ? (known[i] + 1) % 100 : known[i];
      }
      return static_cast<int>(count);
    }
    return 0;
  }

  std::vector<std::vector<int32_t>> all_;
  SeededRandom random_;
};

FakeGrammar GrammarOf(SequenceId id) {
  return {.seed = id * 31, .ends = {7, 8}, .ends_ignored = id % 4 == 3};
}

SequenceSpec SpecOf(const Harness& harness, SequenceId id, int prompt) {
  SequenceSpec spec = harness.Spec(id, prompt, 40);
  spec.sampling = {.temperature = id % 4 < 2 ? 0.0f : 1.0f, .seed = id};
  return spec;
}

// Odd ones have a grammar.
void AddMixed(Harness* harness, SequenceId count, int prompt) {
  for (SequenceId id = 1; id <= count; ++id) {
    if (id % 2 == 1) harness->grammars[id] = GrammarOf(id);
    harness->Add(id, SpecOf(*harness, id, prompt + static_cast<int>(id)));
  }
}

TEST(EngineConstraintTest, TokensAreTheSameUnderEveryBudget) {
  size_t tokens = 0;
  for (const int budget : {1, 7, 64}) {
    for (const int max_num_seqs : {1, 3, 64}) {
      for (const bool ahead : {false, true}) {
        SCOPED_TRACE(absl::StrCat("budget ", budget, " sequences ",
                                  max_num_seqs, " ahead ", ahead));
        HarnessOptions options;
        options.num_blocks = 256;
        options.engine.max_num_seqs = max_num_seqs;
        options.engine.max_num_batched_tokens = budget;
        options.engine.run_ahead = ahead;
        Harness harness(options);
        harness.grammar_delay = absl::Milliseconds(budget % 3);
        AddMixed(&harness, 8, 5);
        harness.RunUntilIdle();
        harness.ExpectAllFinishedRight();
        tokens += harness.told[1].tokens.size();
        harness.ExpectNothingLeft();
      }
    }
  }
  EXPECT_GT(tokens, 100);
}

TEST(EngineConstraintTest, GuessesChangeNoToken) {
  int64_t accepted = 0;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    Oracle oracle(seed);
    HarnessOptions options;
    options.num_blocks = 256;
    options.engine.max_draws = 64;
    options.engine.speculation = {.num_tokens = 1 + static_cast<int>(seed % 6),
                                  .adapt = false,
                                  .drafters = &oracle};
    Harness harness(options);
    AddMixed(&harness, 6, static_cast<int>(seed));
    for (const auto& [id, told] : harness.told) {
      oracle.Learn(told.prompt, harness.ExpectedTokens(id));
    }
    harness.RunUntilIdle();
    harness.ExpectAllFinishedRight();
    accepted += harness.engine->stats().drafts.accepted;
    harness.ExpectNothingLeft();
  }
  EXPECT_GT(accepted, 300);
}

TEST(EngineConstraintTest, PreemptedOnesGoOnAsIfNothingHadBeen) {
  int64_t preemptions = 0;
  for (const bool match_cache : {false, true}) {
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      SCOPED_TRACE(absl::StrCat("cache ", match_cache, " seed ", seed));
      HarnessOptions options;
      options.num_blocks = 24;
      options.engine.max_model_len = 64;
      options.engine.max_num_batched_tokens = 5 + static_cast<int>(seed);
      options.seed = seed;
      Harness harness(options);
      harness.grammar_delay = absl::Milliseconds(seed % 2);
      harness.on_preempted = [&](SequenceId id) {
        harness.loop.After(absl::Milliseconds(20), [&harness, id, match_cache] {
          harness.Resume(id, match_cache);
        });
      };
      harness.on_token = [&](SequenceId id) {
        if (harness.told[id].finish.has_value()) harness.Retire(id);
      };
      AddMixed(&harness, 5, static_cast<int>(seed));
      harness.RunUntilIdle();
      harness.ExpectAllFinishedRight();
      preemptions += harness.engine->stats().preemptions;
      harness.ExpectNothingLeft();
    }
  }
  EXPECT_GT(preemptions, 10);
}

TEST(EngineConstraintTest, AnotherEngineGoesOnBehindAnyToken) {
  for (SequenceId id = 1; id <= 9; id += 2) {
    for (size_t lost = 1; lost < 20; lost += 3) {
      SCOPED_TRACE(absl::StrCat("sequence ", id, " lost behind ", lost));
      Harness first;
      first.grammars[id] = GrammarOf(id);
      first.on_token = [&](SequenceId) {
        if (first.told[id].tokens.size() == lost) first.Retire(id);
      };
      first.Add(id, SpecOf(first, id, 6));
      first.RunUntilIdle();
      const Harness::Told& told = first.told[id];
      if (told.finish.has_value()) break;
      Harness second;
      second.grammars[id] = GrammarOf(id);
      second.grammar_delay = absl::Milliseconds(2);
      SequenceSpec spec = SpecOf(second, id, 6);
      spec.history.insert(spec.history.end(), told.tokens.begin(),
                          told.tokens.end());
      second.Add(id, std::move(spec));
      second.RunUntilIdle();
      second.ExpectAllFinishedRight();
    }
  }
}

TEST(EngineConstraintTest, NobodyWaitsForWhoIsNotReady) {
  Harness harness;
  harness.grammar_delay = absl::Seconds(5);
  harness.grammars[1] = GrammarOf(1);
  harness.Add(1, SpecOf(harness, 1, 6));
  harness.Add(2, SpecOf(harness, 2, 6));
  harness.loop.RunFor(absl::Seconds(4));
  EXPECT_TRUE(harness.told[2].finish.has_value());
  EXPECT_TRUE(harness.told[1].tokens.empty());
  harness.RunUntilIdle();
  harness.ExpectAllFinishedRight();
  harness.ExpectNothingLeft();
}

// Comes to too much behind some tokens.
class Failing final : public TokenConstraint {
 public:
  Failing(int left, bool in_mask) : left_(left), in_mask_(in_mask) {}
  void FillMasks(absl::Span<const int32_t>,
                 absl::Span<uint32_t> masks) override {
    std::fill(masks.begin(), masks.end(), ~0u);
    if (left_ == 0 && in_mask_) status_ = absl::InternalError("too much");
  }
  int guessed() const override { return 0; }
  bool Append(int32_t) override {
    if (--left_ == 0 && !in_mask_) status_ = absl::InternalError("too much");
    return false;
  }
  absl::Status status() const override { return status_; }

 private:
  int left_;
  const bool in_mask_;
  absl::Status status_;
};

TEST(EngineConstraintTest, AFailureIsThatSequencesAlone) {
  for (const bool in_mask : {false, true}) {
    Harness harness;
    harness.Add(2, SpecOf(harness, 2, 6));
    SequenceSpec spec = SpecOf(harness, 1, 6);
    harness.told[1].prompt = spec.history;
    ASSERT_TRUE(harness.engine
                    ->Add(1, std::move(spec), {}, 0,
                          std::make_unique<Failing>(3, in_mask))
                    .ok());
    harness.RunUntilIdle();
    EXPECT_EQ(harness.told[1].failed, 1);
    EXPECT_EQ(harness.told[1].tokens.size(), 3);
    EXPECT_EQ(harness.told[2].failed, 0);
    harness.told.erase(1);
    harness.ExpectAllFinishedRight();
    harness.ExpectNothingLeft();
  }
}

}  // namespace
}  // namespace tandem::engine
