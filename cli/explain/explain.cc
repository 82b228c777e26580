// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cli/explain/command.h"
#include "cli/explain/machine.h"
#include "cli/explain/report.h"
#include "engine/file.h"

namespace tandem::explain {
namespace {

// The shape that most figures are quoted for.
constexpr std::string_view kDefaultName = "Llama 3.1 8B";
constexpr std::string_view kDefaultConfig = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama",
  "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
  "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
  "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
  "rope_theta": 500000.0, "hidden_act": "silu"
})";

// The directory's own name, of "DIR/", "DIR/config.json" and "." too.
std::string NameOf(const std::string& model) {
  if (model.empty()) return std::string(kDefaultName);
  std::error_code error;
  std::filesystem::path path = std::filesystem::weakly_canonical(model, error);
  if (error) path = model;
  if (path.filename() == "config.json") path = path.parent_path();
  return path.filename().string();
}

// On a terminal one line, which the next one replaces; else nothing.
void ShowProgress(std::string_view what) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::cerr << "\r\033[K";
  if (!what.empty()) std::cerr << "measuring: " << what << " ...";
  std::cerr << std::flush;
}

absl::StatusOr<Machine> MeasureFor(const Explanation& explanation,
                                   const ExplainOptions& options) {
  MeasureMachineOptions measure{.threads = options.threads};
  const kernels::DType layers = options.formats.layers;
  measure.integer_dots =
      layers == kernels::DType::kInt8 || layers == kernels::DType::kInt4;
  measure.read_bytes = static_cast<size_t>(
      StepWork(explanation.spec, options.formats, 1, 0, 1).weight_bytes);
  absl::StatusOr<Machine> machine = MeasureMachine(measure, ShowProgress);
  ShowProgress("");
  return machine;
}

}  // namespace

absl::StatusOr<engine::ModelSpec> LoadConfig(const std::string& model) {
  if (model.empty()) {
    return engine::ParseModelSpec("", kDefaultConfig, "", "");
  }
  if (!model.ends_with(".json")) return engine::LoadModelSpec(model);
  const auto config = engine::ReadFile(model, engine::kMaxConfigBytes);
  if (!config.ok()) return config.status();
  return engine::ParseModelSpec(model, *config, "", "");
}

absl::Status Explain(const ExplainOptions& options) {
  absl::StatusOr<engine::ModelSpec> spec = LoadConfig(options.model);
  if (!spec.ok()) return spec.status();
  Explanation explanation{.model = NameOf(options.model),
                          .spec = *std::move(spec),
                          .formats = options.formats,
                          .lengths = options.lengths,
                          .block_size = options.block_size};
  // Before what takes time.
  std::ofstream svg;
  if (!options.svg.empty()) {
    svg.open(options.svg);
    if (!svg) {
      return absl::InvalidArgumentError(
          absl::StrCat("--svg: cannot write '", options.svg, "'"));
    }
  }
  if (options.machine) {
    const absl::StatusOr<Machine> machine = MeasureFor(explanation, options);
    if (!machine.ok()) return machine.status();
    explanation.machine = *machine;
  }
  std::cout << (options.json
                    ? ReportJson(explanation)
                    : ReportText(explanation, isatty(STDOUT_FILENO) != 0))
            << std::flush;
  if (!options.svg.empty()) {
    svg << ReportSvg(explanation);
    svg.close();
    if (svg.fail()) {
      return absl::DataLossError(
          absl::StrCat(options.svg, " could not be written whole"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tandem::explain
