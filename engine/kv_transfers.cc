// SPDX-License-Identifier: Apache-2.0
// KV into and out of the device executor's cache, on a queue beside that of the
// steps, and where the two must meet because both touch a block.

#include <algorithm>
#include <utility>

#include "engine/device_executor.h"

namespace tandem::engine {

using kernels::DType;
using kernels::KvDigest;
using kernels::KvRange;

// A gather, scatter or digest under way: where the device puts its digest.
struct DeviceExecutor::Transfer {
  DeviceExecutor* executor;
  KvDigest digest;
  absl::AnyInvocable<void(KvDigest)> done;
  int32_t block = -1;  // the block table of what moves a whole one
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
  const auto use = [&](int32_t block) {
    newest = std::max(newest, last_scatter_[block]);
    last_step_[block] = steps_issued_;
  };
  for (const StepEntry& entry : step.entries) {
    for (const int32_t block : entry.block_table) {
      if (block >= 0) use(block);  // else behind the window
    }
  }
  for (const BlockCopy& copy : step.copies) {
    use(copy.from);
    use(copy.to);
  }
  if (newest > transfers_finished_) compute_->WaitFor(*transfer_);
}

void DeviceExecutor::WaitForSteps(const KvPart& part) {
  uint64_t newest = 0;
  for (const int32_t block : BlocksOf(part)) {
    newest = std::max(newest, last_step_[block]);
    last_scatter_[block] = transfers_issued_ + 1;
  }
  if (newest > steps_finished_) transfer_->WaitFor(*compute_);
}

absl::Span<const int32_t> DeviceExecutor::BlocksOf(const KvPart& part) const {
  const int block_size = options_.block_size;
  const int first = part.position_begin / block_size;
  const int last = (part.position_end + block_size - 1) / block_size;
  return part.block_table.subspan(first, last - first);
}

// ---- Parts of sequences

void DeviceExecutor::Gather(const KvPart& part, DType wire, uint64_t digest_key,
                            std::byte* staging,
                            absl::AnyInvocable<void(KvDigest)> done) {
  auto transfer =
      std::make_unique<Transfer>(Transfer{this, {}, std::move(done)});
  backend_->KvGather(*transfer_, *cache_, RangeOf(part), wire, digest_key,
                     staging, &transfer->digest);
  FinishTransfer(std::move(transfer));
}

void DeviceExecutor::Scatter(const KvPart& part, DType wire,
                             const std::byte* staging,
                             absl::AnyInvocable<void()> done) {
  WaitForSteps(part);
  auto transfer = std::make_unique<Transfer>(Transfer{
      this, {}, [done = std::move(done)](KvDigest) mutable { done(); }});
  backend_->KvScatter(*transfer_, *cache_, RangeOf(part), wire, staging);
  FinishTransfer(std::move(transfer));
}

void DeviceExecutor::Digest(const KvPart& part, DType wire, uint64_t digest_key,
                            absl::AnyInvocable<void(KvDigest)> done) {
  auto transfer =
      std::make_unique<Transfer>(Transfer{this, {}, std::move(done)});
  backend_->KvDigestOf(*transfer_, *cache_, RangeOf(part), wire, digest_key,
                       &transfer->digest);
  FinishTransfer(std::move(transfer));
}

// After the operation itself is on the queue.
void DeviceExecutor::FinishTransfer(std::unique_ptr<Transfer> transfer) {
  ++transfers_issued_;
  transfer_->Callback([transfer = std::move(transfer)]() mutable {
    Loop* loop = transfer->executor->loop_;
    loop->Post([transfer = std::move(transfer)] {
      ++transfer->executor->transfers_finished_;
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
  last_scatter_[block] = transfers_issued_ + 1;
  backend_->KvGather(*transfer_, *cache_, RangeOf(WholeBlock(&transfer->block)),
                     kv_shape().dtype, 0, to, &transfer->digest);
  FinishTransfer(std::move(transfer));
}

void DeviceExecutor::RestoreBlock(int32_t block, const std::byte* from,
                                  absl::AnyInvocable<void()> done) {
  auto transfer = std::make_unique<Transfer>(Transfer{
      this, {}, [done = std::move(done)](KvDigest) mutable { done(); }, block});
  const KvPart part = WholeBlock(&transfer->block);
  WaitForSteps(part);
  backend_->KvScatter(*transfer_, *cache_, RangeOf(part), kv_shape().dtype,
                      from);
  FinishTransfer(std::move(transfer));
}

}  // namespace tandem::engine
