// SPDX-License-Identifier: Apache-2.0
// What a status must not tell a client: where things are inside.

#ifndef TANDEM_TESTS_INNER_WORDS_H_
#define TANDEM_TESTS_INNER_WORDS_H_

#include <regex>
#include <string>

#include "absl/status/status.h"
#include "common/error.h"

namespace tandem {

// The first path or address in a status that this project worded; empty: none.
// A client's own gRPC, without a connection, says where it looked for one.
inline std::string InnerWordIn(const absl::Status& status) {
  if (absl::IsUnavailable(status) && ErrorReason(status).empty()) return "";
  static const std::regex kInner(
      R"(ipv[46]:|unix:|\d+\.\d+\.\d+\.\d+|localhost|0x[0-9a-f]{6})"
      R"(|(^|[^a-z0-9])/[a-z]+/[a-z])");
  std::smatch found;
  const std::string message(status.message());
  return std::regex_search(message, found, kInner) ? found.str() : "";
}

}  // namespace tandem

#endif  // TANDEM_TESTS_INNER_WORDS_H_
