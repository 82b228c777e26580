// SPDX-License-Identifier: Apache-2.0
// Turns --router (addresses, or DNS names such as a Kubernetes headless
// Service) into the routers to register with, again every few seconds, on a
// thread of its own: getaddrinfo blocks.

#ifndef TANDEM_WORKER_RESOLVER_H_
#define TANDEM_WORKER_RESOLVER_H_

#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "common/flags.h"
#include "common/loop.h"
#include "common/mutex.h"

namespace tandem::worker {

// All addresses of one name; a literal address is its own. Empty if the name
// cannot be resolved now.
std::vector<std::string> ResolveAddresses(const Endpoint& name);

class Resolver {
 public:
  // Posts `found` to `loop` whenever the answer changed: addresses host:port,
  // each with the name it was found by (for its certificate).
  using Found = std::function<void(const std::map<std::string, std::string>&)>;

  using Resolve = std::function<std::vector<std::string>(const Endpoint&)>;

  Resolver(std::vector<Endpoint> names, absl::Duration interval, Loop* loop,
           Found found, Resolve resolve = ResolveAddresses);
  ~Resolver();

 private:
  void Run();

  const std::vector<Endpoint> names_;
  const absl::Duration interval_;
  Loop* const loop_;
  const Found found_;
  const Resolve resolve_;
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_RESOLVER_H_
