// SPDX-License-Identifier: Apache-2.0
// The processes of a simulated cluster: cores as the binaries link them, on
// hosts that can crash, freeze and start again.

#ifndef TANDEM_TESTS_SIMULATION_NODES_H_
#define TANDEM_TESTS_SIMULATION_NODES_H_

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/random.h"
#include "common/shared_stream.h"
#include "common/testing/virtual_loop.h"
#include "decode_worker/core.h"
#include "engine/kv/kv_offload.h"
#include "engine/testing/fake_block_file.h"
#include "engine/testing/noisy_drafter.h"
#include "engine/testing/noisy_executor.h"
#include "prefill_worker/core.h"
#include "router/core/core.h"
#include "tests/simulation/network.h"
#include "tests/simulation/parts.h"
#include "tests/simulation/world.h"
#include "worker/registration.h"

namespace tandem::simulation {

struct Node;
struct WorkerNode;

// The two ends of a stream that the Decode calls of a pair share.
using RouterShared =
    SharedStream<v1::DecodeSharedRequest, v1::DecodeSharedResponse>;
using WorkerShared =
    SharedStream<v1::DecodeSharedResponse, v1::DecodeSharedRequest>;

// What all of one run share.
struct Cluster {
  Cluster(uint64_t seed, const Profile& p)
      : profile(p),
        shared_decode(seed % 2 == 0),
        random(seed),
        network(&loop, &random, {}) {}

  // Starts it on a host of its own.
  void Add(std::unique_ptr<Node> node);
  Node* Find(const std::string& name) { return nodes.at(name).get(); }
  // Notes the first thing that must not be.
  void Wrong(const std::string& what);
  absl::Duration SomeTime(absl::Duration limit) {
    return limit * random.Uniform();
  }

  Profile profile;
  const bool shared_decode;  // calls of a pair share one stream
  VirtualLoop loop;
  SeededRandom random;
  Network network;
  std::shared_ptr<Host> clients = std::make_shared<Host>(&loop, "clients");
  std::vector<std::string> router_names;
  std::map<std::string, std::unique_ptr<Node>> nodes;
  std::set<std::string> crashed_routers;
  Report report;
};

inline absl::Status GoingAway() {
  return absl::UnavailableError("this worker is going away");
}

struct Node {
  Node(Cluster* c, std::string n) : cluster(c), name(std::move(n)) {}
  virtual ~Node() = default;
  virtual void Start() = 0;
  // Destroys everything that a crashed process loses.
  virtual void Clear() = 0;
  virtual WorkerNode* AsWorker() { return nullptr; }

  Cluster* const cluster;
  const std::string name;  // its endpoint, too
  std::shared_ptr<Host> host;
  std::unique_ptr<SeededRandom> random;
};

struct WorkerNode : Node {
  using Node::Node;
  WorkerNode* AsWorker() override { return this; }
  virtual v1::WorkerLoad Load() const = 0;
  virtual handoff::SlabCounts Slabs() const = 0;
  virtual absl::Status CheckCore() const = 0;
  // Not OK: the process ends.
  virtual absl::Status Fatal() const = 0;
  // As SIGTERM does: takes no new call; tells when it has none left; the time
  // for that is over.
  virtual void Drain() = 0;
  virtual bool Idle() const = 0;
  virtual void CloseAll() = 0;
  // What a worker still holds, or "".
  virtual std::string WhatIsLeft() const;
  absl::Status CheckInvariants() const;
  void StartParts();
  void ClearParts();
  void Register(v1::WorkerRole role);

  std::string worker_id = name;
  bool twin = false;  // the id is another's
  int block_size = 16;
  int num_blocks = 48;
  std::string incarnation;
  std::unique_ptr<engine::KvPool> pool;
  std::vector<std::byte> offload_memory;
  std::unique_ptr<engine::FakeExecutor> fake;
  std::unique_ptr<engine::Executor> wrapped;
  std::unique_ptr<engine::FakeBlockFile> offload_file;
  std::unique_ptr<engine::KvOffload> offload;
  std::unique_ptr<worker::Registration> registration;
  std::unique_ptr<FakeGrammars> grammars;
  engine::Executor* executor() const {
    return wrapped != nullptr ? wrapped.get() : fake.get();
  }
};

struct DecodeNode final : WorkerNode {
  using WorkerNode::WorkerNode;
  void Start() override;
  void Clear() override;
  v1::WorkerLoad Load() const override { return core->Load(); }
  handoff::SlabCounts Slabs() const override {
    return core->receiver().slabs();
  }
  absl::Status CheckCore() const override {
    absl::Status status = core->CheckInvariants();
    if (!status.ok() || draft_pool == nullptr) return status;
    if (!draft_device->violations().empty()) {
      return absl::InternalError(draft_device->violations().front());
    }
    return draft_pool->CheckInvariants();
  }
  std::string WhatIsLeft() const override {
    std::string left = WorkerNode::WhatIsLeft();
    if (draft_pool != nullptr && draft_pool->counts().live > 0) {
      absl::StrAppend(&left, name, ": blocks of the draft model; ");
    }
    return left;
  }
  absl::Status Fatal() const override { return core->fatal(); }
  void Drain() override { core->Drain(); }
  bool Idle() const override {
    return core->idle() &&
           std::all_of(shared.begin(), shared.end(),
                       [](const auto& stream) { return stream->idle(); });
  }
  void CloseAll() override {
    core->CloseAll(GoingAway());
    for (const auto& stream : shared) stream->Close(GoingAway());
  }
  // A router's; its calls become the core's.
  void AddShared(std::unique_ptr<WorkerShared::Carrier> carrier);
  engine::Speculation StartDraftModel();
  std::unique_ptr<engine::NoisyDrafters> drafters;
  // Or a draft model, on a device of its own.
  std::unique_ptr<engine::FakeExecutor> draft_device;
  std::unique_ptr<engine::NoisyExecutor> draft_executor;
  std::unique_ptr<engine::KvPool> draft_pool;
  std::unique_ptr<decode_worker::DecodeCore> core;
  std::vector<std::shared_ptr<WorkerShared>> shared;
};

struct PrefillNode final : WorkerNode {
  using WorkerNode::WorkerNode;
  void Start() override;
  void Clear() override;
  v1::WorkerLoad Load() const override { return core->Load(); }
  handoff::SlabCounts Slabs() const override { return core->sender().slabs(); }
  absl::Status CheckCore() const override { return core->CheckInvariants(); }
  absl::Status Fatal() const override { return absl::OkStatus(); }
  void Drain() override { core->Drain(); }
  bool Idle() const override { return core->idle(); }
  void CloseAll() override { core->CloseAll(GoingAway()); }
  std::unique_ptr<prefill_worker::PrefillCore> core;
};

struct RouterNode final : Node, router::Dialer, router::RouterObserver {
  using Node::Node;
  void Start() override;
  void Clear() override;
  std::unique_ptr<router::DecodeStream> DialDecode(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext&) override;
  std::unique_ptr<router::PrefillStream> DialPrefill(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext&) override;
  void OnEnded(const router::RequestSummary& summary) override;
  void CheckReplay();
  std::stringstream session;  // of `core`, if it is recorded
  std::unique_ptr<router::RouterCore> core;
  std::set<std::string> ended;  // requests, by their internal ids
  // By the worker's incarnation.
  std::map<std::string, std::shared_ptr<RouterShared>> shared;
};

}  // namespace tandem::simulation

#endif  // TANDEM_TESTS_SIMULATION_NODES_H_
