// SPDX-License-Identifier: Apache-2.0
// Decodes that the backend has recorded, one for each size and bound of
// positions: which there are, how they are made, and which one a step can be.

#include <algorithm>

#include "engine/device/device_executor.h"

namespace tandem::engine {

std::vector<int> DeviceExecutor::DecodeSizes(int most) {
  std::vector<int> sizes;
  for (int size = 1; size < most; size += size < 8 ? size : 8) {
    sizes.push_back(size);
  }
  sizes.push_back(most);
  return sizes;
}

std::vector<int> DeviceExecutor::DecodeBounds(int most) {
  std::vector<int> bounds;
  for (int64_t bound = 2048; bound < most; bound *= 4) {
    bounds.push_back(static_cast<int>(bound));
  }
  bounds.push_back(most);
  return bounds;
}

absl::Status DeviceExecutor::RecordDecodes(
    absl::FunctionRef<void(int, int)> progress) {
  decode_sizes_ = DecodeSizes(options_.max_sequences);
  decode_bounds_ = DecodeBounds(model_->max_positions());
  const size_t total = decode_sizes_.size() * decode_bounds_.size();
  const Step nobody;
  StepPlan& plan = flights_[0].plan;
  int done = 0;
  // The largest first: what memory the backend takes, it takes but once.
  for (size_t b = decode_bounds_.size(); b-- > 0;) {
    for (size_t s = decode_sizes_.size(); s-- > 0;) {
      const Decode decode{decode_sizes_[s], decode_bounds_[b]};
      plan.Fill(nobody, decode.size);
      backend_->CopyToDevice(*compute_, device_plan_->data(), plan.data(),
                             plan.size());
      const absl::Status status = backend_->Record(
          *compute_, decode.key(), [&] { RunDecode(plan, decode); });
      compute_->Synchronize();
      if (!status.ok()) return ForgetRecords(status);
      progress(++done, static_cast<int>(total));
    }
  }
  recorded_ = true;
  return absl::OkStatus();
}

// With the queue goes what was recorded on it, which would take memory for
// nothing, and what was reserved for it.
absl::Status DeviceExecutor::ForgetRecords(absl::Status why) {
  compute_.reset();
  why.Update(backend_->Reserve(Limits(options_, *model_)));
  compute_ = backend_->NewQueue("compute");
  return why;
}

DeviceExecutor::Decode DeviceExecutor::DecodeOf(const Step& step) const {
  if (!recorded_) return {};
  int end = 0;
  for (const StepEntry& entry : step.entries) {
    // Edits lie elsewhere from when their memory grew.
    if (entry.tokens.size() != 1 || entry.adapter >= 0 ||
        entry.attention != nullptr || entry.constraint != nullptr ||
        entry.draws.size() != 1 || !entry.draws[0].edits.empty()) {
      return {};
    }
    end = std::max(end, entry.position + 1);
  }
  const int count = static_cast<int>(step.entries.size());
  // Check has seen to both limits.
  return {*std::lower_bound(decode_sizes_.begin(), decode_sizes_.end(), count),
          *std::lower_bound(decode_bounds_.begin(), decode_bounds_.end(), end)};
}

// Nothing here may depend on the plan but through the device's copy of it.
void DeviceExecutor::RunDecode(const StepPlan& plan, const Decode& decode) {
  const std::byte* device = device_plan_->data();
  PartRows rows = RowsOf(plan);
  for (kernels::Rows& of_part : rows) of_part.max_positions = decode.bound;
  Forward(*model_, rows, layers_.places,
          {decode.size, plan.DeviceRowIds(device)}, {}, *backend_, *compute_,
          *cache_, *workspace_, [](int) {});
  DrawTokens(plan, decode.size, nullptr);
}

}  // namespace tandem::engine
