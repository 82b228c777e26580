// SPDX-License-Identifier: Apache-2.0
// `tandem plan MODEL`: does it fit, and how many contexts beside it.

#ifndef TANDEM_CLI_PLAN_COMMAND_H_
#define TANDEM_CLI_PLAN_COMMAND_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/plan/figures.h"
#include "common/flags.h"

namespace tandem::plan {

// The model of `directory` (or of a config.json), and the format of its
// weights, into `input`.
absl::Status ReadModel(const std::string& directory, PlanInput* input);

class PlanCommand {
 public:
  void AddTo(CommandLine* line);
  // After parsing. INVALID_ARGUMENT: --device and --memory exclude each other,
  // or a flag is of a GPU, and the plan of a CPU.
  absl::Status Complete(const CommandLine& line);
  // `directory` holds the model's config.json, or is one; `model` is its name,
  // `revision` as of the hub.
  absl::Status Run(const std::string& model, const std::string& revision,
                   const std::string& directory);

 private:
  PlanInput input_;
  std::string device_;
  int64_t memory_bytes_ = 0;
  bool json_ = false;
};

}  // namespace tandem::plan

#endif  // TANDEM_CLI_PLAN_COMMAND_H_
