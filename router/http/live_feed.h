// SPDX-License-Identifier: Apache-2.0
// GET /v1/tandem/events: the cluster at work, as server-sent events for a page
// or a dashboard. Ids and numbers; no text, no token, no name that a client
// gave. `label` is a hash of a request's id, by which its own client knows it.
//
//   event: state   workers with load and blocks, requests in flight, counters
//   event: ended   a request's end with its timings, usage and work
//
// At most ten states a second, one a second where nothing changes. While
// nobody watches, nothing runs but one comparison at a request's end. All of
// it on the router's loop.

#ifndef TANDEM_ROUTER_HTTP_LIVE_FEED_H_
#define TANDEM_ROUTER_HTTP_LIVE_FEED_H_

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/http/server.h"
#include "common/loop.h"
#include "router/telemetry/observer.h"
#include "tandem/v1/admin.pb.h"

namespace tandem::router {

inline constexpr char kEventStream[] = "text/event-stream; charset=utf-8";
// More are answered with 503.
inline constexpr int kMaxWatchers = 16;
// Requests in flight shown in a state, and ends between two of them.
inline constexpr int kMaxShownRequests = 64;
// Of ends that wait for a watcher that reads slowly.
inline constexpr size_t kMaxMissedBytes = 64 << 10;

// 16 hex digits: FNV-1a, 64 bits, of the request id that the client knows.
std::string RequestLabel(std::string_view request_id);

// What `event: state` carries, uptime left out.
std::string StateJson(const v1::GetClusterStateResponse& state);

class LiveFeed final : public RouterObserver {
 public:
  // `state` is asked for on the loop while somebody watches. All outlive this;
  // everything is passed on to `next`.
  LiveFeed(Loop* loop, RouterObserver* next,
           std::function<v1::GetClusterStateResponse()> state);
  ~LiveFeed() override;

  // On the loop. Answers until the client goes.
  void Watch(std::unique_ptr<HttpExchange> exchange);
  // On the loop: ends all streams, for the drain.
  void Close();
  int watchers() const { return static_cast<int>(watchers_.size()); }

  void OnPlaced(bool split) override { next_->OnPlaced(split); }
  void OnStage(Stage stage, absl::Duration took) override {
    next_->OnStage(stage, took);
  }
  void OnFirstToken(int tokens, absl::Duration since_admission) override {
    next_->OnFirstToken(tokens, since_admission);
  }
  void OnTokens(int tokens, absl::Duration gap) override {
    next_->OnTokens(tokens, gap);
  }
  void OnRetry(const AttemptLoss& loss) override { next_->OnRetry(loss); }
  void OnClusterEvent(const ClusterEvent& event) override {
    next_->OnClusterEvent(event);
  }
  void OnSuspect(std::string_view internal_id, const std::string& first,
                 const std::string& second) override {
    next_->OnSuspect(internal_id, first, second);
  }
  void OnEnded(const RequestSummary& summary) override;
  void OnAdapter(const std::string& name, std::string_view what,
                 const absl::Status& status) override {
    next_->OnAdapter(name, what, status);
  }

 private:
  struct Watcher;

  void Tick();
  // `state` may be empty.
  void Send(const std::string& ended, const std::string& state);

  Loop* const loop_;
  RouterObserver* const next_;
  const std::function<v1::GetClusterStateResponse()> state_;
  std::list<std::shared_ptr<Watcher>> watchers_;
  std::string ended_;  // events since the last tick
  int ended_count_ = 0;
  std::string last_state_;
  absl::Time last_sent_;
  bool closed_ = false;
  Timer tick_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_HTTP_LIVE_FEED_H_
