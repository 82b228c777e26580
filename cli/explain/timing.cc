// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/timing.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/thread_loop.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/device/device_executor.h"
#include "engine/engine.h"
#include "engine/kv/kv_pool.h"
#include "engine/model/model.h"
#include "engine/model/model_work.h"
#include "kernels/cpu/cpu_backend.h"

namespace tandem::explain {
namespace {

using Clock = std::chrono::steady_clock;
using engine::DeviceExecutor;
using engine::Engine;

// All g steps of a request: tokens drawn, seconds of each step, work counted.
struct Run {
  std::vector<int32_t> tokens;
  std::vector<double> seconds;
  Work work;
};

// A worker's engine for one sequence after the other.
class Generator final : private engine::EngineListener {
 public:
  // For requests of at most these lengths.
  static absl::StatusOr<std::unique_ptr<Generator>> Create(
      const TimingOptions& options, Lengths lengths, const engine::Model* model,
      kernels::Backend* backend);
  ~Generator() override {
    loop_.Stop();
    engine_.reset();
    executor_.reset();
  }

  // Hears of every step how many rows it had.
  absl::StatusOr<Run> Generate(const std::vector<int32_t>& prompt,
                               int64_t output, bool cached,
                               std::function<void(double)> rows_done);

 private:
  Generator() : loop_("explain") {}
  void OnToken(engine::SequenceId id, int position,
               const engine::SampledToken& token,
               std::optional<engine::Finish> finish) override;
  void OnComputed(engine::SequenceId, int, int, int) override {}
  void OnWork(engine::SequenceId, const engine::Work& work) override;
  void OnPreempted(engine::SequenceId) override {}  // it has the pool alone
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<engine::SequenceId>&,
                    const absl::Status& status) override {
    done_->set_value(status);
  }

  ThreadLoop loop_;
  std::unique_ptr<DeviceExecutor> executor_;
  std::unique_ptr<engine::KvPool> pool_;
  std::unique_ptr<Engine> engine_;
  // The run, on the loop until `done_`.
  Run run_;
  Clock::time_point step_begun_;
  std::function<void(double)> rows_done_;
  std::optional<std::promise<absl::Status>> done_;
};

absl::StatusOr<std::unique_ptr<Generator>> Generator::Create(
    const TimingOptions& options, Lengths lengths, const engine::Model* model,
    kernels::Backend* backend) {
  std::unique_ptr<Generator> generator(new Generator);
  const auto positions = static_cast<int>(lengths.prompt + lengths.output);
  engine::DeviceExecutorOptions executor;
  // A step without a cache is one pass, as the first step with one is.
  executor.max_rows = positions;
  executor.max_sequences = 1;
  executor.block_size = options.block_size;
  executor.num_blocks = positions / options.block_size + 1;
  executor.kv_dtype = options.formats.kv;
  auto made =
      DeviceExecutor::Create(executor, model, backend, &generator->loop_);
  if (!made.ok()) return made.status();
  generator->executor_ = *std::move(made);
  generator->pool_ =
      std::make_unique<engine::KvPool>(executor.num_blocks, options.block_size);
  engine::EngineOptions limits;
  limits.max_num_seqs = 1;
  limits.max_num_batched_tokens = positions;
  limits.max_model_len = positions;
  limits.prefix_caching = false;
  limits.work = engine::MakeWorkShape(*model, options.formats.kv,
                                      /*gpu=*/false);
  engine::EngineListener* const listener = generator.get();
  generator->engine_ = std::make_unique<Engine>(
      limits, &generator->loop_, generator->executor_.get(),
      generator->pool_.get(), listener);
  return generator;
}

absl::StatusOr<Run> Generator::Generate(const std::vector<int32_t>& prompt,
                                        int64_t output, bool cached,
                                        std::function<void(double)> rows_done) {
  done_.emplace();
  std::future<absl::Status> done = done_->get_future();
  rows_done_ = std::move(rows_done);
  loop_.RunSync([&] {
    run_ = Run();
    engine::SequenceSpec spec;
    spec.history = prompt;
    spec.prompt_tokens = static_cast<int>(prompt.size());
    spec.stopping.max_tokens = static_cast<int>(output);
    spec.kv_cache = cached;
    step_begun_ = Clock::now();
    const absl::Status added =
        engine_->Add(/*id=*/1, std::move(spec), {}, /*computed=*/0);
    if (!added.ok()) done_->set_value(added);
  });
  const absl::Status status = done.get();
  loop_.RunSync([&] { engine_->Retire(1); });
  if (!status.ok()) return status;
  return run_;
}

void Generator::OnToken(engine::SequenceId, int, const engine::SampledToken& t,
                        std::optional<engine::Finish> finish) {
  const Clock::time_point now = Clock::now();
  run_.tokens.push_back(t.token_id);
  run_.seconds.push_back(
      std::chrono::duration<double>(now - step_begun_).count());
  step_begun_ = now;
  if (finish.has_value()) done_->set_value(absl::OkStatus());
}

void Generator::OnWork(engine::SequenceId, const engine::Work& work) {
  run_.work += work;
  rows_done_(static_cast<double>(work.positions_computed));
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

RequestTimer::RequestTimer(const engine::ModelSpec& spec,
                           const TimingOptions& options)
    : spec_(spec), options_(options) {}

RequestTimer::~RequestTimer() = default;

absl::StatusOr<std::unique_ptr<RequestTimer>> RequestTimer::Load(
    const engine::ModelSpec& spec, const TimingOptions& options) {
  std::unique_ptr<RequestTimer> timer(new RequestTimer(spec, options));
  const auto checkpoint = engine::Checkpoint::Open(options.directory);
  if (!checkpoint.ok()) return checkpoint.status();
  auto backend = kernels::NewCpuBackend({.threads = options.threads});
  if (!backend.ok()) return backend.status();
  timer->backend_ = *std::move(backend);
  auto model = engine::Model::Load(spec, *checkpoint, LoadAs(options.formats),
                                   timer->backend_.get());
  if (!model.ok()) return model.status();
  timer->model_ = *std::move(model);
  return timer;
}

absl::StatusOr<Timing> RequestTimer::Time(Lengths lengths,
                                          TimingProgress progress) {
  const auto generator =
      Generator::Create(options_, lengths, model_.get(), backend_.get());
  if (!generator.ok()) return generator.status();
  const std::vector<int32_t> prompt = MadeUp(lengths.prompt, spec_.vocab_size);
  const double all = KvRowsWithoutCache(lengths) + KvRowsInLoop(lengths);
  double done = 0;
  const auto more = [&](double rows) { progress((done += rows) / all); };
  // Clocks, caches and pages settle first.
  const auto warm = (*generator)
                        ->Generate(prompt, std::min<int64_t>(lengths.output, 2),
                                   true, [](double) {});
  if (!warm.ok()) return warm.status();
  const auto with =
      (*generator)->Generate(prompt, lengths.output, /*cached=*/true, more);
  if (!with.ok()) return with.status();
  const auto without =
      (*generator)->Generate(prompt, lengths.output, /*cached=*/false, more);
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
                .tokens = with->tokens,
                .with_work = with->work,
                .without_work = without->work};
}

}  // namespace tandem::explain
