// SPDX-License-Identifier: Apache-2.0
#include "engine/device_executor.h"

#include <algorithm>
#include <bit>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/layer_groups.h"

namespace tandem::engine {

using kernels::DType;
using kernels::KvDigest;
using kernels::KvRange;
using kernels::SampleResult;

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

absl::Status OutOfRange(std::string_view what, int64_t value, int64_t min,
                        int64_t max) {
  return absl::InvalidArgumentError(absl::StrCat("step: ", std::string(what),
                                                 " ", value, " is outside ",
                                                 min, " to ", max));
}

SampledToken ToToken(const SampleResult& result) {
  SampledToken token{result.token_id, result.logprob, result.rank, {}};
  token.top.reserve(result.num_top);
  for (int i = 0; i < result.num_top; ++i) {
    token.top.push_back({result.top_ids[i], result.top_logprobs[i]});
  }
  return token;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceExecutor>> DeviceExecutor::Create(
    const DeviceExecutorOptions& options, const Model* model,
    kernels::Backend* backend, Loop* loop) {
  if (options.max_rows < 1 || options.max_sequences < 1 ||
      options.max_sequences > options.max_rows ||
      options.draws() < options.max_sequences || options.num_blocks < 1 ||
      options.block_size < 8 || options.block_size % 8 != 0 ||
      options.layers_per_group < 0 || options.group_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "executor: max_rows ", options.max_rows, ", max_sequences ",
        options.max_sequences, ", max_draws ", options.max_draws,
        ", num_blocks ", options.num_blocks, ", block_size ",
        options.block_size, ", layers_per_group ", options.layers_per_group,
        ", group_bytes ", options.group_bytes,
        ": all must be positive (max_draws and the last two may be 0), "
        "max_sequences at most max_rows and max_draws, block_size a multiple "
        "of 8"));
  }
  std::unique_ptr<DeviceExecutor> executor(
      new DeviceExecutor(options, model, backend, loop));
  const absl::Status status = executor->Initialize();
  if (!status.ok()) return status;
  return executor;
}

absl::Status DeviceExecutor::Initialize() {
  const ModelSpec& spec = model_->spec();
  absl::StatusOr<std::unique_ptr<kernels::KvCache>> cache =
      backend_->NewKvCache({.num_layers = spec.layers,
                            .kv_heads = spec.kv_heads,
                            .head_dim = spec.head_dim,
                            .block_size = options_.block_size,
                            .num_blocks = options_.num_blocks,
                            .dtype = options_.kv_dtype});
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
      backend_->Allocate(StepPlan::MaxBytes(limits));
  if (!plan.ok()) return plan.status();
  device_plan_ = *std::move(plan);
  const size_t results_bytes = sizeof(SampleResult) * options_.draws();
  absl::StatusOr<std::unique_ptr<kernels::Buffer>> results =
      backend_->Allocate(results_bytes);
  if (!results.ok()) return results.status();
  device_results_ = *std::move(results);
  for (Flight& flight : flights_) {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> memory =
        backend_->AllocateHost(results_bytes + StepPlan::MaxBytes(limits));
    if (!memory.ok()) return memory.status();
    flight.executor = this;
    flight.memory = *std::move(memory);
    flight.results = reinterpret_cast<SampleResult*>(flight.memory->data());
    flight.plan.Reserve(flight.memory->data() + results_bytes);
  }
  const absl::Status reserved = backend_->Reserve(Limits(options_, *model_));
  if (!reserved.ok()) return reserved;
  last_step_.resize(options_.num_blocks);
  last_scatter_.resize(options_.num_blocks);
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

kernels::WorkLimits DeviceExecutor::Limits(const DeviceExecutorOptions& options,
                                           const Model& model) {
  const ModelSpec& spec = model.spec();
  return {.rows = options.max_rows,
          .spans = options.max_sequences,
          .sampled = options.draws(),
          .positions = model.max_positions(),
          .heads = spec.heads,
          .kv_heads = spec.kv_heads,
          .head_dim = spec.head_dim,
          .vocab = spec.vocab_size,
          .gated = 2 * spec.intermediate_size,
          .hidden = spec.hidden_size,
          .experts = spec.experts,
          .experts_per_row = spec.experts_per_token};
}

DeviceExecutor::~DeviceExecutor() { Synchronize(); }

void DeviceExecutor::Synchronize() {
  if (masks_ != nullptr) masks_->Synchronize();
  if (compute_ != nullptr) compute_->Synchronize();
  if (transfer_ != nullptr) transfer_->Synchronize();
}

absl::Status DeviceExecutor::Check(const Step& step) const {
  int64_t rows = 0;
  int64_t draws = 0;
  for (const StepEntry& entry : step.entries) {
    absl::Status status = CheckEntry(entry);
    if (status.ok()) status = CheckDraws(entry);
    if (status.ok()) status = CheckAttention(entry);
    if (!status.ok()) return status;
    rows += static_cast<int64_t>(entry.tokens.size());
    draws += static_cast<int64_t>(entry.draws.size());
  }
  for (const BlockCopy& copy : step.copies) {
    for (const int32_t block : {copy.from, copy.to}) {
      if (block >= 0 && block < options_.num_blocks) continue;
      return OutOfRange("a copy's block", block, 0, options_.num_blocks - 1);
    }
  }
  if (rows < 1 || rows > options_.max_rows) {
    return OutOfRange("rows", rows, 1, options_.max_rows);
  }
  const auto entries = static_cast<int64_t>(step.entries.size());
  if (entries > options_.max_sequences) {
    return OutOfRange("entries", entries, 1, options_.max_sequences);
  }
  if (draws > options_.draws()) {
    return OutOfRange("draws", draws, 0, options_.draws());
  }
  return absl::OkStatus();
}

// No sequence is longer than the model or the cache.
int DeviceExecutor::MaxBlocksPerEntry() const {
  const int block_size = options_.block_size;
  const int most = (model_->max_positions() + block_size - 1) / block_size;
  if (model_->spec().common_window() > 0) return most;  // not all at once
  return std::min(options_.num_blocks, most);
}

absl::Status DeviceExecutor::CheckEntry(const StepEntry& entry) const {
  const auto count = static_cast<int64_t>(entry.tokens.size());
  if (count < 1) return OutOfRange("an entry's tokens", count, 1, INT32_MAX);
  if (entry.fed >= 0) {
    if (newest_ == nullptr || newest_->step == nullptr) {
      return absl::FailedPreconditionError(
          "step: an entry is fed by the step before, which has ended");
    }
    const int drawn = newest_->plan.drawn();
    if (count != 1) return OutOfRange("a fed entry's tokens", count, 1, 1);
    if (entry.fed >= drawn) return OutOfRange("fed", entry.fed, 0, drawn - 1);
  }
  if (entry.position < 0 || entry.position + count > model_->max_positions()) {
    return OutOfRange("an entry's last position", entry.position + count - 1,
                      count - 1, model_->max_positions() - 1);
  }
  const int block_size = options_.block_size;
  const int adapters = options_.loras == nullptr ? 0 : options_.loras->count();
  if (entry.adapter < -1 || entry.adapter >= adapters) {
    return OutOfRange("adapter", entry.adapter, -1, adapters - 1);
  }
  const int64_t needed = (entry.position + count + block_size - 1) / block_size;
  const int64_t most = MaxBlocksPerEntry();
  const auto blocks = static_cast<int64_t>(entry.block_table.size());
  if (blocks < needed || blocks > most) {
    return OutOfRange("an entry's blocks", blocks, needed, most);
  }
  const int window = model_->spec().common_window();
  const int seen = window == 0 ? 0 : std::max(0, entry.position - window + 1);
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t block = entry.block_table[static_cast<size_t>(b)];
    const bool behind = block == -1 && b < seen / block_size;
    if (!behind && (block < 0 || block >= options_.num_blocks)) {
      return OutOfRange("block", block, 0, options_.num_blocks - 1);
    }
  }
  const int vocab = model_->spec().vocab_size;
  for (const int32_t token : entry.tokens) {
    if (token < 0 || token >= vocab) {
      return OutOfRange("token id", token, 0, vocab - 1);
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceExecutor::CheckAttention(const StepEntry& entry) const {
  if (entry.attention == nullptr) return absl::OkStatus();
  if (entry.draws.empty()) {
    return absl::InvalidArgumentError(
        "step: an entry asks for attention weights and draws no token");
  }
  int32_t least = 0;
  const int32_t last = model_->spec().layers - 1;
  for (const int32_t layer : entry.attention->layers) {
    if (layer < least || layer > last) {
      return OutOfRange("a layer of attention weights", layer, least, last);
    }
    least = layer + 1;
  }
  const int64_t positions =
      entry.position + static_cast<int64_t>(entry.tokens.size());
  const int64_t count = entry.attention->rows() * positions;
  if (count < 1 || count > kMaxAttentionWeights) {
    return OutOfRange("attention weights", count, 1, kMaxAttentionWeights);
  }
  return absl::OkStatus();
}

absl::Status DeviceExecutor::CheckDraws(const StepEntry& entry) const {
  const auto rows = static_cast<int64_t>(entry.tokens.size());
  const auto draws = static_cast<int64_t>(entry.draws.size());
  if (draws > rows) return OutOfRange("an entry's draws", draws, 0, rows);
  const int vocab = model_->spec().vocab_size;
  for (const RowDraw& draw : entry.draws) {
    const auto edits = static_cast<int64_t>(draw.edits.size());
    if (edits > vocab) return OutOfRange("a draw's edits", edits, 0, vocab);
    for (const kernels::LogitEdit& edit : draw.edits) {
      if (edit.token_id < 0 || edit.token_id >= vocab) {
        return OutOfRange("an edit's token id", edit.token_id, 0, vocab - 1);
      }
    }
    if (draw.given >= vocab) {
      return OutOfRange("a given token id", draw.given, -1, vocab - 1);
    }
    if (draw.constrained && entry.constraint == nullptr) {
      return absl::InvalidArgumentError(
          "step: a draw is constrained, and its entry has no constraint");
    }
    if (draw.given_logprobs > kernels::kMaxTopLogprobs) {
      return OutOfRange("given_logprobs", draw.given_logprobs, -1,
                        kernels::kMaxTopLogprobs);
    }
  }
  if (entry.sampling.logprobs > kernels::kMaxTopLogprobs) {
    return OutOfRange("logprobs", entry.sampling.logprobs, -1,
                      kernels::kMaxTopLogprobs);
  }
  return absl::OkStatus();
}

void DeviceExecutor::Submit(const Step* step, StepListener* listener) {
  absl::Status status = Check(*step);
  const auto free =
      std::find_if(flights_.begin(), flights_.end(),
                   [](const Flight& flight) { return flight.step == nullptr; });
  if (status.ok() && free == flights_.end()) {
    status = absl::FailedPreconditionError(
        absl::StrCat("step: ", kStepsInFlight, " steps are in flight already"));
  }
  if (status.ok()) status = ReserveEdits(*free, *step);
  if (status.ok()) status = ReserveMasks(*free, *step);
  if (status.ok()) status = PlanLooks(*free, *step);
  if (!status.ok()) {
    newest_ = nullptr;
    // By way of the queue: steps end in the order in which they were submitted.
    compute_->Callback([loop = loop_, id = step->id, listener,
                        status = std::move(status)]() mutable {
      loop->Post([id, listener, status = std::move(status)] {
        listener->OnStepDone(id, status);
      });
    });
    return;
  }
  free->step = step;
  free->listener = listener;
  WaitForScatters(*step);
  Run(*free);
}

// What is reported of a sequence becomes slices of its own, so the mean entry
// decides. Steps of single rows are decoding: nobody waits for their layers.
int DeviceExecutor::LayersPerReport(const Step& step) const {
  const int layers = model_->spec().layers;
  if (options_.layers_per_group > 0) return options_.layers_per_group;
  int64_t rows = 0;
  for (const StepEntry& entry : step.entries) {
    rows += static_cast<int64_t>(entry.tokens.size());
  }
  const int64_t mean = rows / static_cast<int64_t>(step.entries.size());
  return LayersPerGroup(layers, mean * kv_shape().bytes_per_position() / layers,
                        options_.group_bytes);
}

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
      plan.Fill(nobody, options_.block_size, decode.size);
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

// Puts the whole step on the queue.
void DeviceExecutor::Run(Flight& flight) {
  StepPlan& plan = flight.plan;
  const Decode decode = DecodeOf(*flight.step);
  plan.Fill(*flight.step, options_.block_size, decode.size);
  newest_ = &flight;
  if (plan.num_masks() > 0) MakeMasks(flight);
  for (const BlockCopy& copy : flight.step->copies) {
    backend_->KvCopyBlock(*compute_, *cache_, copy.from, copy.to);
  }
  backend_->CopyToDevice(*compute_, device_plan_->data(), plan.data(),
                         plan.size());
  if (plan.num_edits() > 0) {
    auto* const edits =
        reinterpret_cast<kernels::LogitEdit*>(flight.edits->data());
    StepPlan::CopyEdits(*flight.step, edits);
    backend_->CopyToDevice(*compute_, device_edits_->data(), edits,
                           sizeof(kernels::LogitEdit) * plan.num_edits());
  }
  if (decode.size == 0) {
    RunMixed(flight);
  } else {
    if (!backend_->Replay(*compute_, decode.key())) RunDecode(plan, decode);
    ReportLayers(flight, model_->spec().layers);
  }
  if (plan.drawn() > 0) FetchTokens(flight);
  compute_->Callback([&flight] {
    flight.executor->loop_->Post(
        [&flight] { flight.executor->Finish(flight); });
  });
}

kernels::Rows DeviceExecutor::RowsOf(const StepPlan& plan) const {
  kernels::Rows rows = plan.DeviceRows(device_plan_->data());
  rows.drawn = reinterpret_cast<const SampleResult*>(device_results_->data());
  return rows;
}

StepAdapters DeviceExecutor::AdaptersOf(const Flight& flight) const {
  if (!flight.plan.has_adapters()) return {};
  StepAdapters adapters{
      .slots = options_.loras,
      .rows = flight.plan.DeviceAdapters(device_plan_->data()),
      .sampled = flight.plan.DeviceDrawnAdapters(device_plan_->data())};
  for (const StepEntry& entry : flight.step->entries) {
    if (entry.adapter >= 0) {
      adapters.sections |= options_.loras->sections(entry.adapter);
    }
  }
  return adapters;
}

void DeviceExecutor::PutAdapter(int slot, const LoraAdapter& adapter,
                                absl::AnyInvocable<void()> done) {
  options_.loras->Put(slot, adapter, *compute_);
  compute_->Callback([loop = loop_, done = std::move(done)]() mutable {
    loop->Post([done = std::move(done)]() mutable { done(); });
  });
}

void DeviceExecutor::RunMixed(Flight& flight) {
  const StepPlan& plan = flight.plan;
  const std::byte* device = device_plan_->data();
  const int layers = model_->spec().layers;
  const int group = LayersPerReport(*flight.step);
  Forward(
      *model_, RowsOf(plan), {plan.drawn(), plan.DeviceRowIds(device)},
      AdaptersOf(flight), *backend_, *compute_, *cache_, *workspace_,
      [&](int written) {
        if (written % group == 0 || written == layers) {
          ReportLayers(flight, written);
        }
      },
      flight.looks);
  if (plan.num_masks() > 0) compute_->WaitFor(*masks_);
  if (plan.drawn() > 0) DrawTokens(plan, plan.drawn(), &flight);
}

// Nothing here may depend on the plan but through the device's copy of it.
void DeviceExecutor::RunDecode(const StepPlan& plan, const Decode& decode) {
  const std::byte* device = device_plan_->data();
  kernels::Rows rows = RowsOf(plan);
  rows.max_positions = decode.bound;
  Forward(*model_, rows, {decode.size, plan.DeviceRowIds(device)}, {},
          *backend_, *compute_, *cache_, *workspace_, [](int) {});
  DrawTokens(plan, decode.size, nullptr);
}

void DeviceExecutor::DrawTokens(const StepPlan& plan, int count,
                                const Flight* flight) {
  kernels::LogitEdit* edits = nullptr;
  if (plan.num_edits() > 0) {
    edits = reinterpret_cast<kernels::LogitEdit*>(device_edits_->data());
  }
  const uint32_t* masks = nullptr;
  if (flight != nullptr && plan.num_masks() > 0) {
    masks = reinterpret_cast<const uint32_t*>(flight->device_masks->data());
  }
  backend_->Sample(*compute_, count, model_->spec().vocab_size,
                   workspace_->logits, plan.DeviceParams(device_plan_->data()),
                   edits, masks,
                   reinterpret_cast<SampleResult*>(device_results_->data()));
}

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

// Only the draws at the step's end wait for them.
void DeviceExecutor::MakeMasks(Flight& flight) {
  if (masks_ == nullptr) {
    mask_threads_ = std::make_unique<MaskThreads>(MaskThreads::HelpersFor(
        static_cast<int>(std::thread::hardware_concurrency())));
    masks_ = backend_->NewQueue("masks");
  }
  auto* const masks = reinterpret_cast<uint32_t*>(flight.masks->data());
  const auto words =
      static_cast<size_t>(kernels::MaskWords(model_->spec().vocab_size));
  const size_t all = static_cast<size_t>(flight.plan.num_masks()) * words;
  flight.masked.clear();
  uint32_t* next = masks;
  for (const StepEntry& entry : flight.step->entries) {
    const size_t count = static_cast<size_t>(entry.constrained()) * words;
    if (count == 0) continue;
    flight.masked.push_back({&entry, absl::MakeSpan(next, count)});
    next += count;
  }
  masks_->HostWork([&flight, threads = mask_threads_.get()] {
    threads->Run(static_cast<int>(flight.masked.size()), [&flight](int index) {
      const EntryMasks& own = flight.masked[static_cast<size_t>(index)];
      std::fill(own.masks.begin(), own.masks.end(), 0);
      own.entry->FillMasks(own.masks);
    });
  });
  backend_->CopyToDevice(*masks_, flight.device_masks->data(), masks,
                         all * sizeof(uint32_t));
}

absl::Status DeviceExecutor::Grow(size_t bytes,
                                  std::unique_ptr<kernels::Buffer>* host,
                                  std::unique_ptr<kernels::Buffer>* device) {
  bytes = std::bit_ceil(bytes);
  if (*host == nullptr || (*host)->size() < bytes) {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> larger =
        backend_->AllocateHost(bytes);
    if (!larger.ok()) return larger.status();
    *host = *std::move(larger);
  }
  if (*device == nullptr || (*device)->size() < bytes) {
    absl::StatusOr<std::unique_ptr<kernels::Buffer>> larger =
        backend_->Allocate(bytes);
    if (!larger.ok()) return larger.status();
    compute_->Synchronize();  // the step that runs may use the smaller one
    *device = *std::move(larger);
  }
  return absl::OkStatus();
}

size_t DeviceExecutor::StatesFloats() const {
  return 2 * static_cast<size_t>(model_->spec().heads);
}

// One look works after the other, so all share the states.
absl::Status DeviceExecutor::PlanLooks(Flight& flight, const Step& step) {
  flight.looks.clear();
  size_t floats = 0;
  int row = -1;  // the last one of the entry
  int64_t table = 0;
  for (const StepEntry& entry : step.entries) {
    const auto tokens = static_cast<int>(entry.tokens.size());
    row += tokens;
    if (entry.attention != nullptr) {
      RowLook& look = flight.looks.emplace_back();
      look.ask = entry.attention;
      look.look.row = row;
      look.look.position = entry.position + tokens - 1;
      look.look.block_table = table;
      floats += static_cast<size_t>(entry.attention->rows()) *
                static_cast<size_t>(entry.position + tokens);
    }
    table += static_cast<int64_t>(entry.block_table.size());
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

void DeviceExecutor::FetchTokens(Flight& flight) {
  const int drawn = flight.plan.drawn();
  backend_->CopyToHost(*compute_, flight.results, device_results_->data(),
                       sizeof(SampleResult) * drawn);
  if (!flight.looks.empty()) {
    const RowLook& last = flight.looks.back();
    const float* const end =
        last.look.out + int64_t{last.ask->rows()} * (last.look.position + 1);
    const float* const begin = flight.looks.front().look.out;
    backend_->CopyToHost(*compute_, flight.attention->data(), begin,
                         static_cast<size_t>(end - begin) * sizeof(float));
  }
  if (!probe_) return;
  flight.logits.resize(static_cast<size_t>(drawn) * model_->spec().vocab_size);
  backend_->CopyToHost(*compute_, flight.logits.data(), workspace_->logits,
                       flight.logits.size() * sizeof(float));
}

void DeviceExecutor::ReportLayers(Flight& flight, int layers) {
  compute_->Callback([&flight, layers] {
    flight.executor->loop_->Post([&flight, layers] {
      flight.listener->OnLayersDone(flight.step->id, layers);
    });
  });
}

// Of entries that asked: to the token of their last draw.
void DeviceExecutor::TakeAttention(const Flight& flight, StepResult* result) {
  if (flight.looks.empty()) return;
  const auto* next = reinterpret_cast<const float*>(flight.attention->data());
  size_t token = 0;
  for (const StepEntry& entry : flight.step->entries) {
    token += entry.draws.size();
    if (entry.attention == nullptr) continue;
    const auto count =
        static_cast<std::ptrdiff_t>(entry.attention->rows()) *
        (entry.position + static_cast<std::ptrdiff_t>(entry.tokens.size()));
    result->tokens[token - 1].attention.assign(next, next + count);
    next += count;
  }
}

// On the loop. The flight is free before the listener, who may submit, runs.
void DeviceExecutor::Finish(Flight& flight) {
  ++steps_finished_;
  const uint64_t id = flight.step->id;
  StepListener* listener = flight.listener;
  const int vocab = model_->spec().vocab_size;
  StepResult result;
  result.tokens.reserve(flight.plan.drawn());
  for (int at = 0; at < flight.plan.drawn(); ++at) {
    if (probe_) {
      probe_(id, at,
             absl::MakeConstSpan(flight.logits)
                 .subspan(static_cast<size_t>(at) * vocab, vocab));
    }
    result.tokens.push_back(ToToken(flight.results[at]));
  }
  TakeAttention(flight, &result);
  flight.step = nullptr;
  listener->OnStepDone(id, std::move(result));
}

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

absl::Span<const int32_t> DeviceExecutor::BlocksOf(const KvPart& part) const {
  const int block_size = options_.block_size;
  const int first = part.position_begin / block_size;
  const int last = (part.position_end + block_size - 1) / block_size;
  return part.block_table.subspan(first, last - first);
}

void DeviceExecutor::WaitForSteps(const KvPart& part) {
  uint64_t newest = 0;
  for (const int32_t block : BlocksOf(part)) {
    newest = std::max(newest, last_step_[block]);
    last_scatter_[block] = transfers_issued_ + 1;
  }
  if (newest > steps_finished_) transfer_->WaitFor(*compute_);
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
