// SPDX-License-Identifier: Apache-2.0
// The frame of both worker binaries: flags, signals, loop, bring-up, servers,
// registration, metrics, drain, exit code. What a role decides is behind Role.

#ifndef TANDEM_WORKER_PROCESS_H_
#define TANDEM_WORKER_PROCESS_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/flags.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "common/random.h"
#include "common/rpc/credentials.h"
#include "worker/bringup.h"
#include "worker/measured_executor.h"

namespace tandem::worker {

// Made, used and destroyed on the loop, except `services`.
class Role {
 public:
  virtual ~Role() = default;
  virtual std::vector<grpc::Service*> services() = 0;
  virtual v1::WorkerLoad Load() const = 0;
  virtual void Drain() = 0;
  // For its calls to others, from now on.
  virtual void ReplaceCredentials(const rpc::Credentials& /*tls*/) {}
  virtual bool idle() const = 0;
  // For liveness: a count of what was done, and whether something could be done
  // now that waits for nobody else. See the cores.
  virtual int64_t progress() const = 0;
  virtual bool has_work() const = 0;
  virtual void CloseAll(const absl::Status& status) = 0;
  // Not OK: the process must end with it.
  virtual absl::Status fatal() const { return absl::OkStatus(); }
  // Once a second.
  virtual void UpdateMetrics() = 0;
};

struct RoleContext {
  const WorkerFlags& flags;
  WorkerParts& parts;
  engine::Executor* executor;  // measured
  Loop* loop;
  Random* random;
  Metrics* metrics;
  const rpc::Credentials& tls;
};

struct RoleSpec {
  std::string binary;  // "tandem-decode"
  std::string description;
  v1::WorkerRole role;
  std::vector<std::string> health_services;  // "tandem.v1.DecodeService"
  // Flags of this role alone.
  std::function<void(CommandLine*)> add_flags;
  std::function<std::unique_ptr<Role>(const RoleContext&)> make;
};

// From main's arguments to its exit code.
int RunWorker(int argc, char** argv, const RoleSpec& spec);

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_PROCESS_H_
