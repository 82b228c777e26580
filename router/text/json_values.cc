// SPDX-License-Identifier: Apache-2.0
#include "router/text/json_values.h"

#include "nlohmann/json.hpp"
#include "router/text/json_scanner.h"

namespace tandem::router {

std::string JsonString(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', /*ensure_ascii=*/false,
                                   nlohmann::json::error_handler_t::replace);
}

bool IsJsonValue(std::string_view text) {
  JsonScanner scanner;
  for (const char c : std::string_view("{\"\":")) scanner.Push(c);
  for (const char c : text) {
    if (scanner.Push(c) != JsonScanner::Verdict::kMore) return false;
  }
  return scanner.Push('}') == JsonScanner::Verdict::kComplete &&
         scanner.members().size() == 1;
}

std::string JsonOf(std::string_view value) {
  const std::string_view bare = WithoutSpacesAround(value);
  if (bare == "True") return "true";
  if (bare == "False") return "false";
  if (bare == "None") return "null";
  return IsJsonValue(bare) ? std::string(bare) : JsonString(value);
}

}  // namespace tandem::router
