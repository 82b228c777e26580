// SPDX-License-Identifier: Apache-2.0
// One (prefill, decode) pair and its communicator through all its lives. Both
// ends run this class; every decision is here, on the worker's loop.
//
//   sender                                receiver
//   place (station.h); want{life}   ->    place; unique id; joins as rank 0
//   joins as rank 1                 <-    open{life, id}
//            warm-up: every size class, there and back, each by
//   posts the send                  <-    posts the receive, then go{operation}
//   up{life}                       <->    up{life}
//   Slice{life, operation}          ->    queues it; at its turn posts the
//   posts the send                  <-    receive, then go{operation}
//   end{life, why}                 <->    end{life, why}   both abort
//
//   down -> queued -> (sender: asking ->) joining -> warming -> up
//      `------------------- ending <------------'------'--------'
//
// - A send is posted only for a go, a go is said only for a posted receive,
//   and of those there is one per GPU.
// - A go agrees on its operation: both ends execute it, whatever became of the
//   request. Announced operations below an agreed one were dropped by the
//   receiver and never happen.
// - Whatever fails, stalls or is late ends the life on both sides, and only
//   this pair's. Memory that an unfinished receive may still write stays out
//   of use until this end's communicator is gone; nothing the peer says or
//   fails to say matters for that.
// - The sender asks for the next life, after a time that doubles: to 30 s, and
//   to an hour where joins fail.

#ifndef TANDEM_HANDOFF_NCCL_PAIR_H_
#define TANDEM_HANDOFF_NCCL_PAIR_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "handoff/alive.h"
#include "handoff/nccl/runner.h"
#include "handoff/nccl/station.h"
#include "tandem/v1/handoff.pb.h"

namespace tandem::handoff::nccl {

// Sizes that the warm-up sends each way, ascending: one per protocol and
// channel count that the library may choose up to `slab_bytes`.
std::vector<size_t> WarmSizes(int64_t slab_bytes);

class Pair {
 public:
  enum class Role { kSender, kReceiver };

  class Owner {
   public:
    virtual ~Owner() = default;
    virtual void Say(v1::NcclControl message) = 0;
    // It was up and is not any more; what was not received never will be.
    virtual void OnBroken(const absl::Status& status) = 0;
    // An announced send is over: what it read may change.
    virtual void OnSent(const std::byte* from) {}
    // The communicator is gone, and with it every store of the life.
    virtual void OnQuiet() = 0;
  };

  // `peer` is the other worker's id. The owner may go first: Abandon.
  Pair(Station* station, Owner* owner, Role role, const std::string& peer);
  ~Pair();
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  bool up() const { return phase_ == Phase::kUp; }
  // No communicator exists.
  bool gone() const { return life_state_ == nullptr; }
  uint64_t life() const { return life_; }
  const std::string& name() const { return name_; }

  void Hear(const v1::NcclControl& message);
  // No word reaches the peer any more: ends for good.
  void LinkLost();
  // LinkLost, and no callback follows.
  void Abandon();
  // Buffers of the station that go back to it only when this pair does.
  void Keep(std::vector<std::byte*> buffers) { kept_ = std::move(buffers); }

  // ---- Sender.

  // It is wanted: asks for a life if there is none and it is time.
  void Interest();
  // Announces an operation that sends `from`; returns its number. The memory
  // stays as it is until the receiver has given its slab back, or the life is
  // over. REQUIRES: up.
  uint64_t Announce(const std::byte* from, size_t bytes);

  // A send from there is posted and not over.
  bool Sending(const std::byte* from) const { return sending_ == from; }

  // ---- Receiver.

  // Receives the announced operation into a buffer of the station, which is
  // then the caller's to return. An error comes after OnBroken and says that
  // it was never posted. REQUIRES: up, numbers ascend.
  using Received = absl::AnyInvocable<void(absl::StatusOr<std::byte*>)>;
  void Receive(uint64_t operation, size_t bytes, Received done);
  uint64_t last_operation() const { return last_operation_; }

  // ---- For the station.

  void OnTurn();
  void OnPlace();
  // Up, nothing under way, and unused since then; else the future.
  absl::Time idle_since() const;
  void DropIdle(const std::string& why);
  // Set once the hand has nothing left to do; null without a communicator.
  std::shared_ptr<std::atomic<bool>> gone_flag() const;
  // At the very end, without the loop: takes what is gone as gone, or gives up
  // on a hand that does not come back.
  void Reap();
  void Leak();

 private:
  enum class Phase {
    kDown,
    kQueued,
    kAsking,
    kJoining,
    kWarming,
    kUp,
    kEnding
  };
  enum class Move { kNone, kSend, kReceive };

  // What exists while a communicator does.
  struct Life {
    std::unique_ptr<Loop> hand;
    std::unique_ptr<Runner> runner;  // used on the hand
    std::shared_ptr<std::atomic<bool>> gone;
    int64_t memory_bytes = 0;
  };
  struct Step {  // of the warm-up
    bool forward = false;
    size_t bytes = 0;
  };
  struct Waiting {  // a receive
    uint64_t operation = 0;
    size_t bytes = 0;
    Received done;
  };
  struct Full {  // an announced send
    const std::byte* from = nullptr;
    size_t bytes = 0;
  };

  void StartLife(const std::string& id);
  void OnReport(uint64_t life, Report report);
  void OnPosted();
  void OnDone();
  void WarmStep();
  bool Transmits(const Step& step) const {
    return step.forward == (role_ == Role::kSender);
  }
  void MaybeUp();
  void PostSend(uint64_t operation, const std::byte* from, size_t bytes);
  void PostReceive(uint64_t operation, std::byte* to, size_t bytes);
  void PostMove(Move move, uint64_t operation, size_t bytes);
  void TrySend();
  void WantTurn();
  enum class Cause { kFault, kIdle };
  // Ends the life because of `status`; tells the peer unless it told us.
  void Break(const absl::Status& status, Cause cause, bool tell);
  void OnWant(uint64_t life);
  void Queue();
  void OnGone();
  void ReturnBuffers();
  void AskLater();
  void SetDeadline(absl::Duration limit);
  void CheckIdle();
  void Say(v1::NcclControl message);
  std::string Stage() const;
  template <typename Command>
  void Tell(Command command);

  Station* const station_;
  Loop* const loop_;
  Owner* owner_;
  const Role role_;
  Phase phase_ = Phase::kDown;
  Move move_ = Move::kNone;  // under way
  int failures_ = 0;         // since an operation worked
  bool lost_ = false;        // the link
  bool wanted_ = false;      // receiver: a life, not begun or taken back
  bool said_up_ = false;     // in this life, as the next two
  bool heard_up_ = false;
  bool wants_turn_ = false;
  bool idle_end_ = false;     // of the last life: nothing was wrong
  bool join_failed_ = false;  // of the last life: it never got to the warm-up
  const std::string name_;    // "prefill-1>decode-2"
  const std::vector<size_t> warm_sizes_;
  std::vector<Step> script_;

  uint64_t life_ = 0;         // the latest
  uint64_t wanted_life_ = 0;  // receiver: the latest that was asked for
  std::unique_ptr<Life> life_state_;

  // Of this life.
  size_t step_ = 0;
  uint64_t heard_go_ = 0;
  uint64_t posted_ = 0;          // last operation posted here
  uint64_t last_operation_ = 0;  // announced (sender), queued (receiver)
  size_t move_bytes_ = 0;
  const std::byte* sending_ = nullptr;  // of the send under way
  std::byte* buffer_ = nullptr;         // of the receive under way
  std::byte* warm_buffer_ = nullptr;    // until up
  std::vector<std::byte*> kept_;
  std::map<uint64_t, Full> full_;
  std::deque<Waiting> waiting_;
  absl::Time last_used_;

  absl::Time not_before_;
  Timer deadline_;  // asking, joining, warming; the end
  Timer stall_;
  Timer retry_;
  Timer idle_;
  Alive alive_;
};

}  // namespace tandem::handoff::nccl

#endif  // TANDEM_HANDOFF_NCCL_PAIR_H_
