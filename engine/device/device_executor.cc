// SPDX-License-Identifier: Apache-2.0
// The way of a step through the device: it is put on the queue as a whole, and
// comes back to the loop with its tokens.

#include "engine/device/device_executor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/available_cpus.h"
#include "engine/model/layer_groups.h"

namespace tandem::engine {

using kernels::SampleResult;

namespace {

SampledToken ToToken(const SampleResult& result) {
  SampledToken token{result.token_id, result.logprob, result.rank, {}};
  token.top.reserve(result.num_top);
  for (int i = 0; i < result.num_top; ++i) {
    token.top.push_back({result.top_ids[i], result.top_logprobs[i]});
  }
  return token;
}

// As in decoding: nobody waits for its layers.
bool DrawsAllRows(const Step& step) {
  return std::all_of(step.entries.begin(), step.entries.end(),
                     [](const StepEntry& entry) {
                       return entry.draws.size() == entry.tokens.size();
                     });
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

DeviceExecutor::~DeviceExecutor() { Synchronize(); }

void DeviceExecutor::Synchronize() {
  if (masks_ != nullptr) masks_->Synchronize();
  if (compute_ != nullptr) compute_->Synchronize();
  if (transfer_ != nullptr) transfer_->Synchronize();
}

// ---- A step comes

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

// Puts the whole step on the queue.
void DeviceExecutor::Run(Flight& flight) {
  StepPlan& plan = flight.plan;
  const Decode decode = DecodeOf(*flight.step);
  plan.Fill(*flight.step, decode.size);
  newest_ = &flight;
  if (plan.num_masks() > 0) MakeMasks(flight);
  for (const BlockCopy& copy : flight.step->copies) {
    for (int part = 0; part < blocks_.parts(); ++part) {
      backend_->KvCopyBlock(*compute_, *cache_, blocks_.CellOf(copy.from, part),
                            blocks_.CellOf(copy.to, part));
    }
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
  } else if (!backend_->Replay(*compute_, decode.key())) {
    RunDecode(plan, decode);
  }
  if (plan.drawn() > 0) FetchTokens(flight);
  compute_->Callback([&flight] {
    flight.executor->loop_->Post(
        [&flight] { flight.executor->Finish(flight); });
  });
}

// Only the draws at the step's end wait for them.
void DeviceExecutor::MakeMasks(Flight& flight) {
  if (masks_ == nullptr) {
    mask_threads_ =
        std::make_unique<MaskThreads>(MaskThreads::HelpersFor(AvailableCpus()));
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

void DeviceExecutor::RunMixed(Flight& flight) {
  const StepPlan& plan = flight.plan;
  const std::byte* device = device_plan_->data();
  const int layers = model_->spec().kv_layers();
  const int group = LayersPerReport(*flight.step);
  PartRows drawn;
  for (int part = 0; part < blocks_.parts(); ++part) {
    drawn.push_back(plan.DeviceDrawnRows(device, part));
  }
  Forward(
      *model_, RowsOf(plan), layers_.places,
      {plan.drawn(), plan.DeviceRowIds(device), drawn}, AdaptersOf(flight),
      *backend_, *compute_, *cache_, *workspace_,
      [&](int written) {
        if (group > 0 && (written % group == 0 || written == layers)) {
          ReportLayers(flight, written);
        }
      },
      flight.looks);
  if (plan.num_masks() > 0) compute_->WaitFor(*masks_);
  if (plan.drawn() > 0) DrawTokens(plan, plan.drawn(), &flight);
}

DeviceExecutor::PartRows DeviceExecutor::RowsOf(const StepPlan& plan) const {
  PartRows rows;
  for (int part = 0; part < blocks_.parts(); ++part) {
    rows.push_back(plan.DeviceRows(device_plan_->data(), part));
    rows.back().drawn =
        reinterpret_cast<const SampleResult*>(device_results_->data());
  }
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

// What is reported of a sequence becomes slices of its own, so the mean entry
// decides. Zero: with the step's end.
int DeviceExecutor::LayersPerReport(const Step& step) const {
  if (DrawsAllRows(step)) return 0;
  const int layers = model_->spec().kv_layers();
  if (options_.layers_per_group > 0) return options_.layers_per_group;
  int64_t rows = 0;
  for (const StepEntry& entry : step.entries) {
    rows += static_cast<int64_t>(entry.tokens.size());
  }
  const int64_t mean = rows / static_cast<int64_t>(step.entries.size());
  return LayersPerGroup(layers, mean * kv_shape().bytes_per_position() / layers,
                        options_.group_bytes);
}

void DeviceExecutor::ReportLayers(Flight& flight, int layers) {
  compute_->Callback([&flight, layers] {
    flight.executor->loop_->Post([&flight, layers] {
      flight.listener->OnLayersDone(flight.step->id, layers);
    });
  });
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

// ---- It is done

// On the loop. The flight is free before the listener, who may submit, runs.
void DeviceExecutor::Finish(Flight& flight) {
  ++steps_finished_;
  const uint64_t id = flight.step->id;
  StepListener* listener = flight.listener;
  if (LayersPerReport(*flight.step) == 0) {
    listener->OnLayersDone(id, model_->spec().kv_layers());
  }
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

// ---- Adapters

void DeviceExecutor::PutAdapter(int slot, const LoraAdapter& adapter,
                                absl::AnyInvocable<void()> done) {
  options_.loras->Put(slot, adapter, *compute_);
  compute_->Callback([loop = loop_, done = std::move(done)]() mutable {
    loop->Post([done = std::move(done)]() mutable { done(); });
  });
}

}  // namespace tandem::engine
