// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/command.h"

#include <string_view>

#include "kernels/cpu/cpu_backend.h"

namespace tandem::explain {
namespace {

constexpr int64_t kLongest = 1 << 17;  // tokens: steps are counted one by one

kernels::DType Format(std::string_view name) {
  for (const kernels::DType type :
       {kernels::DType::kF32, kernels::DType::kBF16, kernels::DType::kF16,
        kernels::DType::kFp8, kernels::DType::kInt8, kernels::DType::kInt4}) {
    if (name == kernels::Name(type)) return type;
  }
  return kernels::DType::kBF16;
}

}  // namespace

void ExplainCommand::AddTo(CommandLine* line) {
  line->Example("tandem explain models/tales");
  line->Example(
      "tandem explain config.json --prompt-tokens 2000 --output-tokens 1000");
  line->Group("Request");
  line->AddInt("prompt-tokens", &options_.lengths.prompt, "Of the prompt",
               {1, kLongest});
  line->AddInt("output-tokens", &options_.lengths.output, "Generated",
               {1, kLongest});
  line->Group("Formats");
  line->AddChoice("dtype", &dtype_, {"f32", "bf16"}, "Of the weights");
  line->AddChoice("quantization", &quantization_,
                  {"none", "fp8", "int8", "int4"}, "Of the layers' weights");
  line->AddChoice("kv-cache-dtype", &kv_dtype_,
                  {"f32", "bf16", "f16", "fp8", "int8", "int4"},
                  "Of the KV cache");
  line->AddInt("block-size", &options_.block_size, "Positions per KV block",
               {8, 256});
  line->Group("This machine");
  line->AddInt("threads", &options_.threads, "That compute; 0: one per CPU",
               {0, kernels::kMaxCpuThreads});
  line->Add("machine", &options_.machine,
            "Measure its limits, which takes a second or two");
  line->Add("measure", &measure_,
            "Time the request on the CPU, with the cache and without. Unless "
            "given: where there are weights, of less than 512 MiB, and no "
            "longer than a few seconds");
  line->Add("pairs-seconds", &options_.pairs_seconds,
            "Where the request is timed, the quoted pairs are as well, those "
            "that would take longer together left out",
            0, 86400);
  line->Group("Output");
  line->Add("json", &options_.json, "One JSON object instead of text");
  line->Add("svg", &options_.svg, "File for the curves and the grid of steps");
  line->LastNotFromEnvironment();
}

ExplainOptions ExplainCommand::Complete(const CommandLine& line) const {
  ExplainOptions options = options_;
  if (line.given("measure")) options.measure = measure_;
  options.formats.weights = Format(dtype_);
  options.formats.layers =
      Format(quantization_ == "none" ? dtype_ : quantization_);
  options.formats.kv = Format(kv_dtype_);
  return options;
}

}  // namespace tandem::explain
