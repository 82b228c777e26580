// SPDX-License-Identifier: Apache-2.0
// The file of --config: YAML, one mapping of flags' names to their values, as
// vLLM reads it.
//
//   port: 8000
//   enable-prefix-caching: false
//   lora-modules: [a=/adapters/a, b=/adapters/b]
//   speculative-config: {method: ngram, num_speculative_tokens: 3}

#ifndef TANDEM_COMMON_CONFIG_FILE_H_
#define TANDEM_COMMON_CONFIG_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

struct ConfigEntry {
  enum class Kind { kScalar, kList, kMap };

  std::string key;
  int line = 0;  // from 1
  Kind kind = Kind::kScalar;
  // The scalar, the list's elements, or NAME=VALUE of a map's.
  std::vector<std::string> values;
  std::string json;     // of a map
  bool nested = false;  // a map: some of its values are lists or maps
};

// In the file's order. INVALID_ARGUMENT names file and line: no YAML, no
// mapping, a key twice, a key without a value, a list of lists, or a map that
// is nested too deep or no UTF-8.
absl::StatusOr<std::vector<ConfigEntry>> ReadConfigFile(
    const std::string& path);

}  // namespace tandem

#endif  // TANDEM_COMMON_CONFIG_FILE_H_
