// SPDX-License-Identifier: Apache-2.0
// Which family a config.json is of, and where it says so: of a model that sees
// too, the part that reads and writes text has a config of its own within.

#ifndef TANDEM_ENGINE_CHECKPOINT_CONFIG_FAMILY_H_
#define TANDEM_ENGINE_CHECKPOINT_CONFIG_FAMILY_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/checkpoint/families.h"
#include "nlohmann/json.hpp"

namespace tandem::engine {

struct TextPart {
  const Family* family = nullptr;
  nlohmann::json config;
  std::string prefix;  // of its fields in messages
  // The whole or the part says that the head is tied. Where the other says that
  // it is not, transformers 4 goes by the part's word, and 5 by the file.
  bool either_ties = false;
};

// Of `config`, an object. Refuses families that are not served by name.
absl::StatusOr<TextPart> FindTextPart(const std::string& path,
                                      const nlohmann::json& config);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_CONFIG_FAMILY_H_
