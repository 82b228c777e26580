// SPDX-License-Identifier: Apache-2.0
// Memory of the device executor. Most is sized once, for the largest step. What
// few steps need, and then maybe much of, grows with what they ask for: edits
// of logits, masks, weights of attention.

#include <algorithm>
#include <bit>
#include <utility>

#include "engine/device/device_executor.h"

namespace tandem::engine {

using kernels::SampleResult;

// ---- Sized once

absl::Status DeviceExecutor::Initialize() {
  const ModelSpec& spec = model_->spec();
  layers_ = options_.cells == nullptr ? OnePart(spec) : PartsOf(spec);
  blocks_ = {options_.block_size, options_.cells, WindowOf(spec)};
  if (options_.cells != nullptr && options_.cells->parts() != layers_.parts) {
    return absl::InvalidArgumentError(
        "executor: the pool's blocks have other parts than the model's");
  }
  shape_ = {.num_layers = spec.kv_layers(),
            .block_size = options_.block_size,
            .num_blocks = options_.num_blocks,
            .dtype = options_.kv_dtype};
  SetHeads(spec, &shape_);
  kernels::KvShape cells = shape_;
  cells.num_layers = layers_.layers_per_part;
  cells.num_blocks *= layers_.parts.count();
  absl::StatusOr<std::unique_ptr<kernels::KvCache>> cache =
      backend_->NewKvCache(cells);
  if (!cache.ok()) return cache.status();
  cache_ = *std::move(cache);
  absl::StatusOr<Workspace> workspace = Workspace::Create(
      spec, options_.max_rows, options_.draws(),
      options_.loras == nullptr ? nullptr : &options_.loras->layout(),
      backend_);
  if (!workspace.ok()) return workspace.status();
  workspace_ = std::make_unique<Workspace>(*std::move(workspace));

  const StepLimits limits{.rows = options_.max_rows,
                          .entries = options_.max_sequences,
                          .draws = options_.draws(),
                          .blocks_per_entry = MaxBlocksPerEntry()};
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> plan =
      backend_->Allocate(StepPlan::MaxBytes(limits, blocks_));
  if (!plan.ok()) return plan.status();
  device_plan_ = *std::move(plan);
  const size_t results_bytes = sizeof(SampleResult) * options_.draws();
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> results =
      backend_->Allocate(results_bytes);
  if (!results.ok()) return results.status();
  device_results_ = *std::move(results);
  for (Flight& flight : flights_) {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> memory =
        backend_->AllocateHost(results_bytes +
                               StepPlan::MaxBytes(limits, blocks_));
    if (!memory.ok()) return memory.status();
    flight.executor = this;
    flight.memory = *std::move(memory);
    flight.results = reinterpret_cast<SampleResult*>(flight.memory->data());
    flight.plan.Reserve(flight.memory->data() + results_bytes, blocks_);
  }
  const absl::Status reserved = backend_->Reserve(Limits(options_, *model_));
  if (!reserved.ok()) return reserved;
  last_step_.resize(static_cast<size_t>(cells.num_blocks));
  last_scatter_.resize(static_cast<size_t>(cells.num_blocks));
  compute_ = backend_->NewQueue("compute");
  transfer_ = backend_->NewQueue("transfer");
  const int64_t most =
      int64_t{options_.max_sequences} * model_->spec().vocab_size;
  const auto edits = static_cast<size_t>(std::min(kEditsAtStart, most));
  for (Flight& flight : flights_) {
    const absl::Status status = GrowEdits(flight, edits);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// No sequence is longer than the model or the cache.
int DeviceExecutor::MaxBlocksPerEntry() const {
  const int block_size = options_.block_size;
  const int most = (model_->max_positions() + block_size - 1) / block_size;
  if (model_->spec().common_window() > 0) return most;  // not all at once
  return std::min(NumBlockIds(), most);
}

int DeviceExecutor::NumBlockIds() const {
  return options_.cells == nullptr ? options_.num_blocks
                                   : options_.cells->num_blocks();
}

kernels::WorkLimits DeviceExecutor::Limits(const DeviceExecutorOptions& options,
                                           const Model& model) {
  const ModelSpec& spec = model.spec();
  return {.rows = options.max_rows,
          .spans = options.max_sequences,
          .sampled = options.draws(),
          .positions = model.max_positions(),
          .heads = spec.heads,
          .kv_heads = std::max(spec.kv_heads, spec.full_kv_heads),
          .head_dim = spec.widest_head_dim(),
          .vocab = spec.vocab_size,
          .gated = 2 * std::max(spec.widest_dense_size(), spec.expert_size),
          .hidden = spec.hidden_size,
          .experts = spec.routes.experts,
          .experts_per_row = spec.routes.chosen};
}

// ---- Growing

absl::Status DeviceExecutor::ReserveEdits(Flight& flight, const Step& step) {
  size_t count = 0;
  for (const StepEntry& entry : step.entries) {
    for (const RowDraw& draw : entry.draws) count += draw.edits.size();
  }
  return GrowEdits(flight, count);
}

// Few rows have edits; what penalties make of long histories of all would be
// too much to keep.
absl::Status DeviceExecutor::GrowEdits(Flight& flight, size_t count) {
  if (count == 0) return absl::OkStatus();
  return Grow(count * sizeof(kernels::LogitEdit), &flight.edits,
              &device_edits_);
}

absl::Status DeviceExecutor::ReserveMasks(Flight& flight, const Step& step) {
  size_t count = 0;
  for (const StepEntry& entry : step.entries) {
    count += static_cast<size_t>(entry.constrained());
  }
  if (count == 0) return absl::OkStatus();
  const auto words =
      static_cast<size_t>(kernels::MaskWords(model_->spec().vocab_size));
  return Grow(count * words * sizeof(uint32_t), &flight.masks,
              &flight.device_masks);
}

// One look works after the other, so all share the states.
absl::Status DeviceExecutor::PlanLooks(Flight& flight, const Step& step) {
  flight.looks.clear();
  size_t floats = 0;
  int row = -1;    // the last one of the entry
  int drawn = -1;  // and the last one that draws
  for (size_t e = 0; e < step.entries.size(); ++e) {
    const StepEntry& entry = step.entries[e];
    const auto tokens = static_cast<int>(entry.tokens.size());
    row += tokens;
    drawn += static_cast<int>(entry.draws.size());
    if (entry.attention != nullptr) {
      RowLook& look = flight.looks.emplace_back();
      look.ask = entry.attention;
      look.look.row = row;
      look.drawn = drawn;
      look.look.position = entry.position + tokens - 1;
      look.entry = static_cast<int>(e);
      floats += static_cast<size_t>(entry.attention->rows()) *
                static_cast<size_t>(entry.position + tokens);
    }
  }
  if (flight.looks.empty()) return absl::OkStatus();
  const absl::Status grown = Grow((StatesFloats() + floats) * sizeof(float),
                                  &flight.attention, &device_attention_);
  if (!grown.ok()) return grown;
  auto* const states = reinterpret_cast<float*>(device_attention_->data());
  float* out = states + StatesFloats();
  for (RowLook& look : flight.looks) {
    look.look.states = states;
    look.look.out = out;
    out += int64_t{look.ask->rows()} * (look.look.position + 1);
  }
  return absl::OkStatus();
}

size_t DeviceExecutor::StatesFloats() const {
  return 2 * static_cast<size_t>(model_->spec().heads);
}

// Nothing is freed while serving: that may wait for the whole GPU, and so for a
// handoff's receive whose sender waits for this loop. Sizes double, so what is
// kept is less than what has replaced it; steps in flight may go on using it.
absl::Status DeviceExecutor::Grow(size_t bytes,
                                  std::unique_ptr<kernels::Buffer>* host,
                                  std::unique_ptr<kernels::Buffer>* device) {
  bytes = std::bit_ceil(bytes);
  if (*host == nullptr || (*host)->size() < bytes) {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> larger =
        backend_->AllocateHost(bytes);
    if (!larger.ok()) return larger.status();
    outgrown_.push_back(std::exchange(*host, *std::move(larger)));
  }
  if (*device == nullptr || (*device)->size() < bytes) {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> larger =
        backend_->Allocate(bytes);
    if (!larger.ok()) return larger.status();
    outgrown_.push_back(std::exchange(*device, *std::move(larger)));
  }
  return absl::OkStatus();
}

}  // namespace tandem::engine
