// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/rig.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>

#include "kernels/cpu/cpu_backend.h"
#include "tests/engine/notification.h"

namespace tandem::engine {

kernels::LogitEdit Ban(int32_t token_id) {
  return {.token_id = token_id,
          .bias = -std::numeric_limits<float>::infinity()};
}
namespace {

template <typename T>
T Must(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
  std::abort();
}

constexpr uint64_t kKey = 7;

}  // namespace

std::unique_ptr<kernels::Backend> NewCpu(int threads, const std::string& isa,
                                         kernels::CpuInputs inputs) {
  return Must(kernels::NewCpuBackend(
      {.threads = threads, .instruction_set = isa, .inputs = inputs}));
}

bool HasIsa(const std::string& isa) {
  return kernels::NewCpuBackend({.threads = 1, .instruction_set = isa}).ok();
}

class Rig::Listener final : public StepListener {
 public:
  void OnLayersDone(uint64_t, int layers_done) override {
    output.layers_done.push_back(layers_done);
  }
  void OnStepDone(uint64_t, absl::StatusOr<StepResult> result) override {
    output.status = result.status();
    if (result.ok()) output.tokens = std::move(result->tokens);
    done.Notify();
  }
  StepOutput output;
  Notification done;
};

Rig::Rig(const std::string& directory, kernels::Backend* backend,
         const RigOptions& options)
    : loop_("rig") {
  const ModelSpec spec = Must(LoadModelSpec(directory));
  const Checkpoint checkpoint = Must(Checkpoint::Open(directory));
  model_ = Must(Model::Load(spec, checkpoint, options.load, backend));
  DeviceExecutorOptions executor = options.executor;
  if (!options.adapters.empty()) {
    loras_ = Must(
        LoraSlots::Create(spec, static_cast<int>(options.adapters.size()) + 1,
                          options.max_lora_rank, backend));
    executor.loras = loras_.get();
    const auto queue = backend->NewQueue("adapters");
    for (size_t i = 0; i < options.adapters.size(); ++i) {
      const LoraAdapter adapter =
          Must(ReadLoraAdapter(options.adapters[i], spec, loras_->layout()));
      loras_->Put(static_cast<int>(i), adapter, *queue);
      queue->Synchronize();
    }
  }
  executor_ =
      Must(DeviceExecutor::Create(executor, model_.get(), backend, &loop_));
  // Far apart and in no order, as in a pool that has been used for a while.
  const int blocks = options.executor.num_blocks;
  for (int i = 0; i < blocks; ++i) {
    free_.push_back(static_cast<int32_t>((int64_t{i} * 37 + 5) % blocks));
  }
  std::sort(free_.begin(), free_.end());
  free_.erase(std::unique(free_.begin(), free_.end()), free_.end());
  for (size_t i = 0; i < free_.size(); ++i) {
    std::swap(free_[i], free_[(i * 7919 + 13) % free_.size()]);
  }
}

Rig::~Rig() {
  loop_.Stop();
  executor_.reset();
}

TestSequence Rig::NewSequence(std::vector<int32_t> ids, int positions) {
  TestSequence sequence;
  sequence.ids = std::move(ids);
  const int size = executor_->kv_shape().block_size;
  for (int i = 0; i < (positions + size - 1) / size; ++i) {
    if (free_.empty()) {
      std::fprintf(stderr, "the rig's pool is too small\n");
      std::abort();
    }
    sequence.blocks.push_back(free_.back());
    free_.pop_back();
  }
  return sequence;
}

StepOutput Rig::Run(const Step& step) {
  Listener listener;
  loop_.RunSync([&] {
    executor_->set_logits_probe(
        [&](uint64_t, int, absl::Span<const float> logits) {
          listener.output.logits.emplace_back(logits.begin(), logits.end());
        });
    executor_->Submit(&step, &listener);
  });
  listener.done.WaitForNotification();
  loop_.RunSync([&] { executor_->set_logits_probe(nullptr); });
  return std::move(listener.output);
}

StepOutput Rig::Advance(absl::Span<TestSequence* const> sequences, int count) {
  Step step;
  step.id = ++steps_;
  for (TestSequence* sequence : sequences) {
    const int left =
        static_cast<int>(sequence->ids.size()) - sequence->computed;
    sequence->draw.edits = sequence->edits;
    const int take = std::min(count, left);
    step.entries.push_back(
        {.sequence = static_cast<uint64_t>(step.entries.size()),
         .position = sequence->computed,
         .tokens = absl::MakeConstSpan(sequence->ids)
                       .subspan(sequence->computed, take),
         .block_table = sequence->blocks,
         .adapter = sequence->adapter,
         .draws = absl::MakeConstSpan(&sequence->draw, 1),
         .sampling = sequence->sampling,
         .attention =
             sequence->attention.rows() > 0 ? &sequence->attention : nullptr});
    sequence->computed += take;
  }
  return Run(step);
}

void Rig::Greedy(absl::Span<TestSequence* const> sequences, int chunk,
                 int steps) {
  std::vector<size_t> target;
  for (const TestSequence* sequence : sequences) {
    target.push_back(sequence->ids.size() + steps);
  }
  // Sequences that have no chunk left decode on beside the others.
  for (;;) {
    std::vector<TestSequence*> running;
    for (size_t i = 0; i < sequences.size(); ++i) {
      if (sequences[i]->ids.size() < target[i]) running.push_back(sequences[i]);
    }
    if (running.empty()) return;
    const StepOutput output = Advance(running, chunk);
    if (!output.status.ok()) {
      std::fprintf(stderr, "%s\n", output.status.ToString().c_str());
      std::abort();
    }
    for (size_t i = 0; i < running.size(); ++i) {
      TestSequence& sequence = *running[i];
      if (sequence.computed == static_cast<int>(sequence.ids.size())) {
        sequence.ids.push_back(output.tokens[i].token_id);
      }
    }
  }
}

kernels::KvDigest Rig::Gather(const KvPart& part, kernels::DType wire,
                              std::byte* staging) {
  Notification done;
  kernels::KvDigest digest;
  loop_.RunSync([&] {
    executor_->Gather(part, wire, kKey, staging, [&](kernels::KvDigest d) {
      digest = d;
      done.Notify();
    });
  });
  done.WaitForNotification();
  return digest;
}

void Rig::Scatter(const KvPart& part, kernels::DType wire,
                  const std::byte* staging) {
  Notification done;
  loop_.RunSync(
      [&] { executor_->Scatter(part, wire, staging, [&] { done.Notify(); }); });
  done.WaitForNotification();
}

kernels::KvDigest Rig::Digest(const KvPart& part, kernels::DType wire) {
  Notification done;
  kernels::KvDigest digest;
  loop_.RunSync([&] {
    executor_->Digest(part, wire, kKey, [&](kernels::KvDigest d) {
      digest = d;
      done.Notify();
    });
  });
  done.WaitForNotification();
  return digest;
}

KvPart WholePart(const TestSequence& sequence, const kernels::KvShape& shape,
                 int begin, int end) {
  return {.block_table = sequence.blocks,
          .position_begin = begin,
          .position_end = end,
          .layer_begin = 0,
          .layer_end = shape.num_layers,
          .head_begin = 0,
          .head_end = shape.kv_heads};
}

}  // namespace tandem::engine
