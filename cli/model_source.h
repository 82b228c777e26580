// SPDX-License-Identifier: Apache-2.0
// MODEL on the command line: a directory, or an id on the Hugging Face hub.

#ifndef TANDEM_CLI_MODEL_SOURCE_H_
#define TANDEM_CLI_MODEL_SOURCE_H_

#include <string>

#include "absl/status/statusor.h"
#include "common/flags.h"

namespace tandem::cli {

// What is neither a path that exists nor written as one.
bool IsHubId(const std::string& model);

struct ModelSource {
  std::string model;
  std::string revision = "main";

  // The argument MODEL, and --revision. `otherwise`: what is taken
  // where there is none; empty: there must be one. Where there need be none, a
  // config.json will do, too.
  void AddTo(CommandLine* line, const std::string& otherwise = "");
  // The directory; an id is fetched first, with progress on standard error.
  // `config_only`: config.json is enough. Errors as of text::FetchModel.
  absl::StatusOr<std::string> Directory(bool config_only = false) const;
};

// `tandem pull MODEL`: fetches and prints the directory.
absl::Status Pull(const ModelSource& source);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_MODEL_SOURCE_H_
