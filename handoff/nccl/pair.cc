// SPDX-License-Identifier: Apache-2.0
#include "handoff/nccl/pair.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "handoff/wire.h"

namespace tandem::handoff::nccl {
namespace {

constexpr size_t kMaxIdBytes = 4096;
constexpr int kMaxDoublings = 16;

}  // namespace

std::vector<size_t> WarmSizes(int64_t slab_bytes) {
  // LL below 16 KiB, then one channel, then as many as are allowed.
  std::vector<size_t> sizes;
  for (const int64_t bytes : {int64_t{8}, int64_t{128} << 10, slab_bytes}) {
    if (bytes <= slab_bytes &&
        (sizes.empty() || static_cast<size_t>(bytes) > sizes.back())) {
      sizes.push_back(static_cast<size_t>(bytes));
    }
  }
  return sizes;
}

Pair::Pair(Station* station, Owner* owner, Role role, const std::string& peer)
    : station_(station),
      loop_(station->loop()),
      owner_(owner),
      role_(role),
      name_(role == Role::kSender
                ? absl::StrCat(station->options().self, ">", peer)
                : absl::StrCat(peer, ">", station->options().self)),
      warm_sizes_(WarmSizes(station->options().slab_bytes)),
      deadline_(loop_),
      stall_(loop_),
      retry_(loop_),
      idle_(loop_) {
  for (const bool forward : {true, false}) {
    for (const size_t bytes : warm_sizes_) script_.push_back({forward, bytes});
  }
  station_->Add(this);
}

Pair::~Pair() {
  for (std::byte* buffer : kept_) station_->ReturnBuffer(buffer);
  station_->Remove(this);
}

void Pair::Say(v1::NcclControl message) {
  if (owner_ == nullptr || lost_) return;
  message.set_life(life_);
  owner_->Say(std::move(message));
}

// ---- What the peer says.

void Pair::Hear(const v1::NcclControl& message) {
  if (lost_) return;
  if (message.has_want()) {
    OnWant(message.life());
    return;
  }
  if (message.has_end() && wanted_ && message.life() == wanted_life_) {
    wanted_ = false;  // taken back before it began
    if (phase_ == Phase::kQueued) {
      station_->CancelPlace(this);
      phase_ = Phase::kDown;
    }
    return;
  }
  if (message.life() != life_ || phase_ == Phase::kDown ||
      phase_ == Phase::kQueued || phase_ == Phase::kEnding) {
    ++station_->mutable_counters()->late_messages;
    return;
  }
  switch (message.what_case()) {
    case v1::NcclControl::kOpen:
      if (phase_ == Phase::kAsking && !message.open().unique_id().empty() &&
          message.open().unique_id().size() <= kMaxIdBytes) {
        StartLife(message.open().unique_id());
        return;
      }
      break;
    case v1::NcclControl::kGo:
      if (message.go().operation() > heard_go_) {
        heard_go_ = message.go().operation();
        if (phase_ == Phase::kWarming) WarmStep();
        if (phase_ == Phase::kUp) TrySend();
        return;
      }
      break;
    case v1::NcclControl::kUp:
      heard_up_ = true;
      MaybeUp();
      return;
    case v1::NcclControl::kEnd:
      Break(message.end().code() == 0
                ? absl::UnavailableError("idle")
                : FailureFrom(message.end().code(),
                              absl::StrCat("the peer ended it: ",
                                           message.end().message())),
            message.end().code() == 0 ? Cause::kIdle : Cause::kFault,
            /*tell=*/false);
      return;
    case v1::NcclControl::kWant:
    case v1::NcclControl::WHAT_NOT_SET:
      break;
  }
  ++station_->mutable_counters()->late_messages;
}

void Pair::OnWant(uint64_t life) {
  if (role_ != Role::kReceiver || life <= std::max(life_, wanted_life_)) {
    ++station_->mutable_counters()->late_messages;
    return;
  }
  wanted_life_ = life;
  wanted_ = true;
  if (phase_ == Phase::kDown) {
    Queue();
  } else if (phase_ != Phase::kQueued && phase_ != Phase::kEnding) {
    Break(absl::UnavailableError("the peer asks for a new communicator"),
          Cause::kFault, /*tell=*/false);
  }
}

// ---- From nothing to up.

void Pair::Queue() {
  phase_ = Phase::kQueued;
  station_->WantPlace(this);
}

void Pair::Interest() {
  last_used_ = loop_->Now();
  if (role_ != Role::kSender || phase_ != Phase::kDown || lost_ ||
      loop_->Now() < not_before_) {
    return;
  }
  retry_.Stop();
  Queue();
}

void Pair::OnPlace() {
  if (role_ == Role::kReceiver) {
    life_ = wanted_life_;
    wanted_ = false;
    StartLife("");
    return;
  }
  phase_ = Phase::kAsking;
  ++life_;
  SetDeadline(station_->options().ask_timeout);
  v1::NcclControl message;
  message.mutable_want();
  Say(std::move(message));
}

void Pair::StartLife(const std::string& id) {
  phase_ = Phase::kJoining;
  step_ = 0;
  said_up_ = heard_up_ = idle_end_ = false;
  heard_go_ = posted_ = last_operation_ = 0;
  ++station_->mutable_counters()->joins;
  ++station_->mutable_counters()->communicators;
  life_state_ = std::make_unique<Life>();
  life_state_->hand = station_->MakeHand(absl::StrCat("nccl ", name_));
  life_state_->gone = std::make_shared<std::atomic<bool>>(false);
  life_state_->runner = std::make_unique<Runner>(
      station_->library(), name_, life_state_->hand.get(),
      [loop = loop_,
       heard = alive_.Guard([this, life = life_](const Report& report) {
         OnReport(life, report);
       })](Report report) {
        loop->Post(
            [heard, report = std::move(report)]() mutable { heard(report); });
      },
      life_state_->gone);
  SetDeadline(station_->options().join_timeout);
  Tell([id, rank = role_ == Role::kReceiver ? 0 : 1](Runner* runner) {
    runner->Join(id, rank);
  });
  warm_buffer_ = station_->TakeBuffer();
  if (warm_buffer_ == nullptr) {
    Break(absl::ResourceExhaustedError("no buffer is left for the warm-up"),
          Cause::kFault, /*tell=*/true);
  }
}

template <typename Command>
void Pair::Tell(Command command) {
  life_state_->hand->Post([runner = life_state_->runner.get(),
                           command = std::move(command)] { command(runner); });
}

void Pair::OnReport(uint64_t life, Report report) {
  if (life != life_ || life_state_ == nullptr) return;
  const bool working = phase_ == Phase::kWarming || phase_ == Phase::kUp;
  switch (report.kind) {
    case Report::Kind::kId:
      if (phase_ == Phase::kJoining) {
        v1::NcclControl message;
        message.mutable_open()->set_unique_id(report.id);
        Say(std::move(message));
      }
      break;
    case Report::Kind::kJoined:
      life_state_->memory_bytes = report.memory_bytes;
      station_->mutable_counters()->memory_bytes += report.memory_bytes;
      if (phase_ == Phase::kJoining) {
        phase_ = Phase::kWarming;
        WarmStep();
      }
      break;
    case Report::Kind::kPosted:
      if (working) OnPosted();
      break;
    case Report::Kind::kDone:
      if (working) OnDone();
      break;
    case Report::Kind::kFailed:
      Break(report.status, Cause::kFault, /*tell=*/true);
      break;
    case Report::Kind::kGone:
      OnGone();
      break;
  }
}

void Pair::WarmStep() {
  if (phase_ != Phase::kWarming || move_ != Move::kNone) return;
  if (step_ == script_.size()) {
    if (!std::exchange(said_up_, true)) {
      v1::NcclControl message;
      message.mutable_up();
      Say(std::move(message));
    }
    MaybeUp();
    return;
  }
  const uint64_t operation = step_ + 1;
  if (!Transmits(script_[step_])) {
    WantTurn();
  } else if (heard_go_ >= operation) {
    PostSend(operation, warm_buffer_, script_[step_].bytes);
  }
}

void Pair::MaybeUp() {
  if (phase_ != Phase::kWarming || !said_up_ || !heard_up_) return;
  phase_ = Phase::kUp;
  station_->ReturnBuffer(std::exchange(warm_buffer_, nullptr));
  deadline_.Stop();
  station_->EndJoin(this);
  posted_ = last_operation_ = heard_go_ = script_.size();
  ++station_->mutable_counters()->ups;
  last_used_ = loop_->Now();
  station_->watcher()->OnUp(name_, life_, life_state_->memory_bytes);
  if (role_ == Role::kSender) CheckIdle();
}

// ---- Operations.

void Pair::WantTurn() {
  if (wants_turn_ || station_->has_turn(this)) return;
  wants_turn_ = true;
  station_->WantTurn(this);
}

void Pair::OnTurn() {
  wants_turn_ = false;
  if (phase_ == Phase::kWarming) {
    PostReceive(step_ + 1, warm_buffer_, script_[step_].bytes);
    return;
  }
  const Waiting& next = waiting_.front();
  buffer_ = station_->TakeBuffer();
  if (buffer_ == nullptr) {
    Break(absl::ResourceExhaustedError("no buffer is left for a receive"),
          Cause::kFault, /*tell=*/true);
    return;
  }
  PostReceive(next.operation, buffer_, next.bytes);
}

void Pair::PostReceive(uint64_t operation, std::byte* to, size_t bytes) {
  PostMove(Move::kReceive, operation, bytes);
  Tell([to, bytes](Runner* runner) { runner->Receive(to, bytes); });
}

void Pair::PostSend(uint64_t operation, const std::byte* from, size_t bytes) {
  PostMove(Move::kSend, operation, bytes);
  sending_ = from;
  Tell([from, bytes](Runner* runner) { runner->Send(from, bytes); });
}

void Pair::PostMove(Move move, uint64_t operation, size_t bytes) {
  move_ = move;
  move_bytes_ = bytes;
  posted_ = operation;
  const absl::Duration limit = phase_ == Phase::kWarming
                                   ? station_->options().warm_stall_timeout
                                   : station_->options().stall_timeout;
  stall_.Start(limit, [this, limit] {
    Break(absl::DeadlineExceededError(
              absl::StrCat("operation ", posted_, " did not end within ",
                           absl::ToInt64Milliseconds(limit), " ms")),
          Cause::kFault, /*tell=*/true);
  });
}

void Pair::OnPosted() {
  if (move_ != Move::kReceive) return;
  v1::NcclControl message;
  message.mutable_go()->set_operation(posted_);
  Say(std::move(message));
}

void Pair::OnDone() {
  stall_.Stop();
  StationCounters* counters = station_->mutable_counters();
  ++counters->operations;
  counters->bytes += static_cast<int64_t>(move_bytes_);
  last_used_ = loop_->Now();
  const Move move = std::exchange(move_, Move::kNone);
  const std::byte* const sent = std::exchange(sending_, nullptr);
  if (move == Move::kReceive) station_->EndTurn(this);
  if (phase_ == Phase::kWarming) {
    ++step_;
    WarmStep();
    return;
  }
  failures_ = 0;
  if (move == Move::kSend) {
    TrySend();
    if (owner_ != nullptr) owner_->OnSent(sent);
    return;
  }
  Waiting done = std::move(waiting_.front());
  waiting_.pop_front();
  std::byte* const buffer = std::exchange(buffer_, nullptr);
  if (!waiting_.empty()) WantTurn();
  done.done(buffer);
}

uint64_t Pair::Announce(const std::byte* from, size_t bytes) {
  last_used_ = loop_->Now();
  // A slab that is filled again was given back without a receive.
  std::erase_if(
      full_, [from](const auto& entry) { return entry.second.from == from; });
  full_[++last_operation_] = {from, bytes};
  return last_operation_;
}

void Pair::TrySend() {
  if (move_ != Move::kNone || heard_go_ <= posted_) return;
  auto found = full_.find(heard_go_);
  if (found == full_.end()) {
    Break(absl::InternalError(absl::StrCat("go for operation ", heard_go_,
                                           ", which is not announced")),
          Cause::kFault, /*tell=*/true);
    return;
  }
  const Full full = found->second;
  full_.erase(full_.begin(), std::next(found));
  PostSend(heard_go_, full.from, full.bytes);
}

void Pair::Receive(uint64_t operation, size_t bytes, Received done) {
  last_used_ = loop_->Now();
  last_operation_ = operation;
  waiting_.push_back({operation, bytes, std::move(done)});
  if (move_ == Move::kNone) WantTurn();
}

// ---- The end of a life.

std::string Pair::Stage() const {
  switch (phase_) {
    case Phase::kDown:
      return "down";
    case Phase::kQueued:
      return "queued";
    case Phase::kAsking:
      return "asking";
    case Phase::kJoining:
      return "joining";
    case Phase::kEnding:
      return "ending";
    case Phase::kWarming:
    case Phase::kUp:
      break;
  }
  return absl::StrCat(phase_ == Phase::kWarming ? "warm-up, " : "",
                      move_ == Move::kNone   ? "idle"
                      : move_ == Move::kSend ? "send"
                                             : "receive");
}

void Pair::Break(const absl::Status& status, Cause cause, bool tell) {
  if (phase_ == Phase::kDown || phase_ == Phase::kEnding) return;
  if (phase_ == Phase::kQueued) {
    station_->CancelPlace(this);
    phase_ = Phase::kDown;
    wanted_ = false;
    return;
  }
  const bool was_up = phase_ == Phase::kUp;
  join_failed_ = phase_ == Phase::kAsking || phase_ == Phase::kJoining;
  if (cause == Cause::kFault) {
    ++station_->mutable_counters()->broken;
    station_->watcher()->OnBroken(
        name_, life_, Stage(),
        move_ == Move::kNone ? 0 : static_cast<int64_t>(move_bytes_), status);
    ++failures_;
  } else {
    ++station_->mutable_counters()->dropped;
  }
  idle_end_ = cause == Cause::kIdle;
  if (tell) {
    v1::NcclControl message;
    message.mutable_end()->set_code(
        idle_end_ ? 0 : static_cast<int>(status.code()));
    message.mutable_end()->set_message(Message(status));
    Say(std::move(message));
  }
  phase_ = Phase::kEnding;
  stall_.Stop();
  idle_.Stop();
  wants_turn_ = false;
  // Aborted kernels wait for nobody: another pair may post beside them.
  station_->EndTurn(this);
  station_->EndJoin(this);
  full_.clear();
  std::deque<Waiting> unposted = std::exchange(waiting_, {});
  if (was_up && move_ == Move::kReceive) unposted.pop_front();
  if (life_state_ == nullptr) {
    OnGone();
  } else {
    Tell([](Runner* runner) { runner->End(); });
    SetDeadline(station_->options().burial_timeout);
  }
  if (was_up && owner_ != nullptr) owner_->OnBroken(status);
  if (unposted.empty()) return;
  loop_->Post([unposted = std::move(unposted), status]() mutable {
    for (Waiting& waiting : unposted) waiting.done(status);
  });
}

void Pair::SetDeadline(absl::Duration limit) {
  deadline_.Start(limit, [this, limit] {
    if (phase_ == Phase::kEnding) {
      station_->Die(absl::DeadlineExceededError(
          absl::StrCat("the communicator of ", name_, " did not go within ",
                       absl::ToInt64Milliseconds(limit),
                       " ms: only the end of this process ends it")));
      return;
    }
    Break(absl::DeadlineExceededError(absl::StrCat(
              "not up within ", absl::ToInt64Milliseconds(limit), " ms")),
          Cause::kFault, /*tell=*/true);
  });
}

void Pair::ReturnBuffers() {
  for (std::byte** buffer : {&buffer_, &warm_buffer_}) {
    if (*buffer != nullptr) {
      station_->ReturnBuffer(std::exchange(*buffer, nullptr));
    }
  }
}

void Pair::OnGone() {
  deadline_.Stop();
  const bool existed = life_state_ != nullptr;
  if (existed) {
    StationCounters* counters = station_->mutable_counters();
    ++counters->gone;
    --counters->communicators;
    counters->memory_bytes -= life_state_->memory_bytes;
    life_state_->hand.reset();  // idle: it has told us
    life_state_.reset();
  }
  move_ = Move::kNone;
  sending_ = nullptr;
  ReturnBuffers();
  station_->Leave(this);
  phase_ = Phase::kDown;
  if (role_ == Role::kReceiver && wanted_ && !lost_) Queue();
  if (role_ == Role::kSender && !idle_end_ && !lost_) AskLater();
  if (owner_ == nullptr) {
    station_->Sweep();
  } else if (existed) {
    owner_->OnQuiet();
  }
}

void Pair::AskLater() {
  const StationOptions& options = station_->options();
  const int doublings = std::min(std::max(failures_ - 1, 0), kMaxDoublings);
  const absl::Duration most =
      join_failed_ ? options.join_backoff_max : options.backoff_max;
  const absl::Duration full =
      std::min(most, options.backoff_min * (1 << doublings));
  // Pairs that broke together do not come back together.
  const absl::Duration wait =
      full / 2 +
      full / 2 *
          (static_cast<double>(station_->random()->Below(1024)) / 1024.0);
  not_before_ = loop_->Now() + wait;
  retry_.Start(wait, [this] { Interest(); });
}

// ---- Idle and lost.

absl::Time Pair::idle_since() const {
  if (phase_ != Phase::kUp || move_ != Move::kNone || !waiting_.empty()) {
    return absl::InfiniteFuture();
  }
  return last_used_;
}

void Pair::CheckIdle() {
  const absl::Duration limit = station_->options().idle_timeout;
  const absl::Time since = idle_since();
  const absl::Duration idle = since == absl::InfiniteFuture()
                                  ? absl::ZeroDuration()
                                  : loop_->Now() - since;
  if (idle >= limit) {
    DropIdle("idle");
    return;
  }
  idle_.Start(limit - idle, [this] { CheckIdle(); });
}

void Pair::DropIdle(const std::string& why) {
  Break(absl::UnavailableError(why), Cause::kIdle, /*tell=*/true);
}

void Pair::LinkLost() {
  if (std::exchange(lost_, true)) return;
  retry_.Stop();
  Break(absl::UnavailableError("the link is lost"),
        move_ == Move::kNone ? Cause::kIdle : Cause::kFault, /*tell=*/false);
}

void Pair::Abandon() {
  owner_ = nullptr;
  LinkLost();
}

std::shared_ptr<std::atomic<bool>> Pair::gone_flag() const {
  return life_state_ == nullptr ? nullptr : life_state_->gone;
}

void Pair::Reap() {
  owner_ = nullptr;
  OnGone();
}

void Pair::Leak() {
  // Its thread may be inside a call that never returns.
  static_cast<void>(life_state_->hand.release());
  static_cast<void>(life_state_->runner.release());
  life_state_.reset();
  buffer_ = warm_buffer_ = nullptr;
  kept_.clear();
}

}  // namespace tandem::handoff::nccl
