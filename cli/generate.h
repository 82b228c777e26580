// SPDX-License-Identifier: Apache-2.0
// `tandem generate`: one prompt to a router, text streamed to standard output
// as it comes, or one JSON object at the end.

#ifndef TANDEM_CLI_GENERATE_H_
#define TANDEM_CLI_GENERATE_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "cli/connect.h"
#include "tandem/v1/inference.pb.h"

namespace tandem::cli {

struct GenerateFlags {
  ConnectFlags router;
  v1::GenerateRequest request;  // all but the prompt
  std::string prompt;
  bool prompt_given = false;  // else it is read from standard input
  bool chat = false;          // the prompt is a user's message
  std::string system;         // with chat
  bool json = false;
  bool timings = false;  // a table on standard error at the end
  double timeout_seconds = 120;
};

// Streams until the end or SIGINT, which cancels the request. The exit code: 0,
// or 130 after SIGINT. What would be asked for and not shown is a UsageError.
absl::StatusOr<int> Generate(const GenerateFlags& flags);

// The object that --json prints: text, token_ids, prompt_token_ids,
// finish_reason, usage, timings, work, workers, logprobs, prompt_logprobs (that
// of the first token is null), attention (of each
// token the layers' weights; layer -1 is their mean); those of all
// sequences under `sequences` where there are several.
std::string ToJson(const v1::GenerateOnceResponse& response);

// Position (the first one has `position`), id, log probability, rank and text
// of each token, a line for each; their sum, and the perplexity.
std::string LogprobsTable(
    const google::protobuf::RepeatedPtrField<v1::TokenLogprob>& tokens,
    int position);

// "prompt 12 tokens (0 cached) ...", aligned, one line per quantity.
std::string TimingsTable(const v1::GenerateDone& done);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_GENERATE_H_
