// SPDX-License-Identifier: Apache-2.0
// LoRA adapters loaded and unloaded in service. A change of one adapter goes
// through these phases:
//
//   loading    every worker that takes requests is told, and must answer with
//              the same content; nobody may name the adapter before that
//   undoing    one could not: those that have it by this load let it go
//   draining   no new request may name it, those in flight end
//   unloading  workers are told, and answer when its memory is free
//
// A worker that registers later is told to load what is loaded in service, and
// asked again where it cannot. What that is, routers keep in memory only: a new
// one learns it from the workers' registrations, where an adapter says where it
// came from. One that a worker lets go without being told by this router was
// unloaded by another router. A worker that was away while one was unloaded is
// told when it comes back, and so is one that was never here and is alone with
// it.
//
// Of the core, on its loop.

#ifndef TANDEM_ROUTER_CORE_ADAPTER_CONTROL_H_
#define TANDEM_ROUTER_CORE_ADAPTER_CONTROL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "router/core/adapters_away.h"
#include "router/core/options.h"
#include "router/core/registry.h"
#include "router/placement/compatibility.h"
#include "router/telemetry/observer.h"
#include "tandem/v1/admin.pb.h"
#include "tandem/v1/registry.pb.h"

namespace tandem::router {

class AdapterControl {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<v1::LoraAdapter>)>;

  // `in_flight`: requests of this router with an adapter. All outlive it.
  AdapterControl(const RouterOptions* options, Loop* loop, Registry* registry,
                 RouterObserver* observer,
                 std::function<int(const std::string& adapter)> in_flight);

  // As AdminService says. `done` may be called at once, and is destroyed
  // uncalled with this.
  void Load(const std::string& name, const std::string& path, Done done);
  void Unload(const std::string& name, Done done);
  std::vector<v1::LoraAdapter> List() const;
  // Answers whoever waits for a change, or comes to ask for one. Changes that
  // workers were told of go on.
  void Close(const absl::Status& status);

  // Whether new requests must not name it, whoever has it.
  bool Closed(const std::string& name) const;
  // Not OK where workers that are here have let it go, and no decode worker has
  // it any more: nobody is to bring it back. One whose workers were lost is
  // another matter.
  absl::Status CheckNotLetGo(const std::string& name) const;
  // What the one in service of that name holds; empty: none is.
  std::string DigestInService(const std::string& name) const;
  // Those that are to be on every worker.
  std::vector<std::string> InService() const;

  // Runs `changed` whenever what requests may name has changed, before whoever
  // changed it hears of it.
  void Watch(std::function<void()> changed) { changed_ = std::move(changed); }

  // Of the registry.
  void OnRegistered(const Worker& worker);
  void OnAdapters(const Worker& worker, const Adapters& before);
  void OnOutcome(const std::string& worker_id,
                 const v1::AdapterOutcome& outcome);
  void OnLost(const Worker& worker);
  // A request with it has ended.
  void OnRequestEnded(const std::string& name);
  // Every beat.
  void Tick();

 private:
  enum class Phase { kLoading, kUndoing, kDraining, kUnloading };
  struct Change {
    Phase phase = Phase::kLoading;
    bool was_served = false;        // before: a load finds nothing to do
    v1::LoraAdapter adapter;        // name, path, digest
    std::set<std::string> waiting;  // workers that have not answered
    std::set<std::string> had;      // before a load
    std::set<std::string> fresh;    // have it by this load
    absl::Status problem;           // of the first worker that had one
    absl::Time due;
    Done done;
  };
  // A load that no caller waits for, of a worker that came later.
  struct Late {
    bool waiting = false;
    std::string problem;  // of the last try
    absl::Duration pause;
    absl::Time next;
  };
  // A command that a worker has not answered.
  struct Command {
    enum class Of { kChange, kLate, kNobody } of;
    std::string worker_id;
    std::string name;
  };
  struct Origin {
    std::string path;
    std::string digest;
  };
  // What was unloaded, and who was told: has one of those it again, another
  // router has loaded it.
  struct Gone {
    std::string digest;
    std::set<std::string> told;  // workers
  };
  using Changes = std::map<std::string, Change>;  // by adapter

  absl::Status CheckLoad(const std::string& name,
                         const std::string& path) const;
  absl::Status CheckIdle(const std::string& name) const;
  bool ServedByAny(const std::string& name) const;
  bool HeldByAny(const std::string& name, const std::string& digest) const;
  bool Told(const std::string& worker_id, const std::string& name) const;
  uint64_t NewCommand(const std::string& worker_id, const std::string& name,
                      Command::Of of);
  void SendLoad(const std::string& worker_id, const v1::LoraAdapter& adapter,
                Command::Of of);
  void SendUnload(const std::string& worker_id, const std::string& name,
                  Command::Of of);
  void OnAnswer(const Command& command,
                const absl::StatusOr<v1::AdapterOutcome>& answer);
  void OnLoadAnswer(Change* change, const std::string& worker_id,
                    const absl::StatusOr<v1::AdapterOutcome>& answer);
  void OnLateAnswer(const Command& command,
                    const absl::StatusOr<v1::AdapterOutcome>& answer);
  // Of an unload on one worker.
  void OnNobodysAnswer(const Command& command,
                       const absl::StatusOr<v1::AdapterOutcome>& answer);
  // Goes on where nobody is waited for any more.
  void Advance(Changes::iterator it);
  void FinishLoad(Changes::iterator it);
  void Undo(Changes::iterator it);
  void StartUnloading(Changes::iterator it);
  void FinishUnload(Changes::iterator it);
  void TimeOut(Changes::iterator it);
  void Finish(Changes::iterator it, absl::StatusOr<v1::LoraAdapter> answer);
  // No worker that comes is to have it any more.
  void TakeOutOfService(const std::string& name);
  // Tells a worker that is back to let go what it owes.
  void Collect(const Worker& worker);
  // Tells it to load what it should have and has not.
  void Complete(const Worker& worker);
  // A worker has it, not by this router.
  void Hear(const Worker& worker, const v1::AdapterRef& adapter);
  void Learn(const v1::AdapterRef& adapter);
  // Whether a worker that comes has it because it did not hear of its unload.
  bool Missed(const Worker& worker, const v1::AdapterRef& adapter) const;
  v1::LoraAdapter Describe(const std::string& name) const;

  const RouterOptions* const options_;
  Loop* const loop_;
  Registry* const registry_;
  RouterObserver* const observer_;
  const std::function<int(const std::string&)> in_flight_;
  std::function<void()> changed_;             // may be null
  std::map<std::string, Origin> in_service_;  // by adapter
  Changes changes_;
  std::map<std::pair<std::string, std::string>, Late> late_;  // worker, adapter
  std::map<uint64_t, Command> commands_;                      // by number
  absl::Status closing_;                                      // unless OK
  uint64_t last_command_ = 0;
  AdaptersAway away_;
  std::map<std::string, Gone> gone_;  // by adapter
  std::set<std::string> let_go_;      // by a worker; no list names it since
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_ADAPTER_CONTROL_H_
