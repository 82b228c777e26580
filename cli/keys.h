// SPDX-License-Identifier: Apache-2.0
// `tandem keys new|list`: the file of the router's --api-keys-file.

#ifndef TANDEM_CLI_KEYS_H_
#define TANDEM_CLI_KEYS_H_

#include <string>

#include "absl/status/status.h"
#include "common/flags.h"
#include "router/tenants/key_file.h"

namespace tandem::cli {

class KeysCommand {
 public:
  void AddTo(CommandLine* line);
  absl::Status Run();

 private:
  absl::Status New();
  absl::Status List() const;

  std::string path_;
  std::string tenant_;
  std::string name_;
  router::TenantLimits limits_;
  CommandLine* line_ = nullptr;
  CommandLine* new_ = nullptr;
};

}  // namespace tandem::cli

#endif  // TANDEM_CLI_KEYS_H_
