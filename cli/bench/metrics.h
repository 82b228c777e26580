// SPDX-License-Identifier: Apache-2.0
// The four latencies that users of such a service feel, and the limits on
// them that make a request good.

#ifndef TANDEM_CLI_BENCH_METRICS_H_
#define TANDEM_CLI_BENCH_METRICS_H_

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/bench/record.h"

namespace tandem::bench {

enum class Metric {
  kTtft,  // scheduled arrival to the first token
  kTpot,  // first token to the last, per token after the first
  kItl,   // between two messages with tokens: many samples a request
  kE2el,  // scheduled arrival to the end of the stream
};

inline constexpr std::array<Metric, 4> kMetrics = {Metric::kTtft, Metric::kTpot,
                                                   Metric::kItl, Metric::kE2el};

// "ttft", "tpot", "itl", "e2el", as in vLLM's flags and results.
std::string_view MetricName(Metric metric);
// "Time to first token"
std::string_view MetricTitle(Metric metric);

// The samples that one completed request gives, in milliseconds: none for
// TPOT and ITL where there was one token.
std::vector<double> Samples(const RequestRecord& record, Metric metric);

struct Objective {
  Metric metric;
  double limit_ms;
};

// Each item "ttft:200": a metric's name and milliseconds. ITL, which has many
// samples a request, has no such limit; tpot says the same of a request.
absl::StatusOr<std::vector<Objective>> ParseObjectives(
    const std::vector<std::string>& items);

// Completed, and within every limit. Where a request has no sample of a
// metric, that limit holds.
bool Good(const RequestRecord& record,
          const std::vector<Objective>& objectives);

// "ttft,e2el" in the order given, each once.
absl::StatusOr<std::vector<Metric>> ParseMetrics(
    const std::vector<std::string>& names);

// "90,99.9": above 0, below 100; ascending in the result, each once.
absl::StatusOr<std::vector<double>> ParsePercentiles(
    const std::vector<std::string>& items);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_METRICS_H_
