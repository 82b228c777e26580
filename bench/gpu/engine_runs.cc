// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/engine_runs.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem::bench {

using engine::Step;
using engine::StepEntry;
using engine::StepResult;
using kernels::DType;

namespace {

using Clock = std::chrono::steady_clock;

StepEntry EntryOf(int sequence, int position, absl::Span<const int32_t> tokens,
                  absl::Span<const int32_t> blocks, bool sample) {
  StepEntry entry;
  entry.sequence = static_cast<uint64_t>(sequence);
  entry.position = position;
  entry.tokens = tokens;
  entry.block_table = blocks;
  if (sample) entry.draws = engine::kOneDraw;
  return entry;
}

double Between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

int32_t TokenAt(int sequence, int position, int vocab) {
  return static_cast<int32_t>((int64_t{sequence} * 7919 + position * 31 + 5) %
                              vocab);
}

}  // namespace

// What the loop is told; the caller waits until `done`.
class EngineRuns::Steps final : public engine::StepListener {
 public:
  std::function<void(int layers)> on_layers;
  std::function<void(StepResult)> on_step;

  void OnLayersDone(uint64_t, int layers) override {
    if (on_layers) on_layers(layers);
  }
  void OnStepDone(uint64_t, absl::StatusOr<StepResult> result) override {
    if (!result.ok()) return Finish(result.status());
    on_step(*std::move(result));
  }
  void Finish(absl::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    status_ = std::move(status);
    done_ = true;
    changed_.notify_all();
  }
  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    return status_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
};

absl::StatusOr<std::unique_ptr<EngineRuns>> EngineRuns::Create(
    const engine::DeviceExecutorOptions& options, const engine::Model* model,
    kernels::Backend* backend) {
  std::unique_ptr<EngineRuns> runs(
      new EngineRuns(options.max_rows, model->spec().vocab_size));
  auto executor =
      engine::DeviceExecutor::Create(options, model, backend, &runs->loop_);
  if (!executor.ok()) return executor.status();
  runs->executor_ = *std::move(executor);
  // As a decode worker does when it starts.
  absl::Status recorded;
  runs->loop_.RunSync(
      [&] { recorded = runs->executor_->RecordDecodes([](int, int) {}); });
  // It goes on without, too; but figures must not hide it.
  if (!recorded.ok()) {
    std::printf("# decodes are not recorded: %s\n",
                std::string(recorded.message()).c_str());
  }
  return runs;
}

EngineRuns::~EngineRuns() {
  loop_.Stop();
  executor_.reset();
}

absl::Status EngineRuns::Fill(int count, int context, int positions) {
  const int size = executor_->kv_shape().block_size;
  const int each = (positions + size - 1) / size;
  if (int64_t{each} * count > executor_->kv_shape().num_blocks) {
    return absl::ResourceExhaustedError(
        absl::StrCat(count, " sequences need ", each, " blocks each, of ",
                     executor_->kv_shape().num_blocks));
  }
  blocks_.assign(static_cast<size_t>(count), {});
  // As in a pool that has been used for a while: neighbours lie apart.
  for (int i = 0; i < each; ++i) {
    for (int s = 0; s < count; ++s) {
      blocks_[static_cast<size_t>(s)].push_back(i * count + s);
    }
  }
  int sequence = 0;
  int position = 0;
  while (sequence < count) {
    Step step;
    std::vector<std::vector<int32_t>> tokens;
    tokens.reserve(static_cast<size_t>(count));
    int rows = 0;
    while (sequence < count && rows < max_rows_) {
      const int take = std::min(context - position, max_rows_ - rows);
      std::vector<int32_t>& ids = tokens.emplace_back();
      for (int i = 0; i < take; ++i) {
        ids.push_back(TokenAt(sequence, position + i, vocab_));
      }
      step.entries.push_back(EntryOf(sequence, position, ids,
                                     blocks_[static_cast<size_t>(sequence)],
                                     false));
      rows += take;
      position += take;
      if (position == context) {
        position = 0;
        ++sequence;
      }
    }
    step.id = 1;
    Steps steps;
    steps.on_step = [&](StepResult) { steps.Finish(absl::OkStatus()); };
    loop_.RunSync([&] { executor_->Submit(&step, &steps); });
    if (absl::Status status = steps.Wait(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<double> EngineRuns::Decode(int context, int steps, bool ahead) {
  const size_t count = blocks_.size();
  struct Flight {
    Step step;
    std::vector<int32_t> tokens;
  };
  Flight flights[2];
  const int in_flight = ahead ? 2 : 1;
  for (int f = 0; f < in_flight; ++f) {
    Flight& flight = flights[f];
    flight.tokens.resize(count);
    for (size_t i = 0; i < count; ++i) {
      flight.tokens[i] = TokenAt(static_cast<int>(i), context + f, vocab_);
      flight.step.entries.push_back(EntryOf(
          static_cast<int>(i), context - 1 + f,
          absl::MakeConstSpan(flight.tokens).subspan(i, 1), blocks_[i], true));
      // As a scheduler that runs ahead says it.
      if (f > 0) flight.step.entries.back().fed = static_cast<int>(i);
    }
  }
  // Clocks and caches settle first.
  const int warm = std::max(1, steps / 4);
  const int total = warm + steps;
  int submitted = 0;
  int finished = 0;
  Clock::time_point begin;
  Clock::time_point end;
  Steps listener;
  const auto submit = [&] {
    Flight& flight = flights[submitted % in_flight];
    flight.step.id = static_cast<uint64_t>(++submitted);
    executor_->Submit(&flight.step, &listener);
  };
  listener.on_step = [&](const StepResult& result) {
    Flight& flight = flights[finished % in_flight];
    ++finished;
    if (finished == warm) begin = Clock::now();
    if (finished == total) {
      end = Clock::now();
      return listener.Finish(absl::OkStatus());
    }
    if (submitted == total) return;
    for (size_t i = 0; i < count; ++i) {
      StepEntry& entry = flight.step.entries[i];
      entry.position += in_flight;
      if (ahead) {
        entry.fed = static_cast<int>(i);
      } else {
        flight.tokens[i] = result.tokens[i].token_id;
      }
    }
    submit();
  };
  loop_.RunSync([&] {
    for (int i = 0; i < in_flight; ++i) submit();
  });
  if (absl::Status status = listener.Wait(); !status.ok()) return status;
  return Between(begin, end) / steps;
}

absl::StatusOr<double> EngineRuns::RunPrefill(int tokens, std::byte* staging) {
  const Clock::time_point begin = Clock::now();
  for (int at = 0; at < tokens; at += max_rows_) {
    const int end = std::min(tokens, at + max_rows_);
    const absl::Status status =
        RunChunk(at, end, end == tokens,
                 staging == nullptr ? nullptr : staging + kv_bytes(at));
    if (!status.ok()) return status;
  }
  return Between(begin, Clock::now());
}

absl::Status EngineRuns::RunChunk(int begin, int end, bool sample,
                                  std::byte* staging) {
  std::vector<int32_t> ids;
  for (int i = begin; i < end; ++i) ids.push_back(TokenAt(0, i, vocab_));
  Step step;
  step.id = 1;
  step.entries.push_back(EntryOf(0, begin, ids, blocks_[0], sample));
  const kernels::KvShape& shape = executor_->kv_shape();
  const int64_t layer_bytes = kv_bytes(end - begin) / shape.num_layers;
  Steps listener;
  int gathered_from = 0;
  int waiting = 1;  // gathers, and the step itself
  const auto finish_one = [&] {
    if (--waiting == 0) listener.Finish(absl::OkStatus());
  };
  if (staging != nullptr) {
    listener.on_layers = [&](int layers) {
      const engine::KvPart part{.block_table = blocks_[0],
                                .position_begin = begin,
                                .position_end = end,
                                .layer_begin = gathered_from,
                                .layer_end = layers,
                                .head_begin = 0,
                                .head_end = shape.kv_heads};
      ++waiting;
      executor_->Gather(part, shape.dtype, 7,
                        staging + gathered_from * layer_bytes,
                        [&](kernels::KvDigest) { finish_one(); });
      gathered_from = layers;
    };
  }
  listener.on_step = [&](StepResult) { finish_one(); };
  loop_.RunSync([&] { executor_->Submit(&step, &listener); });
  return listener.Wait();
}

absl::StatusOr<double> EngineRuns::Prefill(int tokens) {
  return RunPrefill(tokens, nullptr);
}

absl::StatusOr<double> EngineRuns::PrefillAndGather(int tokens,
                                                    std::byte* staging) {
  return RunPrefill(tokens, staging);
}

}  // namespace tandem::bench
