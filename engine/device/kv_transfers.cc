// SPDX-License-Identifier: Apache-2.0
// KV into and out of the device executor's cache, on a queue beside that of the
// steps, and where the two must meet because both touch a block.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "engine/device/device_executor.h"

namespace tandem::engine {

using kernels::DType;
using kernels::KvCache;
using kernels::KvDigest;
using kernels::KvRange;

// A gather, scatter or digest under way: where the device puts its digest.
struct DeviceExecutor::Transfer {
  DeviceExecutor* executor;
  KvDigest digest;
  absl::AnyInvocable<void(KvDigest)> done;
  int32_t block = -1;  // the block table of what moves a whole one
  // Where blocks have several parts: each run of layers' table and digest, of
  // which `digest` is the sum.
  struct Run {
    std::vector<int32_t> table;
    KvDigest digest;
  };
  std::vector<std::unique_ptr<Run>> runs = {};
};

namespace {

KvRange RangeOf(const KvPart& part) {
  return {part.block_table.data(),
          part.position_begin,
          part.position_end,
          part.layer_begin,
          part.layer_end,
          part.head_begin,
          part.head_end};
}

}  // namespace

// ---- Where queues meet

void DeviceExecutor::WaitForScatters(const Step& step) {
  ++steps_issued_;
  uint64_t newest = 0;
  const auto use = [&](int32_t cell) {
    newest = std::max(newest, last_scatter_[cell]);
    last_step_[cell] = steps_issued_;
  };
  for (const StepEntry& entry : step.entries) {
    for (const int32_t block : entry.block_table) {
      if (block >= 0) ForCells(block, use);  // else behind the window
    }
  }
  for (const BlockCopy& copy : step.copies) {
    ForCells(copy.from, use);
    ForCells(copy.to, use);
  }
  if (newest > transfers_finished_) compute_->WaitFor(*transfer_);
}

void DeviceExecutor::WaitForSteps(const KvPart& part) {
  uint64_t newest = 0;
  for (const int32_t block : BlocksOf(part)) {
    ForCells(block, [&](int32_t cell) {
      newest = std::max(newest, last_step_[cell]);
      last_scatter_[cell] = transfers_issued_ + 1;
    });
  }
  if (newest > steps_finished_) transfer_->WaitFor(*compute_);
}

template <typename Use>
void DeviceExecutor::ForCells(int32_t block, const Use& use) const {
  for (int part = 0; part < blocks_.parts(); ++part) {
    const int32_t cell = blocks_.CellOf(block, part);
    if (cell >= 0) use(cell);
  }
}

absl::Span<const int32_t> DeviceExecutor::BlocksOf(const KvPart& part) const {
  const int block_size = options_.block_size;
  const int first = part.position_begin / block_size;
  const int last = (part.position_end + block_size - 1) / block_size;
  return part.block_table.subspan(first, last - first);
}

// ---- Parts of sequences

// move(cache, range, bytes of the wire before it, where its digest goes).
// Layers with other heads have as many bytes there as the rest, their own
// first.
template <typename Move>
void DeviceExecutor::ForRuns(const KvPart& part, DType wire, Transfer* transfer,
                             const Move& move) {
  const KvRange whole = RangeOf(part);
  const bool mixed = shape_.other_layers > 0;
  if (blocks_.parts() == 1 && !mixed) {
    return move(*cache_, whole, 0, &transfer->digest);
  }
  int64_t begin = 0;
  for (const LayerParts::Run& run :
       layers_.Runs(part.layer_begin, part.layer_end)) {
    auto& own = *transfer->runs.emplace_back(std::make_unique<Transfer::Run>());
    for (const int32_t block : part.block_table) {
      own.table.push_back(block < 0 ? block
                                    : blocks_.CellOf(block, run.first.part));
    }
    KvRange range = whole;
    range.block_table = own.table.data();
    range.layer_begin = run.first.layer;
    range.layer_end = run.first.layer + (run.end - run.begin);
    range.layer_shift = run.begin - run.first.layer;
    if (blocks_.windowed(run.first.part)) {
      range.position_begin = std::clamp(part.windowed_begin,
                                        part.position_begin, part.position_end);
    }
    const int64_t bytes = range.bytes(wire, shape_.head_dim);
    if (run.first.other) range.head_end = shape_.other_kv_heads;
    move(run.first.other ? cache_->other() : *cache_, range, begin,
         &own.digest);
    begin += bytes;
  }
}

void DeviceExecutor::Gather(const KvPart& part, DType wire, uint64_t digest_key,
                            std::byte* staging,
                            absl::AnyInvocable<void(KvDigest)> done) {
  auto transfer =
      std::make_unique<Transfer>(Transfer{this, {}, std::move(done)});
  ForRuns(
      part, wire, transfer.get(),
      [&](KvCache& cache, const KvRange& range, int64_t at, KvDigest* digest) {
        backend_->KvGather(*transfer_, cache, range, wire, digest_key,
                           staging + at, digest);
      });
  FinishTransfer(std::move(transfer));
}

void DeviceExecutor::Scatter(const KvPart& part, DType wire,
                             const std::byte* staging,
                             absl::AnyInvocable<void()> done) {
  WaitForSteps(part);
  auto transfer = std::make_unique<Transfer>(Transfer{
      this, {}, [done = std::move(done)](KvDigest) mutable { done(); }});
  ForRuns(part, wire, transfer.get(),
          [&](KvCache& cache, const KvRange& range, int64_t at, KvDigest*) {
            backend_->KvScatter(*transfer_, cache, range, wire, staging + at);
          });
  FinishTransfer(std::move(transfer));
}

void DeviceExecutor::Digest(const KvPart& part, DType wire, uint64_t digest_key,
                            absl::AnyInvocable<void(KvDigest)> done) {
  auto transfer =
      std::make_unique<Transfer>(Transfer{this, {}, std::move(done)});
  ForRuns(part, wire, transfer.get(),
          [&](KvCache& cache, const KvRange& range, int64_t, KvDigest* digest) {
            backend_->KvDigestOf(*transfer_, cache, range, wire, digest_key,
                                 digest);
          });
  FinishTransfer(std::move(transfer));
}

// After the operation itself is on the queue.
void DeviceExecutor::FinishTransfer(std::unique_ptr<Transfer> transfer) {
  ++transfers_issued_;
  transfer_->Callback([transfer = std::move(transfer)]() mutable {
    Loop* loop = transfer->executor->loop_;
    loop->Post([transfer = std::move(transfer)] {
      ++transfer->executor->transfers_finished_;
      for (const auto& run : transfer->runs) transfer->digest += run->digest;
      transfer->done(transfer->digest);
    });
  });
}

// ---- Whole blocks

KvPart DeviceExecutor::WholeBlock(const int32_t* block) const {
  const kernels::KvShape& shape = kv_shape();
  return {.block_table = absl::MakeConstSpan(block, 1),
          .position_begin = 0,
          .position_end = shape.block_size,
          .layer_begin = 0,
          .layer_end = shape.num_layers,
          .head_begin = 0,
          .head_end = shape.kv_heads};
}

int64_t DeviceExecutor::block_bytes() const {
  const int32_t any = 0;
  return RangeOf(WholeBlock(&any)).bytes(kv_shape().dtype, kv_shape().head_dim);
}

void DeviceExecutor::SaveBlock(int32_t block, std::byte* to,
                               absl::AnyInvocable<void()> done) {
  auto transfer = std::make_unique<Transfer>(Transfer{
      this, {}, [done = std::move(done)](KvDigest) mutable { done(); }, block});
  // As if it wrote: the next step that names the block waits.
  ForCells(block,
           [&](int32_t cell) { last_scatter_[cell] = transfers_issued_ + 1; });
  ForRuns(
      WholeBlock(&transfer->block), shape_.dtype, transfer.get(),
      [&](KvCache& cache, const KvRange& range, int64_t at, KvDigest* digest) {
        backend_->KvGather(*transfer_, cache, range, shape_.dtype, 0, to + at,
                           digest);
      });
  FinishTransfer(std::move(transfer));
}

void DeviceExecutor::RestoreBlock(int32_t block, const std::byte* from,
                                  absl::AnyInvocable<void()> done) {
  auto transfer = std::make_unique<Transfer>(Transfer{
      this, {}, [done = std::move(done)](KvDigest) mutable { done(); }, block});
  const KvPart part = WholeBlock(&transfer->block);
  WaitForSteps(part);
  ForRuns(part, shape_.dtype, transfer.get(),
          [&](KvCache& cache, const KvRange& range, int64_t at, KvDigest*) {
            backend_->KvScatter(*transfer_, cache, range, shape_.dtype,
                                from + at);
          });
  FinishTransfer(std::move(transfer));
}

}  // namespace tandem::engine
