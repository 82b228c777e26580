// SPDX-License-Identifier: Apache-2.0
// `tandem cordon|uncordon WORKER`: a worker gets nothing new, or does again.

#ifndef TANDEM_CLI_CORDON_H_
#define TANDEM_CLI_CORDON_H_

#include <string>

#include "absl/status/status.h"
#include "cli/connect.h"
#include "common/flags.h"

namespace tandem::cli {

class CordonCommand {
 public:
  explicit CordonCommand(bool cordoned) : cordoned_(cordoned) {}
  void AddTo(CommandLine* line);
  absl::Status Run();

 private:
  const bool cordoned_;
  ConnectFlags admin_;
  TlsFlags tls_;
  std::string worker_id_;
};

}  // namespace tandem::cli

#endif  // TANDEM_CLI_CORDON_H_
