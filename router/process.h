// SPDX-License-Identifier: Apache-2.0
// The process tandem-router: all its parts, from flags to the end of its drain.
// bringup.cc makes them, listeners.cc opens the ports, process.cc watches over
// what runs, drains and takes the parts down. Included by them and main.cc
// alone.
//
// Threads: gRPC's own and the HTTP listener's handlers (validation,
// tokenisation), the loop "router" (all of RouterCore), and the HTTP
// listener's.

#ifndef TANDEM_ROUTER_PROCESS_H_
#define TANDEM_ROUTER_PROCESS_H_

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/file_watcher.h"
#include "common/http/server.h"
#include "common/lifecycle.h"
#include "common/loop.h"
#include "common/metrics.h"
#include "common/random.h"
#include "common/rpc/cluster_credentials.h"
#include "common/rpc/credentials.h"
#include "common/rpc/rotating_credentials.h"
#include "common/rpc/security_metrics.h"
#include "common/rpc/server.h"
#include "common/self_connect.h"
#include "common/thread_loop.h"
#include "router/core/core.h"
#include "router/flags.h"
#include "router/grpc/service.h"
#include "router/http/front.h"
#include "router/http/live_feed.h"
#include "router/intake/intake.h"
#include "router/intake/model_text.h"
#include "router/intake/structured_checkers.h"
#include "router/intake/structured_gate.h"
#include "router/openengine/service.h"
#include "router/page/page.h"
#include "router/session/session_file.h"
#include "router/telemetry/metrics.h"
#include "router/telemetry/otlp_exporter.h"
#include "router/tenants/access.h"

namespace tandem::router {

class Process {
 public:
  Process(Flags* flags, SignalWatcher* signals)
      : flags_(*flags), signals_(signals), loop_("router") {}

  // Until it is drained. Returns why it could not start or had to end.
  absl::Status Run();

 private:
  // Of the port for clients.
  static constexpr const char* kServices[] = {"tandem.v1.InferenceService",
                                              "openengine.v1.Inference",
                                              "openengine.v1.Control"};

  // ---- bringup.cc, in this order.
  absl::Status Start();
  absl::Status LoadClusterTls();
  absl::Status LoadModel();
  void MakeMetrics();
  absl::Status StartAccess();
  absl::Status OpenSession();
  void MakeLoopParts(const OtlpOptions& otlp);
  std::unique_ptr<RouterCore> MakeCore();
  void MakeServices();
  void SayReady(absl::Time begun, absl::Duration loading);
  void WatchOwnPorts();

  // ---- listeners.cc.
  absl::Status LoadPublicTls();
  void ReloadPublicTls();
  void WarnIfExposed() const;
  void WarnIfFewDescriptors() const;
  absl::Status StartServers();
  absl::Status StartHttp();
  void ServeProbes();
  absl::Status StartInternal();
  absl::Status StartAdmin();
  absl::Status StartPublic();
  absl::StatusOr<std::unique_ptr<rpc::Server>> Listen(
      rpc::ServerOptions options, const std::string& host, int port,
      const std::vector<grpc::Service*>& services);

  // ---- process.cc.
  void EachSecond();
  void UpdateFacts();
  // Can serve: for readiness probes, from any thread.
  absl::Status Ready() const;
  void Drain();
  // Nothing but a new process mends what `fault` says. What runs may end first.
  void DrainForFault(absl::Status fault);
  // Once above the ceiling for three seconds.
  void CheckMemory();
  void PollDrained();
  void Stop();

  Flags& flags_;
  SignalWatcher* const signals_;
  SystemRandom random_;
  // Before the loop, with which requests go that still are charged.
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<rpc::CallMetrics> call_metrics_;
  std::unique_ptr<RouterMetrics> router_metrics_;
  std::unique_ptr<Access> access_;
  ThreadLoop loop_;
  FileWatcher watcher_;
  std::unique_ptr<LiveFeed> feed_;
  std::unique_ptr<Watchdog> watchdog_;
  std::unique_ptr<ModelText> model_;
  std::unique_ptr<rpc::ClusterCredentials> tls_;
  rpc::Credentials public_tls_;  // of --ssl-certfile; may be empty
  std::unique_ptr<rpc::RotatingCredentials> public_credentials_;
  std::unique_ptr<rpc::CertificateMetrics> public_certificate_;
  std::unique_ptr<rpc::SecurityMetrics> security_metrics_;
  ClusterFacts facts_;
  std::unique_ptr<RpcDialer> dialer_;
  std::unique_ptr<OtlpExporter> spans_;
  std::unique_ptr<session::SessionFile> session_;  // null: none is recorded
  std::unique_ptr<RouterCore> core_;
  std::unique_ptr<StructuredCheckers> checkers_;
  std::unique_ptr<StructuredGate> gate_;
  std::unique_ptr<Intake> intake_;
  std::unique_ptr<InferenceServer> inference_;
  std::unique_ptr<OpenEngineInference> openengine_;
  std::unique_ptr<OpenEngineControl> openengine_control_;
  std::unique_ptr<HttpFront> http_front_;
  Page page_;
  std::unique_ptr<RegistryServer> registry_;
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<rpc::Server> public_server_, internal_server_, admin_server_;
  std::unique_ptr<SelfConnect> self_connect_;
  std::unique_ptr<Timer> second_, facts_timer_, drain_poll_;
  std::atomic<bool> draining_ = false;
  // On the loop: whose health says whether a decode worker is ready.
  rpc::Server* health_ = nullptr;
  bool serving_ = false;
  int64_t placed_ = 0;
  // Seconds since then at which one could have been placed.
  int missed_ = 0;
  absl::Time idle_since_ = absl::InfiniteFuture();
  absl::Time drain_ends_;
  absl::Status outcome_;  // what the drain ends in; the loop's
  int seconds_above_ceiling_ = 0;
  std::promise<absl::Status> finished_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_PROCESS_H_
