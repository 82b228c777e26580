// SPDX-License-Identifier: Apache-2.0
// Tokens per second of one sequence with prompt look-up and without, of a
// checkpoint on the CPU backend through the workers' engine, in turns:
//
//   speculation_bench --model DIR [--threads N] [--repeats 5] [--tokens 256]
//                     [--drafts 8] [--lookup-min 3] [--lookup-max 5]
//
// One JSON object a line for each text: "repetitive" is greedy behind a prompt
// that repeats itself, which most models go on with; "sampled" draws from all
// ids, so that little comes back; "few ids" draws from the likeliest four,
// where n-grams come back and something else follows them. Medians of the
// runs, their ratio, the share of guesses that were right; and it dies where a
// token differs.

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
#include "engine/device_executor.h"
#include "engine/engine.h"
#include "engine/model.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "kernels/cpu/cpu_backend.h"

namespace {

using namespace tandem;  // NOLINT: a program of one file

struct Flags {
  std::string model;
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
      {"--threads", &flags.threads},       {"--repeats", &flags.repeats},
      {"--tokens", &flags.tokens},         {"--drafts", &flags.drafts},
      {"--lookup-min", &flags.lookup_min}, {"--lookup-max", &flags.lookup_max}};
  for (int i = 1; i < argc; i += 2) {
    const std::string_view flag = argv[i];
    if (i + 1 == argc) Die(std::string(flag) + ": no value");
    if (flag == "--model") {
      flags.model = argv[i + 1];
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

struct Run {
  std::vector<int32_t> tokens;
  double seconds = 0;  // from the first token to the last
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

  Run Generate(const engine::SequenceSpec& spec) {
    run_ = {};
    done_ = false;
    loop_->RunSync([&] {
      const absl::Status status = engine_->Add(1, spec, {}, 0);
      if (!status.ok()) Die(status.ToString());
    });
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return done_; });
    return run_;
  }

 private:
  void OnToken(engine::SequenceId id, int, const engine::SampledToken& token,
               std::optional<engine::Finish> finish) override {
    if (run_.tokens.empty()) first_ = loop_->Now();
    run_.tokens.push_back(token.token_id);
    if (!finish.has_value()) return;
    run_.seconds = absl::ToDoubleSeconds(loop_->Now() - first_);
    run_.drafts = engine_->drafts(id);
    engine_->Retire(id);
    const std::lock_guard lock(mutex_);
    done_ = true;
    ended_.notify_one();
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
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
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
  engine::DraftCounts drafts;
  for (int i = 0; i <= flags.repeats; ++i) {
    const Run plain = without->Generate(spec);
    const Run guessed = with->Generate(spec);
    if (plain.tokens != guessed.tokens) Die("a token differs");
    if (i == 0) continue;  // to warm up
    rates[0].push_back((flags.tokens - 1) / plain.seconds);
    rates[1].push_back((flags.tokens - 1) / guessed.seconds);
    drafts.verified += guessed.drafts.verified;
    drafts.accepted += guessed.drafts.accepted;
  }
  std::printf(
      "{\"text\": \"%s\", \"without\": %.5g, \"with\": %.5g, \"ratio\": %.3f, "
      "\"verified\": %lld, \"accepted\": %lld, \"runs\": %zu}\n",
      std::string(kind).c_str(), Median(rates[0]), Median(rates[1]),
      Median(rates[1]) / Median(rates[0]),
      static_cast<long long>(drafts.verified),
      static_cast<long long>(drafts.accepted), rates[0].size());
  std::fflush(stdout);
}

void RunAll(const Flags& flags) {
  const auto spec = engine::LoadModelSpec(flags.model);
  if (!spec.ok()) Die(spec.status().ToString());
  const auto checkpoint = engine::Checkpoint::Open(flags.model);
  if (!checkpoint.ok()) Die(checkpoint.status().ToString());
  const auto backend = kernels::NewCpuBackend({.threads = flags.threads});
  if (!backend.ok()) Die(backend.status().ToString());
  const auto model =
      engine::Model::Load(*spec, *checkpoint, {}, backend->get());
  if (!model.ok()) Die(model.status().ToString());
  ThreadLoop loop("engine");
  const int blocks = (flags.tokens + 128) / 16 + 2;
  engine::DeviceExecutorOptions device;
  device.max_rows = 512;
  device.max_sequences = 1;
  device.max_draws = 1 + flags.drafts;
  device.num_blocks = blocks;
  device.kv_dtype = kernels::DType::kBF16;
  const auto executor = engine::DeviceExecutor::Create(device, model->get(),
                                                       backend->get(), &loop);
  if (!executor.ok()) Die(executor.status().ToString());
  engine::EngineOptions options;
  options.max_num_seqs = 1;
  options.max_model_len = blocks * 16;
  options.prefix_caching = false;
  options.max_draws = 1 + flags.drafts;
  Generator without(options, &loop, executor->get(), blocks);
  options.speculation.num_tokens = flags.drafts;
  options.speculation.lookup_min = flags.lookup_min;
  options.speculation.lookup_max = flags.lookup_max;
  Generator with(options, &loop, executor->get(), blocks);
  for (const char* kind : {"repetitive", "sampled", "few ids"}) {
    Compare(flags, kind, spec->vocab_size, &without, &with);
  }
}

}  // namespace

int main(int argc, char** argv) {
  RunAll(Parse(argc, argv));
  return 0;
}
