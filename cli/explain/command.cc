// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/command.h"

#include "kernels/cpu/cpu_backend.h"

namespace tandem::explain {
namespace {

constexpr int64_t kLongest = 1 << 17;  // tokens: steps are counted one by one

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
  line->AddChoice("dtype", &options_.formats.dtype,
                  {"auto", "f32", "bf16", "f16"},
                  "Of the weights; auto is the checkpoint's");
  line->AddChoice("quantization", &options_.formats.quantization,
                  {"none", "fp8", "int8", "int4", "w8a8"},
                  "Of the layers' weights");
  line->AddChoice(
      "kv-cache-dtype", &options_.formats.kv_cache_dtype,
      {"auto", "f32", "bf16", "f16", "fp8", "fp8_e4m3", "int8", "int4"},
      "Of the KV cache; auto: f32 for f32 weights, bf16 for bf16");
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
  return options;
}

}  // namespace tandem::explain
