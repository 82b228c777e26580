// SPDX-License-Identifier: Apache-2.0
// The figures of a run, from its records. Latencies are of the completed
// requests alone, which is why the failed ones are counted beside them, each
// with its status.

#ifndef TANDEM_CLI_BENCH_SUMMARY_H_
#define TANDEM_CLI_BENCH_SUMMARY_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cli/bench/metrics.h"
#include "cli/bench/record.h"
#include "cli/bench/statistics.h"

namespace tandem::bench {

struct Failures {
  int count = 0;
  std::string example;  // the first one's message
};

// One stretch of the timeline, all of the same length.
struct Interval {
  double begin_s = 0;
  int64_t output_tokens = 0;  // that arrived, of failed requests too
  int completed = 0;
  int failed = 0;
  double in_flight = 0;  // requests sent and not ended, averaged over it
};

struct Summary {
  // From the start to the end of the last request.
  double duration_s = 0;
  int planned = 0;
  int sent = 0;
  int completed = 0;
  int good = 0;  // of the completed, those within the objectives
  // By "RESOURCE_EXHAUSTED QUEUE_FULL": the code and, if any, the reason.
  std::map<std::string, Failures> failures;
  int failed = 0;
  // Ended by the model before the tokens asked for.
  int short_outputs = 0;
  int64_t prompt_tokens = 0;  // of completed requests, as are the next two
  int64_t cached_tokens = 0;
  int64_t output_tokens = 0;
  int peak_in_flight = 0;
  double mean_in_flight = 0;

  std::map<Metric, Distribution> latencies_ms;
  // How much later than possible the generator sent: its own fault, not the
  // server's, and part of the latencies.
  Distribution lateness_ms;

  // As the server measured them, over completed requests; handoffs of those
  // that had one.
  Distribution queue_ms, prefill_ms, handoff_ms, handoff_exposed_ms;
  int split = 0;  // prompts computed on a prefill worker
  int64_t retries = 0;
  int64_t preemptions = 0;

  double interval_s = 0;
  std::vector<Interval> timeline;

  double PerSecond(double count) const {
    return duration_s > 0 ? count / duration_s : 0;
  }
};

// `ran_s`: how long the load ran, where that is longer than to the end of its
// last request, as when it was interrupted.
Summary Summarize(const std::vector<RequestRecord>& records,
                  const std::vector<Objective>& objectives, double ran_s = 0);

// The length of intervals that divides `duration_s` into at most `most`: 1, 2
// or 5 times a power of ten, seconds.
double IntervalLength(double duration_s, int most);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_SUMMARY_H_
