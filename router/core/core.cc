// SPDX-License-Identifier: Apache-2.0
// A request as long as the core has it: it is taken, waits, is placed, and
// ends. See core.h.

#include "router/core/core.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "common/utf8.h"
#include "router/placement/placement.h"

namespace tandem::router {
namespace {

// Of a deadline that nobody asked for, behind a limit of time.
constexpr absl::Duration kTimeLimitSlack = absl::Seconds(1);

// Retries a minute, and at once: a worker may be lost with all requests, twice.
constexpr int kLeastRetries = 600;

bool GoesBefore(const Request& a, const Request& b) {
  if (a.was_computed() != b.was_computed()) return a.was_computed();
  const int priority = a.effective().priority;
  if (!a.was_computed() && priority != b.effective().priority) {
    return priority < b.effective().priority;
  }
  return a.admitted() < b.admitted();
}

}  // namespace

RouterCore::RouterCore(const RouterOptions& options, Loop* loop, Random* random,
                       Dialer* dialer, TextCodec* codec,
                       RouterObserver* observer, SpanSink* spans)
    : options_(options),
      loop_(loop),
      random_(random),
      observer_(observer),
      registry_(options_, loop, this),
      adapter_control_(
          &options_, loop, &registry_, observer,
          [this](const std::string& adapter) { return InFlightWith(adapter); }),
      quarantine_(options_.suspect_quarantine),
      retries_(std::max(kLeastRetries, 2 * options_.max_requests), loop->Now()),
      expected_(loop->Now()),
      context_{&options_, loop,       dialer, &registry_, codec,
               observer_, &counters_, this,   spans},
      started_(loop->Now()),
      tick_(loop),
      reap_(loop),
      pump_(loop) {
  tick_due_ = loop->Now() + options_.beat;
  tick_.Start(options_.beat, [this] { Tick(); });
}

RouterCore::~RouterCore() {
  RouterCore::CloseAll(MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                                 "the router is going away"));
}

void RouterCore::Submit(AdmittedRequest admitted,
                        std::unique_ptr<ClientStream> client) {
  TANDEM_FAILPOINT("router.submit", "crash stall");
  // What has ended meanwhile takes no room.
  const absl::Status status = admitted.ended == AdmittedRequest::Ended::kNo
                                  ? Admit(admitted)
                                  : absl::OkStatus();
  if (!status.ok()) {
    counters_.set_refused(counters_.refused() + 1);
    flight::Record(flight::Event::kRefused, {.m = status.raw_code()});
    RequestSummary summary;
    summary.request_id = admitted.effective.request_id;
    summary.internal_id = absl::BytesToHexString(random_->Bytes(16));
    summary.api = admitted.api;
    summary.tenant = admitted.tenant;
    summary.status = status;
    observer_->OnEnded(summary);
    client->Close(status);
    return;
  }
  EffectiveRequest& effective = admitted.effective;
  // Proxies and browsers give one trace's calls one header.
  if (effective.request_id.empty() ||
      (admitted.id_from_header && IdInUse(admitted))) {
    effective.request_id = Uuid(random_);
  }
  if (!effective.sampling.has_seed()) {
    // Whole in a double, as JSON's numbers are to many clients.
    effective.sampling.set_seed(random_->Next() >> 11);
  }
  if (admitted.deadline <= absl::ZeroDuration()) {
    admitted.deadline = options_.default_deadline;
    // A limit of time ends with what there is, and comes before an error.
    if (effective.max_time) {
      admitted.deadline =
          std::max(admitted.deadline, *effective.max_time + kTimeLimitSlack);
    }
  }
  // Hypotheses of a beam search are one search's.
  if (effective.sampling.best_of() <= 1 || effective.beam) {
    StartSequence(std::move(admitted), std::move(client));
    return;
  }
  GroupHost* const host = this;
  groups_.push_back(std::make_unique<SequenceGroup>(
      loop_, host, std::move(admitted), std::move(client)));
  groups_.back()->Start();
}

void RouterCore::StartSequence(AdmittedRequest admitted,
                               std::unique_ptr<ClientStream> client) {
  counters_.set_accepted(counters_.accepted() + 1);
  retries_earned_ += options_.retry_budget;
  if (retries_earned_ >= 1) {
    retries_earned_ -= 1;
    retries_.Give(1, loop_->Now());
  }
  const std::string internal_id = random_->Bytes(16);
  if (admitted.effective.tool_calls) {
    admitted.effective.tool_calls->id_seed = random_->Next();
  }
  const AdmittedRequest::Ended ended = admitted.ended;
  auto request = std::make_unique<Request>(context_, std::move(admitted),
                                           internal_id, std::move(client));
  Request* const raw = request.get();
  by_client_id_[raw->client_id()].push_back(raw);
  requests_[internal_id] = std::move(request);
  switch (ended) {
    case AdmittedRequest::Ended::kAborted:
      return raw->Abort();
    case AdmittedRequest::Ended::kClientGone:
      return raw->Leave();
    case AdmittedRequest::Ended::kNo:
      break;
  }
  Enqueue(raw);
  Pump();
}

void RouterCore::OnWaits(Request* request) {
  Enqueue(request);
  SchedulePump();
  // Refused again and again it would hardly be found waiting at a tick.
  FailIfWaitedTooLong(request);
}

void RouterCore::Enqueue(Request* request) {
  // From the end: mostly that is its place.
  auto place = queue_.end();
  while (place != queue_.begin() && GoesBefore(*request, **std::prev(place))) {
    --place;
  }
  queued_[request] = queue_.insert(place, request);
  Count();
}

void RouterCore::Dequeue(Request* request) {
  const auto it = queued_.find(request);
  if (it == queued_.end()) return;
  queue_.erase(it->second);
  queued_.erase(it);
}

void RouterCore::SchedulePump() {
  pump_.Start(absl::ZeroDuration(), [this] { Pump(); });
}

void RouterCore::Pump() {
  if (pumping_) return;
  pumping_ = true;
  // Those passed over stay at the head, and are asked first the next time.
  size_t passed = 0;
  while (passed < queue_.size()) {
    Request* const request =
        *std::next(queue_.begin(), static_cast<ptrdiff_t>(passed));
    const bool over = TooManyRetries(*request);
    if (!over && TryPlace(request)) continue;
    if (!over && !OthersHaveRoom(*request)) break;
    ++passed;
  }
  pumping_ = false;
}

bool RouterCore::TooManyRetries(const Request& request) {
  return request.attempts_failed() > 0 && !retries_.Has(1, loop_->Now());
}

bool RouterCore::TakeRetry(const Request& request) {
  if (TooManyRetries(request)) return false;
  if (request.attempts_failed() > 0) retries_.Take(1, loop_->Now());
  return true;
}

bool RouterCore::TryPlace(Request* request) {
  if (request->ComputedToTheEnd()) return true;
  if (request->effective().only_scores() && TryPlaceScoring(request)) {
    return true;
  }
  if (TANDEM_FAILPOINT("router.place", "crash fail")) return false;
  const absl::Time begun = context_.loop->Now();
  Snapshot snapshot = MakeSnapshot(*request);
  Pair pair = Place(options_.policy, snapshot, random_);
  if (pair.decode < 0) {
    if (FailIfLetGo(request)) return true;
    if (request->was_computed()) return false;
    if (request->effective().no_kv_cache && NoPoolHolds(request)) return true;
    if (AnyHeeds(*request)) return false;
    request->Fail(WhyNobodyHeeds(*request));
    return true;
  }
  const WorkerView& decode = snapshot.decode[pair.decode];
  Choice choice;
  choice.begun = begun;
  const v1::WorkerHello& hello = registry_.Find(decode.worker_id)->hello;
  choice.decode = hello.worker();
  choice.adapter = request->AdapterOn(hello);
  int cached = decode.cached_tokens;
  if (!request->last_attempt() && !request->effective().only_scores() &&
      WayOf(*request, snapshot, pair) == Way::kSplit) {
    const WorkerView& prefill = snapshot.prefill[pair.prefill];
    choice.prefill = registry_.Find(prefill.worker_id)->hello.worker();
    cached = prefill.cached_tokens;
  }
  context_.observer->OnStage(Stage::kPlace, context_.loop->Now() - begun);
  ++placements_;
  if (request->attempts_failed() > 0) retries_.Take(1, loop_->Now());
  Dequeue(request);
  Count();
  request->Begin(choice, cached);
  return true;
}

bool RouterCore::NoPoolHolds(Request* request) {
  const KvRoom room = registry_.kv_room();
  const int64_t most = int64_t{room.blocks} * room.block_size;
  if (most == 0 || most >= request->positions()) return false;
  request->Fail(
      MakeError(absl::StatusCode::kInvalidArgument, "CONTEXT_LENGTH_EXCEEDED",
                absl::StrCat("without a KV cache, prompt and max_tokens are "
                             "together at most ",
                             most, " tokens here, not ", request->positions()),
                {{"field", "stopping.max_tokens"}}));
  return true;
}

// Where there is none with room a decode worker does it.
bool RouterCore::TryPlaceScoring(Request* request) {
  const bool local = request->effective().placement == v1::PLACEMENT_LOCAL &&
                     !request->suspect();
  if (local || request->last_attempt()) return false;
  const Snapshot snapshot = MakeScoringSnapshot(*request);
  const int chosen =
      PlacePrefill(options_.policy, snapshot, /*decode=*/0, random_);
  if (chosen < 0) return false;
  const v1::WorkerHello& hello =
      registry_.Find(snapshot.prefill[chosen].worker_id)->hello;
  ++placements_;
  if (request->attempts_failed() > 0) retries_.Take(1, loop_->Now());
  Dequeue(request);
  Count();
  request->Begin({.decode = {},
                  .prefill = hello.worker(),
                  .adapter = request->AdapterOn(hello),
                  .begun = context_.loop->Now()},
                 /*cached_tokens=*/0);
  return true;
}

bool RouterCore::CouldPlace() {
  // Which of several it would be does not matter.
  SeededRandom random(0);
  // As Pump goes through them.
  for (const Request* request : queue_) {
    if (TooManyRetries(*request)) continue;
    const Snapshot snapshot = MakeSnapshot(*request);
    if (Place(options_.policy, snapshot, &random).decode >= 0) return true;
    if (!OthersHaveRoom(*request)) return false;
  }
  return false;
}

void RouterCore::Tick() {
  // Late because this process itself stood still: what arrived meanwhile is
  // read before anybody's silence counts.
  const bool judge = context_.loop->Now() - tick_due_ <= options_.beat;
  // A request may end in its turn; it is destroyed later.
  for (Request* request : All()) {
    if (request->phase() == Request::Phase::kQueued) {
      FailIfWaitedTooLong(request);
    } else {
      request->Tick(judge);
    }
  }
  adapter_control_.Tick();
  Count();
  Pump();
  tick_due_ = context_.loop->Now() + options_.beat;
  tick_.Start(options_.beat, [this] { Tick(); });
}

void RouterCore::FailIfWaitedTooLong(Request* request) {
  const absl::Duration waited = loop_->Now() - request->waiting_since();
  if (!AnyCanServe(*request)) {
    if (FailIfLetGo(request)) return;
    const absl::Duration limit = request->was_computed()
                                     ? options_.recovery_wait
                                     : options_.no_workers_wait;
    if (waited < limit) return;
    const std::string needed = absl::StrJoin(NeededFeatures(*request), ", ");
    request->Fail(
        MakeError(absl::StatusCode::kUnavailable, "NO_WORKERS",
                  absl::StrCat("no decode worker", Wanted(*request),
                               needed.empty() ? "" : " that knows ", needed,
                               " for ", absl::FormatDuration(limit)),
                  {}, absl::Seconds(5)));
    return;
  }
  const absl::Duration limit =
      request->was_computed() ? options_.recovery_wait : options_.queue_wait;
  if (waited < limit) return;
  request->Fail(MakeError(
      absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
      absl::StrCat("no worker had room within ", absl::FormatDuration(limit)),
      {}, absl::Seconds(2)));
}

bool RouterCore::FailIfLetGo(Request* request) {
  const absl::Status status =
      adapter_control_.CheckNotLetGo(request->effective().adapter);
  if (!status.ok()) request->Fail(status);
  return !status.ok();
}

void RouterCore::OnVoided(const v1::WorkerRef& old) {
  for (Request* request : All()) request->OnVoided(old);
}

void RouterCore::OnRegistered(const Worker& worker) {
  expected_.Forget();
  const std::string& incarnation = worker.hello.worker().incarnation();
  quarantine_.Acquit(incarnation);
  for (const auto& [id, request] : requests_) request->Acquit(incarnation);
  adapter_control_.OnRegistered(worker);
}

void RouterCore::OnClusterEvent(const ClusterEvent& event) {
  using Kind = ClusterEvent::Kind;
  using flight::Event;
  const bool decode = event.role == v1::WORKER_ROLE_DECODE;
  const Event what = event.kind == Kind::kRegistered ? Event::kRegistered
                     : event.kind == Kind::kLost     ? Event::kWorkerLost
                     : event.kind == Kind::kWorkerAvoided
                         ? Event::kWorkerAvoided
                     : event.kind == Kind::kPairAvoided ? Event::kPairAvoided
                                                        : Event::kRejected;
  flight::Record(what, {.prefill = decode ? "" : event.worker,
                        .decode = decode ? event.worker : event.decode_worker,
                        .word = event.cause,
                        .m = absl::ToInt64Milliseconds(event.length)});
  observer_->OnClusterEvent(event);
}

void RouterCore::OnEnded(Request* request) {
  Dequeue(request);
  const auto same_id = by_client_id_.find(request->client_id());
  std::erase(same_id->second, request);
  if (same_id->second.empty()) by_client_id_.erase(same_id);
  if (request->answered()) {
    --answered_;
  } else if (request->finish_reason() != v1::FINISH_REASON_UNSPECIFIED &&
             request->finish_reason() != v1::FINISH_REASON_CANCELLED) {
    expected_.OnServed(loop_->Now());  // it wanted no token
  }
  const auto it = requests_.find(request->internal_id());
  ended_.push_back(std::move(it->second));
  requests_.erase(it);
  Count();
  adapter_control_.OnRequestEnded(request->effective().adapter);
  registry_.Finished(request->decode_worker_id());
  Reap();
  SchedulePump();
}

void RouterCore::OnGroupEnded(SequenceGroup* group) {
  const auto it = std::find_if(groups_.begin(), groups_.end(),
                               [&](const auto& g) { return g.get() == group; });
  ended_groups_.push_back(std::move(*it));
  groups_.erase(it);
  Reap();
}

void RouterCore::Reap() {
  reap_.Start(absl::ZeroDuration(), [this] {
    ended_.clear();
    ended_groups_.clear();
  });
}

absl::StatusOr<int> RouterCore::Abort(
    const std::string& id, const std::optional<std::string>& tenant) {
  std::vector<Request*> sequences;
  if (const auto it = by_client_id_.find(id); it != by_client_id_.end()) {
    sequences = it->second;
  } else if (const auto by_internal =
                 requests_.find(absl::HexStringToBytes(id));
             id.size() == 32 && by_internal != requests_.end()) {
    sequences = {by_internal->second.get()};
  }
  std::erase_if(sequences, [&tenant](const Request* request) {
    return tenant && request->tenant() != *tenant;
  });
  if (sequences.empty()) {
    return MakeError(
        absl::StatusCode::kNotFound, "REQUEST_NOT_FOUND",
        absl::StrCat("request_id = ", std::string(Utf8Head(id, 128)),
                     ": no such request is in flight here"));
  }
  int tokens = 0;
  for (Request* const request : sequences) {
    tokens += static_cast<int>(request->output().size());
    request->Abort();
  }
  return tokens;
}

int RouterCore::AbortAll(const std::string& tenant) {
  std::set<std::string> aborted;
  for (Request* const request : All()) {
    if (request->tenant() != tenant) continue;
    aborted.insert(request->client_id());
    request->Abort();
  }
  return static_cast<int>(aborted.size());
}

absl::StatusOr<int> RouterCore::Cordon(const std::string& worker_id,
                                       bool cordoned) {
  const absl::Status status = registry_.Cordon(worker_id, cordoned);
  if (!status.ok()) return status;
  int count = 0;
  for (const auto& [id, request] : requests_) {
    count += request->decode_worker_id() == worker_id ||
             request->prefill_worker_id() == worker_id;
  }
  return count;
}

void RouterCore::CloseAll(const absl::Status& status) {
  for (Request* request : All()) request->Fail(status);
}

std::vector<Request*> RouterCore::All() const {
  std::vector<Request*> all;
  for (const auto& [id, request] : requests_) all.push_back(request.get());
  return all;
}

}  // namespace tandem::router
