// SPDX-License-Identifier: Apache-2.0
// What goes wrong in a simulated cluster, by its profile: processes crash,
// freeze, leave and come back, a second worker claims an id that is taken, the
// network loses, repeats, reorders, cuts and delays, and the code fails at its
// failpoints (common/failpoint.h), of which each process has a quarter armed.

#ifndef TANDEM_TESTS_SIMULATION_TROUBLE_H_
#define TANDEM_TESTS_SIMULATION_TROUBLE_H_

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/failpoint.h"
#include "tests/simulation/nodes.h"

namespace tandem::simulation {

class Trouble final : failpoint::Handler {
 public:
  // REQUIRES: one at a time in a thread, whose failpoints it handles.
  explicit Trouble(Cluster* cluster) : cluster_(cluster) {
    failpoint::SetHandler(this);
  }
  ~Trouble() override { failpoint::SetHandler(nullptr); }

  // Begins 1 s from now. The cluster is complete.
  void Begin();
  // Nothing goes wrong from here on. What is down comes back by itself.
  void End();
  // Ends processes that cannot go on.
  void CrashTheBroken();

 private:
  // An armed failpoint; no action: not armed.
  struct Fault {
    std::string action;
    double probability = 0;
  };

  failpoint::Hit OnPass(const failpoint::Site& site) override;
  const Fault& At(const Node& node, const failpoint::Site& site);
  // Runs once the trouble has lasted for a random time.
  void Sometime(Loop::Task task);
  void Crash(Node* node);
  void Freeze(const std::shared_ptr<Host>& host, absl::Duration length);
  void Cut(bool one_way);
  // The workers from `i` on, one after another.
  void DrainFrom(int i);
  void AwaitDrained(WorkerNode* node, absl::Time limit, Loop::Task then);
  void StartTwin(int i);
  template <typename T>
  const T& OneOf(const std::vector<T>& list) {
    return list[cluster_->random.Below(list.size())];
  }

  Cluster* const cluster_;
  bool on_ = false;
  std::vector<std::string> workers_, all_, hosts_;  // hosts_: clients' too
  int hits_left_ = 0;
  uint64_t arming_ = 0;  // decides what is armed
  std::map<std::pair<std::string, std::string>, Fault> faults_;
};

}  // namespace tandem::simulation

#endif  // TANDEM_TESTS_SIMULATION_TROUBLE_H_
