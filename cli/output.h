// SPDX-License-Identifier: Apache-2.0
// Standard output, which a full disk or a closed pipe may have refused.

#ifndef TANDEM_CLI_OUTPUT_H_
#define TANDEM_CLI_OUTPUT_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tandem::cli {

// What a worker or a request said, as part of one line on a terminal: it
// neither steers that nor looks like further lines.
std::string InOneLine(std::string_view text);

// Writes what is buffered. UNAVAILABLE if that or anything printed before was
// lost.
absl::Status FlushOutput();

}  // namespace tandem::cli

#endif  // TANDEM_CLI_OUTPUT_H_
