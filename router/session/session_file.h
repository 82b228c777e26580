// SPDX-License-Identifier: Apache-2.0
// Where a recorded session goes: DIRECTORY/tandem-router-STARTED-PID.session,
// readable by its owner alone.

#ifndef TANDEM_ROUTER_SESSION_SESSION_FILE_H_
#define TANDEM_ROUTER_SESSION_SESSION_FILE_H_

#include <fstream>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace tandem::router::session {

struct SessionFile {
  std::string path;
  std::ofstream stream;
};

// INVALID_ARGUMENT, with the reason, where it cannot be made.
absl::StatusOr<std::unique_ptr<SessionFile>> CreateSessionFile(
    const std::string& directory);

}  // namespace tandem::router::session

#endif  // TANDEM_ROUTER_SESSION_SESSION_FILE_H_
