// SPDX-License-Identifier: Apache-2.0
#include "cli/doctor/doctor.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cli/output.h"
#include "cli/status.h"
#include "common/lifecycle.h"
#include "common/rpc/credentials.h"

namespace tandem::doctor {
namespace {

// A step takes less, of all but the largest models on slow machines.
constexpr absl::Duration kBetweenLooks = absl::Seconds(2);

const char* Name(Verdict verdict) {
  return verdict == Verdict::kOk     ? "ok"
         : verdict == Verdict::kWarn ? "warn"
                                     : "fail";
}

}  // namespace

std::string ChecksText(const Checks& checks, bool colour) {
  std::string text;
  for (const Check& check : checks) {
    const char* const tint = check.verdict == Verdict::kOk     ? "32"
                             : check.verdict == Verdict::kWarn ? "33"
                                                               : "31";
    absl::StrAppend(&text, colour ? absl::StrCat("\033[", tint, "m") : "",
                    absl::StrFormat("%-4s", Name(check.verdict)),
                    colour ? "\033[0m" : "",
                    absl::StrFormat("  %-12s %s\n", cli::InOneLine(check.what),
                                    cli::InOneLine(check.text)));
  }
  return text;
}

std::string ChecksJson(const Checks& checks) {
  nlohmann::json list = nlohmann::json::array();
  for (const Check& check : checks) {
    list.push_back({{"verdict", Name(check.verdict)},
                    {"check", check.what},
                    {"text", check.text}});
  }
  return nlohmann::json{{"checks", list}}.dump(
             1, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\n";
}

void DoctorCommand::AddTo(CommandLine* line) {
  line->Example("tandem doctor models/tales");
  line->Example("tandem doctor --admin 127.0.0.1:50053");
  line->AddModel(&source_.model, "Directory or id on the hub to check", false);
  line->Group("Before a start");
  line->Add("revision", &source_.revision,
            "Branch, tag or commit on the hub; not for directories");
  line->Add("host", &host_, "Address that will be listened on");
  line->AddInt("grpc-port", &grpc_port_, "Public gRPC", {1, 65535});
  line->AddInt("port", &http_port_, "HTTP", {1, 65535});
  line->Group("A running cluster");
  line->Add("admin", &admin_,
            "The router's admin address: its workers are checked, and no ports "
            "of this machine");
  line->Group("TLS");
  tls_.AddTo(line);
  line->Group("Output");
  line->Add("json", &json_, "One JSON object");
}

void DoctorCommand::LookAtCluster(Checks* checks) const {
  const cli::ConnectFlags router{admin_, tls_.cert, tls_.key, tls_.ca};
  const auto state = cli::FetchClusterState(router);
  if (!state.ok()) {
    const std::string why(state.status().message());
    checks->push_back(
        {Verdict::kFail, "router",
         absl::IsUnimplemented(state.status())
             ? why
             : absl::StrCat("no answer at ", admin_, ": ", why,
                            "; start it, or check --admin and --tls-*")});
    return;
  }
  const auto tls = rpc::LoadCredentials(tls_.cert, tls_.key, tls_.ca);
  const bool secured = tls.ok() && tls->tls();
  CheckCluster(
      *state,
      [&](const std::string& endpoint) {
        return secured ? ReachByTls(endpoint, *tls) : Reach(endpoint);
      },
      checks);
  CheckPlaintext(*state, secured, checks);
  for (const v1::WorkerStatus& worker : state->workers()) {
    CheckProcess(worker.hello().worker().worker_id(),
                 AskProcess(worker.hello().http_endpoint()), absl::Now(),
                 checks);
  }
  const bool busy = std::any_of(
      state->workers().begin(), state->workers().end(),
      [](const auto& worker) { return worker.load().running() > 0; });
  if (!busy) return;
  absl::SleepFor(kBetweenLooks);
  const auto after = cli::FetchClusterState(router);
  if (after.ok()) CheckProgress(*state, *after, checks);
}

absl::StatusOr<int> DoctorCommand::Run() {
  if (!admin_.empty()) {
    const auto address =
        cli::HostAndPort({admin_, tls_.cert, tls_.key, tls_.ca});
    if (!address.ok()) return address.status();
  }
  Checks checks;
  CheckHost(&checks);
  CheckGpu(&checks);
  CheckCertificates(tls_, absl::Now(), &checks);
  if (!source_.model.empty()) {
    const absl::StatusOr<std::string> directory = source_.Directory();
    if (directory.ok()) {
      CheckModel(*directory, &checks);
    } else {
      checks.push_back(
          {Verdict::kFail, "model", std::string(directory.status().message())});
    }
  }
  if (admin_.empty()) {
    CheckPort(host_, grpc_port_, "grpc-port", &checks);
    CheckPort(host_, http_port_, "port", &checks);
  } else {
    LookAtCluster(&checks);
  }
  const bool colour =
      isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
  std::cout << (json_ ? ChecksJson(checks) : ChecksText(checks, colour))
            << std::flush;
  const bool failed = std::any_of(
      checks.begin(), checks.end(),
      [](const Check& check) { return check.verdict == Verdict::kFail; });
  return failed ? kExitFailed : kExitOk;
}

}  // namespace tandem::doctor
