// SPDX-License-Identifier: Apache-2.0
#include "tests/handoff/nccl/double.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tandem::handoff::nccl::testing {
namespace {

constexpr std::byte kLate{0xCA};

class DoubleRank final : public Communicator {
 public:
  DoubleRank(Fabric* fabric, const DoubleOptions& options)
      : fabric_(fabric), options_(options), gpu_(&fabric->gpus[options.gpu]) {
    ++gpu_->communicators;
  }
  ~DoubleRank() override { --gpu_->communicators; }

  absl::Status Join(const std::string& id, int rank) override {
    int meeting = -1;
    if (id.size() != 128 || std::memcmp(id.data(), "double", 6) != 0) {
      return absl::InvalidArgumentError("not a unique id");
    }
    std::memcpy(&meeting, id.data() + 8, sizeof(meeting));
    if (meeting < 0 || meeting >= fabric_->meetings.load()) {
      return absl::InvalidArgumentError("no such meeting");
    }
    meeting_ = &fabric_->meeting[meeting];
    rank_ = rank;
    const absl::Status status = Begin(On::kJoin, options_.join_time);
    if (!status.ok()) return status;
    if (meeting_->joined[rank].exchange(1) != 0) {
      return absl::InvalidArgumentError("this rank has joined already");
    }
    return absl::OkStatus();
  }

  absl::Status Send(const std::byte* from, size_t bytes) override {
    const absl::Status status = Begin(On::kSend, absl::ZeroDuration());
    if (!status.ok()) return status;
    from_ = from;
    before_.assign(from, from + bytes);
    Post(&meeting_->ways[1 - rank_], bytes);
    const uint64_t number = way_->sends.fetch_add(1) + 1;
    if (way_->receives.load() < number) ++fabric_->orphan_sends;
    return absl::OkStatus();
  }

  absl::Status Receive(std::byte* to, size_t bytes) override {
    const absl::Status status = Begin(On::kReceive, absl::ZeroDuration());
    if (!status.ok()) return status;
    to_ = to;
    Post(&meeting_->ways[rank_], bytes);
    const int unfinished = ++gpu_->receives;
    int most = gpu_->most_receives.load();
    while (unfinished > most &&
           !gpu_->most_receives.compare_exchange_weak(most, unfinished)) {
    }
    ++way_->receives;
    return absl::OkStatus();
  }

  absl::StatusOr<Progress> Poll() override {
    if (act_ == Act::kFail) {
      return absl::InternalError("remote process exited (double)");
    }
    if (!busy_) {
      int64_t amount;
      if (fabric_->Take(options_.gpu, On::kIdle, &amount) == Act::kFail) {
        act_ = Act::kFail;
        return Poll();
      }
      return Progress::kDone;
    }
    if (act_ == Act::kStall || options_.now() < not_before_) {
      return Progress::kBusy;
    }
    const bool done = to_ != nullptr     ? Pull()
                      : from_ != nullptr ? Push()
                                         : meeting_->joined[1 - rank_] != 0;
    if (!done) return Progress::kBusy;
    if (act_ == Act::kLinger) {
      act_ = Act::kNone;
      not_before_ = options_.now() + absl::Microseconds(amount_);
      return Progress::kBusy;
    }
    Finish();
    ++gpu_->operations;
    return Progress::kDone;
  }

  void Abort() override {
    int64_t amount = 0;
    act_ = fabric_->Take(options_.gpu, On::kAbort, &amount);
    aborted_at_ = options_.now() + options_.abort_time +
                  absl::Microseconds(act_ == Act::kDelay ? amount : 0);
    if (act_ == Act::kHang) Hang();
  }

  bool Quiet() override {
    if ((act_ == Act::kUnquiet || act_ == Act::kHang) &&
        !fabric_->released.load()) {
      return false;
    }
    if (options_.now() < aborted_at_) return false;
    if (to_ != nullptr) {
      std::fill(to_, to_ + bytes_, kLate);
      ++gpu_->late_stores;
    }
    Finish();
    return true;
  }

  int64_t memory_bytes() override { return 1 << 20; }

 private:
  absl::Status Begin(On on, absl::Duration takes) {
    int64_t amount = 0;
    act_ = fabric_->Take(options_.gpu, on, &amount);
    if (act_ == Act::kRefuse) {
      return absl::InternalError("unhandled system error (double)");
    }
    amount_ = amount;
    not_before_ = options_.now() + takes +
                  absl::Microseconds(act_ == Act::kDelay ? amount : 0);
    busy_ = true;
    if (act_ == Act::kHang) Hang();
    return absl::OkStatus();
  }
  void Hang() {
    if (options_.hang) {
      options_.hang();
      return;
    }
    while (!fabric_->released.load()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  void Post(Fabric::Way* way, size_t bytes) {
    way_ = way;
    bytes_ = bytes;
    moved_ = 0;
  }

  // What the kernels do.
  bool Push() {
    if (way_->receives.load() < way_->sends.load()) return false;  // spins
    while (moved_ < bytes_) {
      const uint64_t written = way_->written.load();
      const size_t room = kRing - (written - way_->read.load());
      if (room == 0) return false;
      const size_t at = written % kRing;
      const size_t part = std::min({room, kRing - at, bytes_ - moved_});
      std::memcpy(way_->ring.data() + at, from_ + moved_, part);
      moved_ += part;
      way_->written.store(written + part);
    }
    return way_->read.load() == way_->written.load();
  }
  bool Pull() {
    while (moved_ < bytes_) {
      const uint64_t read = way_->read.load();
      const size_t there = way_->written.load() - read;
      if (there == 0) return false;
      const size_t at = read % kRing;
      const size_t part = std::min({there, kRing - at, bytes_ - moved_});
      std::memcpy(to_ + moved_, way_->ring.data() + at, part);
      if (act_ == Act::kCorrupt) {
        to_[moved_] ^= std::byte{0x20};
        act_ = Act::kNone;
      }
      moved_ += part;
      way_->read.store(read + part);
    }
    return true;
  }
  void Finish() {
    if (from_ != nullptr &&
        std::memcmp(before_.data(), from_, before_.size()) != 0) {
      ++fabric_->changed_sends;
    }
    if (to_ != nullptr) --gpu_->receives;
    from_ = nullptr;
    to_ = nullptr;
    busy_ = false;
  }

  Fabric* const fabric_;
  const DoubleOptions options_;
  Fabric::Gpu* const gpu_;
  Fabric::Meeting* meeting_ = nullptr;
  int rank_ = 0;
  bool busy_ = false;
  Act act_ = Act::kNone;
  int64_t amount_ = 0;
  absl::Time not_before_;
  absl::Time aborted_at_;
  Fabric::Way* way_ = nullptr;
  const std::byte* from_ = nullptr;
  std::byte* to_ = nullptr;
  size_t bytes_ = 0;
  size_t moved_ = 0;
  std::vector<std::byte> before_;  // the send
};

class Double final : public Library {
 public:
  Double(Fabric* fabric, DoubleOptions options)
      : fabric_(fabric), options_(std::move(options)) {}

  std::string version() const override { return "double"; }

  absl::StatusOr<std::string> UniqueId() override {
    int64_t amount;
    if (fabric_->Take(options_.gpu, On::kId, &amount) == Act::kRefuse) {
      return absl::InternalError("no interface found (double)");
    }
    const int meeting = fabric_->meetings.fetch_add(1);
    if (meeting >= kMeetings) return absl::ResourceExhaustedError("meetings");
    std::string id(128, '\0');
    std::memcpy(id.data(), "double", 6);
    std::memcpy(id.data() + 8, &meeting, sizeof(meeting));
    return id;
  }
  absl::StatusOr<std::unique_ptr<Communicator>> NewCommunicator(
      const std::string&) override {
    return std::make_unique<DoubleRank>(fabric_, options_);
  }
  std::string device() const override {
    return absl::StrCat("double-gpu-", options_.gpu);
  }
  bool shares_device() const override { return options_.shares_device; }

 private:
  Fabric* const fabric_;
  const DoubleOptions options_;
};

}  // namespace

Fabric* Fabric::Make() {
  void* memory = mmap(nullptr, sizeof(Fabric), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  // Fresh pages are zero, which is how everything here begins; constructing
  // the members would touch all the rings.
  return static_cast<Fabric*>(memory);
}

Fabric* Fabric::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(fd, sizeof(Fabric)) == 0) {
    memory = mmap(nullptr, sizeof(Fabric), PROT_READ | PROT_WRITE, MAP_SHARED,
                  fd, 0);
  }
  close(fd);
  return memory == MAP_FAILED ? nullptr : static_cast<Fabric*>(memory);
}

void Fabric::Arm(int gpu, On on, Act act, int64_t skip, int64_t amount,
                 int64_t times) {
  for (Rule& rule : rules) {
    if (rule.act.load() != static_cast<int>(Act::kNone)) continue;
    rule.gpu = gpu;
    rule.on = on;
    rule.skip = skip;
    rule.amount = amount;
    rule.times = times;
    rule.act.store(static_cast<int>(act));
    return;
  }
  std::abort();
}

void Fabric::Disarm() {
  for (Rule& rule : rules) rule.act.store(static_cast<int>(Act::kNone));
}

// Ranks of one GPU take turns at its rules only if their hands do: tests arm
// rules for one pair at a time.
Act Fabric::Take(int gpu, On on, int64_t* amount) {
  for (Rule& rule : rules) {
    const Act act = static_cast<Act>(rule.act.load());
    if (act == Act::kNone || rule.gpu != gpu || rule.on != on) continue;
    if (rule.skip-- > 0) return Act::kNone;
    *amount = rule.amount;
    if (--rule.times <= 0) rule.act.store(static_cast<int>(Act::kNone));
    return act;
  }
  return Act::kNone;
}

absl::StatusOr<std::byte*> DoubleMemory::Allocate(size_t bytes) {
  ++fabric_->gpus[gpu_].allocated;
  return static_cast<std::byte*>(::operator new(bytes));
}
void DoubleMemory::Free(std::byte* memory) {
  --fabric_->gpus[gpu_].allocated;
  ::operator delete(memory);
}

std::unique_ptr<Library> NewDouble(Fabric* fabric, DoubleOptions options) {
  return std::make_unique<Double>(fabric, std::move(options));
}

}  // namespace tandem::handoff::nccl::testing
