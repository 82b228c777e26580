// SPDX-License-Identifier: Apache-2.0
#include "cli/plan/figures.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "cli/explain/chosen_formats.h"
#include "cli/explain/counts.h"
#include "common/lifecycle.h"
#include "common/progress.h"
#include "engine/engine.h"
#include "engine/model/forward.h"
#include "engine/model/layer_parts.h"
#include "engine/model/model_work.h"
#include "kernels/experts.h"
#include "worker/gpu_handoff.h"
#include "worker/kv_plan.h"

namespace tandem::plan {
namespace {

using kernels::DType;

constexpr int64_t kGpuSlabBytes = int64_t{8} << 20;  // the workers' default
// Of a worker without model and cache, and of the router, which all of them
// share: 50 and 9 MB of their own with the embedded model and 48 requests at
// once, and room for larger tokenizers.
constexpr int64_t kCpuOverheadBytes = int64_t{96} << 20;
constexpr int64_t kRouterBytes = int64_t{64} << 20;

explain::Formats ChooseFormats(const PlanInput& input) {
  explain::Formats formats = explain::FormatsOf(
      input.spec,
      explain::ChooseFormats(
          input.spec, input.checkpoint_dtype,
          {input.dtype, input.quantization, input.kv_cache_dtype}, input.gpu),
      input.gpu);
  // As those of a checkpoint.
  if (!input.gpu && formats.layers == DType::kFp8) {
    formats.layers = DType::kBF16;
  }
  return formats;
}

// What backends keep for the rows of many experts: copies, what comes of them
// and what is between; a CPU has one expert's at a time, and both halves of
// its gated product.
int64_t ExpertBytes(const PlanInput& input, const explain::Formats& formats) {
  const engine::ModelSpec& spec = input.spec;
  if (spec.routes.experts == 0) return 0;
  const int rows = input.max_num_batched_tokens;
  const int64_t ends = 2 * int64_t{spec.hidden_size};
  const int64_t wide = spec.expert_size;
  if (!input.gpu) return rows * (ends + 3 * wide) * 4;
  return kernels::MostExpertRows(rows, spec.routes.experts,
                                 spec.routes.chosen) *
         (ends + wide) * static_cast<int64_t>(SizeOf(formats.weights));
}

worker::WorkerFlags FlagsOf(const PlanInput& input) {
  worker::WorkerFlags flags;
  flags.max_model_len = input.max_model_len;
  flags.max_num_seqs = input.max_num_seqs;
  flags.max_num_batched_tokens = input.max_num_batched_tokens;
  flags.block_size = input.block_size;
  flags.gpu_memory_utilization = input.gpu_memory_utilization / input.workers;
  return flags;
}

bool QuantisedAlready(const PlanInput& input) {
  return input.spec.quantisation.method != engine::Quantisation::Method::kNone;
}

// What workers refuse once they load (engine/model/model_loader.cc, and a
// backend's matrices and KV cache).
absl::Status CheckFormats(const PlanInput& input,
                          const explain::Formats& formats) {
  const std::optional<DType> quantisation =
      explain::NamedType(input.quantization);
  if (quantisation && QuantisedAlready(input)) {
    return UsageError(
        absl::StrCat("the checkpoint is quantised already; leave out "
                     "--quantization ",
                     input.quantization));
  }
  if (!input.gpu) {
    const absl::Status kept =
        worker::CheckCpuWeights(formats.weights, quantisation, input.spec);
    if (!kept.ok()) return kept;
    if (formats.kv != DType::kF16) return absl::OkStatus();
    return UsageError(
        "--kv-cache-dtype is f16, expected f32, bf16, fp8, int8 or int4 on a "
        "CPU");
  }
  if (formats.weights == DType::kF32 || formats.kv == formats.weights ||
      kernels::IsQuantised(formats.kv)) {
    return absl::OkStatus();
  }
  return UsageError(
      absl::StrCat("KV cache type is ", std::string(kernels::Name(formats.kv)),
                   ", expected fp8, int8, int4 or the activations' ",
                   std::string(kernels::Name(formats.weights)), " on a GPU"));
}

absl::Status DoesNotFit(const PlanInput& input, const Plan& plan) {
  const std::optional<DType> quantisation =
      explain::NamedType(input.quantization);
  const bool codes =
      QuantisedAlready(input) ||
      (quantisation.has_value() && kernels::HasIntegerProducts(*quantisation));
  PlanInput smallest = input;
  smallest.quantization = "int4";
  const int64_t least =
      explain::WeightBytes(input.spec, ChooseFormats(smallest),
                           input.spec.max_positions) +
      plan.workspace_bytes + plan.overhead_bytes;
  return absl::ResourceExhaustedError(absl::StrCat(
      "weights (", HumanBytes(static_cast<double>(plan.weight_bytes)),
      "), working memory and the processes themselves (",
      HumanBytes(
          static_cast<double>(plan.workspace_bytes + plan.overhead_bytes)),
      ") leave nothing of ", HumanBytes(static_cast<double>(plan.budget_bytes)),
      " for a KV cache: take a larger device",
      codes || least >= plan.budget_bytes
          ? ""
          : ", or --quantization int8 or int4"));
}

std::vector<Contexts> CountContexts(const PlanInput& input, const Plan& plan) {
  const engine::EngineOptions options{
      .max_num_batched_tokens = input.max_num_batched_tokens,
      .window = engine::WindowOf(input.spec)};
  std::vector<Contexts> all;
  const auto add = [&](int positions) {
    const int blocks =
        engine::Engine::BlocksAtOnce(options, input.block_size, positions);
    all.push_back({positions, plan.num_blocks / blocks});
  };
  for (int64_t positions = 1024; positions < plan.max_model_len;
       positions *= 2) {
    add(static_cast<int>(positions));
  }
  add(plan.max_model_len);
  return all;
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const PlanInput& input) {
  if (input.block_size % 8 != 0) {
    return UsageError(absl::StrCat("--block-size is ", input.block_size,
                                   ", expected a multiple of 8"));
  }
  const engine::ModelSpec& spec = input.spec;
  const explain::Formats formats = ChooseFormats(input);
  const absl::Status served = CheckFormats(input, formats);
  if (!served.ok()) return served;
  worker::WorkerFlags flags = FlagsOf(input);
  Plan plan;
  plan.weights = formats.weights;
  plan.dtype_assumed = !explain::NamedType(input.dtype) &&
                       !explain::NamedType(input.checkpoint_dtype);
  plan.layers = formats.layers;
  plan.experts = formats.experts.value_or(formats.layers);
  plan.kv = formats.kv;
  plan.parameters = explain::Parameters(spec);
  const int positions = input.max_model_len > 0
                            ? std::min(input.max_model_len, spec.max_positions)
                            : spec.max_positions;
  plan.weight_bytes = explain::WeightBytes(spec, formats, positions);
  plan.workspace_bytes = static_cast<int64_t>(engine::Workspace::Bytes(
      spec, input.max_num_batched_tokens, worker::PlainDraws(flags), nullptr,
      input.gpu ? formats.weights : DType::kF32));
  plan.workspace_bytes += ExpertBytes(input, formats);
  plan.kv_token_bytes = explain::KvBytesPerToken(spec, formats.kv);
  // A block has room for some layers more where they are parted unevenly.
  kernels::KvShape block{.num_layers = engine::PartsOf(spec).room(),
                         .block_size = input.block_size,
                         .dtype = formats.kv};
  engine::SetHeads(spec, &block);
  plan.kv_block_bytes = worker::KvBlockBytes(block, input.gpu);

  std::optional<worker::GpuMemory> gpu;
  if (input.gpu) {
    plan.budget_bytes = static_cast<int64_t>(
        static_cast<double>(input.memory_bytes) * flags.gpu_memory_utilization);
    int64_t buffers =
        worker::GpuHandoff::BufferBytes(v1::WORKER_ROLE_DECODE, kGpuSlabBytes);
    if (input.workers > 1) {  // the fuller of two equal shares
      buffers = std::max(buffers, worker::GpuHandoff::BufferBytes(
                                      v1::WORKER_ROLE_PREFILL, kGpuSlabBytes));
    }
    plan.overhead_bytes = worker::kGpuOverheadBytes + buffers;
    const int64_t used =
        plan.weight_bytes + plan.workspace_bytes + plan.overhead_bytes;
    gpu =
        worker::GpuMemory{input.memory_bytes, used, input.memory_bytes - used};
  } else {
    plan.budget_bytes = input.memory_bytes / input.workers;
    plan.overhead_bytes =
        kCpuOverheadBytes + (kRouterBytes + input.workers - 1) / input.workers;
    flags.kv_cache_bytes = plan.budget_bytes - plan.weight_bytes -
                           plan.workspace_bytes - plan.overhead_bytes;
  }
  const int64_t left = plan.budget_bytes - plan.weight_bytes -
                       plan.workspace_bytes - plan.overhead_bytes;
  if (left < plan.kv_block_bytes) return DoesNotFit(input, plan);
  const absl::StatusOr<worker::KvPlan> kv =
      worker::PlanKv(flags, spec, formats.kv, gpu, engine::WindowOf(spec));
  if (!kv.ok()) return kv.status();
  plan.num_blocks = kv->num_blocks;
  plan.max_model_len = kv->max_model_len;
  plan.kv_bytes = plan.kv_block_bytes * plan.num_blocks;
  plan.contexts = CountContexts(input, plan);
  return plan;
}

}  // namespace tandem::plan
