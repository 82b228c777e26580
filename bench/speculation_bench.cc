// SPDX-License-Identifier: Apache-2.0
// Tokens per second with prompt look-up, or guesses of a draft model, and
// without, of a checkpoint on the CPU backend through the workers' engine, in
// turns:
//
//   speculation_bench --model DIR [--draft DIR] [--threads N] [--repeats 5]
//                     [--tokens 256] [--sequences 1] [--drafts 8]
//                     [--lookup-min 3] [--lookup-max 5]
//
// One JSON object a line for each text: "repetitive" is greedy behind a prompt
// that repeats itself, which most models go on with; "sampled" draws from all
// ids, so that little comes back; "few ids" draws from the likeliest four,
// where n-grams come back and something else follows them. Medians of the
// runs and their ratio, by the clock and by this process's CPU time (which
// other processes disturb less), and the share of guesses that were right; and
// it dies where a token differs.

#include <time.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "common/thread_loop.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/device/device_executor.h"
#include "engine/engine.h"
#include "engine/model/model.h"
#include "kernels/cpu/cpu_backend.h"

namespace {

using namespace tandem;  // NOLINT: a program of one file

struct Flags {
  std::string model;
  std::string draft;  // empty: n-grams
  int sequences = 1;
  int threads = 0;
  int repeats = 5;
  int tokens = 256;
  int drafts = 8;
  int lookup_min = 3;
  int lookup_max = 5;
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "speculation_bench: %s\n", why.c_str());
  std::exit(1);
}

Flags Parse(int argc, char** argv) {
  Flags flags;
  const struct {
    std::string_view name;
    int* value;
  } numbers[] = {
      {"--sequences", &flags.sequences},  {"--threads", &flags.threads},
      {"--repeats", &flags.repeats},      {"--tokens", &flags.tokens},
      {"--drafts", &flags.drafts},        {"--lookup-min", &flags.lookup_min},
      {"--lookup-max", &flags.lookup_max}};
  for (int i = 1; i < argc; i += 2) {
    const std::string_view flag = argv[i];
    if (i + 1 == argc) Die(std::string(flag) + ": no value");
    if (flag == "--model" || flag == "--draft") {
      (flag == "--model" ? flags.model : flags.draft) = argv[i + 1];
      continue;
    }
    const auto number =
        std::find_if(std::begin(numbers), std::end(numbers),
                     [&](const auto& n) { return n.name == flag; });
    if (number == std::end(numbers)) Die("unknown flag " + std::string(flag));
    *number->value = std::max(0, std::atoi(argv[i + 1]));
  }
  if (flags.model.empty()) Die("--model is missing");
  return flags;
}

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) +
         1e-9 * static_cast<double>(now.tv_nsec);
}

struct Run {
  std::vector<std::vector<int32_t>> tokens;  // of each sequence
  double seconds = 0;                        // from the first to the last
  double cpu_seconds = 0;                    // meanwhile
  engine::DraftCounts drafts;
};

// One engine, which learns from run to run what its steps cost.
class Generator final : public engine::EngineListener {
 public:
  Generator(const engine::EngineOptions& options, ThreadLoop* loop,
            engine::DeviceExecutor* executor, int num_blocks)
      : loop_(loop), pool_(num_blocks, 16) {
    loop_->RunSync([&] {
      engine_ = std::make_unique<engine::Engine>(options, loop_, executor,
                                                 &pool_, this);
    });
  }
  ~Generator() override {
    loop_->RunSync([&] { engine_.reset(); });
  }

  // So many like `spec`, with seeds of their own.
  Run Generate(const engine::SequenceSpec& spec, int sequences) {
    run_ = {};
    run_.tokens.resize(static_cast<size_t>(sequences));
    running_ = sequences;
    loop_->RunSync([&] {
      for (int i = 0; i < sequences; ++i) {
        engine::SequenceSpec own = spec;
        own.sampling.seed += static_cast<uint64_t>(i);
        own.history[0] += i;
        const absl::Status status =
            engine_->Add(static_cast<uint64_t>(i) + 1, std::move(own), {}, 0);
        if (!status.ok()) Die(status.ToString());
      }
    });
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return running_ == 0; });
    return run_;
  }

 private:
  void OnToken(engine::SequenceId id, int, const engine::SampledToken& token,
               std::optional<engine::Finish> finish) override {
    std::vector<int32_t>& tokens = run_.tokens[id - 1];
    tokens.push_back(token.token_id);
    // All have computed their prompts.
    if (id == run_.tokens.size() && tokens.size() == 1) {
      first_ = loop_->Now();
      cpu_first_ = CpuSeconds();
    }
    if (!finish.has_value()) return;
    run_.seconds = absl::ToDoubleSeconds(loop_->Now() - first_);
    run_.cpu_seconds = CpuSeconds() - cpu_first_;
    run_.drafts.verified += engine_->drafts(id).verified;
    run_.drafts.accepted += engine_->drafts(id).accepted;
    engine_->Retire(id);
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) ended_.notify_one();
  }
  void OnComputed(engine::SequenceId, int, int, int) override {}
  void OnPreempted(engine::SequenceId) override { Die("preempted"); }
  bool OnBlocksShort(int) override { return false; }
  void OnStepFailed(const std::vector<engine::SequenceId>&,
                    const absl::Status& status) override {
    Die(status.ToString());
  }

  ThreadLoop* const loop_;
  engine::KvPool pool_;
  std::unique_ptr<engine::Engine> engine_;
  Run run_;
  absl::Time first_;
  double cpu_first_ = 0;
  std::mutex mutex_;
  std::condition_variable ended_;
  int running_ = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

engine::SequenceSpec Text(std::string_view kind, int vocab, int tokens) {
  engine::SequenceSpec spec;
  for (int i = 0; i < 96; ++i) {
    spec.history.push_back((17 * (i % 12) + 5) % vocab);
  }
  spec.prompt_tokens = static_cast<int>(spec.history.size());
  spec.stopping.max_tokens = tokens;
  spec.cache_blocks = false;
  spec.sampling.seed = 1;
  if (kind != "repetitive") spec.sampling.temperature = 1;
  if (kind == "few ids") spec.sampling.top_k = 4;
  return spec;
}

void Compare(const Flags& flags, std::string_view kind, int vocab,
             Generator* without, Generator* with) {
  const engine::SequenceSpec spec = Text(kind, vocab, flags.tokens);
  std::vector<double> rates[2];
  std::vector<double> cpu[2];
  const int all = flags.sequences * (flags.tokens - 1);
  engine::DraftCounts drafts;
  for (int i = 0; i <= flags.repeats; ++i) {
    const Run plain = without->Generate(spec, flags.sequences);
    const Run guessed = with->Generate(spec, flags.sequences);
    if (plain.tokens != guessed.tokens) Die("a token differs");
    if (i == 0) continue;  // to warm up
    rates[0].push_back(all / plain.seconds);
    rates[1].push_back(all / guessed.seconds);
    cpu[0].push_back(all / plain.cpu_seconds);
    cpu[1].push_back(all / guessed.cpu_seconds);
    drafts.verified += guessed.drafts.verified;
    drafts.accepted += guessed.drafts.accepted;
  }
  std::printf(
      "{\"text\": \"%s\", \"without\": %.5g, \"with\": %.5g, \"ratio\": %.3f, "
      "\"cpu_ratio\": %.3f, \"verified\": %lld, \"accepted\": %lld, \"runs\": "
      "%zu}\n",
      std::string(kind).c_str(), Median(rates[0]), Median(rates[1]),
      Median(rates[1]) / Median(rates[0]), Median(cpu[1]) / Median(cpu[0]),
      static_cast<long long>(drafts.verified),
      static_cast<long long>(drafts.accepted), rates[0].size());
  std::fflush(stdout);
}

// A checkpoint and what runs it.
struct Device {
  Device(const std::string& directory, kernels::Backend* backend,
         ThreadLoop* loop, engine::DeviceExecutorOptions options) {
    const auto loaded = engine::LoadModelSpec(directory);
    if (!loaded.ok()) Die(loaded.status().ToString());
    spec = *loaded;
    const auto checkpoint = engine::Checkpoint::Open(directory);
    if (!checkpoint.ok()) Die(checkpoint.status().ToString());
    auto weights = engine::Model::Load(spec, *checkpoint, {}, backend);
    if (!weights.ok()) Die(weights.status().ToString());
    model = *std::move(weights);
    options.kv_dtype = kernels::DType::kBF16;
    auto made =
        engine::DeviceExecutor::Create(options, model.get(), backend, loop);
    if (!made.ok()) Die(made.status().ToString());
    executor = *std::move(made);
  }

  engine::ModelSpec spec;
  std::unique_ptr<engine::Model> model;
  std::unique_ptr<engine::DeviceExecutor> executor;
};

void RunAll(const Flags& flags) {
  const auto backend = kernels::NewCpuBackend({.threads = flags.threads});
  if (!backend.ok()) Die(backend.status().ToString());
  ThreadLoop loop("engine");
  const int length = flags.tokens + 128;
  const int blocks = flags.sequences * (length / 16 + 2);
  const int draws = flags.sequences * (1 + flags.drafts);
  const Device target(flags.model, backend->get(), &loop,
                      {.max_rows = std::max(512, draws),
                       .max_sequences = flags.sequences,
                       .max_draws = draws,
                       .num_blocks = blocks});
  engine::EngineOptions options;
  options.max_num_seqs = flags.sequences;
  options.max_num_batched_tokens = std::max(512, draws);
  options.max_model_len = length;
  options.prefix_caching = false;
  options.max_draws = draws;
  Generator without(options, &loop, target.executor.get(), blocks);
  options.speculation.num_tokens = flags.drafts;
  options.speculation.lookup_min = flags.lookup_min;
  options.speculation.lookup_max = flags.lookup_max;
  std::unique_ptr<Device> draft;
  engine::KvPool draft_pool(blocks, 16);
  if (!flags.draft.empty()) {
    draft = std::make_unique<Device>(
        flags.draft, backend->get(), &loop,
        engine::DeviceExecutorOptions{.max_rows = 256,
                                      .max_sequences = flags.sequences,
                                      .num_blocks = blocks});
    options.speculation.draft_model = {.executor = draft->executor.get(),
                                       .pool = &draft_pool,
                                       .max_positions = length,
                                       .max_rows = 256,
                                       .max_sequences = flags.sequences};
  }
  Generator with(options, &loop, target.executor.get(), blocks);
  for (const char* kind : {"repetitive", "sampled", "few ids"}) {
    Compare(flags, kind, target.spec.vocab_size, &without, &with);
  }
}

}  // namespace

int main(int argc, char** argv) {
  RunAll(Parse(argc, argv));
  return 0;
}
