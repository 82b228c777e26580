// SPDX-License-Identifier: Apache-2.0
// The flags of `tandem bench`. Those that `vllm bench serve` has too carry its
// names.

#ifndef TANDEM_CLI_BENCH_COMMAND_H_
#define TANDEM_CLI_BENCH_COMMAND_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cli/bench/bench.h"
#include "common/flags.h"

namespace tandem::bench {

class BenchCommand {
 public:
  void AddTo(CommandLine* line);

  // Checks the flags against each other. INVALID_ARGUMENT says which exclude
  // which.
  absl::StatusOr<BenchOptions> Complete(const CommandLine& line) const;

 private:
  absl::Status CompleteLoad(const CommandLine& line,
                            BenchOptions* options) const;
  void CompleteRequest(BenchOptions* options) const;

  std::string router_ = "127.0.0.1:50051";
  std::string api_key_;
  double timeout_seconds_ = 600;
  std::string request_rate_ = "inf";
  double burstiness_ = 1;
  int max_concurrency_ = 16;
  int num_prompts_ = 100;
  int64_t seed_ = 0;
  std::string trace_;
  double time_scale_ = 1, length_scale_ = 1;
  int input_len_ = 512, output_len_ = 128;
  double range_ratio_ = 0;
  std::string distribution_ = "uniform";
  double sigma_ = 0.5;
  int prefix_len_ = 0, num_prefixes_ = 1;
  double prefix_ratio_ = 0;
  std::optional<double> temperature_;
  bool ignore_eos_ = true;
  bool detokenize_ = true;
  bool bypass_prefix_cache_ = false;
  std::string placement_ = "auto";
  std::string model_;
  std::vector<std::string> goodput_;
  std::vector<std::string> percentile_metrics_ = {"ttft", "tpot", "itl",
                                                  "e2el"};
  std::vector<std::string> metric_percentiles_ = {"90", "99"};
  std::string json_, svg_;
  bool save_detailed_ = false;
  bool progress_ = true;
  TlsFlags tls_;
};

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_COMMAND_H_
