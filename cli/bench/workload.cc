// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/workload.h"

#include <algorithm>
#include <cmath>

#include "cli/bench/arrivals.h"
#include "common/random.h"

namespace tandem::bench {
namespace {

int Scaled(int tokens, double scale) {
  return static_cast<int>(std::clamp(std::round(tokens * scale), 1.0, 0x1p24));
}

}  // namespace

std::vector<PlannedRequest> PlanSynthetic(const SyntheticOptions& options) {
  SeededRandom seeds(options.seed);
  SeededRandom arrivals(seeds.Next()), lengths(seeds.Next()),
      prefixes(seeds.Next());
  const std::vector<double> times = ArrivalTimes(
      options.num_prompts, options.request_rate, options.burstiness, &arrivals);
  std::vector<PlannedRequest> plan(options.num_prompts);
  for (size_t i = 0; i < plan.size(); ++i) {
    PlannedRequest& request = plan[i];
    request.at_s = times[i];
    const int drawn = DrawLength(options.prompt, &lengths);
    request.output_tokens = DrawLength(options.output, &lengths);
    const auto within =
        static_cast<int>(std::round(drawn * options.prefix_ratio));
    const int shared = options.prefix_tokens + within;
    const uint64_t prefix = prefixes.Below(options.num_prefixes);
    if (shared > 0) request.prompt.push_back({PrefixStream(prefix), shared});
    if (drawn > within) {
      request.prompt.push_back({OwnStream(i), drawn - within});
    }
  }
  return plan;
}

std::vector<PlannedRequest> PlanTrace(const std::vector<TraceRow>& rows,
                                      double time_scale, double length_scale) {
  const int block_tokens = Scaled(kTraceBlockTokens, length_scale);
  std::vector<PlannedRequest> plan(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    PlannedRequest& request = plan[i];
    request.at_s = rows[i].at_s * time_scale;
    request.output_tokens = Scaled(rows[i].output_tokens, length_scale);
    int left = Scaled(rows[i].prompt_tokens, length_scale);
    for (const int64_t block : rows[i].blocks) {
      const int taken = std::min(left, block_tokens);
      if (taken == 0) break;
      request.prompt.push_back({static_cast<uint64_t>(block), taken});
      left -= taken;
    }
    if (left > 0) request.prompt.push_back({OwnStream(i), left});
  }
  return plan;
}

Clipping ClipToContext(int context_length, std::vector<PlannedRequest>* plan) {
  Clipping clipping;
  for (PlannedRequest& request : *plan) {
    const int prompt = PromptTokens(request.prompt);
    const int output =
        std::min(request.output_tokens,
                 std::max(context_length / 2, context_length - prompt));
    const int kept = std::min(prompt, context_length - output);
    clipping.prompts += kept < prompt;
    clipping.prompt_tokens += prompt - kept;
    clipping.outputs += output < request.output_tokens;
    clipping.output_tokens += request.output_tokens - output;
    TruncatePrompt(&request.prompt, kept);
    request.output_tokens = output;
  }
  return clipping;
}

}  // namespace tandem::bench
