// SPDX-License-Identifier: Apache-2.0
// A device for tests and simulations: runs FakeModel on virtual time, its KV
// in numbered blocks like a real one. A step's words are computed from what
// the block table finds in the cache, layer by layer, and positions hold
// rubbish from the step's start until their layer is done; gathers and
// scatters touch memory when they finish, not when they are asked for. So a
// block that is reused too early, or read too early, shows as a wrong token.
//
// On the wire a position has 8 bytes per layer, which kv_shape() says in its
// own way (one head; head_dim 1 as f32, 2 as bf16).

#ifndef TANDEM_ENGINE_TESTING_FAKE_EXECUTOR_H_
#define TANDEM_ENGINE_TESTING_FAKE_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "engine/executor.h"
#include "engine/kv/block_cells.h"
#include "engine/kv/block_mover.h"
#include "engine/testing/fake_model.h"

namespace tandem::engine {

struct FakeExecutorOptions {
  FakeModel model;
  int num_blocks = 64;
  int block_size = 16;
  // Of the blocks' pool, a part for each layer; null: they have one for all.
  // Outlives the executor.
  const BlockCells* cells = nullptr;
  kernels::DType dtype = kernels::DType::kF32;
  uint64_t seed = 1;  // of the jitter
  // A step takes base + rows * per_row + jitter, uniform in [0, jitter).
  absl::Duration step_base = absl::Milliseconds(1);
  absl::Duration step_per_row = absl::Microseconds(20);
  absl::Duration step_jitter = absl::ZeroDuration();
  // A gather, scatter or digest takes base + rows * per_row, where a row is
  // one position of one layer. They run in order, beside the steps.
  absl::Duration copy_base = absl::Microseconds(20);
  absl::Duration copy_per_row = absl::Microseconds(1);
};

// Destroyed, it runs nothing any more and calls nobody.
class FakeExecutor final : public Executor, public BlockMover {
 public:
  FakeExecutor(const FakeExecutorOptions& options, Loop* loop);

  void Submit(const Step* step, StepListener* listener) override;
  void Gather(const KvPart& part, kernels::DType wire, uint64_t digest_key,
              std::byte* staging,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override;
  void Scatter(const KvPart& part, kernels::DType wire,
               const std::byte* staging,
               absl::AnyInvocable<void()> done) override;
  void Digest(const KvPart& part, kernels::DType wire, uint64_t digest_key,
              absl::AnyInvocable<void(kernels::KvDigest)> done) override;
  const kernels::KvShape& kv_shape() const override { return shape_; }
  int64_t block_bytes() const override {
    return int64_t{8} * shape_.num_layers * shape_.block_size;
  }
  void SaveBlock(int32_t block, std::byte* to,
                 absl::AnyInvocable<void()> done) override;
  void RestoreBlock(int32_t block, const std::byte* from,
                    absl::AnyInvocable<void()> done) override;

  // The next step that ends, ends with this, and has written rubbish.
  void FailNextStep(absl::Status status) { failure_ = std::move(status); }
  // It takes that much longer.
  void HoldUpNextStep(absl::Duration by) { held_up_ = by; }

  // Broken promises of the caller, in words; the first 16. Tests expect none.
  const std::vector<std::string>& violations() const { return violations_; }
  int64_t steps() const { return steps_; }
  int64_t rows() const { return rows_; }

 private:
  struct Submitted {
    const Step* step;
    StepListener* listener;
  };
  struct Copy {
    int64_t rows;
    absl::AnyInvocable<void()> run;
  };

  // Of a block's part, -1 of one that was let go.
  int32_t CellOf(int32_t block, int layer) const;
  std::vector<int32_t> CellsOf(int32_t block) const;
  int num_ids() const;
  uint64_t& WordAt(absl::Span<const int32_t> block_table, int position,
                   int layer);
  void Violation(std::string what);
  // False: it would touch memory that is not there.
  bool CheckEntry(const StepEntry& entry);
  int32_t TokenOf(const StepEntry& entry, size_t index) const;
  bool CheckStep(const Step& step);
  bool CheckPart(const KvPart& part, kernels::DType wire);
  void CopyBlock(const BlockCopy& copy);
  bool WaitsForMoves(const Step& step) const;
  void StartStep();
  void RunLayer();
  void EndStep();
  void Spoil(const Step& step, StepResult* result);
  void Scramble(const StepEntry& entry);
  // What follows [0, position) of the entry's sequence.
  SampledToken DrawToken(const StepEntry& entry, int position,
                         const RowDraw& draw, absl::Span<const uint32_t> mask);
  void Enqueue(const KvPart& part, absl::AnyInvocable<void()> run);
  void StartCopy();
  // Of a whole block: its cells are those of now.
  template <typename Visit>  // (uint64_t& word)
  void Move(int32_t block, Visit visit, absl::AnyInvocable<void()> done);
  void EndMove(absl::Span<const int32_t> cells);
  template <typename Visit>  // (uint64_t& word, int layer, int position)
  void ForEachRow(const KvPart& part, Visit visit);

  const FakeExecutorOptions options_;
  kernels::KvShape shape_;
  std::vector<uint64_t> words_;  // [cells, block_size]
  uint64_t nowhere_ = 0;
  SeededRandom random_;
  std::deque<Submitted> submitted_;  // the front one runs
  int layers_done_ = 0;              // of the front one
  StepResult drawn_;                 // by the last one that ended
  absl::Duration per_layer_;
  bool step_waits_ = false;  // the front one, for moves of its blocks
  std::vector<int> moving_;  // [cells] saves and restores queued
  std::deque<Copy> copies_;  // the front one runs
  absl::Status failure_;
  absl::Duration held_up_;
  std::vector<std::string> violations_;
  int64_t steps_ = 0;
  int64_t rows_ = 0;
  // Which entry of which step wrote a block last.
  struct Writer {
    uint64_t step = 0;
    size_t entry = 0;
  };
  std::vector<Writer> writers_;  // [ids]
  Timer step_timer_;
  Timer copy_timer_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_TESTING_FAKE_EXECUTOR_H_
