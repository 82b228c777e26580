// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/config_file.h"
#include "cli/explain/command.h"
#include "cli/explain/machine.h"
#include "cli/explain/report.h"
#include "common/lifecycle.h"
#include "engine/checkpoint/file.h"
#include "engine/checkpoint/safetensors.h"

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
  measure.integer_dots =
      kernels::HasIntegerProducts(explanation.formats.layers);
  measure.read_bytes = static_cast<size_t>(
      StepWork(explanation.spec, explanation.formats, 1, 0, 1).weight_bytes);
  absl::StatusOr<Machine> machine = MeasureMachine(measure, ShowProgress);
  ShowProgress("");
  return machine;
}

// One line of progress for what takes over a second: on a terminal how far it
// is, elsewhere that it has begun.
class ShownTiming {
 public:
  explicit ShownTiming(Lengths lengths)
      : what_(absl::StrCat("timing a prompt of ", lengths.prompt,
                           ", output of ", lengths.output)) {}
  ~ShownTiming() {
    if (shown_) ShowProgress("");
  }
  ShownTiming(const ShownTiming&) = delete;
  ShownTiming& operator=(const ShownTiming&) = delete;

  void Update(double share) {
    if (std::chrono::steady_clock::now() - begun_ < std::chrono::seconds(1)) {
      return;
    }
    if (isatty(STDERR_FILENO) != 0) {
      std::cerr << absl::StrFormat("\r\033[K%s: %3.0f %%", what_, 100 * share)
                << std::flush;
    } else if (!shown_) {
      std::cerr << what_ << " ...\n" << std::flush;
    }
    shown_ = true;
  }

 private:
  const std::string what_;
  const std::chrono::steady_clock::time_point begun_ =
      std::chrono::steady_clock::now();
  bool shown_ = false;
};

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

// What is timed of the request. Nothing: it is not to be timed.
absl::StatusOr<std::optional<Lengths>> PlanTiming(
    const engine::ModelSpec& spec, const Formats& formats,
    const ExplainOptions& options) {
  const bool weights = !options.model.empty() &&
                       engine::Checkpoint::MainPath(options.model).ok();
  if (!options.measure.has_value()) {
    const double bytes = StepWork(spec, formats, 1, 0, 1).weight_bytes;
    if (!weights || bytes > kMostWeightBytes) return std::nullopt;
    return ShortEnough(spec, options.lengths);
  }
  if (!*options.measure) return std::nullopt;
  if (!weights) {
    return UsageError(
        "--measure needs a directory with weights (model.safetensors)");
  }
  const int64_t positions = options.lengths.prompt + options.lengths.output;
  if (positions > spec.max_positions) {
    return UsageError(absl::StrCat("--measure: ", positions,
                                   " positions, the model has ",
                                   spec.max_positions));
  }
  return options.lengths;
}

absl::Status AddTimings(const ExplainOptions& options, Lengths lengths,
                        Explanation* explanation) {
  const engine::ModelSpec spec = WithPositionsForPairs(explanation->spec);
  const auto timer = RequestTimer::Load(spec, {.directory = options.model,
                                               .formats = explanation->formats,
                                               .block_size = options.block_size,
                                               .threads = options.threads});
  if (!timer.ok()) return timer.status();
  const auto time = [&](Lengths of) {
    ShownTiming shown(of);
    return (*timer)->Time(of, [&](double share) { shown.Update(share); });
  };
  absl::StatusOr<Timing> request = time(lengths);
  if (!request.ok()) return request.status();
  explanation->timing = *std::move(request);
  absl::StatusOr<std::vector<TimedPair>> pairs =
      TimePairs(spec, explanation->formats, *explanation->timing,
                options.pairs_seconds, time);
  if (!pairs.ok()) return pairs.status();
  explanation->pairs = *std::move(pairs);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<engine::ModelSpec> LoadConfig(const std::string& model) {
  if (model.empty()) {
    return engine::ParseModelSpec("", kDefaultConfig, "", "");
  }
  if (!cli::IsConfigFile(model)) return engine::LoadModelSpec(model);
  const auto config = engine::ReadFile(model, engine::kMaxConfigBytes);
  if (!config.ok()) return config.status();
  return engine::ParseModelSpec(model, *config, "", "");
}

absl::Status Explain(const ExplainOptions& options) {
  absl::StatusOr<engine::ModelSpec> spec = LoadConfig(options.model);
  if (!spec.ok()) return spec.status();
  const absl::StatusOr<std::string> type =
      options.model.empty() ? "bfloat16" : CheckpointType(options.model);
  if (!type.ok()) return type.status();
  Explanation explanation{
      .model = options.name.empty() ? NameOf(options.model) : options.name,
      .spec = *spec,
      .formats = FormatsOf(*spec, ChooseFormats(*spec, *type, options.formats)),
      .lengths = options.lengths,
      .block_size = options.block_size};
  // What may be refused comes before what takes time.
  const auto timing = PlanTiming(*spec, explanation.formats, options);
  if (!timing.ok()) return timing.status();
  std::ofstream svg;
  if (!options.svg.empty()) {
    // What it holds stays until there is something to put in its place.
    svg.open(options.svg, std::ios::app);
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
    const absl::Status timed = AddTimings(options, **timing, &explanation);
    if (!timed.ok()) {
      if (options.measure.has_value() || absl::IsInternal(timed)) return timed;
      // Nobody asked for it.
      std::cerr << "not timed: " << timed.message() << "\n";
    }
  }
  std::cout << (options.json
                    ? ReportJson(explanation)
                    : ReportText(explanation, isatty(STDOUT_FILENO) != 0))
            << std::flush;
  if (!options.svg.empty()) {
    std::error_code ignored;  // pipes have no size
    std::filesystem::resize_file(options.svg, 0, ignored);
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
