// SPDX-License-Identifier: Apache-2.0
// The plan of a run, made whole before the first request is sent: who arrives
// when, with which prompt, and asks for how many tokens. A pure function of
// its options, so that two systems can be given the very same work.

#ifndef TANDEM_CLI_BENCH_WORKLOAD_H_
#define TANDEM_CLI_BENCH_WORKLOAD_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cli/bench/lengths.h"
#include "cli/bench/prompt.h"
#include "cli/bench/trace.h"

namespace tandem::bench {

struct PlannedRequest {
  double at_s = 0;  // after the start
  std::vector<PromptRun> prompt;
  int output_tokens = 0;
};

struct SyntheticOptions {
  int num_prompts = 100;
  uint64_t seed = 0;
  double request_rate = std::numeric_limits<double>::infinity();
  double burstiness = 1;
  LengthDistribution prompt;
  LengthDistribution output;
  // Tokens in front of every prompt that it shares with others. ...
  int prefix_tokens = 0;
  // ... and the share of the prompt's own length that becomes such a prefix.
  double prefix_ratio = 0;
  // How many different prefixes there are; each request takes one at random.
  int num_prefixes = 1;
};

// Arrivals, lengths and prefixes are drawn from three sequences of their own:
// a change of the rate leaves the lengths as they were.
std::vector<PlannedRequest> PlanSynthetic(const SyntheticOptions& options);

// Times and lengths are multiplied by the scales; blocks shrink with the
// lengths, so that as large a share of the prompts stays shared.
std::vector<PlannedRequest> PlanTrace(const std::vector<TraceRow>& rows,
                                      double time_scale, double length_scale);

// What the model's limits took away.
struct Clipping {
  int prompts = 0;  // that lost tokens
  int outputs = 0;
  int64_t prompt_tokens = 0;  // that were lost
  int64_t output_tokens = 0;
};

// Makes prompt and output fit `context_length` positions together. The output
// keeps up to half of them, the prompt's end is cut to what that leaves.
// REQUIRES: context_length >= 2.
Clipping ClipToContext(int context_length, std::vector<PlannedRequest>* plan);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_WORKLOAD_H_
