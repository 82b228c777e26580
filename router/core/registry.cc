// SPDX-License-Identifier: Apache-2.0
#include "router/core/registry.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/utf8.h"
#include "router/core/set_duration.h"
#include "router/placement/compatibility.h"

namespace tandem::router {
namespace {

constexpr absl::Duration kHelloLimit = absl::Seconds(5);
constexpr size_t kMaxDeparted = 1024;
constexpr size_t kMaxRejected = 16;
// Longer than a worker that is turned away waits before it comes again.
constexpr absl::Duration kRejectedShown = absl::Minutes(1);
constexpr int kOffersAtOnce = 32;

std::string PairKey(const std::string& prefill_id, const std::string& decode_id,
                    const std::string& way) {
  return absl::StrCat(prefill_id, "\n", decode_id, "\n", way);
}

// REQUIRES: a hello that was checked.
absl::Status CheckPeer(const rpc::PeerIdentity& peer,
                       const v1::WorkerHello& hello) {
  return rpc::CheckClaim(peer,
                         hello.role() == v1::WORKER_ROLE_PREFILL
                             ? rpc::PeerRole::kPrefill
                             : rpc::PeerRole::kDecode,
                         hello.worker().worker_id());
}

// To one that has found a second address of this router. Or it dials anew and
// the break of its last stream has yet to come here: then it is taken soon.
absl::Status AlreadyRegistered(const std::string& router) {
  return MakeError(absl::StatusCode::kAlreadyExists, "ALREADY_REGISTERED",
                   "this worker has a registration here, and was heard on it "
                   "a moment ago",
                   {{"router", absl::BytesToHexString(router)}});
}

}  // namespace

struct Registry::Lease final : StreamHandler<v1::RegisterRequest> {
  Lease(Registry* registry_in, std::unique_ptr<RegistrationStream> stream_in,
        rpc::PeerIdentity peer_in)
      : registry(registry_in),
        stream(std::move(stream_in)),
        peer(std::move(peer_in)) {}

  void OnMessage(v1::RegisterRequest message) override {
    registry->OnMessage(this, message);
  }
  void OnClosed(absl::Status status) override {
    registry->End(this, status, "reset");
  }

  Registry* const registry;
  std::unique_ptr<RegistrationStream> stream;
  const rpc::PeerIdentity peer;
  absl::Time opened;
  absl::Time heard;
  Worker* worker = nullptr;  // of registry->workers_; null before its hello
  bool ended = false;
};

Registry::Registry(const RouterOptions& options, Loop* loop,
                   RegistryListener* listener)
    : options_(options),
      loop_(loop),
      listener_(listener),
      avoided_workers_(options.avoid_first, options.avoid_longest),
      avoided_pairs_(options.avoid_first, options.avoid_longest),
      tick_(loop),
      retry_(loop) {
  tick_.Start(options_.beat, [this] { Tick(); });
}

Registry::~Registry() { CloseAll(); }

void Registry::CloseAll() {
  for (const auto& lease : leases_) {
    if (std::exchange(lease->ended, true)) continue;
    lease->stream->Close(MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                                   "this router is going away"));
  }
}

void Registry::AddStream(std::unique_ptr<RegistrationStream> stream,
                         rpc::PeerIdentity peer) {
  if (static_cast<int>(leases_.size()) >= options_.max_workers) {
    stream->Close(
        MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_WORKERS",
                  absl::StrCat("this router takes ", options_.max_workers,
                               " registrations")));
    return;
  }
  leases_.push_back(
      std::make_unique<Lease>(this, std::move(stream), std::move(peer)));
  Lease* const lease = leases_.back().get();
  lease->opened = lease->heard = loop_->Now();
  lease->stream->Start(lease);
}

void Registry::OnMessage(Lease* lease, const v1::RegisterRequest& message) {
  lease->heard = loop_->Now();
  if (lease->worker != nullptr) lease->worker->heard = lease->heard;
  switch (message.event_case()) {
    case v1::RegisterRequest::kHello:
      OnHello(lease, message.hello());
      return;
    case v1::RegisterRequest::kLoad:
      if (lease->worker != nullptr) OnLoad(lease->worker, message.load());
      return;
    case v1::RegisterRequest::kCache:
      if (lease->worker != nullptr) OnCache(lease->worker, message.cache());
      return;
    case v1::RegisterRequest::kAdapters:
      if (lease->worker != nullptr) OnAdapters(lease, message.adapters());
      return;
    case v1::RegisterRequest::kAdapterOutcome:
      if (lease->worker != nullptr) {
        listener_->OnAdapterOutcome(lease->worker->id(),
                                    message.adapter_outcome());
      }
      return;
    case v1::RegisterRequest::EVENT_NOT_SET:
      return;  // of a later version
  }
}

void Registry::OnAdapters(Lease* lease, const v1::AdapterList& list) {
  const absl::Status status = CheckAdapters(list.adapters());
  if (!status.ok()) {
    Reject(lease, lease->worker->id(), status);
    return;
  }
  const Adapters before =
      std::exchange(*lease->worker->hello.mutable_adapters(), list.adapters());
  listener_->OnAdapters(*lease->worker, before);
  listener_->OnRoom();
}

void Registry::Send(const std::string& worker_id,
                    v1::RegisterResponse message) {
  for (const auto& lease : leases_) {
    if (lease->worker == nullptr || lease->worker->id() != worker_id) continue;
    lease->stream->Send(std::move(message));
    return;
  }
}

void Registry::OnHello(Lease* lease, const v1::WorkerHello& hello) {
  absl::Status status = CheckHello(hello);
  if (status.ok()) status = CheckPeer(lease->peer, hello);
  if (TANDEM_FAILPOINT("router.hello", "crash fail")) {
    status = failpoint::Error();
  }
  if (status.ok() && lease->worker != nullptr) {
    status = absl::InvalidArgumentError("a second hello on one registration");
  }
  if (status.ok() && hello.model() != options_.model) {
    status = MakeError(absl::StatusCode::kFailedPrecondition, "MODEL_MISMATCH",
                       absl::StrCat("worker serves ", hello.model(),
                                    ", this router serves ", options_.model));
  }
  if (!status.ok()) {
    Reject(lease, hello.worker().worker_id(), status);
    return;
  }
  const std::string& id = hello.worker().worker_id();
  v1::WorkerRef voided;
  const bool restarted = LastIncarnation(id) != hello.worker().incarnation();
  if (Worker* const old = Find(id)) {
    if (restarted) voided = old->hello.worker();
    // What has died is not heard any more.
    const bool heard = loop_->Now() - old->heard <= options_.load_interval * 2;
    if (heard && !restarted) {
      End(lease, AlreadyRegistered(options_.incarnation), "refused");
      return;
    }
    if (heard) {
      Reject(lease, id,
             absl::AlreadyExistsError(absl::StrCat(
                 "two processes have this --worker-id, at ",
                 old->hello.worker().endpoint(), " and ",
                 hello.worker().endpoint(),
                 ", and the first one keeps it: end one, or name it "
                 "otherwise")));
      return;
    }
    for (const auto& other : leases_) {
      if (other->worker != old) continue;
      End(other.get(),
          absl::AbortedError("a newer registration of this worker took over"),
          restarted ? "restarted" : "reset");
      break;
    }
  }
  // A restarted worker starts with a clean slate.
  avoided_workers_.Succeeded(id);
  if (restarted) {
    avoided_pairs_.Forget([&](const std::string& pair) {
      return absl::StartsWith(pair, absl::StrCat(id, "\n")) ||
             absl::StrContains(pair, absl::StrCat("\n", id, "\n"));
    });
  }
  auto worker = std::make_unique<Worker>();
  worker->hello = hello;
  worker->registered = worker->heard = loop_->Now();
  lease->worker = worker.get();
  workers_[id] = std::move(worker);
  ++registrations_;
  ForgetRejected(id);

  v1::RegisterResponse response;
  response.mutable_welcome()->set_router_incarnation(options_.incarnation);
  response.mutable_welcome()->set_load_interval_ms(
      absl::ToInt64Milliseconds(options_.load_interval));
  lease->stream->Send(std::move(response));
  listener_->OnClusterEvent({.kind = ClusterEvent::Kind::kRegistered,
                             .worker = id,
                             .role = hello.role(),
                             .why = hello.worker().endpoint()});
  if (!voided.worker_id().empty()) listener_->OnVoided(voided);
  listener_->OnRegistered(*lease->worker);
}

void Registry::OnLoad(Worker* worker, const v1::WorkerLoad& load) {
  if (TANDEM_FAILPOINT("router.load", "drop delay")) return;
  if (!worker->has_load || load.steps() != worker->load.steps()) {
    worker->stepped = loop_->Now();
  }
  worker->load = load;
  worker->has_load = true;
  worker->load_heard = loop_->Now();
  worker->unreported_requests = 0;
  worker->unreported_tokens = 0;
  listener_->OnRoom();
}

void Registry::OnCache(Worker* worker, const v1::CacheChange& change) {
  if (change.reset()) {
    worker->cached.clear();
    worker->lacking.clear();
  }
  for (const uint64_t hash : change.removed()) {
    worker->cached.erase(hash);
    worker->lacking.erase(hash);
  }
  // What is not remembered is only not found: a longer prefill, no error.
  const auto remember = [&](uint64_t hash) {
    if (worker->cached.size() < options_.max_cached_hashes) {
      worker->cached.insert(hash);
    }
    return worker->cached.contains(hash);
  };
  for (const uint64_t hash : change.added()) {
    if (remember(hash)) worker->lacking.erase(hash);
  }
  for (const uint64_t hash : change.lacking()) {
    if (remember(hash)) worker->lacking.insert(hash);
  }
}

void Registry::ForgetRejected(const std::string& worker_id) {
  std::erase_if(rejected_, [&](const auto& entry) {
    return entry.second.worker_id() == worker_id;
  });
}

void Registry::NoteRejected(const std::string& worker_id,
                            const std::string& reason) {
  v1::RejectedWorker rejected;
  rejected.set_worker_id(std::string(Utf8Head(worker_id, 256)));
  rejected.set_reason(ValidUtf8(reason));
  ForgetRejected(rejected.worker_id());  // who tries again and again is one
  rejected_.emplace_front(loop_->Now(), std::move(rejected));
  if (rejected_.size() > kMaxRejected) rejected_.pop_back();
}

void Registry::Reject(Lease* lease, const std::string& worker_id,
                      const absl::Status& status) {
  NoteRejected(worker_id, std::string(status.message()));
  listener_->OnClusterEvent({.kind = ClusterEvent::Kind::kRefused,
                             .worker = std::string(Utf8Head(worker_id, 256)),
                             .why = std::string(status.message())});
  End(lease, status, "refused");
}

void Registry::End(Lease* lease, const absl::Status& status,
                   std::string_view cause) {
  if (lease->ended) return;
  lease->ended = true;
  std::unique_ptr<Worker> lost;
  if (lease->worker != nullptr) {
    ++leases_lost_;
    const bool draining =
        lease->worker->load.state() == v1::WORKER_STATE_DRAINING;
    listener_->OnClusterEvent({.kind = ClusterEvent::Kind::kLost,
                               .worker = lease->worker->id(),
                               .role = lease->worker->hello.role(),
                               .cause = draining ? "left" : cause,
                               .why = std::string(status.message())});
    lost = Forget(lease->worker->id());
    lease->worker = nullptr;
  }
  lease->stream->Close(status);
  // The caller may be the lease's own callback.
  const auto it =
      std::find_if(leases_.begin(), leases_.end(),
                   [lease](const auto& held) { return held.get() == lease; });
  ended_.splice(ended_.end(), leases_, it);
  if (lost != nullptr) listener_->OnLost(*lost);
}

std::unique_ptr<Worker> Registry::Forget(const std::string& worker_id) {
  const auto it = workers_.find(worker_id);
  if (it == workers_.end()) return nullptr;
  std::unique_ptr<Worker> worker = std::move(it->second);
  workers_.erase(it);
  departed_.push_back({worker->id(), worker->hello.worker().incarnation(),
                       worker->load.state() == v1::WORKER_STATE_DRAINING});
  if (departed_.size() > kMaxDeparted) departed_.pop_front();
  return worker;
}

Worker* Registry::Find(const std::string& worker_id) {
  const auto it = workers_.find(worker_id);
  return it == workers_.end() ? nullptr : it->second.get();
}

std::string Registry::LastIncarnation(const std::string& worker_id) const {
  const auto it = workers_.find(worker_id);
  if (it != workers_.end()) return it->second->hello.worker().incarnation();
  const auto departed = std::find_if(
      departed_.rbegin(), departed_.rend(),
      [&](const Departed& one) { return one.worker_id == worker_id; });
  return departed == departed_.rend() ? "" : departed->incarnation;
}

Registry::Life Registry::LifeOf(const v1::WorkerRef& ref) const {
  const auto it = workers_.find(ref.worker_id());
  if (it != workers_.end() &&
      it->second->hello.worker().incarnation() == ref.incarnation()) {
    // At the end of its grace it ends its calls before its lease.
    if (it->second->load.state() == v1::WORKER_STATE_DRAINING) {
      return Life::kLeft;
    }
    const absl::Duration silent = loop_->Now() - it->second->heard;
    return silent > options_.beat ? Life::kUncertain : Life::kAlive;
  }
  const Life gone = it != workers_.end() ? Life::kReplaced : Life::kLost;
  for (auto departed = departed_.rbegin(); departed != departed_.rend();
       ++departed) {
    if (departed->worker_id == ref.worker_id() &&
        departed->incarnation == ref.incarnation()) {
      return departed->orderly ? Life::kLeft : gone;
    }
  }
  return gone;
}

absl::Status Registry::Cordon(const std::string& worker_id, bool cordoned) {
  const bool known = workers_.find(worker_id) != workers_.end();
  if (!known && (cordoned || !cordoned_.contains(worker_id))) {
    return MakeError(
        absl::StatusCode::kNotFound, "WORKER_NOT_FOUND",
        absl::StrCat("worker_id = ", std::string(Utf8Head(worker_id, 128)),
                     ": no such worker is registered here"));
  }
  if (cordoned) {
    cordoned_.insert(worker_id);
  } else if (cordoned_.erase(worker_id) > 0) {
    listener_->OnRoom();
  }
  return absl::OkStatus();
}

bool Registry::Placeable(const Worker& worker) const {
  return worker.has_load && worker.load.state() == v1::WORKER_STATE_READY &&
         !cordoned_.contains(worker.id()) &&
         !avoided_workers_.Avoided(worker.id(), loop_->Now());
}

bool Registry::Full(const Worker& worker) const {
  return worker.offers == 0 && loop_->Now() < worker.full_until;
}

bool Registry::PairAllowed(const Worker& prefill, const Worker& decode) const {
  return CheckPair(prefill.hello, decode.hello).ok() &&
         // The fallback for all: where it failed, no way is left.
         !avoided_pairs_.Avoided(PairKey(prefill.id(), decode.id(), "grpc"),
                                 loop_->Now());
}

std::vector<std::string> Registry::WaysToAvoid(const std::string& prefill_id,
                                               const std::string& decode_id) {
  const std::string prefix = PairKey(prefill_id, decode_id, "");
  std::vector<std::string> ways;
  for (const auto& [key, entry] : avoided_pairs_.entries()) {
    if (absl::StartsWith(key, prefix))
      ways.push_back(key.substr(prefix.size()));
  }
  const absl::Time now = loop_->Now();
  std::erase_if(ways, [&](const std::string& way) {
    const std::string key = prefix + way;
    if (avoided_pairs_.Avoided(key, now)) return false;
    avoided_pairs_.Using(key, now);
    return true;
  });
  std::sort(ways.begin(), ways.end());
  return ways;
}

void Registry::Refused(const std::string& worker_id) {
  Worker* const worker = Find(worker_id);
  if (worker == nullptr) return;
  worker->offers = 0;
  Pause(worker);
}

void Registry::Pause(Worker* worker) {
  worker->full_until = loop_->Now() + options_.refusal_pause;
  WakeAtNextRetry();
}

// While a worker has no room, each answer of all that wait would be the same: a
// few are offered to it, two for each that it takes, until it takes many.
void Registry::Offered(const std::string& worker_id) {
  Worker* const worker = Find(worker_id);
  if (worker == nullptr || !worker->offers) return;
  *worker->offers = std::max(0, *worker->offers - 1);
  if (worker->offers == 0) Pause(worker);
}

void Registry::Accepted(const std::string& worker_id) {
  Worker* const worker = Find(worker_id);
  if (worker == nullptr || !worker->offers) return;
  *worker->offers += 2;
  if (*worker->offers > kOffersAtOnce) worker->offers.reset();
  // Soon: whoever says this is at work on a request.
  WakeAt(loop_->Now());
}

void Registry::Finished(const std::string& worker_id) {
  Worker* const worker = Find(worker_id);
  if (worker != nullptr && worker->offers == 0) worker->offers = 1;
}

void Registry::CallFailed(const v1::WorkerRef& ref, const std::string& reason) {
  Worker* const worker = Find(ref.worker_id());
  if (worker == nullptr ||
      worker->hello.worker().incarnation() != ref.incarnation()) {
    return;
  }
  ++worker->losses;
  const absl::Duration length =
      avoided_workers_.Failed(ref.worker_id(), loop_->Now(), reason);
  if (length > absl::ZeroDuration()) {
    listener_->OnClusterEvent({.kind = ClusterEvent::Kind::kWorkerAvoided,
                               .worker = ref.worker_id(),
                               .role = worker->hello.role(),
                               .why = reason,
                               .length = length});
  }
  WakeAtNextRetry();
}

void Registry::CallWorked(const std::string& worker_id) {
  avoided_workers_.Succeeded(worker_id);
}

void Registry::PairFailed(const std::string& prefill_id,
                          const std::string& decode_id, const std::string& way,
                          const std::string& reason) {
  const absl::Duration length = avoided_pairs_.Failed(
      PairKey(prefill_id, decode_id, way), loop_->Now(), reason);
  if (length > absl::ZeroDuration()) {
    listener_->OnClusterEvent({.kind = ClusterEvent::Kind::kPairAvoided,
                               .worker = prefill_id,
                               .decode_worker = decode_id,
                               .way = way,
                               .why = reason,
                               .length = length});
  }
  WakeAtNextRetry();
}

void Registry::PairWorked(const std::string& prefill_id,
                          const std::string& decode_id,
                          const std::string& way) {
  avoided_pairs_.Succeeded(PairKey(prefill_id, decode_id, way));
  // Some way is left.
  avoided_pairs_.Succeeded(PairKey(prefill_id, decode_id, "grpc"));
}

Queued Registry::Using(const std::string& prefill_id,
                       const std::string& decode_id, int uncached_tokens) {
  const absl::Time now = loop_->Now();
  avoided_workers_.Using(decode_id, now);
  Worker* computes = Find(decode_id);
  if (Worker* const decode = computes) ++decode->unreported_requests;
  if (!prefill_id.empty()) {
    avoided_workers_.Using(prefill_id, now);
    computes = Find(prefill_id);
    if (computes != nullptr) ++computes->unreported_requests;
  }
  if (computes == nullptr) return {};
  computes->unreported_tokens += uncached_tokens;
  return {.worker_id = computes->id(), .tokens = uncached_tokens, .since = now};
}

void Registry::Computed(const Queued& prompt) {
  Worker* const worker = Find(prompt.worker_id);
  if (worker == nullptr || worker->load_heard > prompt.since) return;
  worker->unreported_tokens =
      std::max(0, worker->unreported_tokens - prompt.tokens);
}

int Registry::prompts_queued() const {
  int64_t queued = 0;
  for (const auto& [id, worker] : workers_) {
    if (worker->hello.role() != v1::WORKER_ROLE_PREFILL ||
        !Placeable(*worker)) {
      continue;
    }
    if (worker->load.waiting() <= 0) return 0;
    queued += int64_t{worker->load.waiting()} + worker->unreported_requests;
  }
  return static_cast<int>(std::min<int64_t>(queued, INT32_MAX));
}

int Registry::context_length() const {
  int length = 0;
  for (const auto& [id, worker] : workers_) {
    if (worker->hello.role() != v1::WORKER_ROLE_DECODE) continue;
    const int its = worker->hello.max_model_len();
    length = length == 0 ? its : std::min(length, its);
  }
  return length;
}

KvRoom Registry::kv_room() const {
  KvRoom room;
  int sequences = 0;
  for (const auto& [id, worker] : workers_) {
    const v1::WorkerHello& hello = worker->hello;
    if (hello.role() != v1::WORKER_ROLE_DECODE) continue;
    if (int64_t{hello.num_blocks()} * hello.block_size() >
        int64_t{room.blocks} * room.block_size) {
      room = {hello.num_blocks(), hello.block_size(),
              hello.kv_bytes_per_token()};
    }
    if (hello.blocks_at_once() > 0) {
      sequences =
          std::max(sequences, hello.num_blocks() / hello.blocks_at_once());
    }
  }
  room.sequences = sequences;
  return room;
}

void Registry::Tick() {
  const absl::Time now = loop_->Now();
  // Late: this process itself stood still, and silence proves nothing yet.
  const bool judge = now - tick_due_ <= options_.beat;
  tick_due_ = now + options_.beat;
  ended_.clear();
  for (auto it = leases_.begin(); it != leases_.end();) {
    Lease* const lease = (it++)->get();  // End() takes it off the list
    if (lease->worker == nullptr && now - lease->opened > kHelloLimit) {
      End(lease, absl::DeadlineExceededError("no hello came"), "silence");
    } else if (judge && now - lease->heard > options_.lease) {
      End(lease,
          absl::UnavailableError(absl::StrCat(
              "nothing heard for ", absl::FormatDuration(options_.lease))),
          "silence");
    } else if (lease->stream->unsent() == 0) {
      v1::RegisterResponse response;
      response.mutable_beat();
      lease->stream->Send(std::move(response));
    }
  }
  avoided_workers_.Sweep(now);
  avoided_pairs_.Sweep(now);
  tick_.Start(options_.beat, [this] { Tick(); });
}

void Registry::WakeAtNextRetry() {
  const absl::Time now = loop_->Now();
  absl::Time next =
      std::min(avoided_workers_.NextRetry(now), avoided_pairs_.NextRetry(now));
  for (const auto& [id, worker] : workers_) {
    if (worker->full_until > now) next = std::min(next, worker->full_until);
  }
  if (next != absl::InfiniteFuture()) WakeAt(next);
}

void Registry::WakeAt(absl::Time when) {
  if (retry_.running() && retry_at_ <= when) return;
  retry_at_ = when;
  retry_.Start(when - loop_->Now(), [this] {
    WakeAtNextRetry();
    listener_->OnRoom();
  });
}

void Registry::Describe(v1::GetClusterStateResponse* state) const {
  const absl::Time now = loop_->Now();
  for (const auto& [id, worker] : workers_) {
    v1::WorkerStatus* const status = state->add_workers();
    *status->mutable_hello() = worker->hello;
    *status->mutable_load() = worker->load;
    if (worker->has_load) {
      SetDuration(now - worker->load_heard, status->mutable_load_age());
    }
    SetDuration(now - worker->registered, status->mutable_registered_for());
    status->set_cached_hashes(static_cast<int>(worker->cached.size()));
    status->set_placeable(Placeable(*worker));
    status->set_losses(worker->losses);
    status->set_full(Full(*worker));
    if (status->placeable()) continue;
    const auto avoided = avoided_workers_.entries().find(id);
    if (cordoned_.contains(id)) {
      status->set_reason("cordoned");
    } else if (worker->load.state() == v1::WORKER_STATE_DRAINING) {
      status->set_reason("draining");
    } else if (!worker->has_load ||
               worker->load.state() != v1::WORKER_STATE_READY) {
      status->set_reason("starting");
    } else if (avoided != avoided_workers_.entries().end()) {
      status->set_reason(
          ValidUtf8(absl::StrCat("avoided: ", avoided->second.reason)));
    }
  }
  for (const auto& [key, entry] : avoided_pairs_.entries()) {
    if (now >= entry.until) continue;
    const std::vector<std::string> names = absl::StrSplit(key, '\n');
    v1::AvoidedPair* const pair = state->add_avoided_pairs();
    pair->set_prefill_worker_id(names[0]);
    pair->set_decode_worker_id(names[1]);
    pair->set_way(names[2]);
    pair->set_reason(ValidUtf8(entry.reason));
    SetDuration(entry.until - now, pair->mutable_retry_in());
  }
  for (const auto& [p, prefill] : workers_) {
    if (prefill->hello.role() != v1::WORKER_ROLE_PREFILL) continue;
    for (const auto& [d, decode] : workers_) {
      if (decode->hello.role() != v1::WORKER_ROLE_DECODE) continue;
      const absl::Status status = CheckPair(prefill->hello, decode->hello);
      if (status.ok()) continue;
      v1::AvoidedPair* const pair = state->add_avoided_pairs();
      pair->set_prefill_worker_id(p);
      pair->set_decode_worker_id(d);
      pair->set_reason(ValidUtf8(std::string(status.message())));
    }
  }
  for (const auto& [when, rejected] : rejected_) {
    if (now - when > kRejectedShown) break;
    v1::RejectedWorker* const shown = state->add_rejected();
    *shown = rejected;
    SetDuration(now - when, shown->mutable_age());
  }
}

}  // namespace tandem::router
