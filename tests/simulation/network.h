// SPDX-License-Identifier: Apache-2.0
// The simulation's network: streams between processes on virtual time, with
// delay, loss, duplication, reordering, slow links, partitions and crashes, all
// drawn from one seed. The cores see it through common/stream.h and cannot
// tell.
//
// A connection is TCP-like unless `messy`: what is lost breaks it. A messy one
// (handoff links, whose protocol promises to bear it) also loses, repeats and
// swaps single messages.

#ifndef TANDEM_TESTS_SIMULATION_NETWORK_H_
#define TANDEM_TESTS_SIMULATION_NETWORK_H_

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "common/stream.h"
#include "common/testing/virtual_loop.h"

namespace tandem::simulation {

struct NetworkOptions {
  absl::Duration min_delay = absl::Microseconds(50);
  absl::Duration max_delay = absl::Milliseconds(2);
  double break_probability = 0;      // per message, any connection
  std::string unbroken = {};         // but of this client
  double lose_probability = 0;       // per message, messy connections
  double duplicate_probability = 0;  // per message, messy connections
  double reorder_probability = 0;    // per message, messy connections
  size_t window = 32;  // messages on the way before unsent() grows
};

// The loop of a process, which knows when it runs.
class HostLoop final : public Loop {
 public:
  explicit HostLoop(VirtualLoop* world) : process_(world) {}

  absl::Time Now() const override { return process_.Now(); }
  void Post(Task task) override {
    After(absl::ZeroDuration(), std::move(task));
  }
  TimerId After(absl::Duration delay, Task task) override {
    return process_.After(delay, [this, task = std::move(task)]() mutable {
      running_ = this;
      task();
      running_ = nullptr;
    });
  }
  void Cancel(TimerId timer) override { process_.Cancel(timer); }
  void Stop() { process_.Stop(); }
  void Freeze() { process_.Freeze(); }
  void Thaw() { process_.Thaw(); }

  // Whose task this thread runs; null: none of a process.
  static const HostLoop* running() { return running_; }

 private:
  static inline thread_local const HostLoop* running_ = nullptr;
  VirtualProcess process_;
};

// A process: where its loop runs, and whether it still does. The simulation
// makes a new one for every start.
struct Host {
  Host(VirtualLoop* world, std::string name_in)
      : name(std::move(name_in)), loop(world) {}

  const std::string name;
  HostLoop loop;
  bool alive = true;
  absl::Time frozen_until = absl::InfinitePast();
};

class Connection;

class Network {
 public:
  Network(VirtualLoop* world, Random* random, NetworkOptions options)
      : world_(world), random_(random), options_(options) {}

  // Connects `client` with `server`; `accept` is told of the server's end on
  // the server's loop, unless the connection broke before.
  template <typename Request, typename Response>
  std::unique_ptr<Stream<Request, Response>> Connect(
      const std::shared_ptr<Host>& client, const std::shared_ptr<Host>& server,
      bool messy,
      std::function<void(std::unique_ptr<Stream<Response, Request>>)> accept);

  NetworkOptions& options() { return options_; }

  // Nothing passes between the two until healed; nothing is told of it.
  void Partition(const std::string& a, const std::string& b) {
    Cut(a, b);
    Cut(b, a);
  }
  // One way only.
  void Cut(const std::string& from, const std::string& to) {
    cut_.insert({from, to});
  }
  void Heal(const std::string& a, const std::string& b) {
    cut_.erase({a, b});
    cut_.erase({b, a});
    for (const auto& connection : AliveConnections()) Resume(connection);
  }
  // Each message between the two takes `longer`, one after another.
  void Slow(const std::string& a, const std::string& b, absl::Duration longer) {
    slow_[{a, b}] = slow_[{b, a}] = longer;
  }
  void HealAll() {
    cut_.clear();
    slow_.clear();
    for (const auto& connection : AliveConnections()) Resume(connection);
  }
  bool IsCut(const std::string& from, const std::string& to) const {
    return cut_.contains({from, to});
  }

  // The process is gone: its peers learn it from their broken streams.
  void Crash(const std::shared_ptr<Host>& host);
  // The same in the middle of a task of its: nothing of it happens any more
  // beyond that task, of which nobody hears. Crash() is still to be called.
  void Doom(const std::shared_ptr<Host>& host);

  absl::Duration Delay() {
    return options_.min_delay +
           (options_.max_delay - options_.min_delay) * random_->Uniform();
  }
  absl::Duration Delay(const std::string& from, const std::string& to) {
    const auto slow = slow_.find({from, to});
    return Delay() +
           (slow == slow_.end() ? absl::ZeroDuration() : slow->second);
  }
  bool Chance(double probability) {
    return probability > 0 && random_->Uniform() < probability;
  }
  VirtualLoop* world() { return world_; }
  Random* random() { return random_; }
  // A hash of every delivery so far: equal runs have equal ones.
  void Trace(const std::string& from, const std::string& to, size_t bytes) {
    trace ^= absl::ToUnixNanos(world_->Now()) + bytes;
    for (const std::string* name : {&from, &to}) {
      for (const char c : *name) {
        trace = (trace ^ static_cast<uint8_t>(c)) * 0x100000001b3;
      }
    }
  }
  uint64_t trace = 0xcbf29ce484222325;
  int64_t delivered = 0;
  int64_t broken = 0;
  int64_t lost = 0;
  int64_t duplicated = 0;
  int64_t reordered = 0;

 private:
  friend class Connection;
  std::vector<std::shared_ptr<Connection>> AliveConnections();
  static void Resume(const std::shared_ptr<Connection>& connection);

  VirtualLoop* const world_;
  Random* const random_;
  NetworkOptions options_;
  std::set<std::pair<std::string, std::string>> cut_;
  std::map<std::pair<std::string, std::string>, absl::Duration> slow_;
  std::vector<std::weak_ptr<Connection>> connections_;
};

// What both directions share: who is connected and whether it broke.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Network* network, std::shared_ptr<Host> client,
             std::shared_ptr<Host> server, bool messy)
      : network_(network),
        hosts_{std::move(client), std::move(server)},
        messy_(messy) {}
  virtual ~Connection() = default;

  // Both ends hear `status`, each after a delay, once what was delivered
  // before is handled.
  void Break(const absl::Status& status) {
    if (broken_) return;
    broken_ = true;
    break_status_ = status;
    ++network_->broken;
    for (int side = 0; side < 2; ++side) TellClosed(side, status);
  }
  // An end that started late hears what it missed.
  void TellIfBroken(int side) {
    if (broken_) TellClosed(side, break_status_);
  }
  bool involves(const Host* host) const {
    return hosts_[0].get() == host || hosts_[1].get() == host;
  }
  virtual void Pump(int to_side) = 0;
  void PumpBoth() {
    Pump(0);
    Pump(1);
  }

 protected:
  virtual void TellClosed(int side, const absl::Status& status) = 0;
  bool cut(int to_side) const {
    return network_->IsCut(hosts_[1 - to_side]->name, hosts_[to_side]->name);
  }

  Network* const network_;
  const std::shared_ptr<Host> hosts_[2];  // client, server
  const bool messy_;
  bool broken_ = false;
  absl::Status break_status_;
};

inline std::vector<std::shared_ptr<Connection>> Network::AliveConnections() {
  std::vector<std::shared_ptr<Connection>> alive;
  std::erase_if(connections_, [&](const std::weak_ptr<Connection>& weak) {
    std::shared_ptr<Connection> connection = weak.lock();
    if (connection == nullptr) return true;
    alive.push_back(std::move(connection));
    return false;
  });
  return alive;
}

inline void Network::Resume(const std::shared_ptr<Connection>& connection) {
  connection->PumpBoth();
}

inline void Network::Crash(const std::shared_ptr<Host>& host) {
  host->loop.Stop();
  Doom(host);
}

inline void Network::Doom(const std::shared_ptr<Host>& host) {
  host->alive = false;
  host->loop.Freeze();
  for (const auto& connection : AliveConnections()) {
    if (connection->involves(host.get())) {
      connection->Break(absl::UnavailableError("connection reset"));
    }
  }
}

// One direction: messages on their way to `handler`'s side.
template <typename Message>
struct Direction {
  std::deque<Message> queue;  // accepted by Send, not yet handled
  StreamHandler<Message>* handler = nullptr;
  bool paused = false;
  bool delivering = false;  // a delivery is scheduled
  bool closed_told = false;
  bool has_close = false;  // the sender closed after the queue
  absl::Status close_status;
  bool open = true;  // the receiving end still exists
};

template <typename Request, typename Response>
class TypedConnection final : public Connection {
 public:
  using Connection::Connection;

  // Directions by receiving side: 0 the client's, 1 the server's.
  Direction<Response>& to(std::integral_constant<int, 0>) { return responses_; }
  Direction<Request>& to(std::integral_constant<int, 1>) { return requests_; }

  template <int kTo>
  auto& direction() {
    return to(std::integral_constant<int, kTo>());
  }

  void Pump(int to_side) override {
    if (to_side == 0) {
      Schedule<0>();
    } else {
      Schedule<1>();
    }
  }

  template <int kTo, typename Message>
  void Send(Message message) {
    auto& there = direction<kTo>();
    auto& here = direction<1 - kTo>();
    if (broken_ || !here.open || there.has_close) return;
    if (hosts_[0]->name != network_->options().unbroken &&
        network_->Chance(network_->options().break_probability)) {
      Break(absl::UnavailableError("connection lost"));
      return;
    }
    if (messy_ && network_->Chance(network_->options().lose_probability)) {
      ++network_->lost;
      return;
    }
    if (messy_ && network_->Chance(network_->options().duplicate_probability)) {
      ++network_->duplicated;
      there.queue.push_back(message);
    }
    there.queue.push_back(std::move(message));
    if (messy_ && there.queue.size() > 1 &&
        network_->Chance(network_->options().reorder_probability)) {
      ++network_->reordered;
      const size_t i = network_->random()->Below(there.queue.size() - 1);
      std::swap(there.queue[i], there.queue.back());
    }
    Schedule<kTo>();
  }

  // The end `1 - kTo` says no more; `status` follows what is queued.
  template <int kTo>
  void CloseFrom(const absl::Status& status) {
    auto& there = direction<kTo>();
    if (!there.has_close) {
      there.has_close = true;
      there.close_status = status;
    }
    direction<1 - kTo>().open = false;
    direction<1 - kTo>().handler = nullptr;
    direction<1 - kTo>().queue.clear();
    Schedule<kTo>();
  }

  template <int kTo>
  void Schedule() {
    auto& there = direction<kTo>();
    if (there.delivering || !there.open || broken_) return;
    if (there.handler == nullptr || cut(kTo)) return;
    if (there.queue.empty() ? !there.has_close : there.paused) return;
    there.delivering = true;
    // The world's loop, then the process's: a crashed one never runs it.
    hosts_[kTo]->loop.After(
        network_->Delay(hosts_[1 - kTo]->name, hosts_[kTo]->name),
        [self = this->shared_from_this(), this] { Deliver<kTo>(); });
  }

 protected:
  void TellClosed(int side, const absl::Status& status) override {
    hosts_[side]->loop.After(
        network_->Delay(),
        [self = this->shared_from_this(), this, side, status] {
          if (side == 0) {
            Closed<0>(status);
          } else {
            Closed<1>(status);
          }
        });
  }

 private:
  template <int kTo>
  void Deliver() {
    auto& there = direction<kTo>();
    there.delivering = false;
    if (there.handler == nullptr || !there.open || broken_ || cut(kTo)) {
      return;
    }
    if (!there.queue.empty()) {
      if (there.paused) return;
      auto message = std::move(there.queue.front());
      there.queue.pop_front();
      ++network_->delivered;
      network_->Trace(hosts_[1 - kTo]->name, hosts_[kTo]->name,
                      message.ByteSizeLong());
      const bool drained = there.queue.empty();
      there.handler->OnMessage(std::move(message));
      // The sender learns that its queue is empty.
      auto& back = direction<1 - kTo>();
      if (drained && back.open && back.handler != nullptr && !broken_) {
        hosts_[1 - kTo]->loop.Post(
            [self = this->shared_from_this(), this] { Drained<1 - kTo>(); });
      }
      Schedule<kTo>();
      return;
    }
    if (there.has_close) Closed<kTo>(there.close_status);
  }

  template <int kSide>
  void Drained() {
    auto& mine = direction<kSide>();
    if (mine.open && mine.handler != nullptr && !broken_ &&
        direction<1 - kSide>().queue.empty()) {
      mine.handler->OnDrained();
    }
  }

  template <int kSide>
  void Closed(const absl::Status& status) {
    auto& mine = direction<kSide>();
    if (mine.closed_told || !mine.open || mine.handler == nullptr) return;
    mine.closed_told = true;
    auto* const handler = std::exchange(mine.handler, nullptr);
    mine.open = false;
    handler->OnClosed(status);
  }

  Direction<Response> responses_;
  Direction<Request> requests_;
};

// One end's handle. kSide: 0 client, 1 server.
template <typename Request, typename Response, int kSide>
class SimulatedStream final
    : public Stream<std::conditional_t<kSide == 0, Request, Response>,
                    std::conditional_t<kSide == 0, Response, Request>> {
 public:
  using Out = std::conditional_t<kSide == 0, Request, Response>;
  using In = std::conditional_t<kSide == 0, Response, Request>;
  using Pair = TypedConnection<Request, Response>;

  SimulatedStream(std::shared_ptr<Pair> pair, std::string peer, size_t window)
      : pair_(std::move(pair)), peer_(std::move(peer)), window_(window) {}
  ~SimulatedStream() override {
    if (!closed_) Close(absl::CancelledError("stream dropped"));
  }

  void Start(StreamHandler<In>* handler) override {
    pair_->template direction<kSide>().handler = handler;
    pair_->TellIfBroken(kSide);
    pair_->Pump(kSide);
  }
  void Send(Out message) override {
    if (!closed_) pair_->template Send<1 - kSide>(std::move(message));
  }
  size_t unsent() const override {
    const size_t queued = pair_->template direction<1 - kSide>().queue.size();
    return queued > window_ ? queued - window_ : 0;
  }
  void PauseReading(bool paused) override {
    pair_->template direction<kSide>().paused = paused;
    if (!paused) pair_->Pump(kSide);
  }
  void Close(absl::Status status) override {
    if (closed_) return;
    closed_ = true;
    if (kSide == 0) status = absl::CancelledError("cancelled by the caller");
    pair_->template CloseFrom<1 - kSide>(status);
  }
  std::string peer() const override { return peer_; }

 private:
  const std::shared_ptr<Pair> pair_;
  const std::string peer_;
  const size_t window_;
  bool closed_ = false;
};

template <typename Request, typename Response>
std::unique_ptr<Stream<Request, Response>> Network::Connect(
    const std::shared_ptr<Host>& client, const std::shared_ptr<Host>& server,
    bool messy,
    std::function<void(std::unique_ptr<Stream<Response, Request>>)> accept) {
  auto pair = std::make_shared<TypedConnection<Request, Response>>(
      this, client, server, messy);
  connections_.push_back(pair);
  auto end = std::make_unique<SimulatedStream<Request, Response, 0>>(
      pair, server->name, options_.window);
  if (!server->alive || !client->alive) {
    pair->Break(absl::UnavailableError("connection refused"));
    return end;
  }
  server->loop.After(
      Delay(), [pair, accept = std::move(accept), name = client->name,
                window = options_.window]() {
        accept(std::make_unique<SimulatedStream<Request, Response, 1>>(
            pair, name, window));
      });
  return end;
}

}  // namespace tandem::simulation

#endif  // TANDEM_TESTS_SIMULATION_NETWORK_H_
