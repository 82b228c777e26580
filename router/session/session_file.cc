// SPDX-License-Identifier: Apache-2.0
#include "router/session/session_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tandem::router::session {

absl::StatusOr<std::unique_ptr<SessionFile>> CreateSessionFile(
    const std::string& directory) {
  auto file = std::make_unique<SessionFile>();
  file->path = absl::StrCat(
      directory, "/tandem-router-",
      absl::FormatTime("%Y%m%dT%H%M%SZ", absl::Now(), absl::UTCTimeZone()), "-",
      getpid(), ".session");
  // Streams have no say in whom a file is for.
  const int made =
      open(file->path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sessions cannot be written to ", directory, ": ",
                     std::strerror(errno)));
  }
  close(made);
  file->stream.open(file->path, std::ios::binary | std::ios::app);
  return file;
}

}  // namespace tandem::router::session
