// SPDX-License-Identifier: Apache-2.0
#include "router/core.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "common/utf8.h"
#include "engine/kv_pool.h"
#include "engine/prefix_cache.h"
#include "router/errors.h"
#include "router/placement.h"

namespace tandem::router {
namespace {

// Of a deadline that nobody asked for, behind a limit of time.
constexpr absl::Duration kTimeLimitSlack = absl::Seconds(1);
// Of a refusal by the expected wait: the rate may have changed by then.
constexpr absl::Duration kLongestPushback = absl::Seconds(30);
// Retries a minute, and at once: a worker may be lost with all requests, twice.
constexpr int kLeastRetries = 600;

absl::Status QueueFull(std::string_view what, int limit) {
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   absl::StrCat(std::string(what), ", the limit is ", limit),
                   {}, absl::Seconds(1));
}

// What decode workers must heed for it.
std::vector<std::string> Needed(const Request& request) {
  const EffectiveRequest& effective = request.effective();
  std::vector<std::string> needed = effective.features;
  needed.insert(needed.end(), effective.decode_features.begin(),
                effective.decode_features.end());
  return needed;
}

// An older worker would ignore what it does not know.
bool Heeds(const Worker& worker, const Request& request) {
  const auto& heeded = worker.hello.features();
  const auto names = [&heeded](const std::vector<std::string>& needed) {
    return std::all_of(needed.begin(), needed.end(), [&](const auto& feature) {
      return std::find(heeded.begin(), heeded.end(), feature) != heeded.end();
    });
  };
  const EffectiveRequest& effective = request.effective();
  return names(effective.features) &&
         (worker.hello.role() != v1::WORKER_ROLE_DECODE ||
          names(effective.decode_features));
}

// What all beams of a search may come to: they share full blocks of the prompt
// and nothing else for certain.
bool HoldsBeams(const Worker& worker, const Request& request) {
  const EffectiveRequest& effective = request.effective();
  if (!effective.beam) return true;
  const int size = worker.hello.block_size();
  const int64_t prompt = static_cast<int64_t>(request.prompt().size());
  const int64_t shared = prompt / size;
  const int64_t all =
      (prompt + effective.stopping.max_tokens() + size - 1) / size;
  return shared + effective.beam->width() * (all - shared) <=
         worker.hello.num_blocks();
}

// Whether there is all that it needs of a decode worker; room is another
// matter.
bool CanServe(const Worker& worker, const Request& request) {
  return Heeds(worker, request) && request.HasAdapter(worker.hello) &&
         HoldsBeams(worker, request);
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
  expected_.SetWaiting(in_flight() - answered_, now);
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
    effective.sampling.set_seed(random_->Next());
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
  // Behind its equals, and behind all that were computed before. From the end:
  // mostly that is its place.
  auto place = queue_.end();
  while (place != queue_.begin()) {
    const Request* const other = *std::prev(place);
    if (other->was_computed() ||
        other->effective().priority <= raw->effective().priority) {
      break;
    }
    --place;
  }
  queued_[raw] = queue_.insert(place, raw);
  Count();
  Pump();
}

void RouterCore::OnWaits(Request* request) {
  // It is older than all that were never computed: before the first of those.
  const auto it =
      std::find_if(queue_.begin(), queue_.end(), [&](const Request* other) {
        return !other->was_computed() ||
               other->admitted() > request->admitted();
      });
  queued_[request] = queue_.insert(it, request);
  Count();
  SchedulePump();
  // Refused again and again it would hardly be found waiting at a tick.
  FailIfWaitedTooLong(request);
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

// Where there is none with room a decode worker does it.
bool RouterCore::TryPlaceScoring(Request* request) {
  const bool local = request->effective().placement == v1::PLACEMENT_LOCAL &&
                     !request->suspect();
  if (local || request->last_attempt()) return false;
  Snapshot snapshot;
  snapshot.history_tokens = request->history_tokens();
  snapshot.turn = placements_;
  snapshot.decode.emplace_back();  // nobody
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() == v1::WORKER_ROLE_PREFILL &&
        registry_.Placeable(*worker) && !registry_.Full(*worker) &&
        Heeds(*worker, *request) && request->HasAdapter(worker->hello) &&
        request->MayScoreOn(worker->hello) &&
        worker->hello.max_model_len() >= request->history_tokens()) {
      snapshot.prefill.push_back(MakeView(*worker, /*cached_tokens=*/0));
      snapshot.pair_allowed.push_back(true);
    }
  }
  MendOldRates(&snapshot);
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
    if (request->was_computed() || AnyHeeds(*request)) return false;
    request->Fail(
        MakeError(absl::StatusCode::kUnavailable, "NO_WORKERS",
                  absl::StrCat("no decode worker is of a version that knows ",
                               absl::StrJoin(Needed(*request), ", ")),
                  {}, absl::Seconds(5)));
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

Way RouterCore::WayOf(const Request& request, const Snapshot& snapshot,
                      const Pair& pair) const {
  return ChooseWay(
      {.placement = request.effective().placement,
       .history_tokens = request.history_tokens(),
       .prefill = pair.prefill < 0 ? nullptr : &snapshot.prefill[pair.prefill],
       .decode = &snapshot.decode[pair.decode],
       .suspect = request.suspect(),
       .max_local_tokens = options_.max_local_tokens});
}

// A worker's count, bounded so that sums with it stay in range.
static int Said(int32_t count) { return std::clamp(count, 0, 1 << 28); }

WorkerView RouterCore::MakeView(const Worker& worker, int cached_tokens) const {
  WorkerView view;
  view.worker_id = worker.id();
  view.running = Said(worker.load.running());
  view.waiting = Said(worker.load.waiting()) + worker.unreported_requests;
  view.queued_tokens =
      Said(worker.load.queued_tokens()) + worker.unreported_tokens;
  view.max_num_seqs = worker.hello.max_num_seqs();
  view.num_blocks = worker.hello.num_blocks();
  view.blocks_available =
      Said(worker.load.blocks_free()) + Said(worker.load.blocks_cached());
  view.cached_tokens = cached_tokens;
  view.tokens_per_second = worker.load.prefill_tokens_per_second();
  view.rate_is_old =
      context_.loop->Now() > worker.stepped + options_.rate_holds;
  return view;
}

Snapshot RouterCore::MakeSnapshot(const Request& request) const {
  const int positions = static_cast<int>(request.prompt().size()) +
                        request.effective().stopping.max_tokens();
  std::vector<const Worker*> prefill, decode;
  for (const auto& [id, worker] : registry_.workers()) {
    if (!registry_.Placeable(*worker) || registry_.Full(*worker)) continue;
    if (!Heeds(*worker, request)) continue;
    if (worker->hello.role() == v1::WORKER_ROLE_PREFILL) {
      if (worker->hello.max_model_len() > request.history_tokens() &&
          request.MayScoreOn(worker->hello) &&
          request.HasAdapter(worker->hello)) {
        prefill.push_back(worker.get());
      }
    } else if (worker->hello.max_model_len() >= positions &&
               request.MayContinueOn(worker->hello) &&
               (request.mixed() || request.MayScoreOn(worker->hello)) &&
               request.HasAdapter(worker->hello) &&
               HoldsBeams(*worker, request)) {
      decode.push_back(worker.get());
    }
  }
  Snapshot snapshot;
  if (decode.empty()) return snapshot;
  snapshot.history_tokens = request.history_tokens();
  snapshot.turn = placements_;
  for (const Worker* worker : prefill) {
    snapshot.prefill.push_back(
        MakeView(*worker, CachedTokens(request, *worker)));
  }
  for (const Worker* worker : decode) {
    snapshot.decode.push_back(
        MakeView(*worker, CachedTokens(request, *worker)));
  }
  MendOldRates(&snapshot);
  for (const Worker* p : prefill) {
    for (const Worker* d : decode) {
      snapshot.pair_allowed.push_back(registry_.PairAllowed(*p, *d) &&
                                      request.AdapterOn(p->hello).digest() ==
                                          request.AdapterOn(d->hello).digest());
    }
  }
  return snapshot;
}

int RouterCore::CachedTokens(const Request& request,
                             const Worker& worker) const {
  // What is scored is computed.
  if (worker.cached.empty() || request.effective().bypass_prefix_cache ||
      !request.scores_complete()) {
    return 0;
  }
  const size_t history = request.history_tokens();
  if (hashed_id_ != request.internal_id() || hashed_tokens_ != history) {
    hashed_id_ = request.internal_id();
    hashed_tokens_ = history;
    hashes_.clear();
  }
  const int block_size = worker.hello.block_size();
  const v1::AdapterRef adapter = request.AdapterOn(worker.hello);
  const std::string key = engine::AdapterKey(adapter.name(), adapter.digest());
  const auto [it, fresh] = hashes_.try_emplace({block_size, key});
  if (fresh) {
    // Only a prompt's head: hashing runs on the loop.
    std::vector<int32_t> tokens = request.prompt();
    tokens.insert(tokens.end(), request.output().begin(),
                  request.output().end());
    const size_t limit =
        static_cast<size_t>(options_.max_hashed_blocks) * block_size;
    if (tokens.size() > limit) tokens.resize(limit);
    for (const engine::BlockHash& hash :
         engine::HashBlocks(engine::RootHash(request.effective().cache_salt,
                                             block_size, "", key),
                            tokens, block_size)) {
      it->second.push_back(hash.Short());
    }
  }
  const std::vector<uint64_t>& hashes = it->second;
  return block_size *
         engine::LongestPrefix(
             static_cast<int>(hashes.size()), block_size, options_.window,
             engine::PrefixCache::kNobodyKeeps,
             [&](int i) {
               return worker.cached.contains(hashes[static_cast<size_t>(i)]);
             })
             .end;
}

std::optional<v1::WorkerRef> RouterCore::ChoosePrefill(Request* request,
                                                       bool* full) {
  *full = false;
  const Worker* const decode = registry_.Find(request->decode_worker_id());
  if (decode == nullptr) return std::nullopt;
  Snapshot snapshot;
  snapshot.history_tokens = request->history_tokens();
  snapshot.turn = placements_++;
  snapshot.decode.push_back(MakeView(*decode, CachedTokens(*request, *decode)));
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() != v1::WORKER_ROLE_PREFILL ||
        !registry_.Placeable(*worker) || !Heeds(*worker, *request) ||
        !request->MayScoreOn(worker->hello) ||
        worker->hello.max_model_len() <= request->history_tokens() ||
        !registry_.PairAllowed(*worker, *decode) ||
        request->AdapterOn(worker->hello).digest() !=
            request->AdapterOn(decode->hello).digest()) {
      continue;
    }
    if (registry_.Full(*worker)) {
      *full = true;
      continue;
    }
    snapshot.prefill.push_back(
        MakeView(*worker, CachedTokens(*request, *worker)));
    snapshot.pair_allowed.push_back(true);
  }
  MendOldRates(&snapshot);
  const int chosen =
      PlacePrefill(options_.policy, snapshot, /*decode=*/0, random_);
  const Pair pair{.prefill = chosen, .decode = 0};
  if (WayOf(*request, snapshot, pair) == Way::kLocal) return std::nullopt;
  return registry_.Find(snapshot.prefill[chosen].worker_id)->hello.worker();
}

void RouterCore::OnVoided(const v1::WorkerRef& old) {
  for (Request* request : All()) request->OnVoided(old);
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
    const absl::Duration limit = request->was_computed()
                                     ? options_.recovery_wait
                                     : options_.no_workers_wait;
    if (waited < limit) return;
    request->Fail(MakeError(
        absl::StatusCode::kUnavailable, "NO_WORKERS",
        absl::StrCat(
            "no decode worker",
            request->effective().adapter.empty()
                ? ""
                : absl::StrCat(" with adapter ", request->effective().adapter),
            request->effective().beam
                ? absl::StrCat(" with room for ",
                               request->effective().beam->width(), " beams")
                : "",
            Needed(*request).empty()
                ? ""
                : absl::StrCat(" that knows ",
                               absl::StrJoin(Needed(*request), ", ")),
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

// False where there are decode workers, and none of them does.
bool RouterCore::AnyHeeds(const Request& request) const {
  bool ready = false;
  for (const auto& [id, worker] : registry_.workers()) {
    if (worker->hello.role() != v1::WORKER_ROLE_DECODE ||
        !registry_.Placeable(*worker)) {
      continue;
    }
    if (Heeds(*worker, request)) return true;
    ready = true;
  }
  return !ready;
}

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

bool RouterCore::AnyCanServe(const Request& request) const {
  const auto& workers = registry_.workers();
  return std::any_of(workers.begin(), workers.end(), [&](const auto& entry) {
    const Worker& worker = *entry.second;
    return worker.hello.role() == v1::WORKER_ROLE_DECODE &&
           registry_.Placeable(worker) && CanServe(worker, request);
  });
}

bool RouterCore::OthersHaveRoom(const Request& request) const {
  return std::any_of(registry_.workers().begin(), registry_.workers().end(),
                     [&](const auto& entry) {
                       const Worker& worker = *entry.second;
                       return worker.hello.role() == v1::WORKER_ROLE_DECODE &&
                              registry_.Placeable(worker) &&
                              !registry_.Full(worker) &&
                              !CanServe(worker, request);
                     });
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
