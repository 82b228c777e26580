// SPDX-License-Identifier: Apache-2.0
#include "handoff/receiver.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "handoff/grpc/grpc_way.h"
#include "handoff/receiver_impl.h"
#include "handoff/wire.h"

namespace tandem::handoff {
namespace {

constexpr size_t kMaxOutcomes = 4096;
constexpr int kTicketKeyBytes = 32;

}  // namespace

Receiver::Impl::Impl(const ReceiverOptions& options, Loop* loop, Random* random,
                     ReceiverDelegate* delegate)
    : options_(options),
      loop_(loop),
      random_(random),
      delegate_(delegate),
      ticket_key_(random->Bytes(kTicketKeyBytes)),
      fingerprint_hash_(HashFingerprint(options.fingerprint)),
      wire_(ParseDType(options.kv_dtype).value_or(kernels::DType::kF32)),
      // Generations of one incarnation say nothing about another's.
      arena_(options.num_slabs, options.slabs_per_peer, random->Next() >> 1),
      credits_(static_cast<size_t>(options.num_slabs)),
      quarantine_(loop) {
  CheckLayers(options.layers);
  ways_.push_back(NewGrpcReceiverWay(options.host_memory, options.slab_bytes));
}

Receiver::Impl::~Impl() {
  for (auto& [serial, link] : links_) {
    link->End(absl::UnavailableError("the decode worker is ending"));
  }
}

void Receiver::Impl::AddWay(std::unique_ptr<ReceiverWay> way) {
  ways_.push_back(std::move(way));
}

Receiver::Impl::State* Receiver::Impl::Find(const Attempt& attempt) {
  auto found = by_attempt_.find(attempt);
  return found == by_attempt_.end() ? nullptr : Find(found->second);
}

Receiver::Impl::State* Receiver::Impl::Find(Serial serial) {
  auto found = states_.find(serial);
  return found == states_.end() ? nullptr : found->second.get();
}

Receiver::Impl::State* Receiver::Impl::Named(Link* link,
                                             const v1::AttemptKey& key) {
  State* state = Find(FromKey(key));
  if (state != nullptr && state->link == link) return state;
  ++counters_.late_messages;
  return nullptr;
}

bool Receiver::Impl::has_landed(const Attempt& attempt) const {
  auto found = by_attempt_.find(attempt);
  return found != by_attempt_.end() && states_.at(found->second)->received;
}

// ---- What the worker asks for.

std::string Receiver::Impl::IssueTicket(const Attempt& attempt,
                                        const v1::WorkerRef& sender,
                                        int max_positions,
                                        absl::Duration lifetime) {
  Ticket ticket;
  ticket.attempt = attempt;
  ticket.sender_id = sender.worker_id();
  ticket.sender_incarnation = sender.incarnation();
  ticket.receiver_incarnation = options_.self.incarnation();
  ticket.fingerprint = fingerprint_hash_;
  ticket.max_positions = max_positions;
  ticket.expires = loop_->Now() + lifetime;
  if (Find(attempt) == nullptr) {
    auto state = std::make_unique<State>(loop_);
    state->attempt = attempt;
    state->serial = next_serial_++;
    state->expiry.Start(lifetime, [this, serial = state->serial] {
      State* expired = Find(serial);
      if (expired == nullptr) return;
      Fail(expired,
           absl::DeadlineExceededError("the handoff ticket's time is over"), "",
           Tell::kDead);
    });
    by_attempt_[attempt] = state->serial;
    states_[state->serial] = std::move(state);
  }
  return SealTicket(ticket, ticket_key_);
}

void Receiver::Impl::StartLater(const Attempt& attempt) {
  State* state = Find(attempt);
  if (state == nullptr || state->phase != Phase::kOffered) return;
  Answer(state, v1::HandoffAnswer::VERDICT_START);
}

void Receiver::Impl::GrantLater(const Attempt& attempt,
                                const struct Grant& grant) {
  State* state = Find(attempt);
  if (state == nullptr || state->phase != Phase::kOffered) return;
  Grant(state, grant);
}

void Receiver::Impl::EndAttempt(const Attempt& attempt,
                                const absl::Status& why) {
  State* state = Find(attempt);
  if (state == nullptr) return;
  const absl::Status status =
      why.ok() ? absl::CancelledError("the attempt was ended") : why;
  ++counters_.ways[state->way].cancelled;
  Link* link = state->link;
  Remove(state, status);
  if (link != nullptr) SendEnd(link, attempt, status, Tell::kDead);
}

// ---- Offer and grant.

absl::Status Receiver::Impl::CheckOffer(Link* link,
                                        const v1::HandoffOffer& offer,
                                        Ticket* ticket) {
  const absl::Status refused =
      absl::PermissionDeniedError("handoff ticket is not valid");
  absl::StatusOr<Ticket> opened =
      OpenTicket(offer.ticket(), ticket_key_, loop_->Now());
  if (!opened.ok()) return refused;
  if (!(opened->attempt == FromKey(offer.key())) ||
      opened->sender_id != link->sender.worker_id() ||
      opened->sender_incarnation != link->sender.incarnation() ||
      opened->receiver_incarnation != options_.self.incarnation() ||
      opened->fingerprint != fingerprint_hash_ || offer.positions() < 1 ||
      offer.positions() > opened->max_positions ||
      offer.cached_positions() < 0 ||
      offer.cached_positions() > offer.positions()) {
    return refused;
  }
  *ticket = *std::move(opened);
  return absl::OkStatus();
}

void Receiver::Impl::OnOffer(Link* link, const v1::HandoffOffer& offer) {
  Ticket ticket;
  const absl::Status valid = CheckOffer(link, offer, &ticket);
  if (!valid.ok()) {
    Refuse(link, offer.key(), valid);
    return;
  }
  State* state = Find(ticket.attempt);
  if (state == nullptr) {
    ++counters_.late_messages;
    auto outcome = outcomes_.find(ticket.attempt);
    if (outcome != outcomes_.end() && outcome->second.ok()) {
      SendEnd(link, ticket.attempt, outcome->second, Tell::kAck);
    } else {
      Refuse(link, offer.key(), absl::AbortedError("the attempt has ended"));
    }
    return;
  }
  if (state->phase != Phase::kIssued) {
    if (state->link != link) {
      Refuse(link, offer.key(),
             absl::PermissionDeniedError("the attempt is on another link"));
      return;
    }
    ++counters_.duplicates;
    Answer(state, state->answer.verdict());
    return;
  }
  state->link = link;
  state->positions = offer.positions();
  link->attempts.insert(state->serial);
  for (Usable& usable : link->ways) {
    if (usable.name == offer.way()) state->usable = &usable;
  }
  // Counters are kept by name: not by one that a peer made up.
  if (offer.way() == "grpc" ||
      absl::c_linear_search(options_.ways, offer.way())) {
    state->way = offer.way();
  }
  if (state->usable == nullptr || !state->usable->channel->ready()) {
    Fail(state,
         absl::UnavailableError(absl::StrCat("way '", offer.way(),
                                             "' is not set up on this link")),
         std::string(state->way), Tell::kDead);
    return;
  }
  state->phase = Phase::kOffered;
  ToKey(state->attempt, state->answer.mutable_key());
  const Serial serial = state->serial;
  struct Grant grant;
  absl::StatusOr<ReceiverDelegate::Verdict> verdict =
      delegate_->OnOffer(ticket, offer, std::string(link->mixed), &grant);
  state = Find(serial);
  if (state == nullptr || state->phase != Phase::kOffered) return;
  if (!verdict.ok()) {
    CountFailed(*state, verdict.status());
    Remove(state, verdict.status());
    Refuse(link, offer.key(), verdict.status());
    return;
  }
  switch (*verdict) {
    case ReceiverDelegate::Verdict::kGranted:
      Grant(state, grant);
      break;
    case ReceiverDelegate::Verdict::kStart:
      Answer(state, v1::HandoffAnswer::VERDICT_START);
      break;
    case ReceiverDelegate::Verdict::kWait:
      // StartLater may have been called from inside OnOffer.
      if (state->answer.verdict() != v1::HandoffAnswer::VERDICT_START) {
        Answer(state, v1::HandoffAnswer::VERDICT_WAIT);
      }
      break;
  }
}

void Receiver::Impl::Refuse(Link* link, const v1::AttemptKey& key,
                            const absl::Status& status) {
  ++counters_.offers_refused;
  Report({"handoff offer refused", link->sender.worker_id(), "", "offered",
          status});
  v1::LinkResponse response;
  v1::HandoffAnswer* answer = response.mutable_answer();
  *answer->mutable_key() = key;
  answer->set_verdict(v1::HandoffAnswer::VERDICT_REFUSED);
  answer->set_code(status.raw_code());
  answer->set_message(Message(status));
  link->Send(std::move(response));
}

void Receiver::Impl::Answer(State* state, v1::HandoffAnswer::Verdict verdict) {
  state->answer.set_verdict(verdict);
  v1::LinkResponse response;
  *response.mutable_answer() = state->answer;
  const failpoint::Hit hit =
      TANDEM_FAILPOINT("handoff.answer", "drop duplicate");
  if (hit == failpoint::kDuplicate) state->link->Send(response);
  if (hit != failpoint::kDrop) state->link->Send(std::move(response));
}

void Receiver::Impl::Grant(State* state, const struct Grant& wanted) {
  struct Grant grant = wanted;
  if (grant.head_end == 0) grant.head_end = options_.kv_heads;
  grant.windowed_begin = std::max(grant.position_begin, grant.windowed_begin);
  grant.wire = wire_;
  grant.digest_key = random_->Next();
  if (grant.position_begin < 0 || grant.position_end < grant.windowed_begin ||
      grant.position_end > state->positions || grant.head_begin < 0 ||
      grant.head_end <= grant.head_begin ||
      grant.head_end > options_.kv_heads ||
      RowBytes(grant, options_.head_dim) > options_.slab_bytes) {
    Fail(state,
         absl::InternalError(absl::StrCat(
             "grant of positions ", grant.position_begin, "..",
             grant.position_end, ", heads ", grant.head_begin, "..",
             grant.head_end, " does not fit an offer of ", state->positions,
             " positions in slabs of ", options_.slab_bytes, " bytes")),
         "", Tell::kDead);
    return;
  }
  state->phase = Phase::kGranted;
  state->grant = grant;
  state->answer.set_position_begin(grant.position_begin);
  state->answer.set_position_end(grant.position_end);
  state->answer.set_windowed_begin(grant.windowed_begin);
  state->answer.set_head_begin(grant.head_begin);
  state->answer.set_head_end(grant.head_end);
  state->answer.set_kv_dtype(std::string(kernels::Name(grant.wire)));
  state->answer.set_digest_key(grant.digest_key);
  Answer(state, v1::HandoffAnswer::VERDICT_GRANTED);
}

// ---- Commit.

absl::Status Receiver::Impl::CheckManifest(
    const State& state, const v1::HandoffCommit& commit) const {
  const int64_t bytes = WantedRows(state.grant, options_.layers) *
                        RowBytes(state.grant, options_.head_dim);
  if (commit.layers() != options_.layers.count ||
      commit.position_begin() != state.grant.position_begin ||
      commit.position_end() != state.grant.position_end ||
      commit.bytes() != bytes) {
    return absl::DataLossError(absl::StrCat(
        "manifest of ", commit.layers(), " layers, positions ",
        commit.position_begin(), "..", commit.position_end(), ", ",
        commit.bytes(), " bytes; granted were ", options_.layers.count,
        " layers, positions ", state.grant.position_begin, "..",
        state.grant.position_end, ", ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

void Receiver::Impl::OnCommit(Link* link, const v1::HandoffCommit& commit) {
  const Attempt attempt = FromKey(commit.key());
  State* state = Find(attempt);
  if (state == nullptr || state->link != link) {
    ++counters_.late_messages;
    auto outcome = outcomes_.find(attempt);
    SendEnd(link, attempt,
            outcome != outcomes_.end()
                ? outcome->second
                : absl::AbortedError("the attempt is not live"),
            Tell::kAck);
    return;
  }
  if (state->commit.has_value()) {
    ++counters_.duplicates;
    return;
  }
  absl::Status status = state->phase == Phase::kGranted
                            ? CheckManifest(*state, commit)
                            : absl::FailedPreconditionError(
                                  "commit of an attempt without a grant");
  if (!status.ok()) {
    Fail(state, status, "", Tell::kAck);
    return;
  }
  state->commit = commit;
  MaybeDigest(state);
}

void Receiver::Impl::MaybeDigest(State* state) {
  if (!state->commit.has_value() || state->phase != Phase::kGranted ||
      state->landed_slices < state->slices.size()) {
    return;
  }
  // The link keeps order: what was not announced by now never will be. Slices
  // do not overlap and lie within the grant, so the sums prove the cover.
  if (state->landed_slices != state->commit->slices() ||
      state->landed_rows != WantedRows(state->grant, options_.layers)) {
    Fail(state,
         absl::DataLossError(absl::StrCat(
             state->landed_slices, " slices with ", state->landed_rows,
             " (layer, position) rows landed; the manifest says ",
             state->commit->slices(), " slices, the grant ",
             WantedRows(state->grant, options_.layers), " rows")),
         "", Tell::kAck);
    return;
  }
  state->phase = Phase::kDigesting;
  const Attempt attempt = state->attempt;
  const struct Grant grant = state->grant;
  delegate_->Digest(
      attempt, grant,
      alive_.Guard([this, serial = state->serial](kernels::KvDigest digest) {
        OnDigest(serial, digest);
      }));
}

void Receiver::Impl::OnDigest(Serial serial, kernels::KvDigest digest) {
  State* state = Find(serial);
  if (state == nullptr) return;
  const kernels::KvDigest sent{state->commit->digest_low(),
                               state->commit->digest_high()};
  if (!(digest == sent)) {
    Fail(state,
         absl::DataLossError(
             "the digest of the landed blocks differs from what was sent"),
         std::string(state->way), Tell::kAck);
    return;
  }
  FirstToken first;
  first.position = state->commit->first_position();
  first.token = state->commit->first_token();
  const Attempt attempt = state->attempt;
  const Serial link_serial = state->link->serial;
  const std::string way = state->way;
  // Gone first: whatever the delegate calls, the attempt has ended.
  Remove(state, absl::OkStatus());
  const absl::Status status = delegate_->OnCommit(attempt, first);
  if (status.ok()) {
    ++counters_.ways[way].committed;
  } else if (absl::IsCancelled(status)) {
    ++counters_.ways[way].cancelled;
    outcomes_[attempt] = status;
  } else {
    CountFailed(FindLink(link_serial), way, StageName(Phase::kDigesting),
                status);
    outcomes_[attempt] = status;
  }
  Link* link = FindLink(link_serial);
  if (link != nullptr) SendEnd(link, attempt, status, Tell::kAck);
}

// ---- Time and ends.

void Receiver::Impl::Progress(State* state) {
  state->last_progress = state->link->last_progress = loop_->Now();
  if (state->clock.running()) return;
  state->clock.Start(options_.transfer_timeout,
                     [this, serial = state->serial] { CheckClock(serial); });
}

void Receiver::Impl::CheckClock(Serial serial) {
  State* state = Find(serial);
  // Without a credit out no byte may flow; the next one starts the clock.
  if (state == nullptr || state->credited == 0) return;
  const absl::Duration idle =
      loop_->Now() - StandsSince(state->last_progress,
                                 state->link->last_progress,
                                 options_.transfer_timeout);
  if (idle < options_.transfer_timeout) {
    state->clock.Start(options_.transfer_timeout - idle,
                       [this, serial] { CheckClock(serial); });
    return;
  }
  Fail(state,
       absl::DeadlineExceededError(
           absl::StrCat("handoff from ", state->link->sender.worker_id(),
                        " over ", state->way, " made no progress for ",
                        absl::ToInt64Milliseconds(idle), " ms")),
       std::string(state->way), Tell::kDead);
}

void Receiver::Impl::Remove(State* state, const absl::Status& outcome) {
  const Attempt attempt = state->attempt;
  const Serial serial = state->serial;
  Link* link = state->link;
  std::erase_if(requests_, [&](const auto& entry) {
    if (entry.second.attempt_serial != serial) return false;
    arena_.CancelRequest(link->pair, entry.first);
    return true;
  });
  if (link != nullptr) {
    link->attempts.erase(serial);
    for (int slab : arena_.Held(link->pair, SlabArena::State::kGranted)) {
      if (credits_[slab].attempt_serial == serial) QuarantineSlab(slab);
    }
  }
  if (!outcomes_.contains(attempt)) outcome_order_.push_back(attempt);
  outcomes_[attempt] = outcome;
  if (outcome_order_.size() > kMaxOutcomes) {
    outcomes_.erase(outcome_order_.front());
    outcome_order_.pop_front();
  }
  by_attempt_.erase(attempt);
  states_.erase(serial);
}

std::string_view Receiver::Impl::StageName(Phase phase) {
  switch (phase) {
    case Phase::kIssued:
      return "issued";
    case Phase::kOffered:
      return "offered";
    case Phase::kGranted:
      return "granted";
    case Phase::kDigesting:
      return "digesting";
  }
  return "";
}

void Receiver::Impl::CountFailed(const State& state,
                                 const absl::Status& status) {
  CountFailed(state.link, state.way, StageName(state.phase), status);
}

void Receiver::Impl::CountFailed(const Link* link, const std::string& name,
                                 std::string_view stage,
                                 const absl::Status& status) {
  HandoffCounters::Way& way = counters_.ways[name];
  ++way.failed;
  ++way.failed_in[std::string(stage)];
  Report({"handoff failed", link == nullptr ? "" : link->sender.worker_id(),
          name, stage, status});
}

void Receiver::Impl::Fail(State* state, const absl::Status& status,
                          const std::string& failed_way, Tell tell) {
  const Attempt attempt = state->attempt;
  Link* link = state->link;
  CountFailed(*state, status);
  Remove(state, status);
  if (link != nullptr) SendEnd(link, attempt, status, tell);
  ServeCredits();
  delegate_->OnFailed(attempt, status, failed_way);
}

void Receiver::Impl::SendEnd(Link* link, const Attempt& attempt,
                             const absl::Status& status, Tell tell) {
  v1::LinkResponse response;
  switch (tell) {
    case Tell::kNothing:
      return;
    case Tell::kDead:
      ToKey(attempt, response.mutable_dead()->mutable_key());
      response.mutable_dead()->set_code(status.raw_code());
      response.mutable_dead()->set_message(Message(status));
      break;
    case Tell::kAck:
      ToKey(attempt, response.mutable_ack()->mutable_key());
      response.mutable_ack()->set_code(status.raw_code());
      response.mutable_ack()->set_message(Message(status));
      switch (TANDEM_FAILPOINT("handoff.ack", "crash drop duplicate")) {
        case failpoint::kDrop:
          return;
        case failpoint::kDuplicate:
          link->Send(response);
          break;
        default:
          break;
      }
      break;
  }
  link->Send(std::move(response));
}

absl::Status Receiver::Impl::CheckInvariants() const {
  const absl::Status slabs = arena_.CheckInvariants();
  if (!slabs.ok()) return slabs;
  for (const auto& [serial, state] : states_) {
    int credited = 0;
    for (const auto& [number, slice] : state->slices) {
      credited += slice.state == SliceState::kCredited ? 1 : 0;
    }
    if (credited != state->credited) {
      return absl::InternalError("an attempt miscounts its credits");
    }
  }
  for (const auto& [serial, link] : links_) {
    if (link->held() > 0 && link->scattering == 0) {
      return absl::InternalError("credits are held, and no slab will follow");
    }
  }
  return absl::OkStatus();
}

// ---- The public face.

Receiver::Receiver(const ReceiverOptions& options, Loop* loop, Random* random,
                   ReceiverDelegate* delegate)
    : impl_(std::make_unique<Impl>(options, loop, random, delegate)) {}
Receiver::~Receiver() = default;
void Receiver::AddWay(std::unique_ptr<ReceiverWay> way) {
  impl_->AddWay(std::move(way));
}
std::string Receiver::IssueTicket(const Attempt& attempt,
                                  const v1::WorkerRef& sender,
                                  int max_positions, absl::Duration lifetime) {
  return impl_->IssueTicket(attempt, sender, max_positions, lifetime);
}
void Receiver::StartLater(const Attempt& attempt) {
  impl_->StartLater(attempt);
}
void Receiver::GrantLater(const Attempt& attempt, const struct Grant& grant) {
  impl_->GrantLater(attempt, grant);
}
void Receiver::EndAttempt(const Attempt& attempt, const absl::Status& why) {
  impl_->EndAttempt(attempt, why);
}
void Receiver::AddLink(std::unique_ptr<ReceiverStream> stream,
                       rpc::PeerIdentity peer) {
  impl_->AddLink(std::move(stream), std::move(peer));
}
SlabCounts Receiver::slabs() const { return impl_->slabs(); }
int Receiver::tickets() const { return impl_->tickets(); }
int Receiver::links() const { return impl_->links(); }
const HandoffCounters& Receiver::counters() const { return impl_->counters(); }
absl::Status Receiver::CheckInvariants() const {
  return impl_->CheckInvariants();
}
bool Receiver::has_landed(const Attempt& attempt) const {
  return impl_->has_landed(attempt);
}

}  // namespace tandem::handoff
