// SPDX-License-Identifier: Apache-2.0
// Stands where NCCL stands: two ranks, in one process or in two, that meet by
// a unique id and move real bytes through shared memory, a chunk at each Poll.
// It is as unpleasant as the real one may be, always:
//
// - a receive that is aborted stores into its buffer at the last moment before
//   it is quiet, so whoever was given that memory too early sees it;
// - a rank whose peer is silent never ends by itself;
// - quiet comes some time after Abort.
//
// And on command, per GPU (one library each): it delays, corrupts, fails,
// stalls, hangs in a call, and does not become quiet. It also counts what the
// protocol forbids: sends without a posted receive, two unfinished receives on
// one GPU, send buffers that change under a send.

#ifndef TANDEM_TESTS_HANDOFF_NCCL_DOUBLE_H_
#define TANDEM_TESTS_HANDOFF_NCCL_DOUBLE_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "handoff/nccl/communicator.h"
#include "handoff/nccl/station.h"

namespace tandem::handoff::nccl::testing {

inline constexpr int kGpus = 8;
inline constexpr int kMeetings = 1024;
inline constexpr size_t kRing = 16 << 10;
inline constexpr int kRules = 16;

enum class On : int { kId, kJoin, kSend, kReceive, kIdle, kAbort };
enum class Act : int {
  kNone,
  kDelay,    // `amount` microseconds
  kLinger,   // done only `amount` microseconds after all is moved
  kCorrupt,  // one bit, on its way into the receiver's buffer
  kFail,     // asynchronous error
  kRefuse,   // the call itself returns an error
  kStall,    // never ends by itself
  kHang,     // the call does not return until `released`
  kUnquiet,  // (kAbort) never quiet, until `released`
};

struct Rule {
  std::atomic<int> act{0};
  int gpu = 0;
  On on = On::kSend;
  int64_t skip = 0;  // this many first
  int64_t times = 1;
  int64_t amount = 0;
};

// In shared memory, between processes that fork after it was made.
struct Fabric {
  struct Way {                          // from rank 1 - r to rank r: index r
    std::atomic<uint64_t> receives{0};  // posted
    std::atomic<uint64_t> sends{0};
    std::atomic<uint64_t> written{0};  // bytes, of all operations
    std::atomic<uint64_t> read{0};
    std::array<std::byte, kRing> ring;
  };
  struct Meeting {
    std::atomic<int> joined[2];
    Way ways[2];
  };
  struct Gpu {
    std::atomic<int> receives{0};  // unfinished
    std::atomic<int> most_receives{0};
    std::atomic<int> communicators{0};
    std::atomic<int64_t> operations{0};
    std::atomic<int64_t> late_stores{0};
    std::atomic<int64_t> allocated{0};
  };

  // Never freed by one of several processes: the kernel does.
  static Fabric* Make();
  // Between processes that find it by a file's name. Open makes what is not
  // there; null: it cannot.
  static Fabric* Open(const std::string& path);

  void Arm(int gpu, On on, Act act, int64_t skip = 0, int64_t amount = 0,
           int64_t times = 1);
  void Disarm();
  Act Take(int gpu, On on, int64_t* amount);

  std::atomic<int> meetings{0};
  std::atomic<bool> released{false};
  // What must not be.
  std::atomic<int64_t> orphan_sends{0};
  std::atomic<int64_t> changed_sends{0};
  Gpu gpus[kGpus];
  Rule rules[kRules];
  Meeting meeting[kMeetings];
};

struct DoubleOptions {
  int gpu = 0;
  bool shares_device = false;
  std::function<absl::Time()> now = [] { return absl::Now(); };
  // What a hanging call does: by default sleeps until `released`.
  std::function<void()> hang;
  absl::Duration join_time = absl::Milliseconds(3);
  absl::Duration abort_time = absl::Milliseconds(5);
};

std::unique_ptr<Library> NewDouble(Fabric* fabric, DoubleOptions options);

// Buffers in host memory, counted by GPU.
class DoubleMemory final : public DeviceMemory {
 public:
  DoubleMemory(Fabric* fabric, int gpu) : fabric_(fabric), gpu_(gpu) {}
  absl::StatusOr<std::byte*> Allocate(size_t bytes) override;
  void Free(std::byte* memory) override;

 private:
  Fabric* const fabric_;
  const int gpu_;
};

}  // namespace tandem::handoff::nccl::testing

#endif  // TANDEM_TESTS_HANDOFF_NCCL_DOUBLE_H_
