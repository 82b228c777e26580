// SPDX-License-Identifier: Apache-2.0
// What is noted of each request while it runs. Everything that is reported is
// worked out from these afterwards.

#ifndef TANDEM_CLI_BENCH_RECORD_H_
#define TANDEM_CLI_BENCH_RECORD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tandem::bench {

// Tokens that came in one message.
struct TokenArrival {
  double at_s = 0;
  int tokens = 0;
};

// The server's own account of a finished request; milliseconds.
struct ServerTimes {
  double queue_ms = 0;
  double prefill_ms = 0;
  double handoff_ms = 0;
  double handoff_exposed_ms = 0;  // after the first token
  int retries = 0;
  int preemptions = 0;
  bool split = false;  // a prefill worker computed the prompt
};

// Times are seconds after the start of the run.
struct RequestRecord {
  // When the user pressed enter. Latencies count from here, so that a system
  // that makes requests wait, or a generator that is late, cannot hide it.
  double scheduled_s = 0;
  // When it could be sent at the earliest: later than `scheduled_s` only if
  // the limit on concurrency held it back.
  double due_s = 0;
  double sent_s = 0;
  double ended_s = 0;
  std::vector<TokenArrival> arrivals;  // in order, none empty
  int prompt_tokens = 0;
  int planned_output_tokens = 0;
  int output_tokens = 0;  // the sum of the arrivals
  int cached_tokens = 0;
  std::string finish_reason;
  ServerTimes server;
  bool sent = false;
  absl::Status status;  // of the call, once it ended

  bool completed() const {
    return sent && status.ok() && !finish_reason.empty();
  }
};

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_RECORD_H_
