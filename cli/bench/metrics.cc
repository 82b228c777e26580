// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/metrics.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "absl/strings/str_cat.h"

namespace tandem::bench {
namespace {

std::optional<double> ParseNumber(std::string_view text) {
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || rest != end) return std::nullopt;
  return value;
}

std::optional<Metric> FindMetric(std::string_view name) {
  for (const Metric metric : kMetrics) {
    if (MetricName(metric) == name) return metric;
  }
  return std::nullopt;
}

}  // namespace

std::string_view MetricName(Metric metric) {
  switch (metric) {
    case Metric::kTtft:
      return "ttft";
    case Metric::kTpot:
      return "tpot";
    case Metric::kItl:
      return "itl";
    case Metric::kE2el:
      return "e2el";
  }
  return "";
}

std::string_view MetricTitle(Metric metric) {
  switch (metric) {
    case Metric::kTtft:
      return "Time to first token";
    case Metric::kTpot:
      return "Time per output token";
    case Metric::kItl:
      return "Inter-token latency";
    case Metric::kE2el:
      return "End-to-end latency";
  }
  return "";
}

std::vector<double> Samples(const RequestRecord& record, Metric metric) {
  std::vector<double> samples;
  const std::vector<TokenArrival>& arrivals = record.arrivals;
  if (arrivals.empty()) return samples;
  switch (metric) {
    case Metric::kTtft:
      samples.push_back(arrivals.front().at_s - record.scheduled_s);
      break;
    case Metric::kTpot:
      if (record.output_tokens > 1) {
        samples.push_back((arrivals.back().at_s - arrivals.front().at_s) /
                          (record.output_tokens - 1));
      }
      break;
    case Metric::kItl:
      for (size_t i = 1; i < arrivals.size(); ++i) {
        samples.push_back(arrivals[i].at_s - arrivals[i - 1].at_s);
      }
      break;
    case Metric::kE2el:
      samples.push_back(record.ended_s - record.scheduled_s);
      break;
  }
  for (double& sample : samples) sample *= 1e3;
  return samples;
}

absl::StatusOr<std::vector<Objective>> ParseObjectives(
    const std::vector<std::string>& items) {
  std::vector<Objective> objectives;
  for (const std::string& item : items) {
    const size_t colon = item.find(':');
    const std::optional<Metric> metric =
        FindMetric(std::string_view(item).substr(0, colon));
    std::optional<double> limit;
    if (colon != std::string::npos) {
      limit = ParseNumber(std::string_view(item).substr(colon + 1));
    }
    if (!metric.has_value() || *metric == Metric::kItl || !limit.has_value() ||
        !(*limit > 0)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--goodput: '", item,
          "' is not one of ttft, tpot, e2el, a colon and milliseconds, as in "
          "ttft:200"));
    }
    objectives.push_back({*metric, *limit});
  }
  return objectives;
}

bool Good(const RequestRecord& record,
          const std::vector<Objective>& objectives) {
  if (!record.completed()) return false;
  for (const Objective& objective : objectives) {
    for (const double sample : Samples(record, objective.metric)) {
      if (sample > objective.limit_ms) return false;
    }
  }
  return true;
}

absl::StatusOr<std::vector<Metric>> ParseMetrics(
    const std::vector<std::string>& names) {
  std::vector<Metric> metrics;
  for (const std::string& name : names) {
    const std::optional<Metric> metric = FindMetric(name);
    if (!metric.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--percentile-metrics: '", name,
                       "' is none of ttft, tpot, itl, e2el"));
    }
    if (std::find(metrics.begin(), metrics.end(), *metric) == metrics.end()) {
      metrics.push_back(*metric);
    }
  }
  return metrics;
}

absl::StatusOr<std::vector<double>> ParsePercentiles(
    const std::vector<std::string>& items) {
  std::vector<double> percentiles;
  for (const std::string& item : items) {
    const std::optional<double> value = ParseNumber(item);
    if (!value.has_value() || !(*value > 0) || !(*value < 100)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--metric-percentiles: '", item,
                       "' is not a number above 0 and below 100"));
    }
    percentiles.push_back(*value);
  }
  std::sort(percentiles.begin(), percentiles.end());
  percentiles.erase(std::unique(percentiles.begin(), percentiles.end()),
                    percentiles.end());
  return percentiles;
}

}  // namespace tandem::bench
