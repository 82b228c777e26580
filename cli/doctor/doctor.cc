// SPDX-License-Identifier: Apache-2.0
#include "cli/doctor/doctor.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cli/status.h"
#include "common/lifecycle.h"

namespace tandem::doctor {
namespace {

const char* Name(Verdict verdict) {
  return verdict == Verdict::kOk     ? "ok"
         : verdict == Verdict::kWarn ? "warn"
                                     : "fail";
}

// Fields of the fingerprint that workers differ in, with both values.
void CompareWorkers(const v1::GetClusterStateResponse& state, Checks* checks) {
  std::map<std::string, std::set<std::string>> values;
  uint32_t least = 0, most = UINT32_MAX;
  for (const v1::WorkerStatus& worker : state.workers()) {
    for (const auto& [field, value] : worker.hello().fingerprint()) {
      values[field].insert(value);
    }
    least = std::max(least, worker.hello().protocol_min());
    most = std::min(most, worker.hello().protocol_max());
  }
  if (state.workers_size() < 2) return;
  bool equal = true;
  for (const auto& [field, different] : values) {
    if (different.size() < 2) continue;
    equal = false;
    checks->push_back(
        {Verdict::kFail, "fingerprint",
         absl::StrCat(field, " differs: ", *different.begin(), " and ",
                      *different.rbegin(),
                      "; start all workers with one model and one build")});
  }
  if (equal) {
    checks->push_back({Verdict::kOk, "fingerprint", "equal on all workers"});
  }
  checks->push_back(
      least <= most
          ? Check{Verdict::kOk, "protocol",
                  absl::StrCat("version ", most, " on all workers")}
          : Check{Verdict::kFail, "protocol",
                  absl::StrCat("one worker needs ", least, ", another knows ",
                               most, ": upgrade the older one")});
}

}  // namespace

void CheckCluster(const v1::GetClusterStateResponse& state,
                  const std::function<std::string(const std::string&)>& reach,
                  Checks* checks) {
  bool decode = false;
  for (const v1::WorkerStatus& worker : state.workers()) {
    const v1::WorkerHello& hello = worker.hello();
    const std::string name = hello.worker().worker_id();
    decode = decode || hello.role() == v1::WORKER_ROLE_DECODE;
    const std::string why = reach(hello.worker().endpoint());
    if (!why.empty()) {
      checks->push_back(
          {Verdict::kFail, name,
           absl::StrCat(hello.worker().endpoint(),
                        " cannot be reached from here (", why,
                        "): check --advertise-host and the network")});
    } else if (!worker.placeable()) {
      checks->push_back(
          {Verdict::kWarn, name, "gets no new requests: " + worker.reason()});
    } else {
      checks->push_back(
          {Verdict::kOk, name, "ready at " + hello.worker().endpoint()});
    }
  }
  for (const v1::RejectedWorker& worker : state.rejected()) {
    checks->push_back({Verdict::kFail, worker.worker_id(),
                       "was rejected: " + worker.reason()});
  }
  if (!decode) {
    checks->push_back({Verdict::kFail, "workers",
                       "no decode worker is registered: start one with "
                       "--router at this router's internal port"});
  }
  CompareWorkers(state, checks);
}

std::string ChecksText(const Checks& checks, bool colour) {
  std::string text;
  for (const Check& check : checks) {
    const char* const tint = check.verdict == Verdict::kOk     ? "32"
                             : check.verdict == Verdict::kWarn ? "33"
                                                               : "31";
    absl::StrAppend(&text, colour ? absl::StrCat("\033[", tint, "m") : "",
                    absl::StrFormat("%-4s", Name(check.verdict)),
                    colour ? "\033[0m" : "",
                    absl::StrFormat("  %-12s %s\n", check.what, check.text));
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
  line->AddPositional("MODEL", &source_.model,
                      "Directory or id on the hub to check", false);
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

absl::StatusOr<int> DoctorCommand::Run() {
  Checks checks;
  CheckHost(&checks);
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
    const auto state =
        cli::FetchClusterState({admin_, tls_.cert, tls_.key, tls_.ca});
    if (state.ok()) {
      CheckCluster(*state, Reach, &checks);
    } else {
      checks.push_back(
          {Verdict::kFail, "router",
           absl::StrCat("no answer at ", admin_, ": ",
                        std::string(state.status().message()),
                        "; start it, or check --admin and --tls-*")});
    }
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
