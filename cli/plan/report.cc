// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "cli/config_file.h"
#include "cli/explain/counts.h"
#include "cli/plan/figures.h"
#include "common/progress.h"

namespace tandem::plan {
namespace {

std::string Size(int64_t bytes) {
  return HumanBytes(static_cast<double>(bytes));
}

std::string Billions(double parameters) {
  return parameters >= 1e9 ? absl::StrFormat("%.2f B", parameters / 1e9)
                           : absl::StrFormat("%.2f M", parameters / 1e6);
}

// The directory of a config.json.
std::string ServedModel(const std::string& model) {
  if (!cli::IsConfigFile(model)) return model;
  const std::string folder =
      std::filesystem::path(model).parent_path().string();
  return folder.empty() ? "." : folder;
}

// As one word of a shell.
std::string Quoted(const std::string& word) {
  constexpr char kPlain[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./:@%+-";
  if (word.find_first_not_of(kPlain) == std::string::npos) return word;
  return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

// A command that does as planned: what was given, and what it needs besides,
// as a CPU's cache is 1 GiB unless it is told.
std::string ServeLine(const PlanInput& input, const Plan& plan) {
  const PlanInput defaults;
  std::string line =
      absl::StrCat("tandem serve ", Quoted(ServedModel(input.model)));
  const auto add = [&](const char* flag, const auto& value, const auto& usual) {
    if (value != usual) absl::StrAppend(&line, " --", flag, " ", value);
  };
  add("revision", Quoted(input.revision), defaults.revision);
  add("prefill", input.workers == 1 ? 0 : 1, -1);
  add("decode", std::max(1, input.workers - 1), -1);
  add("device", input.device, defaults.device);
  add("dtype", input.dtype, defaults.dtype);
  add("quantization", input.quantization, defaults.quantization);
  add("kv-cache-dtype", input.kv_cache_dtype, defaults.kv_cache_dtype);
  add("max-model-len", plan.max_model_len, input.spec.max_positions);
  add("max-num-seqs", input.max_num_seqs, defaults.max_num_seqs);
  add("max-num-batched-tokens", input.max_num_batched_tokens,
      defaults.max_num_batched_tokens);
  add("block-size", input.block_size, defaults.block_size);
  if (input.gpu) {
    add("gpu-memory-utilization", input.gpu_memory_utilization,
        defaults.gpu_memory_utilization);
  } else {
    add("kv-cache-memory-bytes", plan.kv_bytes, -1);
  }
  return line;
}

}  // namespace

std::string PlanText(const PlanInput& input, const Plan& plan) {
  const engine::ModelSpec& spec = input.spec;
  std::string text = absl::StrFormat(
      "%s: %s, %s parameters, %d layers, %s\n", input.model, spec.architecture,
      Billions(plan.parameters), spec.layers, explain::KvHeads(spec));
  const auto line = [&](const char* name, int64_t bytes,
                        const std::string& note) {
    absl::StrAppendFormat(&text, "  %-18s %10s  %s\n", name, Size(bytes), note);
  };
  const std::string layers(kernels::Name(plan.layers));
  const std::string others(kernels::Name(plan.weights));
  line("memory", plan.budget_bytes,
       absl::StrCat(
           input.gpu
               ? absl::StrFormat("%g of the GPU's %s",
                                 input.gpu_memory_utilization / input.workers,
                                 Size(input.memory_bytes))
               : "of this machine, for CPUs",
           input.workers > 1 ? absl::StrCat(", for each of ", input.workers)
                             : ""));
  const engine::Quantisation& quantised = spec.quantisation;
  const bool given = quantised.method != engine::Quantisation::Method::kNone;
  const std::string experts(kernels::Name(plan.experts));
  std::string weights =
      experts != layers
          ? absl::StrCat("experts in ", experts, ", others in ", others)
      : layers == others ? "in " + layers
                         : absl::StrCat("layers in ", layers, ", others in ",
                                        others, given ? "" : " or int8");
  if (given) {
    const std::string why(quantised.DequantisedFor());
    absl::StrAppend(&weights, why.empty() ? "; the checkpoint's own codes"
                                          : "; dequantised, for " + why);
  }
  if (plan.dtype_assumed) {
    absl::StrAppend(&weights, "; ", others,
                    " is assumed: config.json names no dtype");
  }
  line("weights", plan.weight_bytes, weights);
  line("step workspace", plan.workspace_bytes,
       absl::StrFormat("%d positions a step", input.max_num_batched_tokens));
  line("overhead", plan.overhead_bytes,
       input.gpu ? "driver, kernels, KV transfer"
                 : "program, tokenizer, gRPC, a share of the router");
  line("KV cache", plan.kv_bytes,
       absl::StrFormat("%d blocks, %d tokens in %s", plan.num_blocks,
                       int64_t{plan.num_blocks} * input.block_size,
                       std::string(kernels::Name(plan.kv))));
  line("  a token", plan.kv_token_bytes,
       absl::StrFormat("%d bytes", plan.kv_token_bytes));
  line("  a block", plan.kv_block_bytes,
       absl::StrFormat("%d positions", input.block_size));
  const int64_t rest = plan.budget_bytes - plan.weight_bytes -
                       plan.workspace_bytes - plan.overhead_bytes -
                       plan.kv_bytes;
  if (rest > plan.kv_block_bytes) {
    line("not used", rest,
         absl::StrFormat("the cache ends at twice --max-num-seqs %d",
                         input.max_num_seqs));
  }
  absl::StrAppendFormat(&text, "\n  %10s  %s\n", "context", "at once");
  for (const Contexts& contexts : plan.contexts) {
    absl::StrAppendFormat(&text, "  %10d  %7d\n", contexts.positions,
                          contexts.count);
  }
  if (plan.max_model_len < spec.max_positions && input.max_model_len == 0) {
    absl::StrAppendFormat(&text,
                          "  the model's %d positions do not fit: at most %d\n",
                          spec.max_positions, plan.max_model_len);
  }
  absl::StrAppend(&text, "\n  ", ServeLine(input, plan), "\n");
  return text;
}

std::string PlanJson(const PlanInput& input, const Plan& plan) {
  nlohmann::json object = {
      {"model", input.model},
      {"architecture", input.spec.architecture},
      {"parameters", static_cast<int64_t>(plan.parameters)},
      {"device", input.gpu ? "gpu" : "cpu"},
      {"device_memory_bytes", input.memory_bytes},
      {"workers", input.workers},
      {"dtype", kernels::Name(plan.weights)},
      {"dtype_assumed", plan.dtype_assumed},
      {"layers_dtype", kernels::Name(plan.layers)},
      {"experts_dtype", kernels::Name(plan.experts)},
      {"kv_cache_dtype", kernels::Name(plan.kv)},
      {"budget_bytes", plan.budget_bytes},
      {"weight_bytes", plan.weight_bytes},
      {"workspace_bytes", plan.workspace_bytes},
      {"overhead_bytes", plan.overhead_bytes},
      {"kv_bytes_per_token", plan.kv_token_bytes},
      {"kv_bytes_per_block", plan.kv_block_bytes},
      {"block_size", input.block_size},
      {"num_blocks", plan.num_blocks},
      {"kv_cache_bytes", plan.kv_bytes},
      {"kv_cache_tokens", int64_t{plan.num_blocks} * input.block_size},
      {"max_model_len", plan.max_model_len},
      {"model_max_positions", input.spec.max_positions},
      {"serve", ServeLine(input, plan)}};
  object["contexts"] = nlohmann::json::array();
  for (const Contexts& contexts : plan.contexts) {
    object["contexts"].push_back(
        {{"positions", contexts.positions}, {"count", contexts.count}});
  }
  return object.dump(1) + "\n";
}

}  // namespace tandem::plan
