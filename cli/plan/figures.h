// SPDX-License-Identifier: Apache-2.0
// What a model takes of a device's memory, and which contexts fit beside it:
// counted from config.json by the definitions that workers use (worker/
// kv_plan.h, engine/model/forward.h), so that it can be said before anything is
// downloaded or started.

#ifndef TANDEM_CLI_PLAN_FIGURES_H_
#define TANDEM_CLI_PLAN_FIGURES_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint/model_config.h"
#include "kernels/types.h"

namespace tandem::plan {

// Memory as nvidia-smi shows it, in MiB, of devices that the CUDA backend runs
// on; those with less shared memory (A10, L40S) it refuses.
struct Device {
  std::string_view name;
  int64_t mebibytes;
};
inline constexpr std::array<Device, 5> kDevices = {{{"a100-40gb", 40960},
                                                    {"a100-80gb", 81920},
                                                    {"h100", 81559},
                                                    {"h200", 143771},
                                                    {"b200", 183359}}};

struct PlanInput {
  std::string model;              // as it was given, for the report
  std::string revision = "main";  // on the hub
  engine::ModelSpec spec;
  // "bfloat16" or "bf16" and so on, of the file, or else as config.json says;
  // empty: neither does.
  std::string checkpoint_dtype;
  // As the flags of the workers.
  std::string device = "auto";
  std::string dtype = "auto", quantization = "none", kv_cache_dtype = "auto";
  int max_model_len = 0;
  int max_num_seqs = 64;
  int max_num_batched_tokens = 512;
  int block_size = 16;
  double gpu_memory_utilization = 0.9;
  int workers = 1;           // that share the device evenly
  bool gpu = false;          // else a CPU
  int64_t memory_bytes = 0;  // of the device
};

// So many sequences of `positions` fit at once.
struct Contexts {
  int positions = 0;
  int64_t count = 0;
};

struct Plan {
  kernels::DType weights = kernels::DType::kBF16;  // of embedding and norms
  kernels::DType layers = kernels::DType::kBF16;   // of the layers' matrices
  kernels::DType experts = kernels::DType::kBF16;  // of their experts'
  kernels::DType kv = kernels::DType::kBF16;
  bool dtype_assumed = false;  // no file, config or flag says it
  double parameters = 0;
  // Bytes of one worker.
  int64_t budget_bytes = 0;
  int64_t weight_bytes = 0;     // matrices, vectors, rotary tables
  int64_t workspace_bytes = 0;  // of a step
  // Of a GPU: driver, kernels, handoff buffers. Of a CPU: the process, empty.
  int64_t overhead_bytes = 0;
  int64_t kv_token_bytes = 0;
  int64_t kv_block_bytes = 0;
  int64_t kv_bytes = 0;  // of num_blocks
  int num_blocks = 0;
  int max_model_len = 0;
  std::vector<Contexts> contexts;  // shortest first
};

// RESOURCE_EXHAUSTED: the weights alone do not fit; INVALID_ARGUMENT: the
// contexts that were asked for do not, or flags exclude each other or what
// workers do on such a device. Both say what would fit.
absl::StatusOr<Plan> MakePlan(const PlanInput& input);

std::string PlanText(const PlanInput& input, const Plan& plan);
std::string PlanJson(const PlanInput& input, const Plan& plan);

}  // namespace tandem::plan

#endif  // TANDEM_CLI_PLAN_FIGURES_H_
