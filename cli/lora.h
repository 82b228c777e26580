// SPDX-License-Identifier: Apache-2.0
// `tandem lora load|unload|list`: adapters of a running cluster.

#ifndef TANDEM_CLI_LORA_H_
#define TANDEM_CLI_LORA_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/connect.h"
#include "common/flags.h"

namespace tandem::cli {

class LoraCommand {
 public:
  void AddTo(CommandLine* line);
  absl::Status Run();

 private:
  void AddRouter(CommandLine* line);

  ConnectFlags admin_;
  TlsFlags tls_;
  absl::Duration timeout_ = absl::Minutes(5);
  std::string name_;
  std::string path_;
  bool json_ = false;
  CommandLine* line_ = nullptr;
  CommandLine* load_ = nullptr;
  CommandLine* unload_ = nullptr;
};

}  // namespace tandem::cli

#endif  // TANDEM_CLI_LORA_H_
