// SPDX-License-Identifier: Apache-2.0
// What the core tells of the cluster and of the requests in flight. See core.h.

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "router/core/core.h"
#include "router/placement/placement.h"

namespace tandem::router {

std::vector<std::string> RouterCore::adapters() const {
  std::set<std::string> names;
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() != v1::WORKER_ROLE_DECODE) continue;
    for (const v1::AdapterRef& adapter : worker->hello.adapters()) {
      names.insert(adapter.name());
    }
  }
  for (std::string& name : adapter_control_.InService()) {
    names.insert(std::move(name));
  }
  std::erase_if(names, [this](const std::string& name) {
    return adapter_control_.Closed(name);
  });
  return {names.begin(), names.end()};
}

int RouterCore::InFlightWith(const std::string& adapter) const {
  int count = 0;
  for (const auto& [id, request] : requests_) {
    count += request->effective().adapter == adapter;
  }
  for (const auto& group : groups_) {
    if (group->effective().adapter == adapter) count += group->unstarted();
  }
  return count;
}

int RouterCore::ready_workers(v1::WorkerRole role) const {
  int ready = 0;
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() == role && registry_.Placeable(*worker)) ++ready;
  }
  return ready;
}

v1::RequestCounts RouterCore::Counts() const {
  v1::RequestCounts counts;
  counts.set_total(in_flight());
  for (const auto& [id, request] : requests_) {
    switch (request->phase()) {
      case Request::Phase::kQueued:
        counts.set_queued(counts.queued() + 1);
        counts.set_queued_tokens(counts.queued_tokens() +
                                 request->history_tokens());
        break;
      case Request::Phase::kOpening:
        counts.set_opening(counts.opening() + 1);
        break;
      case Request::Phase::kPrefilling:
        counts.set_prefilling(counts.prefilling() + 1);
        break;
      case Request::Phase::kHandingOver:
        counts.set_handing_over(counts.handing_over() + 1);
        break;
      case Request::Phase::kRetrying:
        counts.set_retrying(counts.retrying() + 1);
        break;
      case Request::Phase::kDecoding:
      case Request::Phase::kEnding:
      case Request::Phase::kEnded:
        counts.set_decoding(counts.decoding() + 1);
        break;
    }
  }
  return counts;
}

v1::GetClusterStateResponse RouterCore::State(bool include_requests) const {
  v1::GetClusterStateResponse state;
  state.set_router_incarnation(options_.incarnation);
  state.set_model(options_.model);
  state.set_policy(std::string(PolicyName(options_.policy)));
  const int64_t nanos = absl::ToInt64Nanoseconds(loop_->Now() - started_);
  state.mutable_uptime()->set_seconds(nanos / 1'000'000'000);
  state.mutable_uptime()->set_nanos(static_cast<int>(nanos % 1'000'000'000));
  state.set_draining(draining_);
  registry_.Describe(&state);
  absl::flat_hash_map<std::string, int> per_worker;
  for (const auto& [id, request] : requests_) {
    ++per_worker[request->decode_worker_id()];
    ++per_worker[request->prefill_worker_id()];
    if (include_requests) request->Describe(state.add_in_flight());
  }
  for (v1::WorkerStatus& worker : *state.mutable_workers()) {
    worker.set_requests(per_worker[worker.hello().worker().worker_id()]);
  }
  *state.mutable_requests() = Counts();
  *state.mutable_counters() = counters_;
  state.mutable_counters()->set_registrations(registry_.registrations());
  state.mutable_counters()->set_leases_lost(registry_.leases_lost());
  return state;
}

}  // namespace tandem::router
