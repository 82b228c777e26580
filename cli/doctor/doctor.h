// SPDX-License-Identifier: Apache-2.0
// `tandem doctor [MODEL]`: what would stop a start here or is wrong with a
// running cluster, one line a check, with what to do about it.

#ifndef TANDEM_CLI_DOCTOR_DOCTOR_H_
#define TANDEM_CLI_DOCTOR_DOCTOR_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/connect.h"
#include "cli/model_source.h"
#include "common/flags.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::doctor {

enum class Verdict { kOk, kWarn, kFail };

struct Check {
  Verdict verdict = Verdict::kOk;
  std::string what;  // "cpu", "port 8000"
  std::string text;  // what was found, and what to do
};
using Checks = std::vector<Check>;

// CPU, shared memory, clock.
void CheckHost(Checks* checks);
// Whether `port` of `host` is free.
void CheckPort(const std::string& host, int port, const std::string& flag,
               Checks* checks);
// Files of a model directory, and memory against what it needs here.
void CheckModel(const std::string& directory, Checks* checks);
// A certificate with its key, and an authority; empty paths are not given.
void CheckCertificates(const TlsFlags& tls, absl::Time now, Checks* checks);
// Workers that registered, those that were rejected, and whether they match.
// `reach` says why an address host:port cannot be reached; "": it can.
void CheckCluster(const v1::GetClusterStateResponse& state,
                  const std::function<std::string(const std::string&)>& reach,
                  Checks* checks);

// Why a TCP connection cannot be made within two seconds; "": it can.
std::string Reach(const std::string& endpoint);

std::string ChecksText(const Checks& checks, bool colour);
std::string ChecksJson(const Checks& checks);

class DoctorCommand {
 public:
  void AddTo(CommandLine* line);
  // The exit code: 1 where a check failed.
  absl::StatusOr<int> Run();

 private:
  cli::ModelSource source_;
  std::string host_ = "127.0.0.1";
  int grpc_port_ = 50051, http_port_ = 8000;
  std::string admin_;
  TlsFlags tls_;
  bool json_ = false;
};

}  // namespace tandem::doctor

#endif  // TANDEM_CLI_DOCTOR_DOCTOR_H_
