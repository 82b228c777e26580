// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/explain/command.h"
#include "cli/explain/machine.h"
#include "cli/explain/report.h"
#include "common/lifecycle.h"
#include "engine/file.h"

namespace tandem::explain {
namespace {

// Of the request that is timed without being asked for: without the cache some
// seconds on two cores.
constexpr double kMostFlops = 3e11;
constexpr double kMostWeightBytes = 512.0 * (1 << 20);

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
  const kernels::DType layers = explanation.formats.layers;
  measure.integer_dots =
      layers == kernels::DType::kInt8 || layers == kernels::DType::kInt4;
  measure.read_bytes = static_cast<size_t>(
      StepWork(explanation.spec, explanation.formats, 1, 0, 1).weight_bytes);
  absl::StatusOr<Machine> machine = MeasureMachine(measure, ShowProgress);
  ShowProgress("");
  return machine;
}

void ShowShare(double share) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::cerr << absl::StrFormat("\r\033[Ktiming a request: %3.0f %%",
                               100 * share)
            << std::flush;
}

bool HasWeights(const std::string& directory) {
  return engine::FileExists(directory + "/model.safetensors") ||
         engine::FileExists(directory + "/model.safetensors.index.json");
}

// The longest request of these proportions that nobody has to wait for.
Lengths ShortEnough(const engine::ModelSpec& spec, Lengths lengths) {
  while (lengths.prompt + lengths.output > spec.max_positions ||
         GenerationWork(spec, {}, lengths, false).flops() > kMostFlops) {
    if (lengths.prompt + lengths.output <= 2) break;
    lengths.prompt = (lengths.prompt + 1) / 2;
    lengths.output = (lengths.output + 1) / 2;
  }
  return lengths;
}

// Nothing: the request is not to be timed.
absl::StatusOr<std::optional<TimingOptions>> PlanTiming(
    const engine::ModelSpec& spec, const Formats& formats,
    const ExplainOptions& options) {
  TimingOptions timing{.directory = options.model,
                       .lengths = options.lengths,
                       .formats = formats,
                       .block_size = options.block_size,
                       .threads = options.threads};
  const bool weights = !options.model.empty() && HasWeights(options.model);
  if (!options.measure.has_value()) {
    const double bytes = StepWork(spec, formats, 1, 0, 1).weight_bytes;
    if (!weights || bytes > kMostWeightBytes) return std::nullopt;
    timing.lengths = ShortEnough(spec, timing.lengths);
    return timing;
  }
  if (!*options.measure) return std::nullopt;
  if (!weights) {
    return UsageError(
        "--measure needs a directory with weights (model.safetensors)");
  }
  const int64_t positions = timing.lengths.prompt + timing.lengths.output;
  if (positions > spec.max_positions) {
    return UsageError(absl::StrCat("--measure: ", positions,
                                   " positions, the model has ",
                                   spec.max_positions));
  }
  return timing;
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
  Explanation explanation{
      .model = options.name.empty() ? NameOf(options.model) : options.name,
      .spec = *spec,
      .formats = FormatsOf(*spec, options.formats),
      .lengths = options.lengths,
      .block_size = options.block_size};
  // What may be refused comes before what takes time.
  const auto timing = PlanTiming(*spec, explanation.formats, options);
  if (!timing.ok()) return timing.status();
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
  if (timing->has_value()) {
    absl::StatusOr<Timing> timed = TimeRequest(*spec, **timing, ShowShare);
    ShowProgress("");
    if (timed.ok()) {
      explanation.timing = *std::move(timed);
    } else if (options.measure.has_value() ||
               absl::IsInternal(timed.status())) {
      return timed.status();
    } else {  // nobody asked for it
      std::cerr << "not timed: " << timed.status().message() << "\n";
    }
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
