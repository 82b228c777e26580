// SPDX-License-Identifier: Apache-2.0
// A run's figures with what they were measured on, and its three forms: a
// table for people, JSON for programs, SVG for pages.

#ifndef TANDEM_CLI_BENCH_REPORT_H_
#define TANDEM_CLI_BENCH_REPORT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench/metrics.h"
#include "cli/bench/record.h"
#include "cli/bench/summary.h"
#include "cli/bench/workload.h"

namespace tandem::bench {

struct Report {
  std::string date;  // UTC, "2026-01-31T12:00:00Z"
  std::string router;
  std::string model;
  int context_length = 0;
  int prefill_workers = 0;  // ready at the start
  int decode_workers = 0;
  // "Poisson arrivals, 4 requests/s"
  std::string load;
  uint64_t seed = 0;
  std::vector<std::pair<std::string, std::string>> flags;  // that were set
  Clipping clipping;
  std::vector<Objective> objectives;
  std::vector<Metric> metrics;      // with percentiles, in this order
  std::vector<double> percentiles;  // ascending
  double generator_cpu_s = 0;       // of this process, during the run
  bool interrupted = false;
  Summary summary;
};

// "0.05", "1.23", "12.3", "1234": what a person compares.
std::string ShortNumber(double value);

// 99 is "p99", 99.9 "p99.9".
std::string PercentileName(double percent);

// "ttft within 200 ms, tpot within 50 ms"; empty without objectives.
std::string ObjectivesText(const std::vector<Objective>& objectives);

std::string ReportTable(const Report& report);

// Keys that `vllm bench serve` writes have its names and units. With
// `records`, one object per request as well.
std::string ReportJson(const Report& report,
                       const std::vector<RequestRecord>* records);

// A page of its own: key figures, latency by percentile, timeline.
std::string ReportSvg(const Report& report);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_REPORT_H_
