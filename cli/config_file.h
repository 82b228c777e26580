// SPDX-License-Identifier: Apache-2.0
// Where a model may be named by its config.json alone.

#ifndef TANDEM_CLI_CONFIG_FILE_H_
#define TANDEM_CLI_CONFIG_FILE_H_

#include <filesystem>
#include <string>
#include <system_error>

namespace tandem::cli {

// Rather than the folder that holds it, though one may be called so.
inline bool IsConfigFile(const std::string& model) {
  std::error_code error;
  return model.ends_with(".json") &&
         !std::filesystem::is_directory(model, error);
}

}  // namespace tandem::cli

#endif  // TANDEM_CLI_CONFIG_FILE_H_
