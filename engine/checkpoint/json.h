// SPDX-License-Identifier: Apache-2.0
// JSON from files that may be hostile: UTF-8 is checked, nesting is limited
// (neither parsing nor freeing recurses deeper), nothing throws, and errors
// name the file.

#ifndef TANDEM_ENGINE_CHECKPOINT_JSON_H_
#define TANDEM_ENGINE_CHECKPOINT_JSON_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace tandem::engine {

inline constexpr int kMaxJsonDepth = 32;

// Later duplicates of a key win, as in Python's json.
absl::StatusOr<nlohmann::json> ParseJson(const std::string& path,
                                         std::string_view text);

// The parser takes a NUL byte for the end of its input, so that anything
// could follow; no JSON text has one.
bool HasNul(std::string_view text);

// What a parser's complaint comes down to: where and why, in printable ASCII,
// without the library's prefix and without the text that it stopped at.
std::string JsonErrorText(std::string_view what);

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_CHECKPOINT_JSON_H_
