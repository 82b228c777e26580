// SPDX-License-Identifier: Apache-2.0
// Who is let in: not more requests than the router is to hold, to let wait, or
// to give a first token in time, and no prompt that crashes workers. See
// core.h.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/flight_recorder.h"
#include "router/core/core.h"
#include "router/validate/errors.h"

namespace tandem::router {
namespace {

// Of a refusal by the expected wait: the rate may have changed by then.
constexpr absl::Duration kLongestPushback = absl::Seconds(30);

absl::Status QueueFull(std::string_view what, int limit) {
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   absl::StrCat(std::string(what), ", the limit is ", limit),
                   {}, absl::Seconds(1));
}

}  // namespace

absl::Status RouterCore::Admit(const AdmittedRequest& admitted) {
  if (draining_) return Draining();
  if (quarantine_.Holds(admitted.prompt, loop_->Now())) {
    return MakeError(
        absl::StatusCode::kInternal, "SUSPECT",
        absl::StrCat("two workers crashed while they computed "
                     "this prompt; it is refused for ",
                     absl::FormatDuration(options_.suspect_quarantine)));
  }
  const std::string& id = admitted.effective.request_id;
  if (!admitted.id_from_header && IdInUse(admitted)) {
    return MakeError(absl::StatusCode::kAlreadyExists, "REQUEST_ID_IN_USE",
                     absl::StrCat("request_id = ", id,
                                  ": a request of that name is in flight"));
  }
  // Said before what threads beside the loop know of adapters was renewed.
  if (const std::string& adapter = admitted.effective.adapter;
      adapter_control_.Closed(adapter)) {
    return MakeError(
        absl::StatusCode::kNotFound, "ADAPTER_NOT_FOUND",
        absl::StrCat("adapter = ", adapter, ": is being loaded or unloaded"),
        {{"adapter", adapter}});
  }
  const int others =
      admitted.effective.beam
          ? 0
          : std::max(1, admitted.effective.sampling.best_of()) - 1;
  if (others >= options_.max_requests) {  // now or later
    return FieldInvalid(
        "sampling.best_of", absl::StrCat(others + 1, " sequences"),
        absl::StrCat("at most ", options_.max_requests,
                     ", as many as this router's --max-requests"));
  }
  int unstarted = 0;
  for (const auto& group : groups_) unstarted += group->unstarted();
  const int taken = in_flight() + unstarted;
  if (taken + others >= options_.max_requests) {
    return QueueFull(absl::StrCat(taken, " requests are in flight"),
                     options_.max_requests);
  }
  Count();  // time has passed
  return HasRoom(admitted.effective.priority);
}

// Names are a tenant's own: another's must not be found out by them.
bool RouterCore::IdInUse(const AdmittedRequest& admitted) const {
  const auto named = by_client_id_.find(admitted.effective.request_id);
  return named != by_client_id_.end() &&
         std::any_of(named->second.begin(), named->second.end(),
                     [&](const Request* other) {
                       return other->tenant() == admitted.tenant;
                     });
}

absl::Status RouterCore::HasRoom(int priority) const {
  const int taken = taken_;
  if (taken >= options_.max_requests) {
    return QueueFull(absl::StrCat(taken, " requests are in flight"),
                     options_.max_requests);
  }
  const int waiting = waiting_;
  if (waiting >= options_.max_queued) {
    return QueueFull(absl::StrCat(waiting, " requests are waiting"),
                     options_.max_queued);
  }
  if (priority >= refused_from_) {
    const absl::Duration expected = absl::Milliseconds(expected_ms_.load());
    return MakeError(
        absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
        absl::StrCat("a first token is to be expected in ",
                     absl::FormatDuration(expected), ", the limit is ",
                     absl::FormatDuration(options_.max_expected_wait)),
        {},
        std::clamp(expected - options_.max_expected_wait, absl::Seconds(1),
                   kLongestPushback));
  }
  return absl::OkStatus();
}

void RouterCore::Count() {
  const absl::Time now = loop_->Now();
  taken_ = in_flight();
  waiting_ = static_cast<int>(queue_.size());
  // Those in the queue, and of those behind it who waits for a prefill worker:
  // who is being computed is in nobody's way, however long it takes.
  const int queued = static_cast<int>(queue_.size());
  const int placed = std::max(0, in_flight() - answered_ - queued);
  expected_.SetWaiting(queued + std::min(placed, prompts_queued_), now);
  expected_ms_ =
      absl::ToInt64Milliseconds(expected_.Behind(expected_.waiting()));
  refused_from_ = RefusedFrom();
}

int64_t RouterCore::RefusedFrom() const {
  // So many of those that wait have to be behind it.
  const int behind =
      expected_.waiting() - expected_.MostWithin(options_.max_expected_wait);
  if (behind <= 0) return INT64_MAX;
  if (behind > static_cast<int>(queue_.size())) return INT64_MIN;
  const Request* const last_ahead = *std::prev(queue_.end(), behind);
  return last_ahead->was_computed() ? INT64_MIN
                                    : last_ahead->effective().priority;
}

void RouterCore::OnFirstToken() {
  ++answered_;
  expected_.OnServed(loop_->Now());
  Count();
}

void RouterCore::OnSuspect(const Request& request, const v1::WorkerRef& first,
                           const v1::WorkerRef& second) {
  quarantine_.Add(request.prompt(), {first.incarnation(), second.incarnation()},
                  loop_->Now());
  flight::Record(flight::Event::kSuspect, {.request = request.internal_id(),
                                           .prefill = first.worker_id(),
                                           .decode = second.worker_id()});
  observer_->OnSuspect(absl::BytesToHexString(request.internal_id()),
                       first.worker_id(), second.worker_id());
}

}  // namespace tandem::router
