// SPDX-License-Identifier: Apache-2.0
#include "cli/plan/command.h"

#include <iostream>

#include "absl/strings/str_cat.h"
#include "cli/explain/chosen_formats.h"
#include "cli/explain/command.h"
#include "common/lifecycle.h"
#include "common/memory_limit.h"

namespace tandem::plan {
namespace {

constexpr std::string_view kCpu = "cpu";

}  // namespace

absl::Status ReadModel(const std::string& directory, PlanInput* input) {
  absl::StatusOr<engine::ModelSpec> spec = explain::LoadConfig(directory);
  if (!spec.ok()) return spec.status();
  input->spec = *std::move(spec);
  absl::StatusOr<std::string> type = explain::CheckpointType(directory);
  if (!type.ok()) return type.status();
  input->checkpoint_dtype = *std::move(type);
  return absl::OkStatus();
}

void PlanCommand::AddTo(CommandLine* line) {
  line->Example("tandem plan models/tales");
  line->Example("tandem plan meta-llama/Llama-3.1-8B-Instruct --device h100");
  line->Example("tandem plan config.json --memory 80GiB --quantization int8");
  line->Group("Device");
  std::vector<std::string> devices = {std::string(kCpu)};
  for (const Device& device : kDevices) devices.emplace_back(device.name);
  line->AddChoice("device", &device_, devices,
                  "Where workers would run; cpu is this machine, and the "
                  "default");
  line->LastNotFromEnvironment();  // it is a worker's, "cuda:0"
  line->AddBytes("memory", &memory_bytes_,
                 "Of a GPU, instead of --device; with --device cpu of the "
                 "machine");
  line->Add("gpu-memory-utilization", &input_.gpu_memory_utilization,
            "Share of a GPU's memory, divided among the workers", 0.01, 1);
  line->AddInt("workers", &input_.workers, "That share the device", {1, 64});
  line->Group("Formats");
  line->AddChoice("dtype", &input_.dtype, {"auto", "f32", "bf16", "f16"},
                  "Of the weights");
  line->AddChoice("quantization", &input_.quantization,
                  {"none", "fp8", "int8", "int4", "w8a8"},
                  "Of the layers' weights");
  line->AddChoice(
      "kv-cache-dtype", &input_.kv_cache_dtype,
      {"auto", "f32", "bf16", "f16", "fp8", "fp8_e4m3", "int8", "int4"},
      "Of the KV cache");
  line->Group("Limits");
  line->AddInt("max-model-len", &input_.max_model_len,
               "Positions per sequence; 0: as many as fit", {0, 1 << 24});
  line->AddInt("max-num-seqs", &input_.max_num_seqs, "Sequences per step",
               {1, 4096});
  line->AddInt("max-num-batched-tokens", &input_.max_num_batched_tokens,
               "Positions per step", {1, 1 << 20});
  line->AddInt("block-size", &input_.block_size, "Positions per KV block",
               {8, 256});
  line->Group("Output");
  line->Add("json", &json_, "One JSON object instead of a table");
}

absl::Status PlanCommand::Complete(const CommandLine& line) {
  if (!device_.empty() && device_ != kCpu) {
    if (memory_bytes_ > 0) {
      return UsageError(
          absl::StrCat("--memory and --device ", device_,
                       " exclude each other: the device has a size of its "
                       "own; give one of them"));
    }
    input_.gpu = true;
    for (const Device& device : kDevices) {
      if (device.name == device_) input_.memory_bytes = device.mebibytes << 20;
    }
    return absl::OkStatus();
  }
  input_.gpu = device_.empty() && memory_bytes_ > 0;
  if (!input_.gpu && line.typed("gpu-memory-utilization")) {
    return UsageError(
        "--gpu-memory-utilization is of a GPU's memory, and this plan is for "
        "CPUs: give --memory or a GPU's --device as well, or leave it out");
  }
  if (device_ == kCpu) input_.device = device_;
  input_.memory_bytes = memory_bytes_ > 0 ? memory_bytes_ : AvailableMemory();
  if (input_.memory_bytes > 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this machine does not say how much memory is available: give --memory "
      "with --device cpu");
}

absl::Status PlanCommand::Run(const std::string& model,
                              const std::string& revision,
                              const std::string& directory) {
  input_.model = model;
  input_.revision = revision;
  const absl::Status status = ReadModel(directory, &input_);
  if (!status.ok()) return status;
  const absl::StatusOr<Plan> plan = MakePlan(input_);
  if (!plan.ok()) return plan.status();
  std::cout << (json_ ? PlanJson(input_, *plan) : PlanText(input_, *plan))
            << std::flush;
  return absl::OkStatus();
}

}  // namespace tandem::plan
