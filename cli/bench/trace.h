// SPDX-License-Identifier: Apache-2.0
// Recorded arrivals: when requests came and how long they were. Two formats
// are read, told apart by their first character:
//
//   Azure's LLM inference traces, CSV with a header of at least
//     TIMESTAMP,ContextTokens,GeneratedTokens
//     2023-11-16 18:15:46.6805900,374,44
//   Mooncake's, one JSON object a line; hash_ids name the prompt's blocks of
//   512 tokens, and equal ids mean equal blocks
//     {"timestamp": 27482, "input_length": 6955, "output_length": 52,
//      "hash_ids": [46, 47, ...]}               (timestamp in milliseconds)
//
// Rows are in the order of their times. Anything else is INVALID_ARGUMENT
// with the file, the line and what was expected.

#ifndef TANDEM_CLI_BENCH_TRACE_H_
#define TANDEM_CLI_BENCH_TRACE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem::bench {

inline constexpr int kTraceBlockTokens = 512;

struct TraceRow {
  double at_s = 0;  // after the first row
  int prompt_tokens = 0;
  int output_tokens = 0;
  // Empty, or one id for each kTraceBlockTokens begun, 0..kLargestBlockId.
  std::vector<int64_t> blocks = {};
};

// The first `max_rows` at most. `name` is for messages. At least one row.
absl::StatusOr<std::vector<TraceRow>> ParseTrace(std::string_view text,
                                                 const std::string& name,
                                                 int max_rows);

absl::StatusOr<std::vector<TraceRow>> ReadTrace(const std::string& path,
                                                int max_rows);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_TRACE_H_
