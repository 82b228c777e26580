// SPDX-License-Identifier: Apache-2.0
#include "router/http/live_feed.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/error.h"
#include "common/fnv.h"
#include "nlohmann/json.hpp"
#include "router/http/json_fields.h"
#include "router/http/openai_error.h"
#include "router/http/openai_usage.h"

namespace tandem::router {
namespace {

using nlohmann::json;

constexpr absl::Duration kInterval = absl::Milliseconds(100);
constexpr absl::Duration kQuietInterval = absl::Seconds(1);

std::string Event(const char* name, const std::string& data) {
  return absl::StrCat("event: ", name, "\ndata: ", data, "\n\n");
}

// "WORKER_STATE_READY" is "ready".
std::string Plain(absl::string_view name, absl::string_view prefix) {
  return absl::AsciiStrToLower(std::string(absl::StripPrefix(name, prefix)));
}

json WorkerJson(const v1::WorkerStatus& worker) {
  const v1::WorkerHello& hello = worker.hello();
  const v1::WorkerLoad& load = worker.load();
  return {{"id", hello.worker().worker_id()},
          {"role", Plain(v1::WorkerRole_Name(hello.role()), "WORKER_ROLE_")},
          {"state", Plain(v1::WorkerState_Name(load.state()), "WORKER_STATE_")},
          {"placeable", worker.placeable()},
          {"reason", worker.reason()},
          {"running", load.running()},
          {"waiting", load.waiting()},
          {"queued_tokens", load.queued_tokens()},
          {"max_num_seqs", hello.max_num_seqs()},
          {"block_size", hello.block_size()},
          {"blocks",
           {{"total", hello.num_blocks()},
            {"free", load.blocks_free()},
            {"reserved", load.blocks_reserved()},
            {"live", load.blocks_live()},
            {"cached", load.blocks_cached()}}},
          {"kv_dtype", hello.kv_dtype()},
          {"kv_bytes_per_token", hello.kv_bytes_per_token()},
          {"prefill_tokens_per_second", load.prefill_tokens_per_second()},
          {"step_ms", load.step_seconds() * 1e3},
          {"steps", load.steps()},
          {"tickets", load.tickets()},
          {"requests", worker.requests()},
          {"losses", worker.losses()}};
}

json RequestJson(const v1::RequestStatus& request) {
  return {{"id", request.internal_id()},
          {"label", RequestLabel(request.request_id())},
          {"phase", request.phase()},
          {"age_ms", static_cast<double>(request.age().seconds()) * 1e3 +
                         static_cast<double>(request.age().nanos()) / 1e6},
          {"prompt_tokens", request.prompt_tokens()},
          {"output_tokens", request.output_tokens()},
          {"prefill_worker", request.prefill_worker_id()},
          {"decode_worker", request.decode_worker_id()},
          {"attempts", request.attempts()}};
}

json EndedJson(const RequestSummary& summary) {
  json ended = {
      {"id", summary.internal_id},
      {"label", RequestLabel(summary.request_id)},
      {"ok", summary.status.ok()},
      {"client_gone", summary.client_gone},
      {"error", summary.status.ok()
                    ? json()
                    : json(absl::AsciiStrToLower(ErrorReason(summary.status)))},
      {"finish_reason",
       Plain(v1::FinishReason_Name(summary.finish_reason), "FINISH_REASON_")},
      {"failures", summary.failures},
      {"usage", UsageJson(summary.done.usage())},
      {"timings", TimingsJson(summary.done)},
      {"work", nullptr}};
  if (summary.done.has_work()) ended["work"] = WorkJson(summary.done.work());
  return ended;
}

}  // namespace

std::string RequestLabel(std::string_view request_id) {
  return absl::StrFormat("%016x", Fnv1a(request_id));
}

std::string StateJson(const v1::GetClusterStateResponse& state) {
  json workers = json::array();
  for (const v1::WorkerStatus& worker : state.workers()) {
    workers.push_back(WorkerJson(worker));
  }
  json requests = json::array();
  for (const v1::RequestStatus& request : state.in_flight()) {
    if (requests.size() == kMaxShownRequests) break;
    requests.push_back(RequestJson(request));
  }
  const v1::RequestCounts& counts = state.requests();
  const v1::RouterCounters& counters = state.counters();
  return DumpJson({{"model", state.model()},
                   {"policy", state.policy()},
                   {"draining", state.draining()},
                   {"workers", std::move(workers)},
                   {"requests", std::move(requests)},
                   {"phases",
                    {{"total", counts.total()},
                     {"queued", counts.queued()},
                     {"opening", counts.opening()},
                     {"prefilling", counts.prefilling()},
                     {"handing_over", counts.handing_over()},
                     {"decoding", counts.decoding()},
                     {"retrying", counts.retrying()}}},
                   {"counters",
                    {{"accepted", counters.accepted()},
                     {"finished_ok", counters.finished_ok()},
                     {"failed", counters.failed()},
                     {"cancelled", counters.cancelled()},
                     {"refused", counters.refused()},
                     {"tokens", counters.tokens()},
                     {"prefill_retries", counters.prefill_retries()},
                     {"decode_retries", counters.decode_retries()},
                     {"split_placements", counters.split_placements()},
                     {"local_placements", counters.local_placements()},
                     {"leases_lost", counters.leases_lost()}}}});
}

// One that takes its events slowly gets fewer states, but all ends that others
// get: what nobody tells it has ended would go on for it for ever.
struct LiveFeed::Watcher {
  std::unique_ptr<HttpExchange> exchange;
  bool writing = false;
  std::string missed;  // ends since the last write
};

LiveFeed::LiveFeed(Loop* loop, RouterObserver* next,
                   std::function<v1::GetClusterStateResponse()> state)
    : loop_(loop), next_(next), state_(std::move(state)), tick_(loop) {}

LiveFeed::~LiveFeed() = default;

void LiveFeed::Watch(std::unique_ptr<HttpExchange> exchange) {
  if (closed_ || watchers() >= kMaxWatchers) {
    return exchange->Answer(ErrorResponse(MakeError(
        absl::StatusCode::kUnavailable, closed_ ? "DRAINING" : "FEED_FULL",
        closed_ ? "the router is draining"
                : absl::StrCat("at most ", kMaxWatchers, " clients may watch"),
        {}, absl::Seconds(5))));
  }
  const auto watcher = std::make_shared<Watcher>();
  watcher->exchange = std::move(exchange);
  watcher->exchange->Begin({.content_type = kEventStream,
                            .body = "retry: 1000\n\n",
                            .headers = {{"Cache-Control", "no-store"},
                                        {"X-Accel-Buffering", "no"}}});
  watcher->exchange->OnGone(
      [this, loop = loop_, weak = std::weak_ptr<Watcher>(watcher)] {
        // Closed first, or gone with the loop.
        loop->Post([this, weak] {
          if (const auto gone = weak.lock()) watchers_.remove(gone);
        });
      });
  watchers_.push_back(watcher);
  last_state_.clear();
  if (watchers() == 1) {
    ended_.clear();
    ended_count_ = 0;
    Tick();
  }
}

void LiveFeed::Close() {
  closed_ = true;
  tick_.Stop();
  for (const auto& watcher : watchers_) watcher->exchange->End();
  watchers_.clear();
}

void LiveFeed::OnEnded(const RequestSummary& summary) {
  next_->OnEnded(summary);
  if (watchers_.empty() || ended_count_ >= kMaxShownRequests) return;
  ++ended_count_;
  ended_ += Event("ended", DumpJson(EndedJson(summary)));
}

void LiveFeed::Tick() {
  if (watchers_.empty() || closed_) return;
  tick_.Start(kInterval, [this] { Tick(); });
  std::string state = StateJson(state_());
  const std::string ended = std::exchange(ended_, "");
  ended_count_ = 0;
  const absl::Time now = loop_->Now();
  std::string event;
  if (state != last_state_ || now - last_sent_ >= kQuietInterval) {
    event = Event("state", state);
    last_state_ = std::move(state);
    last_sent_ = now;
  }
  Send(ended, event);
}

void LiveFeed::Send(const std::string& ended, const std::string& state) {
  for (const auto& watcher : watchers_) {
    if (watcher->missed.size() + ended.size() <= kMaxMissedBytes) {
      watcher->missed += ended;
    }
    if (watcher->writing) continue;
    std::string events = std::exchange(watcher->missed, "") + state;
    if (events.empty()) continue;
    watcher->writing = true;
    watcher->exchange->Write(
        std::move(events),
        [loop = loop_, weak = std::weak_ptr<Watcher>(watcher)] {
          loop->Post([weak] {
            if (const auto written = weak.lock()) written->writing = false;
          });
        });
  }
}

}  // namespace tandem::router
