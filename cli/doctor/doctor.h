// SPDX-License-Identifier: Apache-2.0
// `tandem doctor [MODEL]`: what would stop a start here or is wrong with a
// running cluster, one line a check, with what to do about it.

#ifndef TANDEM_CLI_DOCTOR_DOCTOR_H_
#define TANDEM_CLI_DOCTOR_DOCTOR_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/connect.h"
#include "cli/model_source.h"
#include "common/flags.h"
#include "common/rpc/credentials.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::doctor {

enum class Verdict { kOk, kWarn, kFail };

struct Check {
  Verdict verdict = Verdict::kOk;
  std::string what;  // "cpu", "port 8000"
  std::string text;  // what was found, and what to do
};
using Checks = std::vector<Check>;

// CPU, shared memory, clock, file descriptors.
void CheckHost(Checks* checks);
// The GPU and NCCL, where this installation has parts for them.
void CheckGpu(Checks* checks);
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

// Of two looks at one cluster: workers with sequences and without a step.
void CheckProgress(const v1::GetClusterStateResponse& before,
                   const v1::GetClusterStateResponse& after, Checks* checks);
// Workers beyond loopback, where the caller has no `tls` for them.
void CheckPlaintext(const v1::GetClusterStateResponse& state, bool tls,
                    Checks* checks);

inline constexpr absl::Duration kClockTolerance = absl::Seconds(5);
inline constexpr absl::Duration kRenewBefore = absl::Hours(24 * 14);

// What a process tells of itself over HTTP; what it does not tell is absent.
struct ProcessFacts {
  bool answers = true;     // its HTTP port does
  bool counts = true;      // /metrics does
  std::string stuck = {};  // what /livez says where it fails
  double open_fds = 0;
  double max_fds = 0;
  std::optional<absl::Time> date = {};  // its clock
  std::optional<absl::Time> certificate_expiry = {};
};
void CheckProcess(const std::string& name, const ProcessFacts& facts,
                  absl::Time now, Checks* checks);
// By /livez and /metrics of host:port, each within two seconds.
ProcessFacts AskProcess(const std::string& endpoint);

// Why a TCP connection cannot be made within two seconds; "": it can.
std::string Reach(const std::string& endpoint);
// The same of a gRPC connection that both ends' certificates allow.
std::string ReachByTls(const std::string& endpoint,
                       const rpc::Credentials& tls);

std::string ChecksText(const Checks& checks, bool colour);
std::string ChecksJson(const Checks& checks);

class DoctorCommand {
 public:
  void AddTo(CommandLine* line);
  // The exit code: 1 where a check failed.
  absl::StatusOr<int> Run();

 private:
  void LookAtCluster(Checks* checks) const;

  cli::ModelSource source_;
  std::string host_ = "127.0.0.1";
  int grpc_port_ = 50051, http_port_ = 8000;
  std::string admin_;
  TlsFlags tls_;
  bool json_ = false;
};

}  // namespace tandem::doctor

#endif  // TANDEM_CLI_DOCTOR_DOCTOR_H_
