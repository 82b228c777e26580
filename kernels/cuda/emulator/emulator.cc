// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emulator/emulator.h"

#include <immintrin.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/cuda/emulator/block.h"

namespace tandem::kernels::cuda::emulator {
namespace {

struct State {
  std::mutex mutex;
  Settings settings;
  std::string fault;
};
State& Shared() {
  static State* const state = new State;
  return *state;
}

Settings CurrentSettings() {
  State& state = Shared();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.settings;
}

// Denormals off while a kernel runs, as its instructions have it.
class ScopedFlush {
 public:
  ScopedFlush() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~ScopedFlush() { _mm_setcsr(saved_); }
  ScopedFlush(const ScopedFlush&) = delete;
  ScopedFlush& operator=(const ScopedFlush&) = delete;

 private:
  const unsigned saved_;
};

}  // namespace

void SetSettings(const Settings& settings) {
  State& state = Shared();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.settings = settings;
}

std::string LastFault() {
  State& state = Shared();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.fault;
}

// A launch under way, block after block.
class Execution {
 public:
  explicit Execution(Task task)
      : task_(std::move(task)),
        settings_(CurrentSettings()),
        block_(settings_, task_.stream.generation, task_.threads,
               task_.shared_bytes) {}

  // As far as the first block gets while the launch before has not ended.
  void Start() {
    if (blocks() == 0) return;
    const ScopedFlush flush;
    block_.Begin(IndexOf(0), task_.blocks, task_);
    state_ = block_.Go();
    started_ = true;
  }

  int Finish() {
    const ScopedFlush flush;
    block_.EndPrevious();
    for (int64_t i = 0; i < blocks(); ++i) {
      if (!started_) block_.Begin(IndexOf(i), task_.blocks, task_);
      if (!started_ || state_ == Block::Progress::kWaits) state_ = block_.Go();
      started_ = false;
      if (state_ == Block::Progress::kDone) continue;
      State& state = Shared();
      std::lock_guard<std::mutex> lock(state.mutex);
      state.fault = block_.fault();
      return kEmulatorFault;
    }
    return 0;
  }

 private:
  int64_t blocks() const {
    return int64_t{task_.blocks.x} * task_.blocks.y * task_.blocks.z;
  }
  Dim3 IndexOf(int64_t i) const {
    const Dim3& size = task_.blocks;
    if (settings_.order == Order::kReverse) i = blocks() - 1 - i;
    return {static_cast<int>(i % size.x), static_cast<int>(i / size.x % size.y),
            static_cast<int>(i / size.x / size.y)};
  }

  const Task task_;
  const Settings settings_;
  Block block_;
  Block::Progress state_ = Block::Progress::kDone;
  bool started_ = false;
};

int Refusal(const Task& task) {
  constexpr int kMostBlocks =
      65535;  // in y and z; all ints are few enough in x
  const Dim3& size = task.blocks;
  if (size.x < 1 || size.y < 1 || size.z < 1 || size.y > kMostBlocks ||
      size.z > kMostBlocks || task.threads < 1 || task.threads > 1024) {
    return kNoSuchGrid;
  }
  const int family = task.stream.generation / 10;
  const bool large = family == 9 || family == 10;
  const int most = large ? 227 * 1024 : kMostSharedBytes;
  return task.shared_bytes > most ? kInvalidLaunch : 0;
}

int Run(Task task) { return Execution(std::move(task)).Finish(); }

HeldStream::HeldStream() = default;
HeldStream::~HeldStream() = default;

int HeldStream::Launch(Task task) {
  if (recording_ != nullptr) {
    recording_->push_back(std::move(task));
    return 0;
  }
  // Only a launch right behind another may be early (Stream::after_kernel).
  const bool early = task.stream.after_kernel && task.stream.generation >= 90;
  if (!early) {
    if (const int error = Flush(); error != 0) return error;
  }
  auto next = std::make_unique<Execution>(std::move(task));
  if (early) next->Start();
  const int error = Flush();
  held_ = std::move(next);
  return error;
}

int HeldStream::Flush() {
  if (held_ == nullptr) return 0;
  const std::unique_ptr<Execution> ending = std::move(held_);
  return ending->Finish();
}

}  // namespace tandem::kernels::cuda::emulator
