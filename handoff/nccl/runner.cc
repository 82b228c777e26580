// SPDX-License-Identifier: Apache-2.0
#include "handoff/nccl/runner.h"

#include <algorithm>
#include <utility>

namespace tandem::handoff::nccl {
namespace {

// An operation of one slab takes some ten to some hundred microseconds: look
// often at first, then ever less.
constexpr absl::Duration kFirstPoll = absl::Microseconds(20);
constexpr absl::Duration kLastPoll = absl::Milliseconds(1);
constexpr int kPollShare = 8;  // of the time that it has taken
constexpr absl::Duration kJoinPoll = absl::Milliseconds(2);
// Asynchronous errors while nothing is under way.
constexpr absl::Duration kIdlePoll = absl::Milliseconds(250);
constexpr absl::Duration kQuietPoll = absl::Milliseconds(1);

}  // namespace

Runner::Runner(Library* library, std::string peer, Loop* hand, Listener report,
               std::shared_ptr<std::atomic<bool>> gone)
    : library_(library),
      peer_(std::move(peer)),
      hand_(hand),
      report_(std::move(report)),
      gone_(std::move(gone)),
      poll_(hand) {}

void Runner::Say(Report::Kind kind) {
  Report report;
  report.kind = kind;
  report_(std::move(report));
}

void Runner::Join(const std::string& id, int rank) {
  if (doing_ != Doing::kNothing || failed_) return;
  std::string unique_id = id;
  if (unique_id.empty()) {
    absl::StatusOr<std::string> made = library_->UniqueId();
    if (!made.ok()) {
      Fail(made.status());
      return;
    }
    unique_id = *std::move(made);
    Report report;
    report.kind = Report::Kind::kId;
    report.id = unique_id;
    report_(std::move(report));
  }
  absl::StatusOr<std::unique_ptr<Communicator>> made =
      library_->NewCommunicator(peer_);
  if (!made.ok()) {
    Fail(made.status());
    return;
  }
  communicator_ = *std::move(made);
  doing_ = Doing::kJoining;
  Begin(communicator_->Join(unique_id, rank));
}

void Runner::Send(const std::byte* from, size_t bytes) {
  if (doing_ != Doing::kNothing || failed_) return;
  doing_ = Doing::kOperation;
  Begin(communicator_->Send(from, bytes));
}

void Runner::Receive(std::byte* to, size_t bytes) {
  if (doing_ != Doing::kNothing || failed_) return;
  doing_ = Doing::kOperation;
  Begin(communicator_->Receive(to, bytes));
}

void Runner::Begin(const absl::Status& status) {
  if (!status.ok()) {
    Fail(status);
    return;
  }
  if (doing_ == Doing::kOperation) Say(Report::Kind::kPosted);
  since_ = hand_->Now();
  PollAgain();
}

void Runner::PollAgain() {
  absl::Duration wait = kIdlePoll;
  if (doing_ == Doing::kJoining) wait = kJoinPoll;
  if (doing_ == Doing::kOperation) {
    wait =
        std::clamp((hand_->Now() - since_) / kPollShare, kFirstPoll, kLastPoll);
  }
  poll_.Start(wait, [this] { Poll(); });
}

void Runner::Poll() {
  absl::StatusOr<Communicator::Progress> progress = communicator_->Poll();
  if (!progress.ok()) {
    Fail(progress.status());
    return;
  }
  if (*progress == Communicator::Progress::kDone && doing_ != Doing::kNothing) {
    Report report;
    report.kind =
        doing_ == Doing::kJoining ? Report::Kind::kJoined : Report::Kind::kDone;
    if (doing_ == Doing::kJoining) {
      report.memory_bytes = communicator_->memory_bytes();
    }
    doing_ = Doing::kNothing;
    report_(std::move(report));
  }
  PollAgain();
}

void Runner::Fail(const absl::Status& status) {
  if (std::exchange(failed_, true)) return;
  poll_.Stop();
  Report report;
  report.kind = Report::Kind::kFailed;
  // A copy of its own: counted references of a status that two threads hold
  // are beyond what ThreadSanitizer sees in abseil.
  report.status = absl::Status(status.code(), status.message());
  report_(std::move(report));
}

void Runner::End() {
  if (doing_ == Doing::kEnding || doing_ == Doing::kGone) return;
  doing_ = Doing::kEnding;
  poll_.Stop();
  if (communicator_ != nullptr) communicator_->Abort();
  CheckQuiet();
}

void Runner::CheckQuiet() {
  if (communicator_ != nullptr && !communicator_->Quiet()) {
    poll_.Start(kQuietPoll, [this] { CheckQuiet(); });
    return;
  }
  doing_ = Doing::kGone;
  communicator_.reset();
  gone_->store(true);
  Say(Report::Kind::kGone);
}

}  // namespace tandem::handoff::nccl
