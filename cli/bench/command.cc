// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/command.h"

#include <charconv>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/lifecycle.h"

namespace tandem::bench {
namespace {

constexpr int kMostRequests = 10'000'000;

// As vLLM takes some of them, several words, or all in one.
std::vector<std::string> SplitItems(const std::vector<std::string>& values) {
  std::vector<std::string> items;
  for (const std::string& value : values) {
    for (absl::string_view item :
         absl::StrSplit(value, absl::ByAnyChar(", "), absl::SkipEmpty())) {
      items.emplace_back(item);
    }
  }
  return items;
}

absl::StatusOr<double> ParseRate(const std::string& text) {
  if (text == "inf") return std::numeric_limits<double>::infinity();
  double rate;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, rate);
  if (error != std::errc() || rest != end || !(rate > 0) || std::isinf(rate)) {
    return UsageError(absl::StrCat("--request-rate: '", text,
                                   "' is neither a number above 0 nor inf"));
  }
  return rate;
}

}  // namespace

void BenchCommand::AddTo(CommandLine* line) {
  line->Example("tandem bench --max-concurrency 8 --num-prompts 200");
  line->Example(
      "tandem bench --request-rate 4 --goodput ttft:200,tpot:50 --svg run.svg");
  line->Example(
      "tandem bench --trace azure_llm_2023_conv.csv --time-scale 0.5 "
      "--length-scale 0.25");
  line->Group("Router");
  line->Add("router", &router_, "The router's gRPC address");
  line->Add("api-key", &api_key_, "The key that the router asks for");
  line->Add("model", &model_, "Served model; empty: the only one");
  line->Add("timeout", &timeout_seconds_, "Seconds that a request may take",
            0.001, 1e6);

  line->Group("Arrivals");
  line->Add("request-rate", &request_rate_,
            "Requests per second, whatever the answers do (open loop); inf: "
            "as --max-concurrency allows, or all at once where that is 0");
  line->Add("burstiness", &burstiness_,
            "Shape of the gaps: 1 Poisson, less bursts, more evens out", 0.001,
            1e6);
  line->AddInt("max-concurrency", &max_concurrency_,
               "Requests in flight at most. Alone: the closed loop, the next "
               "goes out when one ends. With a rate or a trace: none unless "
               "given, and waiting for a place counts as latency; 0: no limit",
               {0, 1 << 20});
  line->AddInt("num-prompts", &num_prompts_,
               "Requests; of a trace: its first so many, all if not given",
               {1, kMostRequests});
  line->AddInt("seed", &seed_,
               "Equal seeds give equal arrivals, lengths, prompts and draws",
               {0});

  line->Group("Trace");
  line->Add("trace", &trace_,
            "Arrivals and lengths from this file: Azure's LLM trace (CSV) or "
            "Mooncake's (JSON lines, with shared blocks)");
  line->Add("time-scale", &time_scale_,
            "Multiplies its times: 0.5 is twice the load", 0, 1e6);
  line->Add("length-scale", &length_scale_,
            "Multiplies its lengths of prompts, outputs and shared blocks",
            1e-6, 1e3);

  line->Group("Prompts and outputs");
  line->AddInt("random-input-len", &input_len_,
               "Tokens of a prompt on average, without its prefix",
               {1, kMaxTokens});
  line->AddInt("random-output-len", &output_len_, "Tokens asked for on average",
               {1, kMaxTokens});
  line->Add("random-range-ratio", &range_ratio_,
            "Lengths are uniform from (1 - this) to (1 + this) times the mean",
            0, 1);
  line->AddChoice("random-distribution", &distribution_,
                  {"uniform", "lognormal"}, "Of the lengths");
  line->Add("random-sigma", &sigma_,
            "Of the logarithm of lognormal lengths; 1 is as uneven as "
            "production",
            0, 5);
  line->AddInt("random-prefix-len", &prefix_len_,
               "Tokens before each prompt that it shares with others",
               {0, kMaxTokens});
  line->Add("random-prefix-ratio", &prefix_ratio_,
            "Share of the prompt's own length that is such a prefix instead", 0,
            1);
  line->AddInt("random-num-prefixes", &num_prefixes_,
               "Different prefixes; each request takes one at random",
               {1, kMostRequests});
  line->Add("ignore-eos", &ignore_eos_,
            "Generate all tokens asked for, past the model's end token");
  line->Add("temperature", &temperature_, "0 is greedy; the model's default", 0,
            2);
  line->Add("detokenize", &detokenize_,
            "Ask for text, as users do; without, for token ids alone");
  line->AddChoice("placement", &placement_, {"auto", "split", "local"},
                  "Prefill on a prefill worker (split) or in place (local)");
  line->Add("bypass-prefix-cache", &bypass_prefix_cache_,
            "Compute whole prompts, shared or not");

  line->Group("Results");
  line->AddList("goodput", &goodput_,
                "Limits that make a request good, in milliseconds: ttft:200 "
                "tpot:50 e2el:5000");
  line->LastTakesSeveralWords();
  line->AddList("percentile-metrics", &percentile_metrics_,
                "Latencies in the table: ttft, tpot, itl, e2el");
  line->AddList("metric-percentiles", &metric_percentiles_,
                "Percentiles beside mean, median and maximum");
  line->Add("json", &json_, "Write all figures to this file");
  line->LastNotFromEnvironment();
  line->Add("save-detailed", &save_detailed_,
            "With every request's times in the JSON");
  line->Add("svg", &svg_,
            "Draw latency by percentile and the timeline into this file");
  line->LastNotFromEnvironment();
  line->Add("progress", &progress_, "A bar, on a terminal");
  line->Group("TLS");
  tls_.AddTo(line);
}

absl::Status BenchCommand::CompleteLoad(const CommandLine& line,
                                        BenchOptions* options) const {
  if (!trace_.empty()) {
    for (const char* const other :
         {"request-rate", "burstiness", "random-input-len", "random-output-len",
          "random-range-ratio", "random-distribution", "random-sigma",
          "random-prefix-len", "random-prefix-ratio", "random-num-prefixes"}) {
      if (!line.typed(other)) continue;
      return UsageError(
          absl::StrCat("--", other,
                       " and --trace exclude each other: arrivals and lengths "
                       "are the trace's"));
    }
    options->trace = trace_;
    options->trace_rows =
        line.given("num-prompts") ? num_prompts_ : kMostRequests;
    options->time_scale = time_scale_;
    options->length_scale = length_scale_;
    if (line.given("max-concurrency")) {
      options->run.max_concurrency = max_concurrency_;
    }
    return absl::OkStatus();
  }
  for (const char* const of_trace : {"time-scale", "length-scale"}) {
    if (!line.typed(of_trace)) continue;
    return UsageError(absl::StrCat("--", of_trace, " needs --trace"));
  }
  if (prefix_len_ > 0 && prefix_ratio_ > 0) {
    return UsageError(
        "--random-prefix-len and --random-prefix-ratio exclude each other: "
        "tokens before each prompt, or a share of it");
  }
  const absl::StatusOr<double> rate = ParseRate(request_rate_);
  if (!rate.ok()) return rate.status();
  if (std::isinf(*rate) && line.typed("burstiness")) {
    return UsageError("--burstiness needs a --request-rate that is not inf");
  }
  if (std::isinf(*rate) || line.given("max-concurrency")) {
    options->run.max_concurrency = max_concurrency_;
  }
  options->run.closed_loop = std::isinf(*rate) && max_concurrency_ > 0;
  SyntheticOptions& synthetic = options->synthetic;
  synthetic.num_prompts = num_prompts_;
  synthetic.seed = static_cast<uint64_t>(seed_);
  synthetic.request_rate = *rate;
  synthetic.burstiness = burstiness_;
  const bool uniform = distribution_ == "uniform";
  if (line.typed(uniform ? "random-sigma" : "random-range-ratio")) {
    return UsageError(
        uniform ? "--random-sigma needs --random-distribution lognormal"
                : "--random-range-ratio is for --random-distribution uniform");
  }
  synthetic.prompt = {.kind = uniform ? LengthDistribution::Kind::kUniform
                                      : LengthDistribution::Kind::kLogNormal,
                      .mean_tokens = input_len_,
                      .range_ratio = range_ratio_,
                      .sigma = sigma_};
  synthetic.output = synthetic.prompt;
  synthetic.output.mean_tokens = output_len_;
  synthetic.prefix_tokens = prefix_len_;
  synthetic.prefix_ratio = prefix_ratio_;
  synthetic.num_prefixes = num_prefixes_;
  return absl::OkStatus();
}

void BenchCommand::CompleteRequest(BenchOptions* options) const {
  v1::GenerateRequest& request = options->request;
  request.set_model(model_);
  request.mutable_stopping()->set_ignore_eos(ignore_eos_);
  if (temperature_.has_value()) {
    request.mutable_sampling()->set_temperature(
        static_cast<float>(*temperature_));
  }
  // The ids are what tokens are counted by.
  request.mutable_output()->set_text(detokenize_);
  request.mutable_output()->set_return_token_ids(detokenize_);
  request.set_placement(placement_ == "split"   ? v1::PLACEMENT_SPLIT
                        : placement_ == "local" ? v1::PLACEMENT_LOCAL
                                                : v1::PLACEMENT_AUTO);
  if (bypass_prefix_cache_) {
    request.mutable_cache()->set_bypass_prefix_cache(true);
  }
}

absl::StatusOr<BenchOptions> BenchCommand::Complete(
    const CommandLine& line) const {
  BenchOptions options;
  options.router = {router_, tls_.cert, tls_.key,
                    tls_.ca, api_key_,  "--router"};
  options.timeout_seconds = timeout_seconds_;
  options.seed = static_cast<uint64_t>(seed_);
  const absl::Status load = CompleteLoad(line, &options);
  if (!load.ok()) return load;
  if (absl::Status status = cli::CheckUtf8("--model", model_); !status.ok()) {
    return status;
  }
  CompleteRequest(&options);
  auto objectives = ParseObjectives(SplitItems(goodput_));
  if (!objectives.ok()) return objectives.status();
  auto metrics = ParseMetrics(SplitItems(percentile_metrics_));
  if (!metrics.ok()) return metrics.status();
  auto percentiles = ParsePercentiles(SplitItems(metric_percentiles_));
  if (!percentiles.ok()) return percentiles.status();
  options.objectives = *std::move(objectives);
  options.metrics = *std::move(metrics);
  options.percentiles = *std::move(percentiles);
  if (save_detailed_ && json_.empty()) {
    return UsageError("--save-detailed needs --json");
  }
  options.json_path = json_;
  options.svg_path = svg_;
  options.save_detailed = save_detailed_;
  options.progress = progress_;
  options.flags = line.NonDefaults();
  return options;
}

}  // namespace tandem::bench
