// SPDX-License-Identifier: Apache-2.0
// The receiver's links (hello, loss), the slices that come through them, and
// the slabs that those use: credit, landing, quarantine.

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "handoff/receiver_impl.h"
#include "handoff/wire.h"

namespace tandem::handoff {
namespace {

// Announced slices that wait for a slab, per slab of the pair. A sender of
// this project announces two.
constexpr size_t kMaxWaitingPerSlab = 64;

}  // namespace

int Receiver::Impl::links() const {
  return static_cast<int>(
      std::count_if(links_.begin(), links_.end(),
                    [](const auto& link) { return link.second->welcomed; }));
}

Receiver::Impl::Link* Receiver::Impl::FindLink(Serial serial) {
  auto found = links_.find(serial);
  return found == links_.end() ? nullptr : found->second.get();
}

// ---- Links.

void Receiver::Impl::AddLink(std::unique_ptr<ReceiverStream> stream,
                             rpc::PeerIdentity peer) {
  auto owned = std::make_unique<Link>(this, loop_, options_.silence,
                                      options_.silence, std::move(stream));
  Link* link = owned.get();
  link->serial = next_serial_++;
  link->peer = std::move(peer);
  link->last_progress = loop_->Now();
  links_[link->serial] = std::move(owned);
  link->Start();
  if (static_cast<int>(links_.size()) > options_.max_links) {
    Break(link,
          absl::ResourceExhaustedError(absl::StrCat(
              "this decode worker has its ", options_.max_links, " links")),
          /*refused=*/true);
  }
}

void Receiver::Impl::OnLinkBroken(ReceiverLinkBase* link, absl::Status status) {
  Break(static_cast<Link*>(link), status, /*refused=*/false);
}

void Receiver::Impl::OnLinkMessage(ReceiverLinkBase* base,
                                   v1::LinkRequest message) {
  Link* link = static_cast<Link*>(base);
  if (!link->welcomed && !message.has_hello()) {
    Break(link, absl::InvalidArgumentError("a link begins with hello"),
          /*refused=*/true);
    return;
  }
  switch (message.message_case()) {
    case v1::LinkRequest::kHello:
      OnHello(link, message.hello());
      break;
    case v1::LinkRequest::kOffer:
      OnOffer(link, message.offer());
      break;
    case v1::LinkRequest::kSliceReady:
      OnSliceReady(link, message.slice_ready());
      break;
    case v1::LinkRequest::kSlice:
      OnSlice(link, std::move(*message.mutable_slice()));
      break;
    case v1::LinkRequest::kCreditReturn:
      OnCreditReturn(link, message.credit_return());
      break;
    case v1::LinkRequest::kCommit:
      OnCommit(link, message.commit());
      break;
    case v1::LinkRequest::kWithdraw: {
      State* state = Named(link, message.withdraw().key());
      if (state != nullptr) OnWithdraw(state, message.withdraw());
      break;
    }
    case v1::LinkRequest::kNccl:
      for (Usable& usable : link->ways) {
        if (usable.name == "nccl") usable.channel->Hear(message.nccl());
      }
      break;
    case v1::LinkRequest::kBeat:
    case v1::LinkRequest::MESSAGE_NOT_SET:  // of a newer protocol
      break;
  }
}

absl::Status Receiver::Impl::CheckHello(const v1::LinkHello& hello,
                                        uint32_t* protocol, bool* mixed) const {
  absl::StatusOr<uint32_t> version =
      NegotiateProtocol(hello.protocol_min(), hello.protocol_max());
  if (!version.ok()) return version.status();
  if (hello.receiver_incarnation() != options_.self.incarnation()) {
    return absl::FailedPreconditionError(
        absl::StrCat("decode worker ", options_.self.worker_id(),
                     " was restarted since the prefill worker heard of it"));
  }
  if (hello.sender().worker_id().empty() ||
      hello.sender().incarnation().empty()) {
    return absl::InvalidArgumentError("hello names no sender");
  }
  const Compatibility compatible = Compare(
      hello, options_.fingerprint, options_.kv_dtype, options_.mixed_numerics);
  *protocol = *version;
  *mixed = compatible.mixed;
  return compatible.status;
}

void Receiver::Impl::OnHello(Link* link, const v1::LinkHello& hello) {
  if (link->welcomed) {
    ++counters_.duplicates;
    return;
  }
  uint32_t protocol = 0;
  bool mixed = false;
  absl::Status status = rpc::CheckClaim(link->peer, rpc::PeerRole::kPrefill,
                                        hello.sender().worker_id());
  if (status.ok()) status = CheckHello(hello, &protocol, &mixed);
  if (TANDEM_FAILPOINT("handoff.hello", "crash fail")) {
    status = failpoint::Error();
  }
  if (!status.ok()) {
    Break(link, status, /*refused=*/true);
    return;
  }
  link->welcomed = true;
  link->set_batches(protocol >= kProtocolBatches);
  link->sender = hello.sender();
  if (mixed) link->mixed = hello.kv_dtype();
  link->pair = arena_.AddPair();
  ++counters_.links;

  v1::LinkResponse response;
  v1::LinkWelcome* welcome = response.mutable_welcome();
  welcome->set_receiver_incarnation(options_.self.incarnation());
  welcome->set_worker_id(options_.self.worker_id());
  welcome->set_protocol(protocol);
  welcome->set_slab_bytes(options_.slab_bytes);
  welcome->set_num_slabs(options_.slabs_per_peer);
  for (const std::string& name : options_.ways) {
    const auto& theirs = hello.ways();
    if (std::find(theirs.begin(), theirs.end(), name) == theirs.end()) {
      continue;
    }
    for (const std::unique_ptr<ReceiverWay>& way : ways_) {
      if (way->name() != name) continue;
      // Memory is shared within one host only; the way itself checks more.
      if (name == "shm" &&
          (options_.host_id.empty() || hello.host_id() != options_.host_id)) {
        continue;
      }
      absl::StatusOr<std::unique_ptr<ReceiverChannel>> channel =
          way->NewChannel(hello, options_.slabs_per_peer, options_.slab_bytes,
                          welcome);
      if (!channel.ok()) {
        ++counters_.ways_failed;
        continue;
      }
      welcome->add_ways(name);
      auto host = std::make_unique<Host>();
      host->impl = this;
      host->link_serial = link->serial;
      host->way = link->ways.size();
      link->ways.push_back({name, std::move(host), *std::move(channel)});
    }
  }
  link->Send(std::move(response));
  for (Usable& usable : link->ways) {
    usable.channel->Attach(usable.host.get());
  }
  // A sender has one link: what it had before is lost, if not yet known.
  for (auto& [serial, other] : links_) {
    if (other.get() == link || !other->welcomed ||
        other->sender.worker_id() != link->sender.worker_id()) {
      continue;
    }
    Break(other.get(), absl::UnavailableError("replaced by a newer link"),
          /*refused=*/false);
    break;
  }
}

void Receiver::Impl::Break(Link* link, const absl::Status& status,
                           bool refused) {
  if (link->ended()) return;
  TANDEM_FAILPOINT("handoff.receiver_break", "crash");
  // Idle ones are ended by their sender, all by one that goes away in order.
  const bool idle = link->attempts.empty() && absl::IsCancelled(status);
  if (refused) {
    ++counters_.links_refused;
  } else if (!idle) {
    ++counters_.links_lost;
  }
  if (refused || !link->attempts.empty()) {
    Report({refused ? "handoff link refused" : "handoff link lost",
            link->sender.worker_id(), "", "", status});
  }
  link->End(status);
  auto found = links_.find(link->serial);
  ghosts_[link->serial] = std::move(found->second);
  links_.erase(found);
  std::vector<std::pair<Attempt, std::string>> failed;
  const absl::Status lost(absl::StatusCode::kUnavailable,
                          absl::StrCat("handoff link lost: ", Message(status)));
  const std::set<Serial> attempts = link->attempts;
  for (Serial serial : attempts) {
    State* state = Find(serial);
    failed.emplace_back(state->attempt, state->way);
    CountFailed(*state, lost);
    Remove(state, lost);
  }
  for (int slab : arena_.Held(link->pair, SlabArena::State::kGranted)) {
    QuarantineSlab(slab);
  }
  QuarantineUnlanded(link);
  arena_.RemovePair(link->pair);
  for (size_t way = 0; way < link->ways.size(); ++way) {
    link->ways[way].channel->LinkLost(alive_.Guard(
        [this, serial = link->serial, way] { OnQuiet(serial, way); }));
  }
  MaybeBury(link);
  ServeCredits();
  // Last: the delegate may do anything.
  for (const auto& [attempt, way] : failed) {
    delegate_->OnFailed(attempt, lost, way);
  }
}

void Receiver::Impl::MaybeBury(Link* link) {
  if (!link->ended() || link->buried || arena_.held(link->pair) > 0) return;
  link->buried = true;
  // Calls into it may be on the stack.
  loop_->Post(
      alive_.Guard([this, serial = link->serial] { ghosts_.erase(serial); }));
}

// ---- Slices: announced, credited, received, landed.

absl::Status Receiver::Impl::CheckSlice(const State& state,
                                        const v1::SliceReady& ready,
                                        const SliceRange& range) const {
  const struct Grant& grant = state.grant;
  if (state.phase != Phase::kGranted || state.commit.has_value()) {
    return absl::FailedPreconditionError(
        "a slice was announced without a grant, or after its commit");
  }
  if (range.layer_begin < 0 || range.layer_end <= range.layer_begin ||
      range.layer_end > options_.layers.count ||
      range.position_begin < grant.position_begin ||
      range.position_end <= range.position_begin ||
      range.position_end > grant.position_end ||
      !Wants(grant, options_.layers, range)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slice of layers ", range.layer_begin, "..", range.layer_end,
        ", positions ", range.position_begin, "..", range.position_end,
        " lies outside ", options_.layers.count, " layers, positions ",
        grant.position_begin, "..", grant.position_end, " (with a window from ",
        grant.windowed_begin, ")"));
  }
  const int64_t bytes = Rows(range) * RowBytes(grant, options_.head_dim);
  if (ready.bytes() != bytes || bytes > options_.slab_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("slice of ", ready.bytes(), " bytes, where its range has ",
                     bytes, " and a slab ", options_.slab_bytes));
  }
  return absl::OkStatus();
}

void Receiver::Impl::OnSliceReady(Link* link, const v1::SliceReady& ready) {
  State* state = Named(link, ready.key());
  if (state == nullptr) return;
  const SliceRange range{ready.layer_begin(), ready.layer_end(),
                         ready.position_begin(), ready.position_end()};
  auto known = state->slices.find(ready.slice());
  if (known != state->slices.end() && known->second.range == range) {
    ++counters_.duplicates;
    return;
  }
  absl::Status status = CheckSlice(*state, ready, range);
  if (status.ok() &&
      (known != state->slices.end() || !state->announced.Add(range))) {
    status = absl::InvalidArgumentError(
        absl::StrCat("slice ", ready.slice(),
                     " repeats a number or a row of another slice"));
  }
  if (!status.ok()) {
    ++counters_.slices_refused;
    Fail(state, status, "", Tell::kDead);
    return;
  }
  if (arena_.waiting(link->pair) >=
      kMaxWaitingPerSlab * static_cast<size_t>(options_.slabs_per_peer)) {
    Break(link, absl::ResourceExhaustedError("too many slices wait for a slab"),
          /*refused=*/false);
    return;
  }
  state->slices[ready.slice()] = {range, SliceState::kAnnounced};
  const uint64_t token = next_token_++;
  requests_[token] = {state->serial, ready.slice()};
  arena_.Request(link->pair, token);
}

void Receiver::Impl::ServeCredits() {
  std::vector<Link*> served;
  while (std::optional<SlabArena::Loan> loan = arena_.Next()) {
    auto request = requests_.find(loan->token);
    State* state = Find(request->second.attempt_serial);
    SliceRecord& slice = state->slices.at(request->second.slice);
    Credit& credit = credits_[loan->id];
    credit = Credit();
    credit.attempt_serial = state->serial;
    credit.attempt = state->attempt;
    credit.link = state->link;
    credit.link_serial = state->link->serial;
    credit.usable = state->usable;
    credit.slice = request->second.slice;
    credit.range = slice.range;
    credit.grant = state->grant;
    credit.bytes =
        Rows(slice.range) * RowBytes(state->grant, options_.head_dim);
    requests_.erase(request);
    slice.state = SliceState::kCredited;
    ++state->credited;
    Progress(state);
    HoldCredit(credit, *loan);
    if (!absl::c_linear_search(served, state->link)) {
      served.push_back(state->link);
    }
  }
  for (Link* link : served) FlushCredits(link);
}

void Receiver::Impl::HoldCredit(const Credit& credit,
                                const SlabArena::Loan& loan) {
  v1::LinkResponse response;
  v1::SliceCredit* message = response.mutable_credit();
  ToKey(credit.attempt, message->mutable_key());
  message->set_slice(credit.slice);
  message->set_slab(static_cast<uint32_t>(loan.slot));
  message->set_generation(loan.generation);
  const failpoint::Hit hit =
      TANDEM_FAILPOINT("handoff.credit", "drop duplicate delay");
  if (hit == failpoint::kDuplicate) credit.link->Hold(response);
  if (hit != failpoint::kDrop) credit.link->Hold(std::move(response));
}

// Credits wait for slabs that are being emptied, up to half of the pair's:
// with the other half the sender is busy meanwhile.
void Receiver::Impl::FlushCredits(Link* link) {
  if (link->scattering > 0 &&
      link->held() < static_cast<size_t>(options_.slabs_per_peer) / 2) {
    return;
  }
  link->Flush();
}

void Receiver::Impl::OnSlice(Link* link, v1::Slice slice) {
  const SlabArena::Loan* loan = arena_.Find(link->pair, slice.slab());
  if (loan == nullptr || loan->generation != slice.generation()) {
    ++counters_.late_messages;
    return;
  }
  const int slab = loan->id;
  Credit& credit = credits_[slab];
  if (credit.begun) {
    ++counters_.duplicates;
    return;
  }
  if (!(FromKey(slice.key()) == credit.attempt) ||
      slice.slice() != credit.slice) {
    ++counters_.slices_refused;
    return;
  }
  State* state = Find(credit.attempt_serial);
  if (state == nullptr) {
    // Its attempt ended: the peer is done with the slab, nothing lands.
    ++counters_.late_messages;
    FreeSlab(slab);
    ServeCredits();
    return;
  }
  arena_.Fill(slab);
  credit.begun = true;
  Progress(state);
  credit.usable->channel->Receive(
      slice.slab(), &slice, credit.bytes,
      alive_.Guard([this, slab, generation = slice.generation()](
                       absl::StatusOr<const std::byte*> memory) {
        OnReceived(slab, generation, std::move(memory));
      }));
}

void Receiver::Impl::OnReceived(int slab, uint64_t generation,
                                absl::StatusOr<const std::byte*> memory) {
  // Out of quarantine comes only what will never be written.
  if (arena_.loan(slab).generation != generation ||
      (arena_.state(slab) != SlabArena::State::kInFlight &&
       !(arena_.state(slab) == SlabArena::State::kQuarantined &&
         !memory.ok()))) {
    return;
  }
  Credit& credit = credits_[slab];
  credit.received = memory.ok();
  State* state = Find(credit.attempt_serial);
  if (!memory.ok() || state == nullptr) {
    state == nullptr ? ++counters_.late_messages : ++counters_.slices_refused;
    Link* link = credit.link;
    FreeSlab(slab);
    MaybeDrop(link);
    MaybeBury(link);
    ServeCredits();
    if (state != nullptr) Fail(state, memory.status(), "", Tell::kDead);
    return;
  }
  if (TANDEM_FAILPOINT("handoff.landed", "corrupt")) {
    failpoint::Corrupt(*memory, static_cast<size_t>(credit.bytes));
  }
  state->received = true;
  const Attempt attempt = credit.attempt;
  const SliceRange range = credit.range;
  const struct Grant grant = credit.grant;
  if (credit.usable->channel->may_wait()) ++credit.link->scattering;
  delegate_->Scatter(attempt, range, grant, *memory,
                     alive_.Guard([this, slab, generation] {
                       OnScattered(slab, generation);
                     }));
}

void Receiver::Impl::OnScattered(int slab, uint64_t generation) {
  TANDEM_FAILPOINT("handoff.scattered", "crash delay");
  if (arena_.state(slab) != SlabArena::State::kInFlight ||
      arena_.loan(slab).generation != generation) {
    return;
  }
  const Credit credit = credits_[slab];
  if (credit.usable->channel->may_wait()) --credit.link->scattering;
  FreeSlab(slab);
  MaybeDrop(credit.link);
  MaybeBury(credit.link);
  HandoffCounters::Way& way = counters_.ways[credit.usable->name];
  ++way.slices;
  way.bytes += credit.bytes;
  ServeCredits();
  FlushCredits(credit.link);
  State* state = Find(credit.attempt_serial);
  if (state == nullptr) return;
  state->slices.at(credit.slice).state = SliceState::kLanded;
  --state->credited;
  ++state->landed_slices;
  state->landed_rows += Rows(credit.range);
  Progress(state);
  MaybeDigest(state);
}

void Receiver::Impl::OnCreditReturn(Link* link,
                                    const v1::CreditReturn& returned) {
  const SlabArena::Loan* loan = arena_.Find(link->pair, returned.slab());
  if (loan == nullptr || loan->generation != returned.generation() ||
      credits_[loan->id].begun) {
    ++counters_.late_messages;
    return;
  }
  State* state = Find(credits_[loan->id].attempt_serial);
  FreeSlab(loan->id);
  if (state != nullptr) {
    // Said before the withdrawal; either way the slice will not come.
    Fail(state,
         absl::AbortedError("the prefill worker gave a credit back unused"), "",
         Tell::kDead);
    return;
  }
  ServeCredits();
}

// ---- Slabs.

void Receiver::Impl::FreeSlab(int slab) {
  Credit& credit = credits_[slab];
  if (credit.received) {
    credit.usable->channel->Release(
        static_cast<uint32_t>(arena_.loan(slab).slot));
  }
  arena_.Free(slab);
  credit = Credit();
}

void Receiver::Impl::QuarantineSlab(int slab) {
  arena_.Quarantine(slab);
  credits_[slab].quarantined_at = loop_->Now();
  ++counters_.quarantines;
  if (!quarantine_.running()) WatchQuarantine();
}

void Receiver::Impl::OnWithdraw(State* state,
                                const v1::HandoffWithdraw& withdraw) {
  using Code = absl::StatusCode;
  const bool needless = withdraw.code() == static_cast<int>(Code::kCancelled);
  const absl::Status status = FailureFrom(
      static_cast<int>(needless ? Code::kCancelled : Code::kAborted),
      absl::StrCat("the prefill worker withdrew: ", withdraw.reason()));
  if (!needless) {
    Fail(state, status, BrokenWay(*state), Tell::kNothing);
    return;
  }
  ++counters_.ways[state->way].cancelled;
  const Attempt attempt = state->attempt;
  Remove(state, status);
  delegate_->OnFailed(attempt, status, "");
}

// The way that an attempt's end may be put down to although the peer did not
// name it.
std::string Receiver::Impl::BrokenWay(const State& state) const {
  return state.usable != nullptr && !state.usable->channel->ready()
             ? std::string(state.way)
             : "";
}

void Receiver::Impl::Host::Say(v1::NcclControl message) {
  Link* link = impl->FindLink(link_serial);
  if (link == nullptr) return;
  v1::LinkResponse response;
  *response.mutable_nccl() = std::move(message);
  link->Send(std::move(response));
}

void Receiver::Impl::Host::OnBroken(const absl::Status& status) {
  impl->OnWayBroken(link_serial, way, status);
}

void Receiver::Impl::Host::OnQuiet() { impl->OnQuiet(link_serial, way); }

void Receiver::Impl::OnWayBroken(Serial link_serial, size_t way,
                                 const absl::Status& status) {
  Link* link = FindLink(link_serial);
  if (link == nullptr) return;  // lost: its slabs are in quarantine already
  ++counters_.ways_failed;
  Usable* usable = &link->ways[way];
  std::vector<Serial> attempts;
  for (Serial serial : link->attempts) {
    const State* state = Find(serial);
    // What landed as a whole is only being digested.
    if (state->usable == usable && state->phase != Phase::kDigesting) {
      attempts.push_back(serial);
    }
  }
  QuarantineUnlanded(link);
  for (Serial serial : attempts) {
    State* state = Find(serial);
    if (state != nullptr) Fail(state, status, usable->name, Tell::kDead);
  }
}

// A transport may still write where its receive did not end.
void Receiver::Impl::QuarantineUnlanded(Link* link) {
  for (int slab : arena_.Held(link->pair, SlabArena::State::kInFlight)) {
    if (!credits_[slab].received) QuarantineSlab(slab);
  }
}

void Receiver::Impl::OnQuiet(Serial link_serial, size_t way) {
  if (TANDEM_FAILPOINT("handoff.quiet", "drop stall")) return;
  Link* link = FindLink(link_serial);
  if (link == nullptr) {
    auto found = ghosts_.find(link_serial);
    if (found == ghosts_.end()) return;
    link = found->second.get();
  }
  const Usable* usable = &link->ways[way];
  for (int slab : arena_.Held(link->pair, SlabArena::State::kQuarantined)) {
    if (credits_[slab].usable == usable) FreeSlab(slab);
  }
  MaybeBury(link);
  ServeCredits();
}

void Receiver::Impl::WatchQuarantine() {
  absl::Time first = absl::InfiniteFuture();
  for (size_t slab = 0; slab < credits_.size(); ++slab) {
    // Links that are being dropped only wait for local work.
    if (arena_.state(static_cast<int>(slab)) ==
            SlabArena::State::kQuarantined &&
        !credits_[slab].link->dropping) {
      first = std::min(first, credits_[slab].quarantined_at);
    }
  }
  if (first == absl::InfiniteFuture()) return;
  quarantine_.Start(first + options_.quarantine_timeout - loop_->Now(),
                    [this] { OnQuarantineDeadline(); });
}

void Receiver::Impl::OnQuarantineDeadline() {
  std::set<Serial> overdue;
  for (size_t slab = 0; slab < credits_.size(); ++slab) {
    if (arena_.state(static_cast<int>(slab)) ==
            SlabArena::State::kQuarantined &&
        loop_->Now() - credits_[slab].quarantined_at >=
            options_.quarantine_timeout) {
      overdue.insert(credits_[slab].link_serial);
    }
  }
  for (Serial serial : overdue) {
    Link* link = FindLink(serial);
    if (link != nullptr) {
      Break(link,
            absl::DeadlineExceededError(
                "the prefill worker did not give its slabs back"),
            /*refused=*/false);
    }
    auto ghost = ghosts_.find(serial);
    if (ghost == ghosts_.end()) continue;
    ghost->second->dropping = true;
    MaybeDrop(ghost->second.get());
  }
  WatchQuarantine();
}

void Receiver::Impl::MaybeDrop(Link* link) {
  // Scatters still read the memory; the last one comes back here.
  if (!link->dropping ||
      !arena_.Held(link->pair, SlabArena::State::kInFlight).empty()) {
    return;
  }
  std::set<Usable*> drop;
  for (int slab : arena_.Held(link->pair, SlabArena::State::kQuarantined)) {
    drop.insert(credits_[slab].usable);
  }
  absl::Status fatal;
  for (Usable* usable : drop) {
    ++counters_.arenas_dropped;
    const absl::Status status = usable->channel->Drop();
    if (!status.ok()) fatal = status;
  }
  for (int slab : arena_.Held(link->pair, SlabArena::State::kQuarantined)) {
    FreeSlab(slab);
  }
  MaybeBury(link);
  ServeCredits();
  if (!fatal.ok()) delegate_->OnFatal(fatal);
}

}  // namespace tandem::handoff
