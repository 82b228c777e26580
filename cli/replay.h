// SPDX-License-Identifier: Apache-2.0
// `tandem replay FILE`: a router's recorded session (router/session), taken
// once more by a core of this program, as fast as it goes: what befell workers
// and requests, a line each, and whether it decided as it did then.

#ifndef TANDEM_CLI_REPLAY_H_
#define TANDEM_CLI_REPLAY_H_

#include <string>

#include "absl/status/status.h"
#include "common/flags.h"

namespace tandem::cli {

class ReplayCommand {
 public:
  void AddTo(CommandLine* line);
  // NOT_FOUND, INVALID_ARGUMENT: there is no recorded session. ABORTED: this
  // program decides otherwise; the message says where.
  absl::Status Run();

 private:
  std::string path_;
};

}  // namespace tandem::cli

#endif  // TANDEM_CLI_REPLAY_H_
