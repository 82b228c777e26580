// SPDX-License-Identifier: Apache-2.0
// Beam searches within the engine: the hypotheses of a search without blocks,
// lanes or batches, whatever else runs and however little room there is; what
// lanes share and copy; and that nothing is left of them.

#include <map>
#include <string>
#include <vector>

#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The harness, and what searches came to.
class BeamsHarness final : public EngineListener {
 public:
  explicit BeamsHarness(const HarnessOptions& options = {})
      : options_(options),
        pool(options.num_blocks, options.block_size),
        device({.model = options.model,
                .num_blocks = options.num_blocks,
                .block_size = options.block_size,
                .seed = options.seed,
                .step_jitter = options.step_jitter},
               &loop),
        engine(options.engine, &loop, &device, &pool, this) {}
  ~BeamsHarness() override { EXPECT_THAT(device.violations(), IsEmpty()); }

  SequenceSpec Spec(SequenceId id, int prompt_tokens, int max_tokens,
                    BeamOptions beams) const {
    SequenceSpec spec;
    spec.history = Harness::Prompt(id, prompt_tokens);
    spec.prompt_tokens = prompt_tokens;
    spec.stopping.max_tokens = max_tokens;
    spec.stopping.stop_token_ids = {3, 11, 40, 77};
    spec.root = RootHash("", options_.block_size, "");
    spec.admitted = absl::FromUnixSeconds(static_cast<int64_t>(id));
    spec.beams = beams;
    return spec;
  }
  void Add(SequenceId id, const SequenceSpec& spec) {
    specs[id] = spec;
    const absl::Status status = engine.Add(id, spec, {}, 0);
    EXPECT_TRUE(status.ok()) << status;
  }
  void Run() {
    while (loop.RunNext()) {
      ASSERT_TRUE(engine.CheckInvariants().ok()) << engine.CheckInvariants();
      ASSERT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
      most_live = std::max(most_live, pool.counts().live);
    }
  }
  void ExpectRight(SequenceId id) {
    const SequenceSpec& spec = specs.at(id);
    ASSERT_TRUE(results.contains(id)) << "search " << id << " has not ended";
    const BeamResult expected =
        ExpectedBeams(options_.model, spec.history, spec.beams, spec.stopping,
                      options_.engine.max_model_len, spec.sampling.logprobs);
    const BeamResult& result = results.at(id);
    ASSERT_EQ(result.best.size(), expected.best.size());
    for (size_t i = 0; i < expected.best.size(); ++i) {
      const Hypothesis& a = result.best[i];
      const Hypothesis& b = expected.best[i];
      EXPECT_EQ(a.score, b.score);
      EXPECT_EQ(a.stopped, b.stopped);
      ASSERT_EQ(a.tokens.size(), b.tokens.size());
      for (size_t t = 0; t < b.tokens.size(); ++t) {
        EXPECT_EQ(a.tokens[t].token_id, b.tokens[t].token_id);
        EXPECT_EQ(a.tokens[t].logprob, b.tokens[t].logprob);
        EXPECT_EQ(a.tokens[t].rank, b.tokens[t].rank);
        EXPECT_EQ(a.tokens[t].top.size(), b.tokens[t].top.size());
      }
    }
    EXPECT_EQ(result.tokens, expected.tokens);
  }
  void ExpectNothingLeft() {
    for (const auto& [id, spec] : specs) engine.Retire(id);
    Run();
    EXPECT_EQ(pool.counts().live, 0);
    EXPECT_EQ(engine.stats().running, 0);
    EXPECT_EQ(engine.stats().pending_tokens, 0);
  }

  void OnToken(SequenceId id, int, const SampledToken& token,
               std::optional<Finish> finish) override {
    EXPECT_EQ(specs.at(id).beams.width, 0) << "a lane speaks";
    tokens[id].push_back(token.token_id);
    if (finish) engine.Retire(id);
  }
  void OnBeams(SequenceId id, const BeamResult& result) override {
    EXPECT_TRUE(engine.contains(id));
    EXPECT_FALSE(results.contains(id)) << "told twice";
    results[id] = result;
    if (retire_at_end) engine.Retire(id);
  }
  void OnComputed(SequenceId, int, int, int) override {}
  void OnWork(SequenceId id, const Work& done) override {
    EXPECT_TRUE(engine.contains(id));
    work[id] += done;
  }
  void OnBlocksFreed() override { ++blocks_freed; }
  void OnPreempted(SequenceId id) override {
    ++preempted[id];
    EXPECT_FALSE(engine.contains(id));
    loop.Post([this, id] {
      SequenceSpec spec = specs.at(id);
      spec.history.insert(spec.history.end(), tokens[id].begin(),
                          tokens[id].end());
      EXPECT_TRUE(engine.Add(id, std::move(spec), {}, 0).ok());
    });
  }
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<SequenceId>& ids,
                    const absl::Status&) override {
    for (const SequenceId id : ids) ++failed[id];
  }

  const HarnessOptions options_;
  VirtualLoop loop;
  KvPool pool;
  FakeExecutor device;
  std::map<SequenceId, SequenceSpec> specs;
  std::map<SequenceId, BeamResult> results;
  std::map<SequenceId, std::vector<int32_t>> tokens;
  std::map<SequenceId, int> preempted, failed;
  std::map<SequenceId, Work> work;
  int blocks_freed = 0;
  int most_live = 0;
  bool retire_at_end = true;
  Engine engine;
};

TEST(EngineBeams, ComeToWhatASearchWithoutBlocksComesTo) {
  for (const int width : {1, 2, 4, 8}) {
    for (const int prompt : {1, 7, 8, 9}) {
      for (const EarlyStopping early :
           {EarlyStopping::kHeuristic, EarlyStopping::kAlways,
            EarlyStopping::kNever}) {
        BeamsHarness harness;
        SequenceSpec spec =
            harness.Spec(static_cast<SequenceId>(width), prompt, 25,
                         {.width = width,
                          .best = (width + 1) / 2,
                          .length_penalty = width == 4 ? -0.5 : 1.5,
                          .early_stopping = early});
        spec.sampling.logprobs = width % 4;
        spec.stopping.min_tokens = prompt % 4;
        harness.Add(1, spec);
        harness.Run();
        harness.ExpectRight(1);
        harness.ExpectNothingLeft();
      }
    }
  }
}

TEST(EngineBeams, GoOnFromCandidatesThatOthersComputed) {
  for (const int prompt : {7, 8}) {
    for (const int max_tokens : {1, 12}) {
      BeamsHarness harness;
      SequenceSpec spec =
          harness.Spec(1, prompt, max_tokens, {.width = 3, .best = 3});
      harness.specs[1] = spec;
      // The prompt's KV, by a sequence that ends with its first token.
      SequenceSpec first = spec;
      first.first_token_only = true;
      harness.specs[2] = first;
      harness.specs[2].beams.width = 0;
      std::vector<TopLogprob> candidates;
      ASSERT_TRUE(harness.engine.Add(2, first, {}, 0).ok());
      harness.Run();
      std::vector<BlockRef> blocks =
          harness.engine.ShareBlocks(2, 0, prompt / 4 * 4);
      FakeHistory run(harness.options_.model);
      run.Append(spec.history);
      spec.first_candidates = run.Candidates(3 + 4);
      EXPECT_FALSE(harness.engine.Add(1, spec, {}, prompt / 4 * 4).ok())
          << "something is left to compute";
      if (prompt % 4 != 0) {
        // A copy of the last block, as a handoff would land it.
        spec.first_candidates.clear();
      }
      const bool whole = prompt % 4 == 0;
      const absl::Status added = harness.engine.Add(
          1, spec, std::move(blocks), whole ? prompt : prompt / 4 * 4);
      ASSERT_TRUE(added.ok()) << added;
      EXPECT_TRUE(harness.engine.contains(1));
      harness.Run();
      harness.ExpectRight(1);
      harness.ExpectNothingLeft();
    }
  }
}

TEST(EngineBeams, LanesShareFullBlocksAndCopyTheLast) {
  // Each in its own block behind the prompt's 10 full ones and a part.
  BeamsHarness harness({.num_blocks = 200});
  harness.Add(1, harness.Spec(1, 42, 6, {.width = 6, .best = 1}));
  harness.Run();
  harness.ExpectRight(1);
  EXPECT_LE(harness.most_live, 10 + 6 * 2);
  EXPECT_GE(harness.most_live, 10 + 6);
  harness.ExpectNothingLeft();
}

TEST(EngineBeams, RunBesideOthersAndInStepsWithoutRoomForAllLanes) {
  for (const bool run_ahead : {false, true}) {
    BeamsHarness harness({.num_blocks = 200,
                          .engine = {.max_num_seqs = 5,
                                     .max_num_batched_tokens = 9,
                                     .max_model_len = 200,
                                     .run_ahead = run_ahead}});
    for (SequenceId id = 1; id <= 6; ++id) {
      const int width = id % 2 == 0 ? 0 : static_cast<int>(id) + 1;
      harness.Add(id, harness.Spec(id, 10 + static_cast<int>(id), 20,
                                   {.width = width, .best = 1}));
    }
    harness.Run();
    for (const SequenceId id : {1, 3, 5}) harness.ExpectRight(id);
    for (const SequenceId id : {2, 4, 6}) {
      EXPECT_EQ(
          harness.tokens[id],
          ExpectedUntilStop(harness.options_.model, harness.specs[id].history,
                            harness.specs[id].prompt_tokens, {},
                            harness.specs[id].stopping, 200));
    }
    harness.ExpectNothingLeft();
  }
}

TEST(EngineBeams, ArePreemptedAsAWholeAndBeginAgain) {
  int preemptions = 0;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    BeamsHarness harness({.num_blocks = 26,
                          .engine = {.max_num_seqs = 16,
                                     .max_num_batched_tokens = 32,
                                     .max_model_len = 60,
                                     .run_ahead = seed % 2 == 0},
                          .seed = seed});
    for (SequenceId id = 1; id <= 4; ++id) {
      SequenceSpec spec =
          harness.Spec(id + 10 * seed, 6 + static_cast<int>(seed + id) % 5, 14,
                       {.width = id % 3 == 0 ? 0 : 4, .best = 2});
      spec.stopping.stop_token_ids.resize(1);
      harness.Add(id, spec);
    }
    harness.Run();
    for (const SequenceId id : {1, 2, 4}) harness.ExpectRight(id);
    for (const auto& [id, times] : harness.preempted) preemptions += times;
    harness.ExpectNothingLeft();
  }
  EXPECT_GT(preemptions, 0);
}

TEST(EngineBeams, ForksWithoutABlockDoNotHideTheirSearchFromOlderOnes) {
  // The search has a block for its first lane and one for a fork; the other
  // waits for one, and all others for it. Then the older one needs its third.
  BeamsHarness harness({.num_blocks = 4,
                        .block_size = 16,
                        .engine = {.max_num_seqs = 16,
                                   .max_num_batched_tokens = 64,
                                   .max_model_len = 48}});
  SequenceSpec older = harness.Spec(1, 30, 12, {});
  SequenceSpec search = harness.Spec(2, 5, 6, {.width = 3, .best = 3});
  older.stopping.stop_token_ids.clear();
  search.stopping.stop_token_ids.clear();
  harness.Add(1, older);
  harness.Add(2, search);
  harness.Run();
  EXPECT_EQ(harness.tokens[1].size(), 12u);
  EXPECT_EQ(harness.preempted[1], 0);
  EXPECT_GT(harness.preempted[2], 0);
  harness.ExpectRight(2);
  harness.ExpectNothingLeft();
}

TEST(EngineBeams, TheOldestWaitsForBlocksThatOthersHold) {
  BeamsHarness harness({.num_blocks = 24,
                        .engine = {.max_num_seqs = 16,
                                   .max_num_batched_tokens = 64,
                                   .max_model_len = 60}});
  std::vector<BlockRef> held = harness.pool.Allocate(18);
  SequenceSpec spec = harness.Spec(1, 9, 12, {.width = 4, .best = 1});
  spec.stopping.stop_token_ids.clear();
  harness.Add(1, spec);
  for (int i = 0; i < 2000 && harness.loop.RunNext(); ++i) {
  }
  EXPECT_FALSE(harness.results.contains(1));
  EXPECT_EQ(harness.pool.available(), 0);
  held.clear();
  for (int i = 0; i < 2000 && harness.loop.RunNext(); ++i) {
  }
  EXPECT_EQ(harness.preempted[1], 0) << "its lanes take no block of another";
  harness.ExpectRight(1);
  harness.ExpectNothingLeft();
}

TEST(EngineBeams, LanesLetGoWhatIsBehindTheirWindow) {
  BeamsHarness harness(
      {.engine = {.max_num_seqs = 16,
                  .max_num_batched_tokens = 64,
                  .max_model_len = 200,
                  .window = 10},
       .model = {
           .num_layers = 2, .vocab_size = 100, .weights = 1, .window = 10}});
  harness.Add(1, harness.Spec(1, 20, 25, {.width = 4, .best = 2}));
  harness.Run();
  EXPECT_GT(harness.engine.stats().window_blocks, 4);
  harness.ExpectRight(1);
  harness.ExpectNothingLeft();
}

// Routers send what fits by BlocksAtOnce, though its whole history would not.
TEST(EngineBeams, AWindowsBlocksForEachLaneAreEnough) {
  constexpr int kWidth = 4;
  HarnessOptions options{
      .engine = {.max_num_seqs = 16,
                 .max_num_batched_tokens = 16,
                 .max_model_len = 400,
                 .window = 10},
      .model = {
          .num_layers = 2, .vocab_size = 100, .weights = 1, .window = 10}};
  options.num_blocks =
      kWidth * Engine::BlocksAtOnce(options.engine, options.block_size,
                                    options.engine.max_model_len);
  for (const int prompt : {5, 60, 61, 200}) {
    BeamsHarness harness(options);
    SequenceSpec spec =
        harness.Spec(1, prompt, 150, {.width = kWidth, .best = 1});
    spec.stopping.stop_token_ids.clear();
    harness.Add(1, spec);
    harness.Run();
    harness.ExpectRight(1);
    EXPECT_EQ(harness.preempted[1], 0);
    harness.ExpectNothingLeft();
  }
}

// A prefill worker's pool is for its one lane.
TEST(EngineBeams, AFirstTokenNeedsRoomForOneLane) {
  BeamsHarness harness;
  SequenceSpec spec = harness.Spec(1, 20, 100, {.width = 4, .best = 1});
  EXPECT_GT(harness.engine.MostBlocks(spec), harness.pool.num_blocks());
  spec.first_token_only = true;
  EXPECT_EQ(harness.engine.MostBlocks(spec), 30);
}

TEST(EngineBeams, SharesOfAStepMakeAWholeWhateverBecomesOfItsLanes) {
  for (const int width : {1, 4}) {
    BeamsHarness harness(
        {.engine = {
             .max_num_seqs = 16,
             .max_num_batched_tokens = 64,
             .max_model_len = 200,
             .work = {.full = {.count = 3}, .head = 70, .head_bytes = 283}}});
    harness.Add(1, harness.Spec(1, 9, 15, {.width = width, .best = 1}));
    harness.Run();
    harness.ExpectRight(1);
    EXPECT_EQ(harness.work[1].weight_bytes, 283 * harness.engine.stats().steps);
    EXPECT_EQ(harness.work[1].positions_computed, harness.device.rows());
    harness.ExpectNothingLeft();
  }
}

TEST(EngineBeams, WhatLanesLeaveBehindIsTold) {
  // One lane a step: those that are dropped are in none, and their last block
  // is the copied one of a fork that ran after them.
  for (SequenceId id = 1; id <= 8; ++id) {
    BeamsHarness harness({.engine = {.max_num_seqs = 1,
                                     .max_num_batched_tokens = 64,
                                     .max_model_len = 200}});
    harness.retire_at_end = false;
    harness.Add(id, harness.Spec(id, 9, 20, {.width = 4, .best = 1}));
    for (;;) {
      const int available = harness.pool.available();
      const int told = harness.blocks_freed;
      if (!harness.loop.RunNext()) break;
      if (harness.pool.available() > available) {
        EXPECT_GT(harness.blocks_freed, told);
      }
    }
    harness.ExpectRight(id);
    harness.ExpectNothingLeft();
  }
}

TEST(EngineBeams, EndWithTheirStepAndWithTheirOwner) {
  for (int after = 0; after < 40; ++after) {
    BeamsHarness harness;
    harness.Add(1, harness.Spec(1, 9, 20, {.width = 4, .best = 2}));
    for (int i = 0; i < after; ++i) harness.loop.RunNext();
    if (after % 2 == 0) {
      harness.engine.Retire(1);
      EXPECT_FALSE(harness.engine.contains(1));
    } else {
      harness.device.FailNextStep(absl::InternalError("broken"));
    }
    harness.Run();
    const bool over = harness.results.contains(1);
    EXPECT_EQ(harness.failed[1], after % 2 == 1 && !over ? 1 : 0);
    harness.ExpectNothingLeft();
  }
}

TEST(EngineBeams, AResultIsNotToldOfOneThatWasRetiredBefore) {
  BeamsHarness harness;
  SequenceSpec spec = harness.Spec(1, 8, 1, {.width = 3, .best = 1});
  harness.retire_at_end = false;
  harness.Add(1, spec);
  while (harness.engine.stats().steps == 0) harness.loop.RunNext();
  EXPECT_TRUE(harness.engine.contains(1));
  harness.engine.Retire(1);
  harness.Run();
  EXPECT_THAT(harness.results, IsEmpty());
  harness.ExpectNothingLeft();
}

TEST(EngineBeams, NonsenseIsRefused) {
  BeamsHarness harness({.num_blocks = 50});
  const struct {
    BeamOptions beams;
    int max_tokens;
    const char* message;
  } kCases[] = {
      {{.width = -1}, 5, "beam.width is -1"},
      {{.width = 17}, 5, "width is 17, and there are 4 end tokens: together"},
      {{.width = 2, .best = 3}, 5, "beam.best is 3, expected 1 to the width"},
      {{.width = 2, .length_penalty = NAN}, 5, "beam.length_penalty is nan"},
      {{.width = 2, .length_penalty = 11},
       5,
       "beam.length_penalty is 11, expected -10 to 10"},
      {{.width = 2, .length_penalty = -1e300}, 5, "beam.length_penalty is -1e"},
      {{.width = 8}, 100, "beam.width is 8, and 210 KV blocks may be needed"},
  };
  for (const auto& c : kCases) {
    const absl::Status status = harness.engine.Add(
        1, harness.Spec(1, 10, c.max_tokens, c.beams), {}, 0);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    EXPECT_FALSE(harness.engine.contains(1));
  }
  SequenceSpec later = harness.Spec(1, 10, 5, {.width = 2});
  later.prompt_tokens = 8;
  EXPECT_THAT(std::string(harness.engine.Add(1, later, {}, 0).message()),
              HasSubstr("begins behind its prompt"));
  SequenceSpec none = harness.Spec(1, 10, 5, {});
  none.first_candidates = {{1, -1.0f}};
  EXPECT_FALSE(harness.engine.Add(1, none, {}, 0).ok());
}

}  // namespace
}  // namespace tandem::engine
