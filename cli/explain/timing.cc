// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/timing.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/thread_loop.h"
#include "engine/device_executor.h"
#include "engine/model.h"
#include "engine/safetensors.h"
#include "kernels/cpu/cpu_backend.h"

namespace tandem::explain {
namespace {

using Clock = std::chrono::steady_clock;
using engine::DeviceExecutor;
using engine::StepResult;

class Waiter final : public engine::StepListener {
 public:
  void OnLayersDone(uint64_t, int) override {}
  void OnStepDone(uint64_t, absl::StatusOr<StepResult> result) override {
    done_.set_value(std::move(result));
  }
  absl::StatusOr<StepResult> Wait() { return done_.get_future().get(); }

 private:
  std::promise<absl::StatusOr<StepResult>> done_;
};

// One sequence on an executor of its own.
class Sequence {
 public:
  static absl::StatusOr<std::unique_ptr<Sequence>> Create(
      const TimingOptions& options, const engine::Model* model,
      kernels::Backend* backend);
  ~Sequence() {
    loop_.Stop();
    executor_.reset();
  }

  // All g steps from `prompt`; tokens drawn and seconds of each step.
  struct Run {
    std::vector<int32_t> tokens;
    std::vector<double> seconds;
  };
  absl::StatusOr<Run> Generate(std::vector<int32_t> ids, int64_t output,
                               bool cached,
                               absl::FunctionRef<void(double)> rows_done);

 private:
  Sequence() : loop_("explain") {}
  // Computes positions [first, ids.size()) and draws what follows.
  absl::StatusOr<int32_t> Step(const std::vector<int32_t>& ids, size_t first);

  ThreadLoop loop_;
  std::unique_ptr<DeviceExecutor> executor_;
  std::vector<int32_t> blocks_;
  uint64_t steps_ = 0;
};

absl::StatusOr<std::unique_ptr<Sequence>> Sequence::Create(
    const TimingOptions& options, const engine::Model* model,
    kernels::Backend* backend) {
  std::unique_ptr<Sequence> sequence(new Sequence);
  const auto positions =
      static_cast<int>(options.lengths.prompt + options.lengths.output);
  engine::DeviceExecutorOptions executor;
  // A step without a cache is one pass, as the first step with one is.
  executor.max_rows = positions;
  executor.max_sequences = 1;
  executor.block_size = options.block_size;
  executor.num_blocks = positions / options.block_size + 1;
  executor.kv_dtype = options.formats.kv;
  auto made =
      DeviceExecutor::Create(executor, model, backend, &sequence->loop_);
  if (!made.ok()) return made.status();
  sequence->executor_ = *std::move(made);
  sequence->blocks_.resize(static_cast<size_t>(executor.num_blocks));
  std::iota(sequence->blocks_.begin(), sequence->blocks_.end(), 0);
  return sequence;
}

absl::StatusOr<int32_t> Sequence::Step(const std::vector<int32_t>& ids,
                                       size_t first) {
  engine::Step step;
  step.id = ++steps_;
  engine::StepEntry& entry = step.entries.emplace_back();
  entry.position = static_cast<int>(first);
  entry.tokens = absl::MakeConstSpan(ids).subspan(first);
  entry.block_table = blocks_;
  entry.draws = engine::kOneDraw;
  Waiter waiter;
  loop_.RunSync([&] { executor_->Submit(&step, &waiter); });
  absl::StatusOr<StepResult> result = waiter.Wait();
  // The executor is done with the step when the loop is.
  loop_.RunSync([] {});
  if (!result.ok()) return result.status();
  return result->tokens[0].token_id;
}

absl::StatusOr<Sequence::Run> Sequence::Generate(
    std::vector<int32_t> ids, int64_t output, bool cached,
    absl::FunctionRef<void(double)> rows_done) {
  Run run;
  size_t known = 0;
  for (int64_t i = 0; i < output; ++i) {
    const size_t first = cached ? known : 0;
    const Clock::time_point begin = Clock::now();
    const absl::StatusOr<int32_t> token = Step(ids, first);
    if (!token.ok()) return token.status();
    run.seconds.push_back(
        std::chrono::duration<double>(Clock::now() - begin).count());
    rows_done(static_cast<double>(ids.size() - first));
    known = ids.size();
    ids.push_back(*token);
    run.tokens.push_back(*token);
  }
  return run;
}

// Ids that are spread over the vocabulary.
std::vector<int32_t> MadeUp(int64_t count, int vocab) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    ids.push_back(static_cast<int32_t>((i * 7919 + 31) % vocab));
  }
  return ids;
}

engine::LoadOptions LoadAs(const Formats& formats) {
  engine::LoadOptions options;
  if (formats.from_checkpoint) return options;
  options.weight_dtype = formats.weights;
  if (formats.layers != formats.weights) options.quantisation = formats.layers;
  return options;
}

}  // namespace

double Timing::with_total() const {
  return std::accumulate(with_seconds.begin(), with_seconds.end(), 0.0);
}

double Timing::without_total() const {
  return std::accumulate(without_seconds.begin(), without_seconds.end(), 0.0);
}

double Timing::prefill_per_token() const {
  return with_seconds.front() / static_cast<double>(lengths.prompt);
}

double Timing::decode_per_token() const {
  if (with_seconds.size() < 2) return 0;
  std::vector<double> later(with_seconds.begin() + 1, with_seconds.end());
  const auto middle =
      later.begin() + static_cast<std::ptrdiff_t>(later.size() / 2);
  std::nth_element(later.begin(), middle, later.end());
  return *middle;
}

absl::StatusOr<Timing> TimeRequest(const engine::ModelSpec& spec,
                                   const TimingOptions& options,
                                   TimingProgress progress) {
  const auto checkpoint = engine::Checkpoint::Open(options.directory);
  if (!checkpoint.ok()) return checkpoint.status();
  const auto backend = kernels::NewCpuBackend({.threads = options.threads});
  if (!backend.ok()) return backend.status();
  const auto model = engine::Model::Load(
      spec, *checkpoint, LoadAs(options.formats), backend->get());
  if (!model.ok()) return model.status();
  const auto sequence = Sequence::Create(options, model->get(), backend->get());
  if (!sequence.ok()) return sequence.status();

  const Lengths lengths = options.lengths;
  const std::vector<int32_t> prompt = MadeUp(lengths.prompt, spec.vocab_size);
  const double all = KvRowsWithoutCache(lengths) + KvRowsInLoop(lengths);
  double done = 0;
  const auto more = [&](double rows) { progress((done += rows) / all); };
  // Clocks, caches and pages settle first.
  const auto warm = (*sequence)->Generate(
      prompt, std::min<int64_t>(lengths.output, 2), true, [](double) {});
  if (!warm.ok()) return warm.status();
  const auto with =
      (*sequence)->Generate(prompt, lengths.output, /*cached=*/true, more);
  if (!with.ok()) return with.status();
  const auto without =
      (*sequence)->Generate(prompt, lengths.output, /*cached=*/false, more);
  if (!without.ok()) return without.status();
  const auto [a, b] = std::mismatch(with->tokens.begin(), with->tokens.end(),
                                    without->tokens.begin());
  if (a != with->tokens.end()) {
    return absl::InternalError(absl::StrCat(
        "token ", a - with->tokens.begin(), " is ", *a, " with the cache and ",
        *b, " without it: they must be equal"));
  }
  return Timing{.lengths = lengths,
                .with_seconds = with->seconds,
                .without_seconds = without->seconds,
                .tokens = with->tokens};
}

}  // namespace tandem::explain
