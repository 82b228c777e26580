// SPDX-License-Identifier: Apache-2.0
// `tandem bench`: loads a running cluster with requests of known arrivals and
// lengths and reports what its users would have felt.

#ifndef TANDEM_CLI_BENCH_BENCH_H_
#define TANDEM_CLI_BENCH_BENCH_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/bench/metrics.h"
#include "cli/bench/runner.h"
#include "cli/bench/workload.h"
#include "cli/connect.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::bench {

struct BenchOptions {
  cli::ConnectFlags router;
  double timeout_seconds = 600;  // of each request
  RunOptions run;
  SyntheticOptions synthetic;
  std::string trace;  // a file that takes the place of `synthetic`
  int trace_rows = 0;
  double time_scale = 1;
  double length_scale = 1;
  uint64_t seed = 0;
  v1::GenerateRequest request;  // all but prompt, length and seed
  std::vector<Objective> objectives;
  std::vector<Metric> metrics;
  std::vector<double> percentiles;
  std::string json_path;  // empty: none is written
  std::string svg_path;
  bool save_detailed = false;  // every request, in the JSON
  bool progress = true;        // on a terminal
  std::vector<std::pair<std::string, std::string>> flags;  // for the JSON
};

// Returns the process's exit code: 0, or 130 and 143 after a signal, which
// ends the run early and reports what there is. An error where no request
// completed.
absl::StatusOr<int> Bench(const BenchOptions& options);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_BENCH_H_
