// SPDX-License-Identifier: Apache-2.0
// Ten thousand steps of everything at once, per seed: sequences of all kinds,
// with grammars, scored, without a cache and as beam searches too, come, pause,
// are retired, preempted and resumed, steps fail, grants are
// reserved, held, committed and abandoned beside them, with steps one by one
// or running ahead. Whoever finishes has the tokens of an undisturbed run; at
// the end nothing is left.

#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <vector>

#include "common/random.h"
#include "engine/testing/noisy_drafter.h"
#include "tests/engine/engine_harness.h"

namespace tandem::engine {
namespace {

constexpr int64_t kSteps = 10'000;

HarnessOptions SoakOptions(uint64_t seed, DrafterFactory* drafters) {
  SeededRandom random(seed);
  HarnessOptions options;
  options.block_size = 1 << random.Below(4);
  options.engine.max_model_len = 48;
  options.num_blocks =
      static_cast<int>(48 + random.Below(60)) / options.block_size + 1;
  options.engine.max_num_seqs = 1 + static_cast<int>(random.Below(12));
  options.engine.max_num_batched_tokens =
      1 + static_cast<int>(random.Below(40));
  options.engine.prefix_caching = random.Below(4) != 0;
  options.engine.run_ahead = seed % 2 == 0;
  if (seed % 3 == 1) {
    options.engine.speculation = {.num_tokens = 1 + static_cast<int>(seed % 5),
                                  .adapt = seed % 2 == 0};
    options.draft = {.num_blocks = options.num_blocks / 2,
                     .right = 0.7,
                     .max_positions = 40};
    options.engine.max_draws = options.engine.max_num_seqs + 8;
  } else {
    options.engine.speculation = {.num_tokens = 1 + static_cast<int>(seed % 7),
                                  .adapt = seed % 4 == 0,
                                  .drafters = drafters};
    options.engine.max_draws =
        options.engine.max_num_seqs + static_cast<int>(seed % 5) * 3;
  }
  if (seed % 2 == 1) {
    options.model.window = 2 + static_cast<int>(random.Below(30));
    options.engine.window = options.model.window;
    if (seed % 4 == 3) {  // of one of two layers
      options.model.full_layers = 1;
      options.engine.window.parts = {.full = 1, .windowed = 1};
    }
  }
  options.seed = seed;
  options.step_jitter = absl::Milliseconds(3);
  if (seed % 3 == 0) return options;
  // What is evicted goes to memory, and (every third) to a disk that fails.
  options.offload.memory_blocks = 1 + static_cast<int>(random.Below(20));
  options.offload.read_timeout = absl::Milliseconds(20);
  if (seed % 3 == 2) {
    options.offload.file_blocks = 1 + static_cast<int>(random.Below(60));
    options.offload.file_retry = absl::Milliseconds(50);
    // Slow ones let blocks come and go while their saves and writes wait.
    const bool slow = seed % 2 == 0;
    if (slow) options.copy_base = absl::Milliseconds(3);
    options.file = {.latency = absl::Milliseconds(slow ? 20 : 2),
                    .full = 0.1,
                    .corrupt = 0.1,
                    .seed = seed};
  }
  return options;
}

class Soak {
 public:
  explicit Soak(uint64_t seed)
      : random_(~seed),
        drafters_(HarnessOptions().model, seed),
        harness_(SoakOptions(seed, &drafters_)) {
    harness_.on_token = [this](SequenceId id) {
      const Harness::Told& told = harness_.told[id];
      if (told.finish.has_value() || told.spec.first_token_only) {
        Finish(id);
      } else if (random_.Below(40) == 0) {
        Meddle();
      }
    };
    harness_.on_scores = [this](SequenceId id) {
      if (harness_.told[id].finish.has_value()) Finish(id);
    };
    harness_.on_beams = [this](SequenceId id) { Finish(id); };
    harness_.on_computed = [this](SequenceId, int) {
      if (random_.Below(60) == 0) Meddle();
    };
    harness_.on_preempted = [this](SequenceId id) { ResumeLater(id); };
    harness_.on_step_failed = [this](const std::vector<SequenceId>& ids) {
      for (const SequenceId id : ids) ResumeLater(id);
    };
    harness_.on_blocks_short = [this](int) {
      if (grants_.empty()) return false;
      grants_.pop_front();
      ++revoked_;
      return true;
    };
  }

  void Run() {
    while (harness_.device.steps() < kSteps && !testing::Test::HasFailure()) {
      Meddle();
      for (uint64_t i = random_.Below(20); i > 0; --i) {
        if (!harness_.loop.RunNext()) break;
      }
      if (random_.Below(20) == 0) harness_.CheckInvariants();
      if (random_.Below(50) == 0) ExpectToldRight();
    }
    closing_ = true;
    grants_.clear();
    holds_.clear();
    for (const auto& [id, told] : std::map(harness_.told)) {
      harness_.engine->Pause(id, false);
    }
    harness_.RunUntilIdle();
    Forget();
    // All that were not given up have finished.
    EXPECT_TRUE(harness_.told.empty()) << harness_.told.size() << " left";
    harness_.ExpectNothingLeft();
  }

  // Of which there are few among the plain ones.
  enum class Kind : uint8_t { kGrammar, kScored, kWithoutCache, kBeams };

  // Proof that the soak was one.
  int64_t finished() const { return finished_; }
  const std::map<Kind, int64_t>& finished_of() const { return finished_of_; }
  int64_t given_up() const { return given_up_; }
  int64_t failed() const { return failed_; }
  int64_t revoked() const { return revoked_; }
  int64_t fed() const { return harness_.executor.fed; }
  KvOffloadCounters offload() const {
    return harness_.offload == nullptr ? KvOffloadCounters()
                                       : harness_.offload->counters();
  }
  int64_t window_blocks() { return harness_.engine->stats().window_blocks; }
  int64_t surplus() { return harness_.engine->stats().surplus_tokens; }
  DraftCounts drafts() { return harness_.engine->stats().drafts; }
  int64_t preempted() { return harness_.engine->stats().preemptions; }

 private:
  void Finish(SequenceId id) {
    const SequenceSpec& spec = harness_.told[id].spec;
    if (spec.beams.width > 0) {
      harness_.ExpectBeamsRight(id);
    } else {
      EXPECT_EQ(harness_.told[id].tokens, harness_.ExpectedTokens(id)) << id;
    }
    if (spec.scoring.wanted()) harness_.ExpectScoresRight(id);
    ++finished_;
    if (const auto kind = kind_.find(id); kind != kind_.end()) {
      ++finished_of_[kind->second];
    }
    harness_.Retire(id);
    gone_.push_back(id);
  }
  void ResumeLater(SequenceId id) {
    const absl::Duration delay = absl::Milliseconds(1 + random_.Below(60));
    harness_.loop.After(delay, [this, id] {
      if (harness_.told.contains(id) && !harness_.told[id].retired &&
          !harness_.engine->contains(id)) {
        harness_.Resume(id, random_.Below(2) == 0);
      }
    });
  }
  void AddOne() {
    const SequenceId id = ++last_id_;
    SequenceSpec spec =
        harness_.Spec(id, 1 + static_cast<int>(random_.Below(40)),
                      1 + static_cast<int>(random_.Below(20)));
    // Few different prompts, so that many share their beginnings.
    spec.history = Harness::Prompt(random_.Below(3), spec.prompt_tokens);
    spec.sampling.temperature = random_.Below(2) == 0 ? 0.0f : 1.0f;
    spec.sampling.seed = random_.Next();
    if (random_.Below(3) == 0) {
      spec.stopping.stop_token_ids = {7, 13, 21, 42, 77};
      spec.stopping.min_tokens = static_cast<int>(random_.Below(4));
    }
    spec.first_token_only = random_.Below(8) == 0;
    spec.alone = random_.Below(10) == 0;
    spec.cache_blocks = random_.Below(8) != 0;
    spec.admitted = harness_.loop.Now() - absl::Seconds(random_.Below(3));
    const bool whole = random_.Below(4) == 0 && MakeSpecial(id, &spec);
    harness_.Add(id, std::move(spec), !whole && random_.Below(3) != 0);
  }
  // Whether all of its prompt must be computed.
  bool MakeSpecial(SequenceId id, SequenceSpec* spec) {
    const auto kind = static_cast<Kind>(random_.Below(4));
    kind_[id] = kind;
    spec->first_token_only = false;
    switch (kind) {
      case Kind::kGrammar:
        harness_.grammars[id] = {.seed = random_.Next(),
                                 .ends = {7, 8},
                                 .ends_ignored = random_.Below(4) == 0};
        return false;
      case Kind::kScored:
        if (spec->prompt_tokens == 1) return false;  // nothing to score
        spec->scoring = {.alternatives = static_cast<int>(random_.Below(4))};
        if (random_.Below(3) == 0) {
          spec->stopping = Stopping();
          spec->stopping.max_tokens = 0;
        }
        return true;
      case Kind::kWithoutCache:
        spec->kv_cache = false;
        return true;
      case Kind::kBeams:
        spec->sampling = {};
        spec->stopping.min_tokens = 0;
        spec->beams = {.width = 1 + static_cast<int>(random_.Below(4))};
        spec->beams.best = 1 + static_cast<int>(random_.Below(
                                   static_cast<uint64_t>(spec->beams.width)));
        while (spec->beams.width > 0 &&
               (spec->beams.width > harness_.options.engine.max_num_seqs ||
                harness_.engine->MostBlocks(*spec) >
                    harness_.options.num_blocks)) {
          spec->beams.best = std::min(spec->beams.best, --spec->beams.width);
        }
        return false;
    }
    return false;
  }
  void Meddle() {
    if (closing_) return;
    // Outside of its callbacks, what has finished may be forgotten.
    switch (random_.Below(16)) {
      default:
        if (harness_.told.size() < 16) AddOne();
        break;
      case 0:
      case 1:
        if (const SequenceId id = Any(); id != 0) {
          harness_.Retire(id);
          gone_.push_back(id);
          ++given_up_;
        }
        break;
      case 2:
      case 3:
        if (const SequenceId id = Any(); id != 0) {
          harness_.engine->Pause(id, true);
          harness_.loop.After(
              absl::Milliseconds(random_.Below(100)),
              [this, id] { harness_.engine->Pause(id, false); });
        }
        break;
      case 4:
        if (random_.Below(5) == 0) {
          ++failed_;
          harness_.device.FailNextStep(absl::UnavailableError("device"));
        }
        break;
      case 5:
      case 6:
        if (std::optional<Reservation> grant =
                harness_.pool.Reserve(1 + static_cast<int>(random_.Below(3)));
            grant.has_value()) {
          holds_.push_back(
              grant->Hold(0, static_cast<int>(grant->ids().size())));
          grants_.push_back(std::move(*grant));
        }
        break;
      case 7:
      case 8:
        if (!grants_.empty()) {
          // Committed and dropped, or abandoned.
          if (random_.Below(2) == 0) {
            ReleaseBlocks(std::move(grants_.front()).Commit());
          }
          grants_.pop_front();
        }
        break;
      case 9:
      case 10:
      case 11:
        holds_.clear();
        break;
    }
    if (!harness_.engine->stats().step_in_flight) Forget();
  }
  // What routers are told one by one is what there is.
  void ExpectToldRight() {
    const CacheChanges changes = harness_.pool.TakeChanges();
    for (const uint64_t hash : changes.added) {
      // Or it may have lacked parts, and come and gone since.
      EXPECT_TRUE(told_.insert(hash).second ||
                  harness_.pool.cells().parts().windowed > 0);
      lacking_.erase(hash);
    }
    for (const uint64_t hash : changes.lacking) {
      told_.insert(hash);
      lacking_.insert(hash);
    }
    for (const uint64_t hash : changes.removed) {
      EXPECT_EQ(told_.erase(hash), 1u);
      lacking_.erase(hash);
    }
    const std::vector<uint64_t> all = harness_.pool.CachedHashes();
    EXPECT_TRUE(std::equal(told_.begin(), told_.end(), all.begin(), all.end()));
    const std::vector<uint64_t> lacking = harness_.pool.LackingHashes();
    EXPECT_TRUE(std::equal(lacking_.begin(), lacking_.end(), lacking.begin(),
                           lacking.end()));
  }
  void Forget() {
    for (const SequenceId id : gone_) {
      harness_.told.erase(id);
      harness_.grammars.erase(id);
      kind_.erase(id);
    }
    gone_.clear();
  }
  SequenceId Any() {
    if (harness_.told.empty()) return 0;
    auto it = harness_.told.begin();
    std::advance(it, static_cast<int>(random_.Below(harness_.told.size())));
    return it->second.retired ? 0 : it->first;
  }

  SeededRandom random_;
  std::map<SequenceId, Kind> kind_;
  std::map<Kind, int64_t> finished_of_;
  std::set<uint64_t> told_;  // hashes, by the pool's changes
  std::set<uint64_t> lacking_;
  std::deque<Reservation> grants_;
  std::vector<BlockHold> holds_;
  std::vector<SequenceId> gone_;
  SequenceId last_id_ = 0;
  bool closing_ = false;
  int64_t finished_ = 0;
  int64_t given_up_ = 0;
  int64_t failed_ = 0;
  int64_t revoked_ = 0;
  NoisyDrafters drafters_;
  Harness harness_;
};

TEST(EngineSoakTest, TenThousandRandomStepsLoseNothingAndChangeNoToken) {
  int64_t finished = 0;
  int64_t given_up = 0;
  int64_t failed = 0;
  int64_t revoked = 0;
  int64_t preempted = 0;
  int64_t fed = 0;
  int64_t surplus = 0;
  DraftCounts drafts;
  KvOffloadCounters offload;
  int64_t window_blocks = 0;
  std::map<Soak::Kind, int64_t> finished_of;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    Soak soak(seed);
    soak.Run();
    if (HasFailure()) return;
    finished += soak.finished();
    given_up += soak.given_up();
    failed += soak.failed();
    revoked += soak.revoked();
    preempted += soak.preempted();
    fed += soak.fed();
    surplus += soak.surplus();
    drafts.verified += soak.drafts().verified;
    drafts.accepted += soak.drafts().accepted;
    window_blocks += soak.window_blocks();
    for (const auto& [kind, count] : soak.finished_of()) {
      finished_of[kind] += count;
    }
    offload.saved += soak.offload().saved;
    offload.restored += soak.offload().restored;
    offload.dropped += soak.offload().dropped;
    offload.read += soak.offload().read;
    offload.read_errors += soak.offload().read_errors;
    offload.write_errors += soak.offload().write_errors;
  }
  EXPECT_GT(finished, 5000);
  EXPECT_EQ(finished_of.size(), 4u);
  for (const auto& [kind, count] : finished_of) EXPECT_GT(count, 100);
  EXPECT_GT(given_up, 500);
  EXPECT_GT(failed, 100);
  EXPECT_GT(revoked, 100);
  EXPECT_GT(preempted, 500);
  EXPECT_GT(fed, 1000);
  EXPECT_GT(surplus, 100);
  EXPECT_GT(drafts.verified, drafts.accepted + 1000);
  EXPECT_GT(drafts.accepted, 1000);
  EXPECT_GT(window_blocks, 1000);
  EXPECT_GT(offload.saved, 1000);
  EXPECT_GT(offload.restored, 1000);
  EXPECT_GT(offload.dropped, 100);
  EXPECT_GT(offload.read, 50);
  EXPECT_GT(offload.read_errors, 5);
  EXPECT_GT(offload.write_errors, 5);
}

TEST(EngineSoakTest, OneSeedIsOneHistory) {
  const auto run = [](uint64_t seed) {
    Soak soak(seed);
    soak.Run();
    return std::vector<int64_t>{soak.finished(), soak.given_up(), soak.failed(),
                                soak.revoked(), soak.preempted()};
  };
  EXPECT_EQ(run(3), run(3));
  EXPECT_NE(run(3), run(4));
}

}  // namespace
}  // namespace tandem::engine
