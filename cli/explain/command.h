// SPDX-License-Identifier: Apache-2.0
// `tandem explain`: what the KV cache saves on a given model and request, and
// why prefill and decode are bound by different things on this machine.

#ifndef TANDEM_CLI_EXPLAIN_COMMAND_H_
#define TANDEM_CLI_EXPLAIN_COMMAND_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/explain/chosen_formats.h"
#include "cli/explain/counts.h"
#include "common/flags.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::explain {

struct ExplainOptions {
  std::string model;  // directory or config.json; empty: Llama 3.1 8B
  std::string name;   // for the report; empty: the directory's
  Lengths lengths{.prompt = 100, .output = 50};
  FormatFlags formats = {};
  int block_size = 16;
  int threads = 0;      // 0: one per CPU
  bool machine = true;  // measure its limits
  // Time the request, with the cache and without. Unset: where there are
  // weights, small ones, and then of a request that is short enough.
  std::optional<bool> measure;
  double pairs_seconds = 10;  // for the quoted pairs that are timed beside it
  bool json = false;
  std::string svg;  // file; empty: none
};

class ExplainCommand {
 public:
  void AddTo(CommandLine* line);
  ExplainOptions Complete(const CommandLine& line) const;

 private:
  ExplainOptions options_;
  bool measure_ = true;
};

// The configuration that options.model names. INVALID_ARGUMENT and NOT_FOUND
// name the file.
absl::StatusOr<engine::ModelSpec> LoadConfig(const std::string& model);

// Prints to standard output.
absl::Status Explain(const ExplainOptions& options);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_COMMAND_H_
