// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/trouble.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tandem::simulation {

void Trouble::Begin() {
  const Profile& profile = cluster_->profile;
  arming_ = cluster_->random.Next();
  for (const auto& [name, node] : cluster_->nodes) {
    all_.push_back(name);
    if (node->AsWorker() != nullptr) {
      workers_.push_back(name);
    }
  }
  hosts_ = all_;
  hosts_.push_back(cluster_->clients->name);
  const auto crash = [this](const std::string& name) {
    Sometime([this, name] { Crash(cluster_->Find(name)); });
  };
  for (int i = 0; i < profile.worker_crashes; ++i) crash(OneOf(workers_));
  for (int i = 0; i < profile.router_crashes; ++i) {
    crash(OneOf(cluster_->router_names));
  }
  for (int i = 0; i < profile.freezes; ++i) {
    Sometime([this, name = OneOf(all_),
              length = absl::Milliseconds(500) +
                       cluster_->SomeTime(absl::Milliseconds(7500))] {
      Freeze(cluster_->Find(name)->host, length);
    });
  }
  for (int i = 0; i < profile.partitions; ++i) Cut(/*one_way=*/i % 3 == 2);
  for (int i = 0; i < profile.slow_links; ++i) {
    Sometime([this, a = OneOf(hosts_), b = OneOf(hosts_),
              longer = cluster_->SomeTime(absl::Milliseconds(200))] {
      if (on_) cluster_->network.Slow(a, b, longer);
    });
  }
  for (int i = 0; i < profile.twins; ++i) {
    Sometime([this, i] { StartTwin(i); });
  }
  if (profile.drains > 0) {
    cluster_->loop.After(absl::Seconds(1), [this] { DrainFrom(0); });
  }
  NetworkOptions& network = cluster_->network.options();
  network.break_probability = profile.break_probability;
  // A client that lost its router has failed.
  if (!profile.may_fail) network.unbroken = cluster_->clients->name;
  network.lose_probability = profile.messy;
  network.duplicate_probability = profile.messy;
  network.reorder_probability = profile.messy;
  cluster_->loop.After(absl::Seconds(1),
                       [this, &profile] { hits_left_ = profile.failpoints; });
  on_ = true;
}

void Trouble::End() {
  on_ = false;
  NetworkOptions& network = cluster_->network.options();
  network.break_probability = 0;
  network.lose_probability = 0;
  network.duplicate_probability = 0;
  network.reorder_probability = 0;
  cluster_->network.HealAll();
  for (const auto& [name, node] : cluster_->nodes) {
    if (!node->host->alive) continue;
    node->host->loop.Thaw();
    const WorkerNode* const worker = node->AsWorker();
    if (worker != nullptr && worker->twin) Crash(node.get());
  }
}

void Trouble::Sometime(Loop::Task task) {
  cluster_->loop.After(
      absl::Seconds(1) + cluster_->SomeTime(cluster_->profile.trouble_for),
      std::move(task));
}

void Trouble::Crash(Node* node) {
  const std::shared_ptr<Host> host = node->host;
  if (!host->alive) return;
  const WorkerNode* const worker = node->AsWorker();
  if (worker == nullptr) cluster_->crashed_routers.insert(node->name);
  // It may be in the middle of a task: the rest of it follows.
  cluster_->network.Doom(host);
  cluster_->loop.Post([this, node, host] {
    cluster_->network.Crash(host);
    node->Clear();
  });
  const bool twin = worker != nullptr && worker->twin;
  cluster_->loop.After(
      absl::Milliseconds(300) + cluster_->SomeTime(absl::Seconds(2)),
      [this, node, twin] {
        if (twin && !on_) return;
        node->host = std::make_shared<Host>(&cluster_->loop, node->name);
        node->Start();
      });
}

void Trouble::CrashTheBroken() {
  for (const auto& [name, node] : cluster_->nodes) {
    WorkerNode* const worker = node->AsWorker();
    if (worker == nullptr || !node->host->alive) continue;
    if (!worker->Fatal().ok()) Crash(worker);
  }
}

void Trouble::Freeze(const std::shared_ptr<Host>& host, absl::Duration length) {
  if (!host->alive) return;
  host->frozen_until =
      std::max(host->frozen_until, cluster_->loop.Now() + length);
  host->loop.Freeze();
  cluster_->loop.After(length, [this, host] {
    if (host->alive && cluster_->loop.Now() >= host->frozen_until) {
      host->loop.Thaw();
    }
  });
}

void Trouble::Cut(bool one_way) {
  const std::string a = OneOf(hosts_);
  const std::string b = OneOf(hosts_);
  if (a == b) return;
  const absl::Duration length = cluster_->SomeTime(absl::Seconds(12));
  Sometime([this, a, b, one_way, length] {
    if (!on_) return;
    one_way ? cluster_->network.Cut(a, b) : cluster_->network.Partition(a, b);
    cluster_->loop.After(length,
                         [this, a, b] { cluster_->network.Heal(a, b); });
  });
}

void Trouble::DrainFrom(int i) {
  if (!on_ || i == cluster_->profile.drains) return;
  WorkerNode* const node =
      cluster_->Find(workers_[static_cast<size_t>(i) % workers_.size()])
          ->AsWorker();
  // Two leave at once only where the restart takes longer than this.
  const auto next = [this, i] {
    cluster_->loop.After(absl::Seconds(3), [this, i] { DrainFrom(i + 1); });
  };
  if (!node->host->alive) return next();
  node->host->loop.Post([node] {
    node->Drain();
    node->registration->SayLoad();
  });
  AwaitDrained(node, cluster_->loop.Now() + absl::Seconds(5), next);
}

void Trouble::AwaitDrained(WorkerNode* node, absl::Time limit,
                           Loop::Task then) {
  const std::shared_ptr<Host> host = node->host;
  cluster_->loop.After(
      absl::Milliseconds(100),
      [this, node, host, limit, then = std::move(then)]() mutable {
        if (!host->alive) return then();
        if (!node->Idle() && cluster_->loop.Now() < limit) {
          return AwaitDrained(node, limit, std::move(then));
        }
        host->loop.Post([node] {
          node->registration.reset();
          node->CloseAll();
        });
        // Last words take up to two seconds.
        cluster_->loop.After(
            absl::Seconds(2),
            [this, node, host, then = std::move(then)]() mutable {
              if (host->alive) Crash(node);
              then();
            });
      });
}

void Trouble::StartTwin(int i) {
  if (!on_) return;
  const std::string taken = OneOf(workers_);
  const std::string name = absl::StrCat(taken, "-twin-", i);
  std::unique_ptr<WorkerNode> node;
  if (taken.rfind("decode", 0) == 0) {
    node = std::make_unique<DecodeNode>(cluster_, name);
  } else {
    node = std::make_unique<PrefillNode>(cluster_, name);
  }
  node->worker_id = taken;
  node->twin = true;
  cluster_->Add(std::move(node));
}

namespace {

// FNV-1a: equal on all machines.
uint64_t Hash(uint64_t hash, const std::string& text) {
  for (const char c : text) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace

const Trouble::Fault& Trouble::At(const Node& node,
                                  const failpoint::Site& site) {
  const auto [at, fresh] = faults_.try_emplace({node.name, site.name});
  if (!fresh) return at->second;
  SeededRandom random(Hash(Hash(arming_, node.name), site.name));
  if (random.Below(4) != 0) return at->second;
  std::vector<std::string> actions = absl::StrSplit(site.actions, ' ');
  // A step that never ends fails liveness, after which nobody here would start
  // the worker anew.
  if (std::string_view(site.name) == "engine.step") {
    std::erase(actions, "drop");
  }
  Fault& fault = at->second;
  fault.action = actions[random.Below(actions.size())];
  // Between one passage in four and one in 4000; where the process is lost for
  // seconds, one in 40 at most.
  fault.probability = 0.25 * std::pow(0.001, random.Uniform());
  if (fault.action == "crash" || fault.action == "stall") {
    fault.probability /= 10;
  }
  return fault;
}

failpoint::Hit Trouble::OnPass(const failpoint::Site& site) {
  if (!on_ || hits_left_ == 0) return failpoint::kNone;
  const auto running = std::find_if(
      cluster_->nodes.begin(), cluster_->nodes.end(), [](const auto& entry) {
        return &entry.second->host->loop == HostLoop::running();
      });
  if (running == cluster_->nodes.end()) return failpoint::kNone;
  Node* const node = running->second.get();
  const Fault& fault = At(*node, site);
  if (!node->host->alive || fault.action.empty() ||
      !cluster_->network.Chance(fault.probability)) {
    return failpoint::kNone;
  }
  --hits_left_;
  ++cluster_->report.hits[absl::StrCat(site.name, " ", fault.action)];
  if (fault.action == "crash") Crash(node);
  // The passage itself goes on at once: what follows it waits.
  if (fault.action == "stall") {
    Freeze(node->host, cluster_->SomeTime(absl::Seconds(6)));
  }
  if (fault.action == "delay") Freeze(node->host, absl::Milliseconds(30));
  return failpoint::HitOf(fault.action);
}

}  // namespace tandem::simulation
