// SPDX-License-Identifier: Apache-2.0
// The router: registrations, the queue, placement, and all requests in
// flight, on one Loop. It knows tokens, hashes and loads, never tensors, and
// no gRPC: clients, workers, time and randomness come in through interfaces,
// so that a simulation links the same objects.
//
// core.cc: a request's way from its submission to its end. admission.cc: which
// are let in. candidates.cc: which workers may serve one. cluster_state.cc:
// what is told of requests and workers.

#ifndef TANDEM_ROUTER_CORE_CORE_H_
#define TANDEM_ROUTER_CORE_CORE_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "common/loop.h"
#include "common/random.h"
#include "router/core/adapter_control.h"
#include "router/core/dialer.h"
#include "router/core/options.h"
#include "router/core/registry.h"
#include "router/core/request.h"
#include "router/core/sequence_group.h"
#include "router/placement/expected_wait.h"
#include "router/placement/quarantine.h"
#include "router/placement/short_way.h"
#include "router/placement/snapshot.h"
#include "router/telemetry/observer.h"
#include "router/tenants/token_bucket.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::router {

class RouterCore : private RegistryListener,
                   private RequestHost,
                   private GroupHost {
 public:
  // `codec` may be null if no request asks for text; `spans`, where those of
  // sampled requests go, if nobody wants them. All outlive the core. What is
  // virtual is what session/recorded_core.h records.
  RouterCore(const RouterOptions& options, Loop* loop, Random* random,
             Dialer* dialer, TextCodec* codec, RouterObserver* observer,
             SpanSink* spans = nullptr);
  ~RouterCore() override;

  // Takes a request over, or closes `client` with the reason why not. One that
  // has ended before is counted, and its client told, as if it ended here.
  virtual void Submit(AdmittedRequest admitted,
                      std::unique_ptr<ClientStream> client);
  // A worker registers; which, `peer` knows.
  virtual void AddRegistration(std::unique_ptr<RegistrationStream> stream,
                               rpc::PeerIdentity peer = {}) {
    registry_.AddStream(std::move(stream), std::move(peer));
  }

  // The requests that the worker has, which go on. NOT_FOUND.
  virtual absl::StatusOr<int> Cordon(const std::string& worker_id,
                                     bool cordoned);

  // For liveness: how many requests were placed so far, and whether one waits
  // that could be placed now.
  int64_t placements() const { return static_cast<int64_t>(placements_); }
  bool CouldPlace();

  // By the client's id, or the internal one in hex. NOT_FOUND, or the number
  // of tokens delivered. With `tenant`, of its own requests alone, which are
  // those without a tenant where it is empty.
  virtual absl::StatusOr<int> Abort(
      const std::string& id,
      const std::optional<std::string>& tenant = std::nullopt);
  // All of the tenant's; how many.
  virtual int AbortAll(const std::string& tenant);

  // As AdapterControl has them.
  virtual void LoadAdapter(const std::string& name, const std::string& path,
                           AdapterControl::Done done) {
    adapter_control_.Load(name, path, std::move(done));
  }
  virtual void UnloadAdapter(const std::string& name,
                             AdapterControl::Done done) {
    adapter_control_.Unload(name, std::move(done));
  }

  // Takes no new request from here on; those taken go on.
  virtual void Drain() { draining_ = true; }
  bool draining() const { return draining_; }
  bool idle() const { return requests_.empty() && groups_.empty(); }
  int in_flight() const { return static_cast<int>(requests_.size()); }
  // From any thread: QUEUE_FULL where one more request of that priority would
  // be refused, so that a router which is full spends nothing on preparing it.
  absl::Status HasRoom(int priority) const;
  // The grace is over.
  virtual void CloseAll(const absl::Status& status);
  // Takes leave of the workers, when nothing runs any more.
  void LeaveWorkers() { registry_.CloseAll(); }

  int context_length() const { return registry_.context_length(); }
  KvRoom kv_room() const { return registry_.kv_room(); }
  // Names of those that requests may name: what some decode worker has or is
  // to have, and nobody is loading or unloading. Ascending.
  std::vector<std::string> adapters() const;
  AdapterControl& adapter_control() { return adapter_control_; }
  int ready_workers(v1::WorkerRole role) const;
  v1::GetClusterStateResponse State(bool include_requests) const;
  v1::RequestCounts Counts() const;
  const v1::RouterCounters& counters() const { return counters_; }
  Registry& registry() { return registry_; }

 private:
  // RegistryListener
  void OnRoom() override {
    prompts_queued_ = registry_.prompts_queued();
    Pump();
  }
  void OnVoided(const v1::WorkerRef& old) override;
  void OnRegistered(const Worker& worker) override;
  void OnLost(const Worker& worker) override {
    adapter_control_.OnLost(worker);
  }
  void OnAdapters(const Worker& worker, const Adapters& before) override {
    adapter_control_.OnAdapters(worker, before);
  }
  void OnAdapterOutcome(const std::string& worker_id,
                        const v1::AdapterOutcome& outcome) override {
    adapter_control_.OnOutcome(worker_id, outcome);
  }
  void OnClusterEvent(const ClusterEvent& event) override;
  // RequestHost
  void OnWaits(Request* request) override;
  std::optional<v1::WorkerRef> ChoosePrefill(Request* request,
                                             bool* full) override;
  bool TakeRetry(const Request& request) override;
  void OnFirstToken() override;
  std::string DigestInService(const std::string& adapter) const override {
    return adapter_control_.DigestInService(adapter);
  }
  void OnSuspect(const Request& request, const v1::WorkerRef& first,
                 const v1::WorkerRef& second) override;
  void OnEnded(Request* request) override;
  // GroupHost
  void StartSequence(AdmittedRequest admitted,
                     std::unique_ptr<ClientStream> client) override;
  void OnGroupEnded(SequenceGroup* group) override;

  // admission.cc
  absl::Status Admit(const AdmittedRequest& admitted);
  bool IdInUse(const AdmittedRequest& admitted) const;
  // Tells other threads how many there are, and who would be refused.
  void Count();
  // Requests of this priority, and greater ones, would wait too long.
  int64_t RefusedFrom() const;

  // Places waiting requests, oldest first, until one finds no room. One that
  // waits for workers of its features is in nobody's way.
  void Pump();
  void SchedulePump();
  // Whether it must wait before another worker is tried, because so many
  // requests are being tried again that they would keep the cluster down.
  bool TooManyRetries(const Request& request);
  bool TryPlace(Request* request);
  // Fails one that no decode worker's whole pool holds without a cache.
  bool NoPoolHolds(Request* request);
  // Of a request that wants nothing but scores: a prefill worker alone.
  bool TryPlaceScoring(Request* request);
  void Enqueue(Request* request);
  void Dequeue(Request* request);
  void Tick();
  absl::Time tick_due_;
  void FailIfWaitedTooLong(Request* request);
  // Fails one whose adapter another router has unloaded.
  bool FailIfLetGo(Request* request);
  void Reap();
  std::vector<Request*> All() const;

  // candidates.cc
  // What decode workers must heed for it.
  static std::vector<std::string> NeededFeatures(const Request& request);
  // Of those that may be given something.
  bool AnyDecodeWorker(absl::FunctionRef<bool(const Worker&)> matches) const;
  bool AnyHeeds(const Request& request) const;
  // Where that is false.
  absl::Status WhyNobodyHeeds(const Request& request) const;
  // Whether some decode worker has what it needs; room is another matter.
  bool AnyCanServe(const Request& request) const;
  // What AnyCanServe did not find, for people to read.
  std::string Wanted(const Request& request) const;
  // Where only what it needs keeps it from a decode worker.
  bool OthersHaveRoom(const Request& request) const;
  Snapshot MakeSnapshot(const Request& request) const;
  // Of prefill workers alone.
  Snapshot MakeScoringSnapshot(const Request& request) const;
  WorkerView MakeView(const Worker& worker, int cached_tokens) const;
  // Positions of the request's history that the worker's cache holds.
  int CachedTokens(const Request& request, const Worker& worker) const;
  // Of that pair, whose prefill worker may be none.
  Way WayOf(const Request& request, const Snapshot& snapshot,
            const Pair& pair) const;

  // cluster_state.cc
  // Requests in flight that name it, sequences yet to start included.
  int InFlightWith(const std::string& adapter) const;

  const RouterOptions options_;
  Loop* const loop_;
  Random* const random_;
  RouterObserver* const observer_;
  v1::RouterCounters counters_;
  Registry registry_;
  AdapterControl adapter_control_;
  Quarantine quarantine_;
  TokenBucket retries_;        // see TooManyRetries
  double retries_earned_ = 0;  // by requests, and not in it yet
  ExpectedWait expected_;
  int prompts_queued_ = 0;  // as workers said last
  int answered_ = 0;        // of requests_
  RequestContext context_;
  const absl::Time started_;
  bool draining_ = false;
  bool pumping_ = false;
  uint64_t placements_ = 0;
  std::atomic<int> taken_ = 0;
  std::atomic<int> waiting_ = 0;
  std::atomic<int64_t> refused_from_ = INT64_MAX;
  std::atomic<int64_t> expected_ms_ = 0;

  // By internal id, in no order that matters.
  std::map<std::string, std::unique_ptr<Request>> requests_;
  // The sequences of each.
  absl::flat_hash_map<std::string, std::vector<Request*>> by_client_id_;
  std::vector<std::unique_ptr<SequenceGroup>> groups_;
  // Those that were computed before come first, by age, the others by priority,
  // then age: also where a worker refused them meanwhile.
  std::list<Request*> queue_;
  absl::flat_hash_map<const Request*, std::list<Request*>::iterator> queued_;
  // Block hashes of the request at the queue's head, per block size.
  mutable std::string hashed_id_;
  mutable size_t hashed_tokens_ = 0;
  // And per adapter's content.
  mutable std::map<std::pair<int, std::string>, std::vector<uint64_t>> hashes_;
  // Until callbacks returned.
  std::vector<std::unique_ptr<Request>> ended_;
  std::vector<std::unique_ptr<SequenceGroup>> ended_groups_;
  Timer tick_;
  Timer reap_;
  Timer pump_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_CORE_H_
