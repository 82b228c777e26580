// SPDX-License-Identifier: Apache-2.0
#include "handoff/nccl/station.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/thread_loop.h"
#include "handoff/nccl/pair.h"

namespace tandem::handoff::nccl {
namespace {

// At the end of the process.
constexpr absl::Duration kFarewell = absl::Seconds(3);

}  // namespace

absl::StatusOr<std::unique_ptr<Station>> Station::Create(
    const StationOptions& options, Loop* loop, Random* random, Library* library,
    DeviceMemory* memory, NewHand new_hand, Watcher* watcher) {
  std::unique_ptr<Station> station(new Station(
      options, loop, random, library, memory, std::move(new_hand), watcher));
  for (int i = 0; i < options.buffers; ++i) {
    absl::StatusOr<std::byte*> buffer =
        memory->Allocate(static_cast<size_t>(options.slab_bytes));
    if (!buffer.ok()) {
      return absl::Status(
          buffer.status().code(),
          absl::StrCat(
              options.buffers, " handoff buffers of ", options.slab_bytes,
              " bytes do not fit: ", std::string(buffer.status().message())));
    }
    station->buffers_.push_back(*buffer);
    station->free_.push_back(*buffer);
  }
  return station;
}

Station::Station(const StationOptions& options, Loop* loop, Random* random,
                 Library* library, DeviceMemory* memory, NewHand new_hand,
                 Watcher* watcher)
    : options_(options),
      loop_(loop),
      random_(random),
      library_(library),
      memory_(memory),
      new_hand_(std::move(new_hand)),
      watcher_(watcher),
      next_join_(loop->Now()),
      places_(loop) {}

Station::~Station() {
  const absl::Time limit = MonotonicNow() + kFarewell;
  bool left = false;
  for (const std::unique_ptr<Pair>& pair : buried_) {
    const auto gone = pair->gone_flag();
    if (gone == nullptr) continue;
    while (!gone->load() && MonotonicNow() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (gone->load()) {
      pair->Reap();
    } else {
      pair->Leak();
      left = true;
    }
  }
  buried_.clear();
  if (left) {
    // A kernel may still store into a buffer, and whoever frees memory of the
    // device would wait for it.
    Die(absl::DeadlineExceededError(
        "a communicator did not go at the end of this process"));
    return;
  }
  for (std::byte* buffer : buffers_) memory_->Free(buffer);
}

void Station::Add(Pair* pair) { pairs_.insert(pair); }

void Station::Remove(Pair* pair) {
  CancelPlace(pair);
  EndTurn(pair);
  Leave(pair);
  pairs_.erase(pair);
}

// ---- Turns.

void Station::WantTurn(Pair* pair) {
  turns_.push_back(pair);
  if (turn_ == nullptr && turns_.size() == 1) {
    // Not from inside the pair's own call.
    loop_->Post(alive_.Guard([this] { GiveTurn(); }));
  }
}

void Station::EndTurn(Pair* pair) {
  std::erase(turns_, pair);
  if (turn_ != pair) return;
  turn_ = nullptr;
  if (!turns_.empty()) loop_->Post(alive_.Guard([this] { GiveTurn(); }));
}

void Station::GiveTurn() {
  if (turn_ != nullptr || turns_.empty()) return;
  turn_ = turns_.front();
  turns_.pop_front();
  turn_->OnTurn();
}

// ---- Places.

void Station::WantPlace(Pair* pair) {
  wanted_.push_back(pair);
  if (!places_.running()) {
    places_.Start(absl::ZeroDuration(), [this] { GivePlaces(); });
  }
}

void Station::CancelPlace(Pair* pair) { std::erase(wanted_, pair); }

void Station::GivePlaces() {
  const absl::Time now = loop_->Now();
  while (!wanted_.empty() && now >= next_join_ &&
         static_cast<int>(joining_.size()) < options_.max_joining &&
         static_cast<int>(placed_.size()) < options_.max_communicators) {
    Pair* const pair = wanted_.front();
    wanted_.pop_front();
    placed_.insert(pair);
    joining_.insert(pair);
    next_join_ = now + options_.join_interval;
    pair->OnPlace();
  }
  if (wanted_.empty()) return;
  if (static_cast<int>(placed_.size()) >= options_.max_communicators) {
    MakeRoom();
  }
  // Whatever it is that fails, time may change it.
  if (!places_.running()) {
    places_.Start(std::max(next_join_ - now, options_.join_interval),
                  [this] { GivePlaces(); });
  }
}

void Station::MakeRoom() {
  Pair* oldest = nullptr;
  for (Pair* pair : placed_) {
    const absl::Time since = pair->idle_since();
    if (since == absl::InfiniteFuture() ||
        loop_->Now() - since < options_.min_idle) {
      continue;
    }
    if (oldest == nullptr || since < oldest->idle_since()) oldest = pair;
  }
  if (oldest != nullptr) oldest->DropIdle("its place is needed");
}

void Station::EndJoin(Pair* pair) { joining_.erase(pair); }

void Station::Leave(Pair* pair) {
  joining_.erase(pair);
  placed_.erase(pair);
}

// ---- Buffers and ends.

std::byte* Station::TakeBuffer() {
  if (free_.empty()) return nullptr;
  std::byte* const buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Station::ReturnBuffer(std::byte* buffer) { free_.push_back(buffer); }

void Station::Bury(std::unique_ptr<Pair> pair) {
  pair->Abandon();
  buried_.push_back(std::move(pair));
  Sweep();
}

void Station::Sweep() {
  // Calls into them may be on the stack.
  loop_->Post(alive_.Guard([this] {
    buried_.remove_if([](const auto& one) { return one->gone(); });
  }));
}

void Station::Die(const absl::Status& status) {
  if (!std::exchange(dead_, true)) watcher_->OnFatal(status);
}

absl::Status Station::CheckInvariants() const {
  if (counters_.communicators < 0 || counters_.memory_bytes < 0 ||
      counters_.communicators > static_cast<int>(placed_.size()) ||
      static_cast<int>(placed_.size()) > options_.max_communicators ||
      static_cast<int>(joining_.size()) > options_.max_joining) {
    return absl::InternalError(
        absl::StrCat(counters_.communicators, " communicators in ",
                     placed_.size(), " places, ", joining_.size(), " joining"));
  }
  std::set<std::byte*> free(free_.begin(), free_.end());
  if (free.size() != free_.size() || free_.size() > buffers_.size()) {
    return absl::InternalError("a buffer is free twice");
  }
  for (const Pair* pair : joining_) {
    if (!placed_.contains(const_cast<Pair*>(pair))) {
      return absl::InternalError("a pair joins without a place");
    }
  }
  if (turn_ != nullptr && !pairs_.contains(turn_)) {
    return absl::InternalError("a pair that is not has the turn");
  }
  return absl::OkStatus();
}

absl::Status Station::CheckIdle() const {
  const absl::Status invariants = CheckInvariants();
  if (!invariants.ok()) return invariants;
  if (counters_.communicators != 0 || counters_.memory_bytes != 0 ||
      !placed_.empty() || turn_ != nullptr || !turns_.empty() ||
      free_.size() != buffers_.size()) {
    return absl::InternalError(absl::StrCat(
        counters_.communicators, " communicators, ", placed_.size(),
        " places, ", turns_.size() + (turn_ == nullptr ? 0 : 1), " turns, ",
        buffers_.size() - free_.size(), " buffers are in use"));
  }
  return absl::OkStatus();
}

}  // namespace tandem::handoff::nccl
