// SPDX-License-Identifier: Apache-2.0
// Guesses from a small model with a KV cache of its own (Leviathan et al.,
// "Fast inference from transformers via speculative decoding", 2023), to be
// verified as any guess is: see engine/scheduler.cc.
//
// It runs in rounds, between two steps of the model that it guesses for. A
// round feeds each sequence what its cache does not hold yet, draws a guess
// behind it, feeds that, and so on, all sequences side by side. A guess is
// drawn as the token will be: with the sequence's sampling, its rules over the
// guesses before, and the random number of its position; so two models that
// nearly agree draw the same token. A sequence whose cache is far behind (a
// prompt computed elsewhere) catches up in chunks, a bounded one each round,
// and has guesses when it is there.
//
// What the cache holds of guesses that were wrong is found by comparing with
// the history and written over. Blocks are taken for a whole history at once,
// so that no two sequences wait for each other's; one that finds too few has no
// guesses. Full blocks of what is sure are found by their hashes, as those of
// the model's cache, so that a prompt that comes again, or a request that is
// tried again here, is not computed again.

#ifndef TANDEM_ENGINE_DRAFT_MODEL_H_
#define TANDEM_ENGINE_DRAFT_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/loop.h"
#include "engine/executor.h"
#include "engine/kv/kv_pool.h"
#include "engine/logit_edits.h"

namespace tandem::engine {

struct DraftModelOptions {
  Executor* executor = nullptr;  // of the small model; null: there is none
  KvPool* pool = nullptr;        // of its KV cache, for nobody else
  int max_positions = 0;         // of a sequence, guesses included
  int max_rows = 512;            // per step; at least max_sequences
  int max_sequences = 64;        // per step
  // Of one step of its, in units of one of the other model's: what is assumed
  // until it is measured.
  double step_cost = 0.1;
};

// What is to be guessed for one sequence. Pointers are valid until the round is
// over or the id is forgotten.
struct DraftWish {
  uint64_t id = 0;  // of the sequence; never used twice
  // Where its block hashes start; null: it neither finds blocks nor leaves any.
  const BlockHash* root = nullptr;
  uint64_t owner = 0;  // of those (KvPool::Publish)
  // With room for `length` more.
  std::vector<int32_t>* history = nullptr;
  LogitEdits* edits = nullptr;  // of what follows the history
  const Sampling* sampling = nullptr;
  int owed_until = 0;  // stop tokens are banned while less tokens are there
  int length = 0;      // guesses at most, at least 1
  std::vector<int32_t>* guesses =
      nullptr;  // come behind what is in there: none
};

class DraftModel final : private StepListener {
 public:
  // What options point to and the loop outlive it.
  DraftModel(const DraftModelOptions& options, Loop* loop);
  // REQUIRES: no round runs, or the executor runs nothing any more.
  ~DraftModel() override = default;
  DraftModel(const DraftModel&) = delete;
  DraftModel& operator=(const DraftModel&) = delete;

  // Takes blocks for a wish's history and guesses, those that it has and those
  // that are found included. False where there are too few, or the device
  // fails: then it is to be forgotten, so that others go on with what it has.
  // REQUIRES: no round runs; no more than max_positions.
  bool Reserve(const DraftWish& wish);
  // Starts a round, in which caches that are behind may take about
  // `catch_up_seconds`. `done` is called when it is over, and not within.
  // REQUIRES: no round runs; wishes, no more than max_sequences, of different
  // ids, that were reserved.
  void Start(absl::Span<const DraftWish> wishes, double catch_up_seconds,
             absl::AnyInvocable<void()> done);
  bool running() const { return done_ != nullptr; }
  // Layers and steps that the device has reported, for liveness.
  int64_t progress() const { return progress_; }
  // Positions of the last round's that were fed to catch up.
  int caught_up() const { return caught_up_; }

  // The sequence is over, or guessed for no more: its blocks come back, now or
  // when the step that uses them is done. Idempotent.
  void Forget(uint64_t id);

  // Positions that are to be computed before a guess behind the history can be
  // drawn: those that neither its cache has nor a block that is found.
  int Behind(uint64_t id, const BlockHash* root,
             const std::vector<int32_t>& history);
  int max_positions() const { return options_.max_positions; }
  // Of a position fed to catch up, smoothed; 0: not measured.
  double row_seconds() const { return row_seconds_; }
  // Of blocks that the sequences hold, and that they are the pool's: INTERNAL
  // with the first contradiction. For tests.
  absl::Status CheckInvariants() const;
  std::vector<uint64_t> ids() const;  // not forgotten; for tests

 private:
  // Of one sequence.
  struct Cache {
    std::vector<BlockRef> blocks;
    std::vector<int32_t> table;  // ids of `blocks`
    // Of the history's full blocks, but for that of its last position, which is
    // fed whatever is there. The first `published` of them are in the pool.
    std::vector<BlockHash> hashes;
    int published = 0;
    int computed = 0;           // KV of [0, computed) is there,
    int settled = 0;            // of the history in [0, settled),
    std::vector<int32_t> tail;  // and of these tokens behind
    bool in_step = false;
    uint64_t owner = 0;
  };
  // A wish in this round, and what its next step takes.
  struct Part {
    DraftWish wish;  // id 0: forgotten
    Cache* cache = nullptr;
    int tokens = 0;  // in the step in flight; 0: none
    bool draws = false;
  };

  void OnLayersDone(uint64_t, int) override { ++progress_; }
  void OnStepDone(uint64_t step_id, absl::StatusOr<StepResult> result) override;

  Cache* CacheOf(uint64_t id, const BlockHash* root,
                 const std::vector<int32_t>& history);
  static void Settle(const std::vector<int32_t>& history, Cache* cache);
  void Publish(Cache* cache);
  void Adopt(Cache* cache);
  static void Release(Cache* cache);
  void PlanFirst(double catch_up_seconds);
  void PlanNext();
  int CatchUpRows(double seconds) const;
  bool Submit();
  void AddEntry(Part* part);
  void AddDraw(const Part& part);
  void Fail();
  void Finish();

  const DraftModelOptions options_;
  Loop* const loop_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Cache>> caches_;
  std::vector<std::unique_ptr<Cache>> leaving_;  // forgotten, in the step
  std::vector<Part> parts_;
  absl::AnyInvocable<void()> done_;  // empty: no round
  int caught_up_ = 0;
  int failures_ = 0;
  int64_t progress_ = 0;
  double row_seconds_ = 0;

  // The step in flight.
  Step step_;
  std::vector<int32_t> tokens_;
  std::vector<kernels::LogitEdit> edits_;
  std::vector<RowDraw> draws_;
  absl::Time submitted_;
  bool first_ = false;  // of its round
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_DRAFT_MODEL_H_
