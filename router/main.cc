// SPDX-License-Identifier: Apache-2.0
// tandem-router: the front door. See process.h.

#include <optional>
#include <string>

#include "common/flags.h"
#include "common/flight_recorder.h"
#include "common/lifecycle.h"
#include "common/log.h"
#include "router/flags.h"
#include "router/process.h"

int main(int argc, char** argv) {
  using namespace tandem;  // NOLINT(google-build-using-namespace)
  router::Flags flags;
  CommandLine line("tandem-router",
                   "The front door: takes prompts over gRPC, places them on "
                   "workers, and streams tokens back.");
  line.Example("tandem-router models/tales");
  router::AddFlags(&line, &flags);
  if (const std::optional<int> code = line.Parse(argc, argv)) return *code;
  const absl::Status logging = InitLog(
      {.format = flags.log.format, .level = flags.log.level, .role = "router"});
  if (!logging.ok()) return ReportFailure("tandem-router", logging);
  for (const auto& [name, value] : line.NonDefaults()) {
    LogDebug("flag", {{name, value}});
  }
  RaiseDescriptorLimit();
  const absl::Status recording =
      flight::Install("router", flags.log.flight_record_dir);
  if (!recording.ok()) return ReportFailure("tandem-router", recording);
  SignalWatcher signals;
  router::Process process(&flags, &signals);
  const absl::Status status = process.Run();
  if (!status.ok()) return ReportFailure("tandem-router", status);
  return signals.ExitCode(kExitOk);
}
