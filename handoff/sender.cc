// SPDX-License-Identifier: Apache-2.0
#include "handoff/sender.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/failpoint.h"
#include "handoff/grpc/grpc_way.h"
#include "handoff/sender_impl.h"
#include "handoff/wire.h"

namespace tandem::handoff {
namespace {

// A link with this much queued is not told again what it was told before.
constexpr size_t kBusyUnsent = 64;

std::unique_ptr<HostSlabs> MapStaging(const SenderOptions& options, int slabs) {
  auto staging = HostSlabs::Map(options.host_memory, slabs, options.slab_bytes);
  TANDEM_CHECK(staging.ok(), "address space for staging buffers");
  return *std::move(staging);
}

}  // namespace

Sender::Impl::Impl(const SenderOptions& options, Loop* loop, Random*, Dial dial,
                   SenderDelegate* delegate)
    : options_(options),
      loop_(loop),
      dial_(std::move(dial)),
      delegate_(delegate),
      arena_(static_cast<int>(std::max<int64_t>(
                 1, options.staging_bytes / options.slab_bytes)),
             static_cast<int>(std::max<int64_t>(
                 1, options.staging_bytes / options.slab_bytes))),
      staging_(MapStaging(options, arena_.counts().total)) {
  CheckLayers(options.layers);
  ways_.push_back(NewGrpcSenderWay());
}

Sender::Impl::~Impl() {
  for (auto& [key, link] : links_) {
    link->End(absl::CancelledError("the prefill worker is ending"));
  }
}

void Sender::Impl::AddWay(std::unique_ptr<SenderWay> way) {
  ways_.push_back(std::move(way));
}

Sender::Impl::State* Sender::Impl::Find(const Attempt& attempt) {
  auto found = by_attempt_.find(attempt);
  return found == by_attempt_.end() ? nullptr : Find(found->second);
}

Sender::Impl::State* Sender::Impl::Find(Serial serial) {
  auto found = states_.find(serial);
  return found == states_.end() ? nullptr : found->second.get();
}

Sender::Impl::State* Sender::Impl::Named(Link* link,
                                         const v1::AttemptKey& key) {
  State* state = Find(FromKey(key));
  if (state != nullptr && state->link == link && !state->failing) return state;
  ++counters_.late_messages;
  return nullptr;
}

int Sender::Impl::waiting_positions(const std::string& worker_id) const {
  int64_t rows = 0;
  for (const auto& [serial, state] : states_) {
    if (state->link->worker_id == worker_id) rows += state->waiting_rows;
  }
  const int64_t layers = std::max(1, options_.layers.count);
  return static_cast<int>((rows + layers - 1) / layers);
}

// ---- What the worker asks for.

void Sender::Impl::Offer(const Attempt& attempt, const v1::WorkerRef& receiver,
                         const std::string& ticket, int positions,
                         int cached_positions, absl::Duration expected_prefill,
                         const std::vector<std::string>& avoid_ways,
                         const v1::AdapterRef& adapter) {
  if (Find(attempt) != nullptr) return;
  auto owned = std::make_unique<State>(loop_);
  State* state = owned.get();
  state->attempt = attempt;
  state->serial = next_serial_++;
  state->avoid_ways = avoid_ways;
  state->last_progress = loop_->Now();
  ToKey(attempt, state->offer.mutable_key());
  state->offer.set_ticket(ticket);
  state->offer.set_positions(positions);
  state->offer.set_cached_positions(cached_positions);
  state->offer.set_expected_prefill_ms(
      absl::ToInt64Milliseconds(expected_prefill));
  if (!adapter.name().empty()) *state->offer.mutable_adapter() = adapter;
  state->offer.set_windowed_apart(!options_.layers.windowed.empty());
  // Should the link itself fail, this is the way that did.
  for (const std::string& way : options_.hello.ways()) {
    if (std::find(avoid_ways.begin(), avoid_ways.end(), way) ==
        avoid_ways.end()) {
      state->way = way;
      break;
    }
  }
  by_attempt_[attempt] = state->serial;
  states_[state->serial] = std::move(owned);
  state->link = LinkTo(receiver);
  state->link->attempts.insert(state->serial);
  state->link->last_used = loop_->Now();
  if (state->link->ready) StartOffer(state);
}

void Sender::Impl::Computed(const Attempt& attempt, const SliceRange& range) {
  State* state = Find(attempt);
  if (state == nullptr || state->failing) return;
  state->computed_at = loop_->Now();
  if (Rows(range) <= 0 || range.layer_begin < 0 ||
      range.layer_end > options_.layers.count || range.position_begin < 0 ||
      range.position_end > state->offer.positions()) {
    FailLater(state,
              absl::InternalError(absl::StrCat(
                  "computed layers ", range.layer_begin, "..", range.layer_end,
                  ", positions ", range.position_begin, "..",
                  range.position_end, " are not of this history")),
              "");
    return;
  }
  if (state->phase == Phase::kGranted) {
    Enqueue(state, range);
    Announce(state->link);
    return;
  }
  state->waiting_rows += Rows(range);
  std::vector<SliceRange>& computed = state->computed;
  // Waiting costs one range per chunk, not one per layer.
  if (!computed.empty() && computed.back().layer_end == range.layer_begin &&
      computed.back().position_begin == range.position_begin &&
      computed.back().position_end == range.position_end) {
    computed.back().layer_end = range.layer_end;
  } else {
    computed.push_back(range);
  }
}

void Sender::Impl::Commit(const Attempt& attempt, const FirstToken& first) {
  State* state = Find(attempt);
  if (state == nullptr || state->first.has_value()) return;
  state->first = first;
  MaybeCommit(state);
}

void Sender::Impl::Cancel(const Attempt& attempt) {
  State* state = Find(attempt);
  if (state == nullptr) return;
  ++counters_.ways[state->way].cancelled;
  Withdraw(state, absl::CancelledError("cancelled by the prefill worker"));
  Link* link = state->link;
  Remove(state);
  Announce(link);
}

// ---- Offer and answer.

bool Sender::Impl::ChooseWay(State* state) {
  for (Usable& usable : state->link->ways) {
    if (std::find(state->avoid_ways.begin(), state->avoid_ways.end(),
                  usable.name) != state->avoid_ways.end()) {
      continue;
    }
    if (!usable.channel->Usable()) continue;
    state->way = usable.name;
    state->channel = usable.channel.get();
    return true;
  }
  return false;
}

void Sender::Impl::StartOffer(State* state) {
  if (!ChooseWay(state)) {
    FailLater(state,
              absl::FailedPreconditionError(
                  absl::StrCat("no handoff way is left between this worker "
                               "and ",
                               state->link->worker_id)),
              "");
    return;
  }
  state->phase = Phase::kOffered;
  state->offer.set_way(state->way);
  SendOffer(state);
}

void Sender::Impl::SendOffer(State* state) {
  if (state->link->unsent() <= kBusyUnsent) {
    v1::LinkRequest request;
    *request.mutable_offer() = state->offer;
    const failpoint::Hit hit =
        TANDEM_FAILPOINT("handoff.offer", "drop duplicate");
    if (hit == failpoint::kDuplicate) state->link->Send(request);
    if (hit != failpoint::kDrop) state->link->Send(std::move(request));
  }
  state->repeat.Start(options_.repeat, [this, serial = state->serial] {
    State* again = Find(serial);
    if (again != nullptr) SendOffer(again);
  });
}

void Sender::Impl::OnAnswer(Link* link, const v1::HandoffAnswer& answer) {
  State* state = Named(link, answer.key());
  if (state == nullptr) return;
  if (answer.verdict() == v1::HandoffAnswer::VERDICT_REFUSED) {
    ++counters_.offers_refused;
    Fail(state, FailureFrom(answer.code(), answer.message()), "");
    return;
  }
  if (state->phase != Phase::kOffered) {
    ++counters_.duplicates;
    return;
  }
  if (answer.verdict() == v1::HandoffAnswer::VERDICT_GRANTED) {
    OnGranted(state, answer);
    return;
  }
  const auto verdict = answer.verdict() == v1::HandoffAnswer::VERDICT_START
                           ? SenderDelegate::Answer::kStart
                           : SenderDelegate::Answer::kWait;
  if (state->answer == verdict) return;  // a repeat
  state->answer = verdict;
  delegate_->OnAnswer(Attempt(state->attempt), verdict, Grant());
}

void Sender::Impl::OnGranted(State* state, const v1::HandoffAnswer& answer) {
  const std::optional<kernels::DType> wire = ParseDType(answer.kv_dtype());
  Grant grant;
  grant.position_begin = answer.position_begin();
  grant.position_end = answer.position_end();
  grant.windowed_begin =
      std::max(answer.position_begin(), answer.windowed_begin());
  grant.head_begin = answer.head_begin();
  grant.head_end = answer.head_end();
  grant.wire = wire.value_or(kernels::DType::kF32);
  grant.digest_key = answer.digest_key();
  state->grant = grant;
  if (!wire.has_value() || grant.position_begin < 0 ||
      grant.position_end < grant.windowed_begin ||
      grant.position_end > state->offer.positions() || grant.head_begin < 0 ||
      grant.head_end <= grant.head_begin ||
      grant.head_end > options_.kv_heads ||
      (options_.whole_heads &&
       grant.head_end - grant.head_begin < options_.kv_heads) ||
      SlotRows(*state) < 1) {
    const absl::Status status = absl::InternalError(absl::StrCat(
        "the decode worker granted positions ", grant.position_begin, "..",
        grant.position_end, " (with a window from ", grant.windowed_begin,
        "), heads ", grant.head_begin, "..", grant.head_end, " as '",
        answer.kv_dtype(), "', which this worker cannot send"));
    Withdraw(state, status);
    Fail(state, status, "");
    return;
  }
  state->phase = Phase::kGranted;
  state->answer = SenderDelegate::Answer::kGranted;
  state->repeat.Stop();
  state->granted_at = loop_->Now();
  state->waiting_rows = 0;
  for (const SliceRange& range : std::exchange(state->computed, {})) {
    Enqueue(state, range);
  }
  const Serial serial = state->serial;
  delegate_->OnAnswer(Attempt(state->attempt), SenderDelegate::Answer::kGranted,
                      grant);
  state = Find(serial);
  if (state != nullptr) MaybeCommit(state);
}

// ---- Slices.

int64_t Sender::Impl::SlotRows(const State& state) const {
  int64_t bytes = state.link->slab_bytes;
  if (state.channel->Staging(0) == nullptr) {
    bytes = std::min(bytes, options_.slab_bytes);
  }
  return bytes / std::max<int64_t>(1, RowBytes(state.grant, options_.head_dim));
}

void Sender::Impl::Enqueue(State* state, const SliceRange& range) {
  for (const SliceRange& wanted : Clip(range, state->grant, options_.layers)) {
    state->waiting_rows += Rows(wanted);
    if (state->cut.empty()) state->link->turns.push_back(state->serial);
    for (const SliceRange& slice : Cut(wanted, SlotRows(*state))) {
      state->cut.push_back(slice);
    }
  }
}

void Sender::Impl::OnCredit(Link* link, const v1::SliceCredit& credit) {
  if (link->credits.contains(credit.generation())) {
    ++counters_.duplicates;
    return;
  }
  if (credit.slab() >= static_cast<uint32_t>(link->num_slabs)) {
    Break(link,
          absl::InternalError(absl::StrCat("credit for slab ", credit.slab(),
                                           " of ", link->num_slabs)),
          /*lost=*/true);
    return;
  }
  State* state = Find(FromKey(credit.key()));
  if (state != nullptr && (state->link != link || state->failing)) {
    state = nullptr;
  }
  if (state == nullptr || !state->announced.contains(credit.slice())) {
    // Of an ended attempt: no store will be made.
    ++counters_.late_messages;
    v1::LinkRequest request;
    request.mutable_credit_return()->set_slab(credit.slab());
    request.mutable_credit_return()->set_generation(credit.generation());
    link->Send(std::move(request));
    return;
  }
  Op op;
  op.serial = next_serial_++;
  op.attempt_serial = state->serial;
  op.attempt = state->attempt;
  op.grant = state->grant;
  op.slice = credit.slice();
  op.range = state->announced.at(credit.slice());
  op.link = link;
  op.channel = state->channel;
  op.slab = credit.slab();
  op.generation = credit.generation();
  op.bytes = static_cast<size_t>(Rows(op.range) *
                                 RowBytes(op.grant, options_.head_dim));
  state->announced.erase(credit.slice());
  ++state->credited;
  --link->announced;
  link->credits.insert(op.generation);
  ++link->ops;
  Progress(state);
  StartOp(std::move(op));
}

// ---- Commit.

void Sender::Impl::MaybeCommit(State* state) {
  if (state->phase != Phase::kGranted || state->failing ||
      !state->first.has_value() || !state->cut.empty() ||
      !state->announced.empty() || state->credited > 0) {
    return;
  }
  const int64_t wanted = WantedRows(state->grant, options_.layers);
  if (state->sent_rows != wanted) {
    FailLater(state,
              absl::InternalError(absl::StrCat(
                  "commit after ", state->sent_rows, " of ", wanted,
                  " wanted (layer, position) rows were computed")),
              "");
    return;
  }
  state->phase = Phase::kCommitted;
  Progress(state);
  SendCommit(state);
}

void Sender::Impl::SendCommit(State* state) {
  if (state->link->unsent() <= kBusyUnsent) {
    v1::LinkRequest request;
    v1::HandoffCommit* commit = request.mutable_commit();
    ToKey(state->attempt, commit->mutable_key());
    commit->set_slices(state->sent_slices);
    commit->set_layers(options_.layers.count);
    commit->set_position_begin(state->grant.position_begin);
    commit->set_position_end(state->grant.position_end);
    commit->set_bytes(state->sent_bytes);
    commit->set_digest_low(state->digest.low);
    commit->set_digest_high(state->digest.high);
    commit->set_first_position(state->first->position);
    *commit->mutable_first_token() = state->first->token;
    switch (TANDEM_FAILPOINT("handoff.manifest",
                             "crash corrupt truncate duplicate")) {
      case failpoint::kCorrupt:
        commit->set_digest_low(commit->digest_low() ^ 1);
        break;
      case failpoint::kTruncate:
        commit->set_slices(commit->slices() - 1);
        break;
      case failpoint::kDuplicate:
        state->link->Send(request);
        break;
      default:
        break;
    }
    state->link->Send(std::move(request));
  }
  state->repeat.Start(options_.repeat, [this, serial = state->serial] {
    State* again = Find(serial);
    if (again != nullptr) SendCommit(again);
  });
}

void Sender::Impl::OnAck(Link* link, const v1::HandoffAck& ack) {
  State* state = Named(link, ack.key());
  if (state == nullptr) return;
  if (ack.code() != 0) {
    // Bytes that changed on the way: both ends name it, whoever is heard first.
    const absl::Status status = FailureFrom(ack.code(), ack.message());
    Fail(state, status,
         absl::IsDataLoss(status) ? std::string(state->way) : "");
    return;
  }
  if (state->phase != Phase::kCommitted) {
    const absl::Status status = absl::InternalError(
        "the decode worker acknowledged a commit that was not sent");
    Withdraw(state, status);
    Fail(state, status, "");
    return;
  }
  HandoffTimings timings;
  timings.bytes = state->sent_bytes;
  timings.transfer = loop_->Now() - state->granted_at;
  if (state->computed_at != absl::Time()) {
    timings.exposed =
        loop_->Now() - std::max(state->computed_at, state->granted_at);
  }
  timings.way = state->way;
  ++counters_.ways[state->way].committed;
  const Attempt attempt = state->attempt;
  Remove(state);
  delegate_->OnAcknowledged(attempt, timings);
}

// ---- Time and ends.

void Sender::Impl::Progress(State* state) {
  state->last_progress = state->link->last_progress = loop_->Now();
  StartClock(state);
}

void Sender::Impl::StartClock(State* state) {
  if (state->clock.running()) return;
  state->clock.Start(options_.transfer_timeout,
                     [this, serial = state->serial] { CheckClock(serial); });
}

void Sender::Impl::CheckClock(Serial serial) {
  State* state = Find(serial);
  if (state == nullptr || state->failing) return;
  const bool committed = state->phase == Phase::kCommitted;
  const bool pending = committed || state->credited > 0 ||
                       !state->announced.empty() || !state->cut.empty();
  // Nothing to move: the clock starts again with the next announcement.
  if (!pending) return;
  absl::Time since = state->last_progress;
  if (!committed) {
    since = StandsSince(since, state->link->last_progress,
                        options_.transfer_timeout);
  }
  const absl::Duration idle = loop_->Now() - since;
  if (idle < options_.transfer_timeout) {
    state->clock.Start(options_.transfer_timeout - idle,
                       [this, serial] { CheckClock(serial); });
    return;
  }
  const absl::Status status = absl::DeadlineExceededError(absl::StrCat(
      "handoff to ", state->link->worker_id, " over ", state->way,
      " made no progress for ", absl::ToInt64Milliseconds(idle), " ms"));
  Withdraw(state, status);
  Fail(state, status, std::string(state->way));
}

void Sender::Impl::Withdraw(State* state, const absl::Status& why) {
  if (state->phase == Phase::kLinking || state->link->ended()) return;
  if (TANDEM_FAILPOINT("handoff.withdraw", "crash drop")) return;
  v1::LinkRequest request;
  ToKey(state->attempt, request.mutable_withdraw()->mutable_key());
  request.mutable_withdraw()->set_reason(Message(why));
  request.mutable_withdraw()->set_code(why.raw_code());
  state->link->Send(std::move(request));
}

void Sender::Impl::Remove(State* state) {
  Link* link = state->link;
  link->announced -= static_cast<int>(state->announced.size());
  link->attempts.erase(state->serial);
  link->last_used = loop_->Now();
  // Credits that wait for an own slab go back at once; running gathers when
  // they end.
  std::vector<Serial> waiting;
  for (const auto& [serial, op] : ops_) {
    if (op.attempt_serial == state->serial && !op.gathering) {
      waiting.push_back(serial);
    }
  }
  const Serial serial = state->serial;
  by_attempt_.erase(state->attempt);
  states_.erase(serial);
  for (Serial op : waiting) EndOp(op, /*return_credit=*/true);
}

absl::Status Sender::Impl::CheckInvariants() const {
  for (const auto& [key, link] : links_) {
    if (link->held() > 0 && link->gathering == 0) {
      return absl::InternalError("slices are held, and none will follow");
    }
  }
  return arena_.CheckInvariants();
}

std::string_view Sender::Impl::StageName(Phase phase) {
  switch (phase) {
    case Phase::kLinking:
      return "linking";
    case Phase::kOffered:
      return "offered";
    case Phase::kGranted:
      return "granted";
    case Phase::kCommitted:
      return "committed";
  }
  return "";
}

void Sender::Impl::CountFailed(const State& state, const absl::Status& status) {
  HandoffCounters::Way& way = counters_.ways[state.way];
  const std::string_view stage = StageName(state.phase);
  ++way.failed;
  ++way.failed_in[std::string(stage)];
  Tell({"handoff failed", state.link->worker_id, state.way, stage, status});
}

void Sender::Impl::Fail(State* state, const absl::Status& status,
                        const std::string& failed_way) {
  // The receiver's word, who may hear of the request's end first.
  if (absl::IsCancelled(status)) {
    ++counters_.ways[state->way].cancelled;
  } else {
    CountFailed(*state, status);
  }
  const Attempt attempt = state->attempt;
  Link* link = state->link;
  Remove(state);
  if (!link->ended()) Announce(link);
  delegate_->OnFailed(attempt, status, failed_way);
}

void Sender::Impl::FailLater(State* state, absl::Status status,
                             std::string failed_way) {
  if (std::exchange(state->failing, true)) return;
  loop_->Post(
      alive_.Guard([this, serial = state->serial, status = std::move(status),
                    failed_way = std::move(failed_way)] {
        State* failed = Find(serial);
        if (failed == nullptr) return;
        Withdraw(failed, status);
        Fail(failed, status, failed_way);
      }));
}

// ---- The public face.

Sender::Sender(const SenderOptions& options, Loop* loop, Random* random,
               Dial dial, SenderDelegate* delegate)
    : impl_(std::make_unique<Impl>(options, loop, random, std::move(dial),
                                   delegate)) {}
Sender::~Sender() = default;
void Sender::AddWay(std::unique_ptr<SenderWay> way) {
  impl_->AddWay(std::move(way));
}
void Sender::Offer(const Attempt& attempt, const v1::WorkerRef& receiver,
                   const std::string& ticket, int positions,
                   int cached_positions, absl::Duration expected_prefill,
                   const std::vector<std::string>& avoid_ways,
                   const v1::AdapterRef& adapter) {
  impl_->Offer(attempt, receiver, ticket, positions, cached_positions,
               expected_prefill, avoid_ways, adapter);
}
void Sender::Computed(const Attempt& attempt, const SliceRange& range) {
  impl_->Computed(attempt, range);
}
void Sender::Commit(const Attempt& attempt, const FirstToken& first) {
  impl_->Commit(attempt, first);
}
void Sender::Cancel(const Attempt& attempt) { impl_->Cancel(attempt); }
SlabCounts Sender::slabs() const { return impl_->slabs(); }
int Sender::attempts() const { return impl_->attempts(); }
int Sender::links() const { return impl_->links(); }
const HandoffCounters& Sender::counters() const { return impl_->counters(); }
absl::Status Sender::CheckInvariants() const {
  return impl_->CheckInvariants();
}
int Sender::waiting_positions(const std::string& worker_id) const {
  return impl_->waiting_positions(worker_id);
}

}  // namespace tandem::handoff
