// SPDX-License-Identifier: Apache-2.0

#include "common/read_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem {

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t most) {
  const auto failed = [&path] {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
  };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return failed();
  const absl::Cleanup close_file = [file] { close(file); };
  std::string text;
  char piece[1 << 16];
  for (;;) {
    const ssize_t bytes = read(file, piece, sizeof(piece));
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return failed();
    if (bytes == 0) return text;
    text.append(piece, static_cast<size_t>(bytes));
    if (text.size() > most) {
      return absl::InvalidArgumentError(
          absl::StrCat("cannot read ", path, ": it has over ", most, " bytes"));
    }
  }
}

}  // namespace tandem
