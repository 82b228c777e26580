// SPDX-License-Identifier: Apache-2.0
// A worker's registration with every router (DESIGN.md section 6): one stream
// to each, on which it says what it is, its load several times a second and
// once more when it has become idle, and what its prefix cache gained and lost.
// A broken stream is dialled again with back-off and jitter, and then says
// everything anew. A router that is found by two addresses takes one stream.

#ifndef TANDEM_WORKER_REGISTRATION_H_
#define TANDEM_WORKER_REGISTRATION_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "common/stream.h"
#include "engine/kv/kv_pool.h"
#include "tandem/v1/registry.pb.h"
#include "worker/adapter_loader.h"

namespace tandem::worker {

using RegistryStream = Stream<v1::RegisterRequest, v1::RegisterResponse>;

struct RegistrationOptions {
  v1::WorkerHello hello;
  absl::Duration load_interval = absl::Milliseconds(250);
  absl::Duration idle_interval = absl::Milliseconds(50);  // looks whether it is
  absl::Duration silence = absl::Seconds(4);              // of a router
  absl::Duration min_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(5);
  absl::Duration left_backoff = absl::Milliseconds(500);
  absl::Duration patience = absl::Seconds(5);  // for a router that starts
  // Of the whole cache, as many as a router remembers; and 2 MiB a message,
  // where gRPC takes 4.
  size_t max_cached_hashes = size_t{1} << 20;
  int max_hashes_per_message = 1 << 18;
};

class Registration {
 public:
  using Dial = std::function<std::unique_ptr<RegistryStream>(
      const std::string& endpoint)>;
  // Told when a router refuses (fingerprint, version), leaves, is lost, or is
  // not there in time.
  using OnTrouble =
      std::function<void(const std::string& endpoint, const absl::Status&)>;

  Registration(const RegistrationOptions& options, Loop* loop, Random* random,
               Dial dial, std::function<v1::WorkerLoad()> load,
               engine::KvPool* pool, OnTrouble on_trouble);
  ~Registration();

  // The routers to register with: those no longer named are left.
  void SetRouters(const std::vector<std::string>& endpoints);

  // Takes routers' commands about adapters to `loader`, and its outcomes back
  // to who asked, unless it has gone. The loader is stopped before this ends.
  void ServeAdapters(AdapterLoader* loader) { loader_ = loader; }
  // Those that this worker has from now on.
  void SetAdapters(const v1::AdapterList& list);

  // Sends the load now, e.g. when a drain begins.
  void SayLoad();

  int connected() const;  // routers that welcomed this worker

 private:
  struct Link;
  void Connect(Link* link);
  void Lost(Link* link, const absl::Status& status);
  // Whether a router of this incarnation has welcomed it, and is not lost.
  bool Knows(const std::string& router) const;
  void Look();
  void Tick();
  void SayAdapters();
  // What came of a router's command, if its stream is still that one.
  AdapterLoader::Done AnswerTo(const Link& link);

  RegistrationOptions options_;  // the hello's adapters change
  Loop* const loop_;
  Random* const random_;
  Dial dial_;
  std::function<v1::WorkerLoad()> load_;
  engine::KvPool* const pool_;
  OnTrouble on_trouble_;
  AdapterLoader* loader_ = nullptr;
  uint64_t streams_ = 0;  // dialled
  std::map<std::string, std::unique_ptr<Link>> links_;
  bool idle_ = true;  // as last seen
  Timer look_;
  Timer tick_;
};

}  // namespace tandem::worker

#endif  // TANDEM_WORKER_REGISTRATION_H_
