// SPDX-License-Identifier: Apache-2.0
// A record made by hand, for tests of what is worked out from it.

#ifndef TANDEM_TESTS_CLI_BENCH_RECORDS_H_
#define TANDEM_TESTS_CLI_BENCH_RECORDS_H_

#include <vector>

#include "cli/bench/record.h"

namespace tandem::bench {

// Completed; one token at each of `token_times_s`, the end with the last.
inline RequestRecord Completed(double scheduled_s, double sent_s,
                               const std::vector<double>& token_times_s) {
  RequestRecord record;
  record.scheduled_s = record.due_s = scheduled_s;
  record.sent_s = sent_s;
  record.ended_s = token_times_s.back();
  for (const double at_s : token_times_s) record.arrivals.push_back({at_s, 1});
  record.prompt_tokens = 10;
  record.output_tokens = record.planned_output_tokens =
      static_cast<int>(token_times_s.size());
  record.finish_reason = "FINISH_REASON_LENGTH";
  record.sent = true;
  return record;
}

inline RequestRecord Failed(double sent_s, double ended_s,
                            const absl::Status& status) {
  RequestRecord record;
  record.scheduled_s = record.due_s = record.sent_s = sent_s;
  record.ended_s = ended_s;
  record.sent = true;
  record.status = status;
  return record;
}

}  // namespace tandem::bench

#endif  // TANDEM_TESTS_CLI_BENCH_RECORDS_H_
