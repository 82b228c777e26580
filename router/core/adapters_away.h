// SPDX-License-Identifier: Apache-2.0
// Adapters of workers that were lost. Often only the stream of a worker has
// broken, or it stood still: it comes back as the same process, with all that
// it had. What was to go meanwhile it owes, and is told then. One that has
// restarted owes nothing: it has what it was started with.
//
// Of the core, on its loop.

#ifndef TANDEM_ROUTER_CORE_ADAPTERS_AWAY_H_
#define TANDEM_ROUTER_CORE_ADAPTERS_AWAY_H_

#include <deque>
#include <set>
#include <string>

#include "tandem/v1/registry.pb.h"

namespace tandem::router {

class AdaptersAway {
 public:
  // It was lost just now, with the adapters that `hello` names.
  void OnLost(const v1::WorkerHello& hello);
  // It may have this one too: it was told to load it.
  void MayHave(const std::string& worker_id, const std::string& name);
  // It is to let it go; and so are all that may have it.
  void Owe(const std::string& worker_id, const std::string& name);
  void OweAll(const std::string& name);
  // What it owes now that it is back. Nothing is kept of it any more.
  std::set<std::string> Return(const v1::WorkerRef& worker);

 private:
  struct Lost {
    std::string worker_id;
    std::string incarnation;
    std::set<std::string> has;  // or may have
    std::set<std::string> owes;
  };

  std::deque<Lost>::iterator Find(const std::string& worker_id);

  std::deque<Lost> lost_;  // newest last, each worker once
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_CORE_ADAPTERS_AWAY_H_
