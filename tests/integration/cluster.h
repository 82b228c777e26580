// SPDX-License-Identifier: Apache-2.0
// A cluster of real processes on loopback, for integration and fault tests:
// starts the binaries, kills and stops them, asks them what they hold. Every
// test ends with WhatIsLeft: nothing may be left behind.

#ifndef TANDEM_TESTS_INTEGRATION_CLUSTER_H_
#define TANDEM_TESTS_INTEGRATION_CLUSTER_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tandem/v1/admin.grpc.pb.h"
#include "tandem/v1/inference.grpc.pb.h"

namespace tandem::integration {

using TimePoint = std::chrono::steady_clock::time_point;

struct ClusterOptions {
  std::string model_dir = {};  // empty: the embedded model
  int prefill = 1;
  int decode = 1;
  int routers = 1;  // workers register with all
  std::vector<std::string> router_arguments = {};
  std::vector<std::string> worker_arguments = {};
  std::vector<std::string> prefill_arguments = {};
  std::vector<std::string> decode_arguments = {};
  // The programs with failpoints (tests/failpoints).
  bool faulty = false;
  // What scripts/dev-ca.sh makes: a certificate for each role or worker, and
  // "client" and "operator" for the test itself; empty: plain text.
  std::string tls_directory = {};
};

// What a process holds of the system, as of one moment.
struct Footprint {
  int descriptors = 0;
  int threads = 0;
  int arenas = 0;  // mappings of memory that is shared with a peer
  int files = 0;   // other mappings of files
};

// One request's outcome, folded from its events.
struct Outcome {
  absl::Status status;
  // Of several sequences, one behind the other.
  std::string text;
  std::vector<int32_t> token_ids;
  std::map<int, v1::GeneratedSequence> sequences;
  v1::PromptLogprobs prompt_logprobs;  // of all messages
  v1::FinishReason reason = v1::FINISH_REASON_UNSPECIFIED;
  v1::GenerateDone done;
  int started = 0;  // events of each kind, for their order and number
  int finished = 0;
  int ends = 0;
  TimePoint sent, ended;
  std::vector<TimePoint> deltas;  // of those that brought a token
};

class Cluster {
 public:
  explicit Cluster(ClusterOptions options);
  ~Cluster();  // kills everything
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  // Starts all, waits until every worker is placeable, runs a few requests, so
  // that what is made once is there, and takes the footprints that WhatIsLeft
  // compares with. One that is started again has the next check's.
  absl::Status Start();

  // `name` is "router", "router-1", "prefill-0", "decode-1", ...
  pid_t pid(const std::string& name) const;
  void Signal(const std::string& name, int signal);
  // What the next start of it has in TANDEM_FAILPOINTS, once.
  void ArmAtStart(const std::string& name, const std::string& faults);
  // "NAME=value" for every start of it from now on, in place of what was set
  // here before.
  void SetEnvironment(const std::string& name, const std::string& variable);
  // POST /failpoints: "" once armed, or why not.
  std::string Arm(const std::string& name, const std::string& faults);
  // SIGKILL and reap.
  void Kill(const std::string& name);
  // Starts a killed one again, on the same ports.
  absl::Status Restart(const std::string& name);
  // Waits for it to end by itself; its exit code, or 128 + signal.
  std::optional<int> WaitForExit(const std::string& name,
                                 std::chrono::seconds timeout);
  // Every router places on so many.
  absl::Status WaitUntilReady(int prefill, int decode,
                              std::chrono::seconds timeout);

  int routers() const { return static_cast<int>(routers_.size()); }
  absl::StatusOr<v1::GetClusterStateResponse> State(int router = 0,
                                                    bool requests = true);
  std::unique_ptr<v1::InferenceService::Stub> Client(int router = 0);
  // As `who` under TLS.
  std::shared_ptr<grpc::Channel> Channel(int port,
                                         const std::string& who = "client");
  int grpc_port() const { return routers_[0].grpc_port; }
  int admin_port() const { return routers_[0].admin_port; }
  int internal_port() const { return routers_[0].internal_port; }
  // Of a worker's gRPC.
  int worker_port(const std::string& name) const {
    return processes_.at(name).grpc_port;
  }
  int http_port() const { return routers_[0].http_port; }

  // Reads the whole stream. `context` lets the caller cancel, and brings a
  // deadline of its own.
  Outcome Generate(const v1::GenerateRequest& request,
                   grpc::ClientContext* context = nullptr, int router = 0);
  // Behind any test that is right.
  static void SetDeadline(grpc::ClientContext* context);

  // Within a few seconds: no request anywhere; on every worker no ticket, no
  // stream, no live or reserved block, all blocks accounted for, no slab in
  // use, no memory shared with a peer that is gone; descriptors, threads and
  // mapped files as at the start; every log free of `canary`, and of lines at
  // level ERROR but for those of ExpectErrors. An empty string, or all that is
  // wrong.
  std::string WhatIsLeft(const std::string& canary = "");
  // Lines with `part` are what the test wanted.
  void ExpectErrors(const std::string& part) { expected_.push_back(part); }

  // Values of "name{labels}" lines of a process's /metrics.
  std::map<std::string, double> Metrics(const std::string& name);
  // "CODE BODY" of GET `path` on a process's HTTP port; empty: no answer.
  std::string Probe(const std::string& name, const std::string& path);
  Footprint FootprintOf(const std::string& name) const;
  std::string Log(const std::string& name) const;
  static std::string BinaryPath(const std::string& binary);

 private:
  struct Process {
    std::vector<std::string> argv = {};
    pid_t pid = -1;
    std::string log_path = {};
    int http_port = 0;
    int grpc_port = 0;  // of a worker
    std::string faults = {};
    std::string variable = {};  // of its environment
    std::optional<Footprint> baseline = {};
  };

  struct Router {
    std::string name = {};
    int grpc_port = 0;
    int internal_port = 0;
    int admin_port = 0;
    int http_port = 0;
    std::shared_ptr<grpc::Channel> channel = {};
    std::shared_ptr<grpc::Channel> admin_channel = {};
  };

  absl::Status Spawn(const std::string& name);
  void WarmUp();
  std::string Program(const std::string& name) const;
  std::string TlsFile(const std::string& name, const std::string& ending) const;
  // "" or what is missing.
  std::string Missing(int router, int prefill, int decode);
  bool ClientsSee(int router, int decode);
  std::string CheckWorkers(const v1::GetClusterStateResponse& state);
  std::string CheckFootprints();
  std::string CheckLog(const std::string& name,
                       const std::string& canary) const;

  const ClusterOptions options_;
  std::string directory_;  // of logs
  std::vector<Router> routers_;
  std::map<std::string, Process> processes_;
  std::vector<std::string> expected_;
};

// Greedy unless changed; token ids are returned.
v1::GenerateRequest TextRequest(const std::string& prompt, int max_tokens);

// Prompts of many lengths from `seed`, all different, in plain words.
std::vector<std::string> SomePrompts(int count, uint64_t seed);

// The model that tests serve.
std::string EmbeddedModel();

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_CLUSTER_H_
