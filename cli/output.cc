// SPDX-License-Identifier: Apache-2.0
#include "cli/output.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "common/utf8.h"

namespace tandem::cli {

std::string InOneLine(std::string_view text) {
  return ForTerminal(JsonEscaped(text, /*quotes=*/false));
}

absl::Status FlushOutput() {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0;
  if (std::cout.good() && flushed && std::ferror(stdout) == 0) {
    return absl::OkStatus();
  }
  if (flushed) {  // why an earlier write failed is forgotten: a last one tells
    errno = 0;
    std::fputc('\n', stdout);
    std::fflush(stdout);
  }
  return absl::UnavailableError(
      absl::StrCat("cannot write standard output",
                   errno == 0 ? "" : absl::StrCat(": ", std::strerror(errno))));
}

}  // namespace tandem::cli
