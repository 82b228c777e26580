// SPDX-License-Identifier: Apache-2.0
// The sender's links (dial, hello, ways, loss) and what flows through them:
// announcements, credits in use, own slabs.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "handoff/sender_impl.h"
#include "handoff/wire.h"

namespace tandem::handoff {
namespace {

// Slices announced beyond the pair's slabs only wait in the receiver's queue;
// a few keep it from running dry.
constexpr int kAnnouncedPerSlab = 2;

// What a receiver may ask of this process.
constexpr int64_t kMaxSlabBytes = int64_t{1} << 30;
constexpr int kMaxSlabs = 4096;

// Stands in for a stream that could not be opened.
class NoStream final : public SenderStream {
 public:
  void Start(StreamHandler<v1::LinkResponse>*) override {}
  void Send(v1::LinkRequest) override {}
  size_t unsent() const override { return 0; }
  void PauseReading(bool) override {}
  void Close(absl::Status) override {}
  std::string peer() const override { return "nowhere"; }
};

}  // namespace

int Sender::Impl::links() const {
  int ready = 0;
  for (const auto& [key, link] : links_) ready += link->ready ? 1 : 0;
  return ready;
}

// ---- Links.

Sender::Impl::Link* Sender::Impl::LinkTo(const v1::WorkerRef& receiver) {
  const std::string key =
      absl::StrCat(receiver.worker_id(), "\n", receiver.incarnation());
  auto found = links_.find(key);
  if (found != links_.end()) return found->second.get();

  std::unique_ptr<SenderStream> stream =
      TANDEM_FAILPOINT("handoff.dial", "fail delay") ? nullptr
                                                     : dial_(receiver);
  const bool dialled = stream != nullptr;
  if (!dialled) stream = std::make_unique<NoStream>();
  auto owned = std::make_unique<Link>(this, loop_, options_.link_timeout,
                                      options_.silence, std::move(stream));
  Link* link = owned.get();
  links_[key] = std::move(owned);
  link->key = key;
  link->worker_id = receiver.worker_id();
  link->serial = next_serial_++;
  link->pair = arena_.AddPair();
  link->last_progress = link->last_used = loop_->Now();
  link->deadline = std::make_unique<Timer>(loop_);
  link->deadline->Start(
      dialled ? options_.link_timeout : absl::ZeroDuration(), [this, link] {
        Break(link,
              absl::UnavailableError(absl::StrCat(
                  "no handoff link to ", link->worker_id, " within ",
                  absl::ToInt64Milliseconds(options_.link_timeout), " ms")),
              /*lost=*/true);
      });
  link->Start();
  v1::LinkRequest request;
  v1::LinkHello* hello = request.mutable_hello();
  *hello = options_.hello;
  hello->set_receiver_incarnation(receiver.incarnation());
  if (hello->protocol_max() == 0) {
    hello->set_protocol_min(OurProtocol().min);
    hello->set_protocol_max(OurProtocol().max);
  }
  link->Send(std::move(request));
  return link;
}

void Sender::Impl::OnWelcome(Link* link, const v1::LinkWelcome& welcome) {
  TANDEM_FAILPOINT("handoff.welcome", "crash delay");
  if (std::exchange(link->welcomed, true)) {
    ++counters_.duplicates;
    return;
  }
  if (welcome.slab_bytes() < 1 || welcome.slab_bytes() > kMaxSlabBytes ||
      welcome.num_slabs() < 1 || welcome.num_slabs() > kMaxSlabs) {
    Break(link,
          absl::InternalError(absl::StrCat(link->worker_id, " offers ",
                                           welcome.num_slabs(), " slabs of ",
                                           welcome.slab_bytes(), " bytes")),
          /*lost=*/true);
    return;
  }
  link->slab_bytes = welcome.slab_bytes();
  link->num_slabs = welcome.num_slabs();
  link->set_batches(welcome.protocol() >= kProtocolBatches);
  std::vector<SenderWay*> connect;
  for (const std::string& name : welcome.ways()) {
    const auto& ours = options_.hello.ways();
    if (std::find(ours.begin(), ours.end(), name) == ours.end()) continue;
    for (const std::unique_ptr<SenderWay>& way : ways_) {
      if (way->name() != name || link->ways.size() >= ways_.size()) continue;
      connect.push_back(way.get());
      link->ways.push_back({name, nullptr, nullptr});
    }
  }
  // From here the ways have their own half of the time.
  link->deadline->Start(options_.link_timeout, [this, link] {
    Break(link, absl::UnavailableError("handoff ways were not set up in time"),
          /*lost=*/true);
  });
  // One too many, so that ways that connect at once do not end the count.
  link->ways_pending = static_cast<int>(connect.size()) + 1;
  const Serial serial = link->serial;
  for (size_t i = 0; i < connect.size(); ++i) {
    connect[i]->Connect(
        welcome, options_.link_timeout / 2,
        alive_.Guard(
            [this, serial,
             i](absl::StatusOr<std::unique_ptr<SenderChannel>> channel) {
              OnWay(serial, i, std::move(channel));
            }));
  }
  if (--link->ways_pending == 0) OnReady(link);
}

void Sender::Impl::OnWay(
    Serial link_serial, size_t index,
    absl::StatusOr<std::unique_ptr<SenderChannel>> channel) {
  Link* link = FindLink(link_serial);
  if (link == nullptr) return;
  if (TANDEM_FAILPOINT("handoff.way", "fail stall")) {
    channel = failpoint::Error();
  }
  if (channel.ok()) {
    Usable& usable = link->ways[index];
    usable.host = std::make_unique<Host>();
    usable.host->impl = this;
    usable.host->link_serial = link_serial;
    usable.host->way = usable.name;
    usable.channel = *std::move(channel);
    usable.channel->Attach(usable.host.get());
  } else {
    ++counters_.ways_failed;
  }
  if (--link->ways_pending == 0) OnReady(link);
}

Sender::Impl::Link* Sender::Impl::FindLink(Serial serial) {
  for (auto& [key, link] : links_) {
    if (link->serial == serial) return link.get();
  }
  return nullptr;
}

void Sender::Impl::Host::Say(v1::NcclControl message) {
  Link* link = impl->FindLink(link_serial);
  if (link == nullptr) return;
  v1::LinkRequest request;
  *request.mutable_nccl() = std::move(message);
  link->Send(std::move(request));
}

void Sender::Impl::Host::OnBroken(const absl::Status& status) {
  impl->OnWayBroken(link_serial, way, status);
}

void Sender::Impl::OnWayBroken(Serial link_serial, const std::string& way,
                               const absl::Status& status) {
  Link* link = FindLink(link_serial);
  if (link == nullptr) return;
  ++counters_.ways_failed;
  const std::set<Serial> attempts = link->attempts;
  for (Serial serial : attempts) {
    State* state = Find(serial);
    // A committed one may have landed as a whole: the receiver will say.
    if (state == nullptr || state->failing || state->channel == nullptr ||
        state->way != way || state->phase == Phase::kCommitted) {
      continue;
    }
    Withdraw(state, status);
    Fail(state, status, way);
  }
}

void Sender::Impl::OnReady(Link* link) {
  std::erase_if(link->ways,
                [](const Usable& way) { return way.channel == nullptr; });
  link->ready = true;
  link->deadline->Stop();
  ++counters_.links;
  const std::set<Serial> waiting = link->attempts;
  for (Serial serial : waiting) {
    State* state = Find(serial);
    if (state != nullptr && state->phase == Phase::kLinking) StartOffer(state);
  }
}

void Sender::Impl::OnLinkMessage(SenderLinkBase* base,
                                 v1::LinkResponse message) {
  Link* link = static_cast<Link*>(base);
  ReleaseTaken(link);
  switch (message.message_case()) {
    case v1::LinkResponse::kWelcome:
      OnWelcome(link, message.welcome());
      break;
    case v1::LinkResponse::kAnswer:
      OnAnswer(link, message.answer());
      break;
    case v1::LinkResponse::kCredit:
      OnCredit(link, message.credit());
      break;
    case v1::LinkResponse::kAck:
      OnAck(link, message.ack());
      break;
    case v1::LinkResponse::kDead: {
      const v1::HandoffDead& dead = message.dead();
      State* state = Named(link, dead.key());
      if (state != nullptr) {
        const bool broken =
            state->channel != nullptr && !state->channel->Usable();
        Fail(state, FailureFrom(dead.code(), dead.message()),
             broken ? std::string(state->way) : "");
      }
      break;
    }
    case v1::LinkResponse::kNccl:
      for (Usable& usable : link->ways) {
        if (usable.name == "nccl" && usable.channel != nullptr) {
          usable.channel->Hear(message.nccl());
        }
      }
      break;
    case v1::LinkResponse::kBeat:
    case v1::LinkResponse::MESSAGE_NOT_SET:  // of a newer protocol
      break;
  }
}

void Sender::Impl::OnLinkHandled(SenderLinkBase* link) {
  Announce(static_cast<Link*>(link));
}

void Sender::Impl::OnLinkDrained(SenderLinkBase* link) {
  ReleaseTaken(static_cast<Link*>(link));
}

void Sender::Impl::OnLinkTick(SenderLinkBase* base) {
  Link* link = static_cast<Link*>(base);
  ReleaseTaken(link);
  if (!link->attempts.empty() || link->ops > 0 ||
      loop_->Now() - link->last_used < options_.idle_timeout) {
    return;
  }
  Break(link, absl::CancelledError("idle"), /*lost=*/false);
}

void Sender::Impl::OnLinkBroken(SenderLinkBase* link, absl::Status status) {
  Break(static_cast<Link*>(link), status, /*lost=*/true);
}

void Sender::Impl::Break(Link* link, const absl::Status& status, bool lost) {
  if (link->ended()) return;
  TANDEM_FAILPOINT("handoff.sender_break", "crash");
  if (lost) {
    ++counters_.links_lost;
    Tell({"handoff link lost", link->worker_id, "", "", status});
  }
  link->End(absl::CancelledError("handoff link ended"));
  link->deadline->Stop();
  auto found = links_.find(link->key);
  ghosts_.push_back(std::move(found->second));
  links_.erase(found);
  for (const auto& [ordinal, own] : std::exchange(link->sending, {})) {
    FreeOwn(own);
  }
  std::vector<std::pair<Attempt, std::string>> failed;
  const std::set<Serial> attempts = link->attempts;
  for (Serial serial : attempts) {
    State* state = Find(serial);
    if (state == nullptr) continue;
    failed.emplace_back(state->attempt, state->way);
    CountFailed(*state, status);
    Remove(state);
  }
  arena_.RemovePair(link->pair);
  for (Usable& usable : link->ways) {
    if (usable.channel != nullptr) usable.channel->LinkLost();
  }
  if (link->ops == 0) Bury(link);
  ServeStaging();
  // Last: the delegate may offer again, or do anything else.
  for (const auto& [attempt, way] : failed) {
    delegate_->OnFailed(
        attempt,
        absl::Status(status.code(),
                     absl::StrCat("handoff link lost: ", Message(status))),
        way);
  }
}

void Sender::Impl::Bury(Link* link) {
  // Calls into it may be on the stack.
  loop_->Post(alive_.Guard([this, serial = link->serial] {
    std::erase_if(ghosts_, [serial](const std::unique_ptr<Link>& ghost) {
      return ghost->serial == serial;
    });
  }));
}

// ---- Announcements: attempts take turns.

void Sender::Impl::Announce(Link* link) {
  const int most = kAnnouncedPerSlab * link->num_slabs;
  // Those before them are credited first: half of them go together.
  if (link->turns.empty() || link->announced > most / 2) return;
  while (!link->turns.empty() && link->announced < most) {
    const Serial serial = link->turns.front();
    link->turns.pop_front();
    State* state = Find(serial);
    if (state == nullptr || state->cut.empty()) continue;
    const SliceRange range = state->cut.front();
    state->cut.pop_front();
    if (!state->cut.empty()) link->turns.push_back(serial);
    const uint32_t slice = state->next_slice++;
    state->announced[slice] = range;
    ++link->announced;
    // Where all announcements get lost no credit will start it.
    if (!state->clock.running()) {
      state->last_progress = loop_->Now();
      StartClock(state);
    }
    v1::LinkRequest request;
    v1::SliceReady* ready = request.mutable_slice_ready();
    ToKey(state->attempt, ready->mutable_key());
    ready->set_slice(slice);
    ready->set_layer_begin(range.layer_begin);
    ready->set_layer_end(range.layer_end);
    ready->set_position_begin(range.position_begin);
    ready->set_position_end(range.position_end);
    ready->set_bytes(Rows(range) * RowBytes(state->grant, options_.head_dim));
    const failpoint::Hit hit =
        TANDEM_FAILPOINT("handoff.announce", "crash drop duplicate");
    if (hit == failpoint::kDrop) continue;
    if (hit == failpoint::kDuplicate) link->Hold(request);
    link->Hold(std::move(request));
  }
  link->Flush();
}

// Slices wait for those that are being gathered, up to half of the slabs: with
// the other half the receiver is busy meanwhile.
void Sender::Impl::FlushSlices(Link* link) {
  if (link->gathering > 0 &&
      link->held() < static_cast<size_t>(link->num_slabs) / 2) {
    return;
  }
  link->Flush();
}

// ---- Credits in use: own slab (if the way needs one), gather, send.

void Sender::Impl::StartOp(Op op) {
  std::byte* staging = op.channel->Staging(op.slab);
  const Serial serial = op.serial;
  const SlabArena::Pair pair = op.link->pair;
  SenderChannel* const channel = op.channel;
  const uint32_t slab = op.slab;
  ops_[serial] = std::move(op);
  if (staging != nullptr) {
    channel->Prepare(slab, alive_.Guard([this, serial, staging] {
      auto found = ops_.find(serial);
      if (found != ops_.end()) Gather(&found->second, staging);
    }));
    return;
  }
  arena_.Request(pair, serial);
  ServeStaging();
}

void Sender::Impl::ServeStaging() {
  // Gathers may end at once and free their slab: one loop serves them all.
  if (std::exchange(serving_, true)) return;
  while (std::optional<SlabArena::Loan> loan = arena_.Next()) {
    Op* op = &ops_.at(loan->token);
    op->own = loan->id;
    arena_.Fill(loan->id);
    Gather(op, (*staging_)[loan->id]);
  }
  serving_ = false;
}

void Sender::Impl::Gather(Op* op, std::byte* staging) {
  op->gathering = true;
  ++op->link->gathering;
  op->staging = staging;
  // Copies: the op may be gone before Gather returns.
  const Attempt attempt = op->attempt;
  const Grant grant = op->grant;
  delegate_->Gather(
      attempt, op->range, grant, staging,
      alive_.Guard([this, serial = op->serial](kernels::KvDigest digest) {
        OnGathered(serial, digest);
      }));
}

void Sender::Impl::OnGathered(Serial op_serial, kernels::KvDigest digest) {
  auto found = ops_.find(op_serial);
  if (found == ops_.end()) return;
  const Op& op = found->second;
  --op.link->gathering;
  State* state = Find(op.attempt_serial);
  if (op.link->ended() || state == nullptr || state->failing) {
    EndOp(op_serial, /*return_credit=*/true);
    return;
  }
  state->digest += digest;
  Progress(state);
  if (TANDEM_FAILPOINT("handoff.payload", "corrupt")) {
    failpoint::Corrupt(op.staging, op.bytes);
  }
  v1::Slice slice;
  ToKey(op.attempt, slice.mutable_key());
  slice.set_slice(op.slice);
  slice.set_slab(op.slab);
  slice.set_generation(op.generation);
  op.channel->Send(
      std::move(slice), op.staging, op.bytes,
      alive_.Guard([this, op_serial](absl::StatusOr<v1::Slice> sendable) {
        OnSendable(op_serial, std::move(sendable));
      }));
}

void Sender::Impl::OnSendable(Serial op_serial,
                              absl::StatusOr<v1::Slice> slice) {
  auto found = ops_.find(op_serial);
  if (found == ops_.end()) return;
  Op* op = &found->second;
  Link* link = op->link;
  const Serial attempt_serial = op->attempt_serial;
  if (link->ended() || !slice.ok()) {
    // First the withdrawal: a credit that comes back names no way.
    State* state = Find(attempt_serial);
    if (state != nullptr && !state->failing && !slice.ok()) {
      Withdraw(state, slice.status());
      Fail(state, slice.status(), std::string(state->way));
    }
    EndOp(op_serial, /*return_credit=*/true);
    return;
  }
  v1::LinkRequest request;
  *request.mutable_slice() = *std::move(slice);
  const failpoint::Hit hit =
      TANDEM_FAILPOINT("handoff.slice", "crash drop duplicate");
  const bool wait = op->channel->may_wait();
  if (hit == failpoint::kDuplicate) link->Hold(request);
  if (hit != failpoint::kDrop) link->Hold(std::move(request));
  wait ? FlushSlices(link) : link->Flush();
  if (op->own >= 0) {
    link->sending.emplace_back(link->sent(), std::exchange(op->own, -1));
  }
  const int64_t rows = Rows(op->range);
  const int64_t bytes = static_cast<int64_t>(op->bytes);
  EndOp(op_serial, /*return_credit=*/false);
  State* state = Find(attempt_serial);
  if (state != nullptr) {
    HandoffCounters::Way& way = counters_.ways[state->way];
    ++way.slices;
    way.bytes += bytes;
    --state->credited;
    state->waiting_rows -= rows;
    state->sent_rows += rows;
    state->sent_bytes += bytes;
    ++state->sent_slices;
    Progress(state);
    MaybeCommit(state);
  }
  ReleaseTaken(link);
}

void Sender::Impl::EndOp(Serial op_serial, bool return_credit) {
  auto found = ops_.find(op_serial);
  const Op op = found->second;
  ops_.erase(found);
  Link* link = op.link;
  link->credits.erase(op.generation);
  --link->ops;
  if (op.own >= 0) {
    FreeOwn(op.own);
  } else if (!op.gathering) {
    arena_.CancelRequest(link->pair, op_serial);
  }
  if (link->ended()) {
    if (link->ops == 0) Bury(link);
  } else if (return_credit) {
    v1::LinkRequest request;
    request.mutable_credit_return()->set_slab(op.slab);
    request.mutable_credit_return()->set_generation(op.generation);
    link->Send(std::move(request));
  }
  ServeStaging();
}

void Sender::Impl::FreeOwn(int own) { arena_.Free(own); }

void Sender::Impl::ReleaseTaken(Link* link) {
  const uint64_t taken = link->taken();
  bool freed = false;
  while (!link->sending.empty() && link->sending.front().first <= taken) {
    FreeOwn(link->sending.front().second);
    link->sending.pop_front();
    freed = true;
  }
  if (freed) ServeStaging();
}

}  // namespace tandem::handoff
