// SPDX-License-Identifier: Apache-2.0
// `tandem flight PATH`: what flight recorders wrote (common/flight_recorder.h),
// several processes as one story: a line each with the time of day in UTC, the
// process and what it did. No request goes out: it reads files.

#ifndef TANDEM_CLI_FLIGHT_H_
#define TANDEM_CLI_FLIGHT_H_

#include <string>

#include "absl/status/status.h"
#include "common/flags.h"

namespace tandem::cli {

class FlightCommand {
 public:
  void AddTo(CommandLine* line);
  // NOT_FOUND, INVALID_ARGUMENT: what is there is no flight record.
  absl::Status Run();

 private:
  std::string path_;
  std::string request_;
};

}  // namespace tandem::cli

#endif  // TANDEM_CLI_FLIGHT_H_
