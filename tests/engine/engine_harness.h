// SPDX-License-Identifier: Apache-2.0
// One engine on virtual time, for its tests: a fake device that notes what
// every step held, a listener that notes all it hears and can be given things
// to do meanwhile, and the check that ends every scenario: right tokens, all
// blocks back, every sum right.

#ifndef TANDEM_TESTS_ENGINE_ENGINE_HARNESS_H_
#define TANDEM_TESTS_ENGINE_ENGINE_HARNESS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/testing/virtual_loop.h"
#include "engine/engine.h"
#include "engine/kv/kv_offload.h"
#include "engine/kv/kv_pool.h"
#include "engine/kv/prefix_cache.h"
#include "engine/testing/fake_block_file.h"
#include "engine/testing/fake_executor.h"
#include "engine/testing/fake_grammar.h"
#include "engine/testing/noisy_executor.h"

namespace tandem::engine {

// Notes steps as text before it passes them on: "1@0+5* 2@7+1" is positions
// [0, 5) of sequence 1, which then draws, and position 7 of sequence 2. A "~"
// stands before an entry that is fed by the step before.
class NotingExecutor final : public Executor {
 public:
  explicit NotingExecutor(Executor* device) : device_(device) {}

  void Submit(const Step* step, StepListener* listener) override {
    std::string text;
    int rows = 0;
    int draws = 0;
    for (const StepEntry& entry : step->entries) {
      draws += static_cast<int>(entry.draws.size());
      absl::StrAppend(&text, text.empty() ? "" : " ", entry.fed < 0 ? "" : "~",
                      entry.sequence, "@", entry.position, "+",
                      entry.tokens.size(),
                      std::string(entry.draws.size(), '*'));
      rows += static_cast<int>(entry.tokens.size());
      fed += entry.fed < 0 ? 0 : 1;
    }
    steps.push_back(text);
    most_rows = std::max(most_rows, rows);
    most_draws = std::max(most_draws, draws);
    most_sequences =
        std::max(most_sequences, static_cast<int>(step->entries.size()));
    device_->Submit(step, listener);
  }
  void Gather(const KvPart& part, kernels::DType wire, uint64_t key,
              std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    device_->Gather(part, wire, key, staging, std::move(done));
  }
  void Scatter(const KvPart& part, kernels::DType wire,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override {
    device_->Scatter(part, wire, staging, std::move(done));
  }
  void Digest(const KvPart& part, kernels::DType wire, uint64_t key,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override {
    device_->Digest(part, wire, key, std::move(done));
  }
  const kernels::KvShape& kv_shape() const override {
    return device_->kv_shape();
  }

  std::vector<std::string> steps;
  int64_t fed = 0;  // entries
  int most_rows = 0;
  int most_draws = 0;
  int most_sequences = 0;

 private:
  Executor* const device_;
};

// A draft model on a fake device of its own, which knows what comes.
struct HarnessDraft {
  int num_blocks = 0;  // 0: there is none
  double right = 1;    // of its guesses
  int max_positions = 200;
  int max_rows = 64;
  absl::Duration step_base = absl::Microseconds(100);
  absl::Duration step_per_row = absl::Microseconds(2);
};

struct HarnessOptions {
  int num_blocks = 64;
  int block_size = 4;
  double owner_share = 1;
  EngineOptions engine = {.max_num_seqs = 64,
                          .max_num_batched_tokens = 64,
                          .max_model_len = 200,
                          .prefix_caching = true};
  FakeModel model = {.num_layers = 2, .vocab_size = 100, .weights = 1};
  uint64_t seed = 1;
  absl::Duration step_jitter = absl::ZeroDuration();
  absl::Duration copy_base = FakeExecutorOptions().copy_base;
  KvOffloadOptions offload = {};  // no memory: none
  FakeBlockFileOptions file = {};
  HarnessDraft draft = {};
};

class Harness final : public EngineListener {
 public:
  struct Told {
    SequenceSpec spec;  // as last added
    std::vector<int32_t> prompt;
    std::vector<int32_t> tokens;
    std::vector<SampledToken> scores;  // of the prompt from position 1 on
    std::optional<Finish> finish;
    std::optional<BeamResult> beams;
    int preempted = 0;
    int failed = 0;
    bool retired = false;
    Work work;
  };

  explicit Harness(const HarnessOptions& harness_options = {})
      : options(harness_options),
        pool(options.num_blocks, options.block_size, options.owner_share,
             options.engine.window.parts),
        device({.model = options.model,
                .num_blocks = options.num_blocks,
                .block_size = options.block_size,
                .cells = options.engine.window.frees_parts() ? &pool.cells()
                                                             : nullptr,
                .seed = options.seed,
                .step_jitter = options.step_jitter,
                .copy_base = options.copy_base},
               &loop),
        executor(&device),
        file(options.file, &loop),
        offload_memory(static_cast<size_t>(options.offload.memory_blocks *
                                           device.block_bytes())),
        offload(options.offload.memory_blocks == 0
                    ? nullptr
                    : std::make_unique<KvOffload>(
                          options.offload, &loop, &device, &pool,
                          offload_memory.data(),
                          options.offload.file_blocks > 0 ? &file : nullptr)),
        cache(&pool, offload.get(), options.engine.window),
        draft_pool(std::max(1, options.draft.num_blocks), options.block_size),
        draft_device({.model = options.model,
                      .num_blocks = draft_pool.num_blocks(),
                      .block_size = options.block_size,
                      .step_base = options.draft.step_base,
                      .step_per_row = options.draft.step_per_row},
                     &loop),
        draft_noise(&draft_device, options.model.vocab_size, options.seed,
                    options.draft.right),
        draft_executor(&draft_noise),
        engine(std::make_unique<Engine>(WithDraftModel(), &loop, &executor,
                                        &pool, this)) {}

  ~Harness() override {
    EXPECT_THAT(device.violations(), ::testing::IsEmpty());
    EXPECT_THAT(draft_device.violations(), ::testing::IsEmpty());
  }

  EngineOptions WithDraftModel() {
    EngineOptions with = options.engine;
    if (options.draft.num_blocks == 0) return with;
    with.speculation.draft_model = {
        .executor = &draft_executor,
        .pool = &draft_pool,
        .max_positions = options.draft.max_positions,
        .max_rows = std::max(options.draft.max_rows, with.max_num_seqs),
        .max_sequences = with.max_num_seqs};
    return with;
  }

  // A prompt of `length` tokens that differ by `id`.
  static std::vector<int32_t> Prompt(SequenceId id, int length) {
    std::vector<int32_t> prompt;
    for (int i = 0; i < length; ++i) {
      prompt.push_back(static_cast<int32_t>(
          Mix64(id * 1000 + static_cast<uint64_t>(i)) % 100));
    }
    return prompt;
  }
  // Sequence `id` is of age `id` (1 the oldest) unless said otherwise.
  SequenceSpec Spec(SequenceId id, int prompt_tokens, int max_tokens) const {
    SequenceSpec spec;
    spec.history = Prompt(id, prompt_tokens);
    spec.prompt_tokens = prompt_tokens;
    spec.stopping.max_tokens = max_tokens;
    spec.root = RootHash("", options.block_size, "");
    spec.admitted = absl::FromUnixSeconds(static_cast<int64_t>(id));
    return spec;
  }

  void Add(SequenceId id, SequenceSpec spec, bool match_cache = false) {
    Told& entry = told[id];
    entry.prompt.assign(spec.history.begin(),
                        spec.history.begin() + spec.prompt_tokens);
    entry.tokens.assign(spec.history.begin() + spec.prompt_tokens,
                        spec.history.end());
    entry.retired = false;
    entry.finish.reset();
    CachedPrefix found;
    if (match_cache) {
      // Never the whole history: its last position must be computed.
      const auto hashes = HashBlocks(
          spec.root,
          absl::MakeConstSpan(spec.history).first(spec.history.size() - 1),
          options.block_size);
      cache.Prefetch(hashes);
      found = cache.Find(hashes);
      if (PrefixCache::Missing(found) > pool.available()) found = {};
      cache.Restore(hashes, &found, spec.cache_owner);
    }
    const int computed = found.size() * options.block_size;
    entry.spec = spec;
    std::unique_ptr<TokenConstraint> constraint;
    if (const auto it = grammars.find(id); it != grammars.end()) {
      constraint = std::make_unique<FakeConstraint>(it->second, entry.tokens,
                                                    &loop, grammar_delay);
    }
    const absl::Status status =
        engine->Add(id, std::move(spec), std::move(found.blocks), computed,
                    std::move(constraint));
    EXPECT_TRUE(status.ok()) << status;
  }
  void Add(SequenceId id, int prompt_tokens, int max_tokens) {
    Add(id, Spec(id, prompt_tokens, max_tokens));
  }
  void Retire(SequenceId id) {
    told[id].retired = true;
    engine->Retire(id);
  }
  // Adds it again with what it has, as a router would. A prompt goes on with
  // the first score that was not told.
  void Resume(SequenceId id, bool match_cache) {
    SequenceSpec spec = told[id].spec;
    const Scoring scoring = spec.scoring;
    spec.history = told[id].prompt;
    spec.history.insert(spec.history.end(), told[id].tokens.begin(),
                        told[id].tokens.end());
    if (scoring.wanted()) {
      spec.scoring.position = static_cast<int>(told[id].scores.size()) + 1;
      if (spec.scoring.position >= spec.prompt_tokens) spec.scoring = {};
    }
    match_cache = match_cache && spec.kv_cache && !spec.scoring.wanted();
    Add(id, std::move(spec), match_cache);
    told[id].spec.scoring = scoring;
  }

  // Until that many steps were submitted in all, and done.
  void RunSteps(int64_t count) {
    while ((device.steps() < count || engine->stats().step_in_flight) &&
           loop.RunNext()) {
      if (device.steps() >= count) break;
    }
  }
  void RunUntilIdle() {
    EXPECT_LT(loop.RunUntilIdle(2'000'000), 2'000'000) << "it never ends";
  }

  std::vector<int32_t> ExpectedTokens(SequenceId id) {
    const Told& entry = told[id];
    if (const auto it = grammars.find(id); it != grammars.end()) {
      return ExpectedByGrammar(options.model, entry.prompt, it->second,
                               entry.spec.sampling, entry.spec.stopping,
                               options.engine.max_model_len);
    }
    std::vector<int32_t> tokens = ExpectedUntilStop(
        options.model, entry.prompt, static_cast<int>(entry.prompt.size()),
        entry.spec.sampling, entry.spec.stopping, options.engine.max_model_len);
    if (entry.spec.first_token_only) tokens.resize(1);
    if (entry.spec.only_scores()) tokens.clear();
    return tokens;
  }
  // Each one finished, with the tokens that an undisturbed run gives.
  void ExpectAllFinishedRight() {
    for (const auto& [id, entry] : told) {
      if (entry.retired && !entry.finish.has_value()) continue;
      EXPECT_TRUE(entry.finish.has_value() || entry.spec.first_token_only)
          << "sequence " << id << " did not finish";
      EXPECT_EQ(entry.tokens, ExpectedTokens(id)) << "sequence " << id;
    }
  }
  // All of them, once and in order, are those of an undisturbed run.
  void ExpectScoresRight(SequenceId id) {
    const Told& entry = told[id];
    const std::vector<SampledToken> expected = ExpectedScores(
        options.model, entry.prompt, entry.spec.scoring.alternatives);
    ASSERT_EQ(entry.scores.size(), expected.size()) << "sequence " << id;
    for (size_t i = 0; i < expected.size(); ++i) {
      const SampledToken& got = entry.scores[i];
      EXPECT_EQ(got.token_id, expected[i].token_id) << id << "@" << i + 1;
      EXPECT_EQ(got.logprob, expected[i].logprob) << id << "@" << i + 1;
      EXPECT_EQ(got.rank, expected[i].rank) << id << "@" << i + 1;
      ASSERT_EQ(got.top.size(), expected[i].top.size()) << id << "@" << i + 1;
      for (size_t j = 0; j < got.top.size(); ++j) {
        EXPECT_EQ(got.top[j].token_id, expected[i].top[j].token_id);
        EXPECT_EQ(got.top[j].logprob, expected[i].top[j].logprob);
      }
    }
  }
  // Those of a search without blocks, lanes or batches.
  void ExpectBeamsRight(SequenceId id) {
    const Told& entry = told[id];
    ASSERT_TRUE(entry.beams.has_value()) << "search " << id;
    const BeamResult expected =
        ExpectedBeams(options.model, entry.prompt, entry.spec.beams,
                      entry.spec.stopping, options.engine.max_model_len);
    ASSERT_EQ(entry.beams->best.size(), expected.best.size()) << id;
    for (size_t i = 0; i < expected.best.size(); ++i) {
      const Hypothesis& got = entry.beams->best[i];
      EXPECT_EQ(got.score, expected.best[i].score) << id;
      ASSERT_EQ(got.tokens.size(), expected.best[i].tokens.size()) << id;
      for (size_t t = 0; t < got.tokens.size(); ++t) {
        EXPECT_EQ(got.tokens[t].token_id, expected.best[i].tokens[t].token_id);
      }
    }
  }
  // Retires all: nothing may be left. Blocks are free or cached.
  void ExpectNothingLeft() {
    for (auto& [id, entry] : told) Retire(id);
    RunUntilIdle();
    const KvPoolCounts counts = pool.counts();
    EXPECT_EQ(counts.live, 0);
    EXPECT_EQ(counts.reserved, 0);
    EXPECT_EQ(counts.free + counts.cached, options.num_blocks);
    EXPECT_EQ(draft_pool.available(), draft_pool.num_blocks());
    CheckInvariants();
    EXPECT_EQ(engine->stats().running, 0);
    EXPECT_EQ(engine->stats().paused, 0);
    EXPECT_EQ(engine->stats().pending_tokens, 0);
    EXPECT_FALSE(engine->stats().step_in_flight);
  }
  void CheckInvariants() const {
    EXPECT_TRUE(engine->CheckInvariants().ok()) << engine->CheckInvariants();
    EXPECT_TRUE(pool.CheckInvariants().ok()) << pool.CheckInvariants();
    if (offload == nullptr) return;
    EXPECT_TRUE(offload->CheckInvariants().ok()) << offload->CheckInvariants();
  }

  // ---- EngineListener
  void OnToken(SequenceId id, int position, const SampledToken& token,
               std::optional<Finish> finish) override {
    Told& entry = told[id];
    EXPECT_FALSE(entry.retired) << "a retired sequence speaks: " << id;
    EXPECT_FALSE(entry.finish.has_value()) << "a token after the end: " << id;
    // Each position once and in order.
    EXPECT_EQ(position,
              static_cast<int>(entry.prompt.size() + entry.tokens.size()));
    entry.tokens.push_back(token.token_id);
    entry.finish = finish;
    events.push_back(absl::StrCat("token ", id, "@", position));
    if (on_token) on_token(id);
  }
  void OnScores(SequenceId id, int position,
                absl::Span<const SampledToken> scores,
                std::optional<Finish> finish) override {
    Told& entry = told[id];
    EXPECT_FALSE(entry.retired) << "a retired sequence scores: " << id;
    EXPECT_TRUE(entry.tokens.empty()) << "scores behind a token: " << id;
    EXPECT_EQ(position, static_cast<int>(entry.scores.size()) + 1);
    entry.scores.insert(entry.scores.end(), scores.begin(), scores.end());
    entry.finish = finish;
    events.push_back(absl::StrCat("scores ", id, "@", position, "+",
                                  scores.size(),
                                  finish.has_value() ? " finish" : ""));
    if (on_scores) on_scores(id);
  }
  void OnBeams(SequenceId id, const BeamResult& result) override {
    EXPECT_FALSE(told[id].retired) << "a retired search ends: " << id;
    EXPECT_FALSE(told[id].beams.has_value()) << "it ends twice: " << id;
    told[id].beams = result;
    if (on_beams) on_beams(id);
  }
  void OnWork(SequenceId id, const Work& work) override {
    EXPECT_FALSE(told[id].retired) << "a retired sequence works: " << id;
    told[id].work += work;
  }
  void OnComputed(SequenceId id, int begin, int end, int layers_done) override {
    EXPECT_FALSE(told[id].retired) << "a retired sequence computes: " << id;
    layers.push_back(
        absl::StrCat(id, " [", begin, ", ", end, ") layer ", layers_done));
    if (on_computed) on_computed(id, layers_done);
  }
  void OnPreempted(SequenceId id) override {
    EXPECT_FALSE(told[id].retired) << "a retired sequence is preempted";
    EXPECT_FALSE(engine->contains(id));
    ++told[id].preempted;
    events.push_back(absl::StrCat("preempted ", id));
    if (on_preempted) on_preempted(id);
  }
  bool OnBlocksShort(int blocks) override {
    events.push_back(absl::StrCat("short ", blocks));
    return on_blocks_short ? on_blocks_short(blocks) : false;
  }
  void OnBlocksFreed() override { ++blocks_freed; }
  void OnStepFailed(const std::vector<SequenceId>& sequences,
                    const absl::Status& status) override {
    for (const SequenceId id : sequences) {
      EXPECT_FALSE(engine->contains(id));
      ++told[id].failed;
      events.push_back(absl::StrCat("failed ", id));
    }
    if (on_step_failed) on_step_failed(sequences);
  }

  const HarnessOptions options;
  VirtualLoop loop;
  KvPool pool;
  FakeExecutor device;
  NotingExecutor executor;
  FakeBlockFile file;
  std::vector<std::byte> offload_memory;
  std::unique_ptr<KvOffload> offload;  // may be null
  PrefixCache cache;
  KvPool draft_pool;
  FakeExecutor draft_device;
  NoisyExecutor draft_noise;
  NotingExecutor draft_executor;
  std::map<SequenceId, Told> told;
  std::map<SequenceId, FakeGrammar> grammars;  // of sequences that have one
  absl::Duration grammar_delay;                // until each may be asked
  std::vector<std::string> events;
  std::vector<std::string> layers;
  int blocks_freed = 0;  // so often it was told
  std::function<void(SequenceId)> on_token;
  std::function<void(SequenceId)> on_scores;
  std::function<void(SequenceId)> on_beams;
  std::function<void(SequenceId, int)> on_computed;
  std::function<void(SequenceId)> on_preempted;
  std::function<bool(int)> on_blocks_short;
  std::function<void(const std::vector<SequenceId>&)> on_step_failed;
  std::unique_ptr<Engine> engine;
};

// Sequences from 1 on, every other one sampled; each of the first six has
// rules of its own. REQUIRES: count >= 6.
inline std::vector<SequenceSpec> RuledSpecs(const Harness& harness,
                                            SequenceId count) {
  std::vector<SequenceSpec> specs;
  for (SequenceId id = 1; id <= count; ++id) {
    SequenceSpec spec = harness.Spec(id, 3 + static_cast<int>(id), 40);
    spec.sampling = {.temperature = id % 2 == 0 ? 1.0f : 0.0f, .seed = id};
    specs.push_back(spec);
  }
  specs[0].rules.repetition_penalty = 1.3f;
  specs[1].rules.frequency_penalty = 0.5f;
  specs[1].rules.presence_penalty = 0.25f;
  specs[2].rules.logit_bias = {{.token_id = 4, .bias = 2}};
  specs[2].rules.banned_ids = {1, 2, 3};
  for (int32_t id = 0; id < 8; ++id) {
    specs[3].rules.allowed_ids.push_back(id * 11);
    specs[4].rules.allowed_ids.push_back(id * 7);
  }
  specs[3].rules.repetition_penalty = 0.7f;
  for (int32_t id = 0; id < 8; ++id) {
    specs[4].rules.bad_words.push_back({id * 7, (id * 21) % 56});
  }
  specs[5].rules.presence_penalty = -1;
  return specs;
}

}  // namespace tandem::engine

#endif  // TANDEM_TESTS_ENGINE_ENGINE_HARNESS_H_
