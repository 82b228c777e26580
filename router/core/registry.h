// SPDX-License-Identifier: Apache-2.0
// The workers that registered, as this router knows them. A registration
// stream is a lease: broken or silent, its worker gets nothing new, while
// running requests are judged by their own calls. A new incarnation of a
// worker voids everything known of the old one.
//
// Soft state only, on the router's loop. What failed lately (a worker's calls,
// a pair, a way of a pair) is avoided for a while and then probed.

#ifndef TANDEM_ROUTER_CORE_REGISTRY_H_
#define TANDEM_ROUTER_CORE_REGISTRY_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/rpc/identity.h"
#include "router/core/dialer.h"
#include "router/core/options.h"
#include "router/placement/avoid_list.h"
#include "router/placement/compatibility.h"
#include "router/telemetry/observer.h"
#include "tandem/v1/admin.pb.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::router {

// A registered worker. Gone with its lease: look it up, don't keep it.
struct Worker {
  v1::WorkerHello hello;
  v1::WorkerLoad load;
  bool has_load = false;
  absl::Time registered;
  absl::Time heard;
  absl::Time load_heard;
  absl::Time stepped;                    // when a report told of new steps
  absl::flat_hash_set<uint64_t> cached;  // short hashes of its prefix cache
  // Of those, the ones of which layers with a window have nothing.
  absl::flat_hash_set<uint64_t> lacking;
  // It refused for lack of room: how many more requests it is offered before
  // it has answered; at 0 none until then.
  std::optional<int> offers;
  absl::Time full_until;
  // Given by this router since the last load report, which did not count it.
  int unreported_requests = 0;
  int unreported_tokens = 0;
  int64_t losses = 0;  // calls of this router that failed

  const std::string& id() const { return hello.worker().worker_id(); }
};

// A prompt that was given to a worker.
struct Queued {
  std::string worker_id;
  int tokens = 0;
  absl::Time since;
};

class RegistryListener {
 public:
  virtual ~RegistryListener() = default;
  // A worker registered, reported its load, or may be tried again: requests
  // that wait may now find room.
  virtual void OnRoom() = 0;
  // This incarnation has ended: a new one of the same worker registered.
  virtual void OnVoided(const v1::WorkerRef& old) = 0;
  // A worker is among workers() now; and it no longer is.
  virtual void OnRegistered(const Worker& worker) = 0;
  virtual void OnLost(const Worker& worker) = 0;
  // It had `before`.
  virtual void OnAdapters(const Worker& worker, const Adapters& before) = 0;
  virtual void OnAdapterOutcome(const std::string& worker_id,
                                const v1::AdapterOutcome& outcome) = 0;
  virtual void OnClusterEvent(const ClusterEvent& event) = 0;
};

struct KvRoom {
  int blocks = 0;
  int block_size = 0;
  int64_t bytes_per_token = 0;
  // Sequences that fit one of the workers together, however long they are; 0:
  // none said so.
  int sequences = 0;
};

class Registry {
 public:
  Registry(const RouterOptions& options, Loop* loop,
           RegistryListener* listener);
  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  // A worker's registration call. Its hello must name the worker that `peer`
  // is.
  void AddStream(std::unique_ptr<RegistrationStream> stream,
                 rpc::PeerIdentity peer = {});

  // This router goes away: workers are told so, and none of them is lost.
  void CloseAll();

  // To a worker that has a lease.
  void Send(const std::string& worker_id, v1::RegisterResponse message);

  // By worker id; null where it has no lease.
  Worker* Find(const std::string& worker_id);
  const std::map<std::string, std::unique_ptr<Worker>>& workers() const {
    return workers_;
  }

  // What became of the process that a call went to.
  enum class Life {
    kAlive,      // its lease holds, and it was heard just now
    kUncertain,  // its lease holds, but it has been silent for a while
    kLeft,       // drains, or drained and took its leave
    kLost,       // its lease broke without a word
    kReplaced,   // and a new incarnation is here
  };
  Life LifeOf(const v1::WorkerRef& worker) const;

  // Whether it gets nothing new, until told otherwise: also where it registers
  // anew. NOT_FOUND where there is none, and none was cordoned.
  absl::Status Cordon(const std::string& worker_id, bool cordoned);

  // READY, not cordoned, and its calls do not fail. Whether it has room is
  // another matter.
  bool Placeable(const Worker& worker) const;
  bool Full(const Worker& worker) const;
  bool PairAllowed(const Worker& prefill, const Worker& decode) const;
  // For a handoff that is about to begin, which probes those whose time-out has
  // passed.
  std::vector<std::string> WaysToAvoid(const std::string& prefill_id,
                                       const std::string& decode_id);

  // What requests found out.
  void Refused(const std::string& worker_id);
  // A decode worker was asked to take one, took one, and is done with one.
  void Offered(const std::string& worker_id);
  void Accepted(const std::string& worker_id);
  void Finished(const std::string& worker_id);
  void CallFailed(const v1::WorkerRef& worker, const std::string& reason);
  void CallWorked(const std::string& worker_id);
  void PairFailed(const std::string& prefill_id, const std::string& decode_id,
                  const std::string& way, const std::string& reason);
  void PairWorked(const std::string& prefill_id, const std::string& decode_id,
                  const std::string& way);
  // A request goes there now: probes workers that were avoided and may be tried
  // again.
  // What it adds to the queue of the one that computes its prompt.
  Queued Using(const std::string& prefill_id, const std::string& decode_id,
               int uncached_tokens);
  // Out of the queue again, without waiting for the next load report.
  void Computed(const Queued& prompt);

  // Prompts that are queued on prefill workers, by their reports and what was
  // given to them since; 0 where one of them has none, or where there are none.
  // Decode workers refuse what they have no room for.
  int prompts_queued() const;

  // Positions of one sequence that every decode worker can hold; 0 of none.
  int context_length() const;
  // The largest KV cache of a decode worker, and the most sequences of one that
  // has them; zeros while there is none.
  KvRoom kv_room() const;

  void Describe(v1::GetClusterStateResponse* state) const;
  int64_t registrations() const { return registrations_; }
  int64_t leases_lost() const { return leases_lost_; }

 private:
  struct Lease;
  struct Departed {
    std::string worker_id;
    std::string incarnation;
    bool orderly = false;
  };

  void OnMessage(Lease* lease, const v1::RegisterRequest& message);
  void OnHello(Lease* lease, const v1::WorkerHello& hello);
  void OnLoad(Worker* worker, const v1::WorkerLoad& load);
  void OnCache(Worker* worker, const v1::CacheChange& change);
  void OnAdapters(Lease* lease, const v1::AdapterList& list);
  // For operators to see.
  void ForgetRejected(const std::string& worker_id);
  void NoteRejected(const std::string& worker_id, const std::string& reason);
  void Reject(Lease* lease, const std::string& worker_id,
              const absl::Status& status);
  // Ends the lease in any state, telling the worker `status`. Idempotent.
  // `cause`: ClusterEvent's.
  void End(Lease* lease, const absl::Status& status, std::string_view cause);
  // Takes it off workers().
  std::unique_ptr<Worker> Forget(const std::string& worker_id);
  // Of the worker that has this id here, or had it last; empty: nobody had.
  std::string LastIncarnation(const std::string& worker_id) const;
  void Tick();
  absl::Time tick_due_ = absl::InfinitePast();
  void Pause(Worker* worker);
  void WakeAtNextRetry();
  // Or earlier, where that was asked for before.
  void WakeAt(absl::Time when);

  const RouterOptions& options_;
  Loop* const loop_;
  RegistryListener* const listener_;
  std::list<std::unique_ptr<Lease>> leases_;
  std::list<std::unique_ptr<Lease>> ended_;  // until their callbacks returned
  std::map<std::string, std::unique_ptr<Worker>> workers_;
  std::set<std::string> cordoned_;  // by worker id
  std::deque<Departed> departed_;   // newest last, bounded
  AvoidList avoided_workers_;       // by worker id
  AvoidList avoided_pairs_;         // "prefill\ndecode\nway"; way may be empty
  std::deque<std::pair<absl::Time, v1::RejectedWorker>> rejected_;
  int64_t registrations_ = 0;
  int64_t leases_lost_ = 0;
  Timer tick_;
  Timer retry_;
  absl::Time retry_at_;  // while it runs
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_REGISTRY_H_
