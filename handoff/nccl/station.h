// SPDX-License-Identifier: Apache-2.0
// What all pairs of one process share, because they share its GPU:
//
// - turns. At most one posted receive is unfinished at a time. A posted kernel
//   spins on the GPU until its peer comes; with one per GPU, posted only for a
//   peer whose slab is full, no ring of GPUs can wait for each other. Turns go
//   round, so no pair that has much to send holds up another.
// - places. So many communicators, so many joins at once, and not too fast.
//   When all places are taken the pair unused for longest gives its place up.
// - buffers: slabs of device memory, all allocated at the start.
// - the end: a communicator that does not go in time takes the process along.
//
// All of it on the worker's loop. Made before the ways and the core that use
// it, destroyed after them.

#ifndef TANDEM_HANDOFF_NCCL_STATION_H_
#define TANDEM_HANDOFF_NCCL_STATION_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/random.h"
#include "handoff/alive.h"
#include "handoff/nccl/communicator.h"

namespace tandem::handoff::nccl {

class Pair;

struct StationOptions {
  std::string self;  // this worker's id, for logs
  int64_t slab_bytes = 1 << 20;
  // Of slab_bytes each. A decode worker needs one per slab of its receiver, a
  // prefill worker those of each pair that is wanted; pairs for which none are
  // left have no communicator. Both need one more per join.
  int buffers = 64;
  int max_communicators = 32;
  int max_joining = 2;
  absl::Duration join_interval = absl::Milliseconds(100);
  absl::Duration ask_timeout = absl::Seconds(20);   // for the peer's answer
  absl::Duration join_timeout = absl::Seconds(20);  // join and warm-up
  // Of one posted operation. Its peer has promised to be there, so this is
  // far beyond what a slab takes, and well under a transfer's own time.
  absl::Duration stall_timeout = absl::Seconds(2);
  // The same while connections are still being made.
  absl::Duration warm_stall_timeout = absl::Seconds(5);
  absl::Duration idle_timeout = absl::Minutes(5);
  absl::Duration min_idle = absl::Seconds(10);  // before a place is taken away
  absl::Duration burial_timeout = absl::Seconds(10);
  absl::Duration backoff_min = absl::Seconds(1);
  absl::Duration backoff_max = absl::Seconds(30);
  // After a join that failed: it may have cost the receiver a thread and a
  // listening socket of NCCL's bootstrap, which waits for the missing rank for
  // as long as the process lives.
  absl::Duration join_backoff_max = absl::Hours(1);
};

// What has happened so far. Only ever grows, but for the last two.
struct StationCounters {
  int64_t joins = 0;
  int64_t ups = 0;
  int64_t broken = 0;   // by an error, a stall or the peer
  int64_t dropped = 0;  // idle, or for another's place
  int64_t gone = 0;
  int64_t operations = 0;
  int64_t bytes = 0;
  int64_t late_messages = 0;
  int communicators = 0;     // that exist
  int64_t memory_bytes = 0;  // that those take
};

// Memory of the device that operations read and write. Never registered with
// NCCL: so only kernels of this process store into it, and a quiet communicator
// proves a quiet buffer whatever the peer does.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual absl::StatusOr<std::byte*> Allocate(size_t bytes) = 0;
  virtual void Free(std::byte* memory) = 0;
};

// What an operator wants to know of pairs ("prefill-1>decode-2").
class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void OnUp(const std::string& pair, uint64_t life,
                    int64_t memory_bytes) = 0;
  // `stage`: "joining", "warm-up, send", "receive"...; `bytes` of the operation
  // that was under way.
  virtual void OnBroken(const std::string& pair, uint64_t life,
                        const std::string& stage, int64_t bytes,
                        const absl::Status& cause) = 0;
  // This pair never has a communicator, and uses its other ways.
  virtual void OnRefused(const std::string& pair, const absl::Status& cause) {}
  // A communicator cannot be got rid of: the process must end, and at once,
  // since memory that may still be written is part of it. At most once.
  virtual void OnFatal(const absl::Status& cause) = 0;
};

class Station {
 public:
  // Makes the loop that a communicator's calls run on.
  using NewHand = std::function<std::unique_ptr<Loop>(const std::string& name)>;

  // Allocates the buffers. `library`, `memory` and `watcher` outlive the
  // station.
  static absl::StatusOr<std::unique_ptr<Station>> Create(
      const StationOptions& options, Loop* loop, Random* random,
      Library* library, DeviceMemory* memory, NewHand new_hand,
      Watcher* watcher);
  // Waits, for a moment, for what is not gone yet; what then still is not
  // keeps its memory and its thread.
  ~Station();
  Station(const Station&) = delete;
  Station& operator=(const Station&) = delete;

  const StationOptions& options() const { return options_; }
  const StationCounters& counters() const { return counters_; }
  Loop* loop() const { return loop_; }

  // No pair has a communicator, a turn or a buffer: for tests.
  absl::Status CheckIdle() const;
  // The sums agree, at any time.
  absl::Status CheckInvariants() const;
  int free_buffers() const { return static_cast<int>(free_.size()); }

  // ---- For pairs and ways (this folder) only.

  void Add(Pair* pair);
  void Remove(Pair* pair);
  // OnTurn follows, at once or later.
  void WantTurn(Pair* pair);
  void EndTurn(Pair* pair);
  bool has_turn(const Pair* pair) const { return turn_ == pair; }
  // OnPlace follows, later. Given back by Leave.
  void WantPlace(Pair* pair);
  void CancelPlace(Pair* pair);
  void EndJoin(Pair* pair);
  void Leave(Pair* pair);
  std::byte* TakeBuffer();  // null: none is left
  void ReturnBuffer(std::byte* buffer);
  // Keeps a pair whose channel is gone until its communicator is.
  void Bury(std::unique_ptr<Pair> pair);
  void Sweep();  // some of those may be gone
  void Die(const absl::Status& status);

  StationCounters* mutable_counters() { return &counters_; }
  Watcher* watcher() const { return watcher_; }
  Library* library() const { return library_; }
  Random* random() const { return random_; }
  std::unique_ptr<Loop> MakeHand(const std::string& name) {
    return new_hand_(name);
  }

 private:
  Station(const StationOptions& options, Loop* loop, Random* random,
          Library* library, DeviceMemory* memory, NewHand new_hand,
          Watcher* watcher);
  void GiveTurn();
  void GivePlaces();
  void MakeRoom();

  const StationOptions options_;
  Loop* const loop_;
  Random* const random_;
  Library* const library_;
  DeviceMemory* const memory_;
  const NewHand new_hand_;
  Watcher* const watcher_;
  bool dead_ = false;

  std::set<Pair*> pairs_;
  Pair* turn_ = nullptr;
  std::deque<Pair*> turns_;   // each at most once
  std::deque<Pair*> wanted_;  // places
  std::set<Pair*> placed_;    // hold a place
  std::set<Pair*> joining_;   // of them
  absl::Time next_join_;
  Timer places_;
  std::vector<std::byte*> buffers_;  // all
  std::vector<std::byte*> free_;
  std::list<std::unique_ptr<Pair>> buried_;
  StationCounters counters_;
  Alive alive_;
};

}  // namespace tandem::handoff::nccl

#endif  // TANDEM_HANDOFF_NCCL_STATION_H_
