// SPDX-License-Identifier: Apache-2.0
// The Executor of real workers: runs steps of a Model on a Backend.
//
// Two queues. Steps go on `compute` in order: one upload of everything the
// step's operations need to know about their rows, the forward pass, the
// drawing of tokens, one copy back. Gathers, scatters and digests go on
// `transfer` beside them. They meet only where both touch a block: a step
// waits for an unfinished scatter into a block that it names, and a scatter
// waits for an unfinished step that names its block. A gather waits for
// nothing, since it may read only what OnLayersDone has reported. Saving and
// restoring a whole block are a gather and a scatter for which steps wait
// alike.
//
// A step in which every entry has one position and draws (a decode) can be
// recorded by the backend once for each size and put on the queue in one go:
// see RecordDecodes. Sizes are few; a step is filled up to the next one with
// rows that belong to nobody and are written nowhere. Steps with adapters are
// not recorded: which products they touch differs from step to step.
//
// Memory is sized once for the largest step; that for edits of logits grows
// beyond kEditsAtStart. Two steps may be in flight, each with its own host
// memory, so that the second is prepared and queued while the first one runs.

#ifndef TANDEM_ENGINE_DEVICE_DEVICE_EXECUTOR_H_
#define TANDEM_ENGINE_DEVICE_DEVICE_EXECUTOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loop.h"
#include "engine/device/mask_threads.h"
#include "engine/executor.h"
#include "engine/kv/block_mover.h"
#include "engine/model/forward.h"
#include "engine/model/layer_parts.h"
#include "engine/model/lora_slots.h"
#include "engine/model/model.h"
#include "engine/model/step_layout.h"
#include "kernels/backend.h"

namespace tandem::engine {

struct DeviceExecutorOptions {
  int max_rows = 512;      // positions per step at most
  int max_sequences = 64;  // entries per step at most
  int max_draws = 0;       // tokens per step at most; 0: max_sequences
  int block_size = 16;     // positions per KV block; a multiple of 8
  int num_blocks = 0;      // of the KV cache, with all their parts
  // Of the pool that the blocks of steps come from, whose parts are PartsOf the
  // model's; null: blocks have one part. Outlives the executor.
  const BlockCells* cells = nullptr;
  kernels::DType kv_dtype = kernels::DType::kF32;
  // Of the adapters that entries may name; null: none. Outlives the executor.
  LoraSlots* loras = nullptr;
  // OnLayersDone after so many layers each; 0: as group_bytes says. Of a step
  // that draws a token after each row, as decodes do, once and with its end.
  int layers_per_group = 0;
  // After as few layers as make a slice of so many bytes (layer_groups.h); 0:
  // once, after the last.
  int64_t group_bytes = 0;

  int draws() const { return max_draws > 0 ? max_draws : max_sequences; }
};

class DeviceExecutor final : public Executor, public BlockMover {
 public:
  // All three outlive the executor.
  static absl::StatusOr<std::unique_ptr<DeviceExecutor>> Create(
      const DeviceExecutorOptions& options, const Model* model,
      kernels::Backend* backend, Loop* loop);

  // What it will ask of a backend.
  static kernels::WorkLimits Limits(const DeviceExecutorOptions& options,
                                    const Model& model);

  // Waits for the device. REQUIRES: nothing is in flight, or the loop has
  // stopped (and so destroys, unrun, what was posted to it).
  ~DeviceExecutor() override;

  // Records decodes of every size, if the backend records at all; before the
  // first step. `progress` hears how many of how many are done. Errors are the
  // backend's: steps then go on the queue operation by operation.
  absl::Status RecordDecodes(absl::FunctionRef<void(int, int)> progress);

  // A step that breaks a limit or names what is not there ends with
  // OnStepDone(INVALID_ARGUMENT) and touches nothing. REQUIRES: at most
  // kStepsInFlight - 1 others are unfinished.
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
  int64_t block_bytes() const override;
  void SaveBlock(int32_t block, std::byte* to,
                 absl::AnyInvocable<void()> done) override;
  void RestoreBlock(int32_t block, const std::byte* from,
                    absl::AnyInvocable<void()> done) override;
  // Puts an adapter into a slot of options.loras, behind all steps that were
  // submitted; `adapter` lives until `done` has run on the loop. REQUIRES: no
  // later step names the slot for what was in it before.
  void PutAdapter(int slot, const LoraAdapter& adapter,
                  absl::AnyInvocable<void()> done);
  // Waits for all that was asked for.
  void Synchronize();

  // For tools and tests: called on the loop before OnStepDone, with the
  // logits [vocab] of each draw, in the order of the tokens.
  using LogitsProbe = absl::AnyInvocable<void(uint64_t step_id, int index,
                                              absl::Span<const float> logits)>;
  void set_logits_probe(LogitsProbe probe) { probe_ = std::move(probe); }

  static constexpr int kStepsInFlight = 2;
  // Edits of logits in a step for which there is memory from the start: 64
  // sequences with as many as a request may list.
  static constexpr int64_t kEditsAtStart = int64_t{64} * 1024;

  // Sizes that decodes are filled up to, ascending, the last `most`.
  static std::vector<int> DecodeSizes(int most);
  // Bounds of their positions, likewise: attention's work is laid out for the
  // bound, of which a shorter context leaves a part idle.
  static std::vector<int> DecodeBounds(int most);

 private:
  // An entry and where its masks come to lie.
  struct EntryMasks {
    const StepEntry* entry;
    absl::Span<uint32_t> masks;
  };
  // Host side of one step in flight. Addresses in it stay put.
  struct Flight {
    DeviceExecutor* executor = nullptr;
    const Step* step = nullptr;  // null: free
    StepListener* listener = nullptr;
    std::unique_ptr<kernels::Buffer> memory;  // host's: of the next two
    StepPlan plan;
    std::unique_ptr<kernels::Buffer> edits;  // host's
    // [num_masks, MaskWords(vocab)], host's and device's; they grow.
    std::unique_ptr<kernels::Buffer> masks;
    std::unique_ptr<kernels::Buffer> device_masks;
    std::vector<EntryMasks> masked;            // those with constrained draws
    kernels::SampleResult* results = nullptr;  // in the order of the draws
    std::vector<float> logits;                 // for the probe
    // Of entries that ask for attention weights, and where these come to lie,
    // entry by entry: host memory, as device_attention_ behind the states.
    std::vector<RowLook> looks;
    std::unique_ptr<kernels::Buffer> attention;
  };
  struct Transfer;

  DeviceExecutor(const DeviceExecutorOptions& options, const Model* model,
                 kernels::Backend* backend, Loop* loop)
      : options_(options), model_(model), backend_(backend), loop_(loop) {}

  // device_executor.cc: the way of a step.
  void Run(Flight& flight);
  // Puts the making of the step's masks on the queue beside the step's.
  void MakeMasks(Flight& flight);
  void RunMixed(Flight& flight);
  // As layers of each part see them.
  using PartRows = absl::InlinedVector<kernels::Rows, 2>;
  PartRows RowsOf(const StepPlan& plan) const;
  StepAdapters AdaptersOf(const Flight& flight) const;
  int LayersPerReport(const Step& step) const;
  void ReportLayers(Flight& flight, int layers);
  // `flight` is null for what is recorded.
  void DrawTokens(const StepPlan& plan, int count, const Flight* flight);
  void FetchTokens(Flight& flight);
  void Finish(Flight& flight);
  static void TakeAttention(const Flight& flight, StepResult* result);

  // step_check.cc: what is refused.
  absl::Status Check(const Step& step) const;
  absl::Status CheckEntry(const StepEntry& entry) const;
  absl::Status CheckDraws(const StepEntry& entry) const;
  absl::Status CheckAttention(const StepEntry& entry) const;

  // executor_memory.cc: what is sized once, and what grows.
  absl::Status Initialize();
  int MaxBlocksPerEntry() const;
  int NumBlockIds() const;
  absl::Status ReserveEdits(Flight& flight, const Step& step);
  absl::Status GrowEdits(Flight& flight, size_t count);
  absl::Status ReserveMasks(Flight& flight, const Step& step);
  // Fills flight.looks.
  absl::Status PlanLooks(Flight& flight, const Step& step);
  size_t StatesFloats() const;  // what a look works in
  // Makes room for at least `bytes` in both, which grow together.
  absl::Status Grow(size_t bytes, std::unique_ptr<kernels::Buffer>* host,
                    std::unique_ptr<kernels::Buffer>* device);

  // recorded_decodes.cc: steps that were recorded.
  // Of a step that is filled up: its size and bound of positions.
  struct Decode {
    int size = 0;
    int bound = 0;
    uint64_t key() const {
      return static_cast<uint64_t>(size) << 32 | static_cast<uint32_t>(bound);
    }
  };
  absl::Status ForgetRecords(absl::Status why);
  // Size 0: not such a step.
  Decode DecodeOf(const Step& step) const;
  void RunDecode(const StepPlan& plan, const Decode& decode);

  // kv_transfers.cc: KV into and out of the cache.
  void WaitForScatters(const Step& step);
  void WaitForSteps(const KvPart& part);
  absl::Span<const int32_t> BlocksOf(const KvPart& part) const;
  template <typename Use>
  void ForCells(int32_t block, const Use& use) const;
  // What a part of a sequence is in the cache, run of layers by run.
  template <typename Move>
  void ForRuns(const KvPart& part, kernels::DType wire, Transfer* transfer,
               const Move& move);
  void FinishTransfer(std::unique_ptr<Transfer> transfer);
  KvPart WholeBlock(const int32_t* block) const;

  const DeviceExecutorOptions options_;
  const Model* const model_;
  kernels::Backend* const backend_;
  Loop* const loop_;
  LayerParts layers_;
  StepBlocks blocks_;
  kernels::KvShape shape_;  // of what the cache stands for
  std::unique_ptr<kernels::KvCache> cache_;
  std::unique_ptr<Workspace> workspace_;
  std::unique_ptr<kernels::Buffer> device_plan_;       // one step's StepPlan
  std::unique_ptr<kernels::Buffer> device_edits_;      // one step's; grows
  std::unique_ptr<kernels::Buffer> device_results_;    // [max_draws]
  std::unique_ptr<kernels::Buffer> device_attention_;  // one step's; grows
  std::array<Flight, kStepsInFlight> flights_;
  const Flight* newest_ = nullptr;  // of the step submitted last
  LogitsProbe probe_;
  bool recorded_ = false;  // decodes
  std::vector<int> decode_sizes_;
  std::vector<int> decode_bounds_;

  // The last step and transfer that touched each cell, and how many of each
  // have finished: what tells whether queues must meet.
  std::vector<uint64_t> last_step_;     // [cells]
  std::vector<uint64_t> last_scatter_;  // [cells]
  uint64_t steps_issued_ = 0;
  uint64_t steps_finished_ = 0;
  uint64_t transfers_issued_ = 0;
  uint64_t transfers_finished_ = 0;

  // What Grow replaced.
  std::vector<std::unique_ptr<kernels::Buffer>> outgrown_;

  std::unique_ptr<MaskThreads> mask_threads_;  // null until there is a mask

  // Last: their destructors wait for work that uses the members above.
  std::unique_ptr<kernels::Queue> compute_;
  std::unique_ptr<kernels::Queue> transfer_;
  std::unique_ptr<kernels::Queue> masks_;  // null until there is a mask
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_DEVICE_DEVICE_EXECUTOR_H_
