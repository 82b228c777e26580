// SPDX-License-Identifier: Apache-2.0
// Steps of a checkpoint on the CPU backend through the worker's executor, one
// JSON object a line with the median of several runs:
//
//   cpu_bench --model DIR [--threads N] [--activations f32|bf16|bf16-amx]
//             [--quantization none|fp8|int8|int4|w8a8]
//             [--kv-cache-dtype bf16|f32|fp8|int8|int4]
//             [--repeats 5] [--prefill 512,2048] [--decode 128,2048]
//             [--batch 16,32]
//
// `decode` is at batch 1 and that context, over 32 steps; `batch` decodes as
// many sequences at context 512. For bench/compare_llama.py.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "bench/gpu/engine_runs.h"
#include "engine/checkpoint/model_config.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/model/model.h"
#include "kernels/cpu/cpu_backend.h"

namespace {

using namespace tandem;  // NOLINT: a program of one file
using kernels::CpuInputs;
using kernels::DType;

constexpr int kSteps = 32;
constexpr int kBatchContext = 512;

struct Flags {
  std::string model;
  std::string quantisation = "none";
  DType kv = DType::kBF16;
  CpuInputs activations = CpuInputs::kF32;
  int threads = 0;
  int repeats = 5;
  std::vector<int> prefill = {512, 2048};
  std::vector<int> decode = {128, 2048};
  std::vector<int> batch = {16, 32};
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "cpu_bench: %s\n", why.c_str());
  std::exit(1);
}

std::vector<int> Numbers(const std::string& text) {
  std::vector<int> numbers;
  for (const auto& part : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    int number = 0;
    if (!absl::SimpleAtoi(part, &number) || number < 1) {
      Die("'" + text + "' must be numbers with commas between");
    }
    numbers.push_back(number);
  }
  return numbers;
}

DType KvType(const std::string& name) {
  for (const DType type :
       {DType::kBF16, DType::kF32, DType::kFp8, DType::kInt8, DType::kInt4}) {
    if (name == kernels::Name(type)) return type;
  }
  Die("--kv-cache-dtype: bf16, f32, fp8, int8 or int4");
}

Flags Parse(int argc, char** argv) {
  Flags flags;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view flag = argv[i];
    if (i + 1 == argc) Die(std::string(flag) + ": no value");
    const std::string value = argv[i + 1];
    if (flag == "--model") {
      flags.model = value;
    } else if (flag == "--quantization") {
      flags.quantisation = value;
    } else if (flag == "--kv-cache-dtype") {
      flags.kv = KvType(value);
    } else if (flag == "--activations") {
      if (value == "bf16") {
        flags.activations = CpuInputs::kBf16;
      } else if (value == "bf16-amx") {
        flags.activations = CpuInputs::kBf16Amx;
      } else if (value != "f32") {
        Die("--activations: f32, bf16 or bf16-amx");
      }
    } else if (flag == "--threads") {
      flags.threads = std::atoi(value.c_str());
    } else if (flag == "--repeats") {
      flags.repeats = std::max(1, std::atoi(value.c_str()));
    } else if (flag == "--prefill") {
      flags.prefill = Numbers(value);
    } else if (flag == "--decode") {
      flags.decode = Numbers(value);
    } else if (flag == "--batch") {
      flags.batch = Numbers(value);
    } else {
      Die("unknown flag " + std::string(flag));
    }
  }
  if (flags.model.empty()) Die("--model is missing");
  return flags;
}

engine::LoadOptions LoadAs(const std::string& quantisation) {
  engine::LoadOptions options;
  if (quantisation == "none") return options;
  for (const DType type :
       {DType::kFp8, DType::kInt8, DType::kInt4, DType::kW8A8}) {
    if (quantisation == kernels::Name(type)) options.quantisation = type;
  }
  if (!options.quantisation) {
    Die("--quantization: none, fp8, int8, int4 or w8a8");
  }
  return options;
}

// Prints the median of `flags.repeats` runs, after one to warm up.
template <typename Run>
void Measure(const Flags& flags, const char* what, int at, double tokens,
             const Run& run) {
  std::vector<double> seconds;
  for (int i = 0; i <= flags.repeats; ++i) {
    const absl::StatusOr<double> one = run();
    if (!one.ok()) Die(std::string(one.status().message()));
    if (i > 0) seconds.push_back(*one);
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf(
      "{\"what\": \"%s\", \"at\": %d, \"seconds\": %.6g, "
      "\"tokens_per_second\": %.6g, \"runs\": %zu}\n",
      what, at, median, tokens / median, seconds.size());
  std::fflush(stdout);
}

int Most(const std::vector<int>& numbers) {
  return numbers.empty() ? 0
                         : *std::max_element(numbers.begin(), numbers.end());
}

void Run(const Flags& flags) {
  const auto spec = engine::LoadModelSpec(flags.model);
  if (!spec.ok()) Die(std::string(spec.status().message()));
  const auto checkpoint = engine::Checkpoint::Open(flags.model);
  if (!checkpoint.ok()) Die(std::string(checkpoint.status().message()));
  const auto backend = kernels::NewCpuBackend(
      {.threads = flags.threads, .inputs = flags.activations});
  if (!backend.ok()) Die(std::string(backend.status().message()));
  const auto model = engine::Model::Load(
      *spec, *checkpoint, LoadAs(flags.quantisation), backend->get());
  if (!model.ok()) Die(std::string(model.status().message()));
  engine::DeviceExecutorOptions options;
  options.max_rows = 512;
  options.max_sequences = std::max(1, Most(flags.batch));
  options.kv_dtype = flags.kv;
  options.block_size = 16;
  const int longest =
      std::max({Most(flags.prefill), Most(flags.decode) + 2 * kSteps,
                Most(flags.batch) * (kBatchContext + 2 * kSteps)});
  options.num_blocks = longest / 16 + options.max_sequences + 8;
  auto runs = bench::EngineRuns::Create(options, model->get(), backend->get());
  if (!runs.ok()) Die(std::string(runs.status().message()));
  const auto decode = [&](const char* what, int at, int count, int context) {
    const absl::Status status =
        (*runs)->Fill(count, context, context + 2 * kSteps);
    if (!status.ok()) Die(std::string(status.message()));
    Measure(flags, what, at, count,
            [&] { return (*runs)->Decode(context, kSteps, /*ahead=*/false); });
  };
  for (const int tokens : flags.prefill) {
    const absl::Status status = (*runs)->Fill(1, 1, tokens + 16);
    if (!status.ok()) Die(std::string(status.message()));
    Measure(flags, "prefill", tokens, tokens,
            [&] { return (*runs)->Prefill(tokens); });
  }
  for (const int context : flags.decode) decode("decode", context, 1, context);
  for (const int count : flags.batch) {
    decode("batch", count, count, kBatchContext);
  }
}

}  // namespace

int main(int argc, char** argv) {
  Run(Parse(argc, argv));
  return 0;
}
