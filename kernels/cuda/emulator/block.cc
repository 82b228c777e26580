// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emulator/block.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tandem::kernels::cuda {
namespace emulator {

Block::Block(const Settings& settings, int generation, int threads,
             int shared_bytes)
    : settings_(settings),
      generation_(generation >= 90 ? Generation::kHopper : Generation::kAmpere),
      threads_(threads),
      shared_bytes_(shared_bytes),
      random_(settings.seed),
      memory_(static_cast<size_t>(shared_bytes) + 1024) {
  // Aligned to 16 alone, as the device promises no more.
  shared_ = memory_.data() +
            (1024 - reinterpret_cast<uintptr_t>(memory_.data()) % 1024) % 1024;
  for (int i = 0; i < threads; ++i) {
    thread_.push_back(std::make_unique<ThreadState>());
    entry_.emplace_back(this, i);
  }
  const int warpgroups = (threads + kWarpgroup - 1) / kWarpgroup;
  warpgroups_.resize(static_cast<size_t>(warpgroups));
}

void Block::Begin(const Dim3& index, const Dim3& blocks, const Task& task) {
  task_ = &task;
  left_ = threads_;
  waited_ = false;
  std::memset(shared_, 0xff, static_cast<size_t>(shared_bytes_));
  const int pieces = shared_bytes_ / kPiece + 1;
  unfenced_.assign(static_cast<size_t>(pieces), 0);
  any_unfenced_ = false;
  phases_.clear();  // meetings are over where the block before ended well
  flights_.clear();
  order_.clear();
  for (int i = 0; i < threads_; ++i) {
    order_.push_back(settings_.order == Order::kReverse ? threads_ - 1 - i : i);
    ThreadState& thread = *thread_[static_cast<size_t>(i)];
    thread.grid = Grid();
    thread.grid.emulated = this;
    thread.grid.thread_ = i;
    thread.grid.threads_ = threads_;
    thread.grid.block_index_ = index;
    thread.grid.blocks_ = blocks;
    thread.grid.shared_ = shared_;
    thread.ready = true;
    thread.held = false;
    thread.awaited = nullptr;
    thread.open.clear();
    thread.groups.clear();
    thread.fiber.Start(&Block::Enter, &entry_[static_cast<size_t>(i)]);
  }
  for (Warpgroup& warpgroup : warpgroups_) {
    warpgroup.open.clear();
    warpgroup.groups.clear();
  }
}

void Block::AwaitPrevious(Grid& g) {
  waited_ = true;
  ThreadState& thread = Thread(g);
  while (!previous_ended_) {
    thread.held = true;
    thread.ready = false;
    thread.fiber.Leave();
  }
}

void Block::EndPrevious() {
  previous_ended_ = true;
  for (const auto& thread : thread_) {
    if (std::exchange(thread->held, false)) thread->ready = true;
  }
}

Block::Progress Block::Go() {
  while (left_ > 0) {
    if (settings_.order == Order::kRandom) {
      std::shuffle(order_.begin(), order_.end(), random_);
    }
    bool moved = false;
    for (const int i : order_) {
      ThreadState& thread = *thread_[static_cast<size_t>(i)];
      if (!thread.ready || thread.fiber.done()) continue;
      thread.fiber.Enter();
      moved = true;
      if (thread.fiber.done()) --left_;
      if (!fault_.empty()) return Progress::kFault;
    }
    if (!moved && !flights_.empty()) {
      LandOne();
      moved = true;
    }
    if (!moved && std::any_of(thread_.begin(), thread_.end(),
                              [](const auto& t) { return t->held; })) {
      return Progress::kWaits;
    }
    if (!moved) {
      fault_ = "threads wait for others that have ended or wait elsewhere";
      for (const auto& [key, meeting] : meetings_) {
        if (meeting.arrived > 0) {
          fault_ += "; " + std::to_string(meeting.arrived) + " of " +
                    std::to_string(key.first) + " at line " +
                    std::to_string(meeting.line) + " of " + meeting.file;
        }
      }
      for (const auto& thread : thread_) {
        if (thread->awaited == nullptr) continue;
        fault_ += "; thread " + std::to_string(thread->grid.thread()) +
                  " for a barrier that lacks " +
                  std::to_string(thread->awaited->missing) + " arrivals, " +
                  std::to_string(thread->awaited->bytes) + " bytes";
        break;
      }
      return Progress::kFault;
    }
  }
  if (!flights_.empty()) {
    fault_ = "a block ends with copies on their way";
  } else if (!waited_) {
    fault_ = "a block ends without having waited for the kernel before";
  }
  return fault_.empty() ? Progress::kDone : Progress::kFault;
}

}  // namespace emulator

using emulator::Place;

void Grid::Barrier(Place place) {
  emulated->Together(*this, threads_, place, this, [](Grid* const*) {});
}
void Grid::Meet(int threads, Place place) {
  emulated->Together(*this, threads, place, this, [](Grid* const*) {});
}
void Grid::WarpBarrier(Place place) {
  emulated->Together(*this, emulator::kWarp, place, this, [](Grid* const*) {});
}
uint32_t Grid::Exchange(uint32_t value, int from, Place place) {
  struct Arguments {
    uint32_t value;
    int from;
    uint32_t result;
  } mine{value, from, 0};
  emulated->Together(*this, emulator::kWarp, place, &mine,
                     [](Arguments* const* lanes) {
                       for (int i = 0; i < emulator::kWarp; ++i) {
                         lanes[i]->result = lanes[lanes[i]->from & 31]->value;
                       }
                     });
  return mine.result;
}

void WaitForPrevious(Grid& g) { g.emulated->AwaitPrevious(g); }

}  // namespace tandem::kernels::cuda
