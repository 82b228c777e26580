// SPDX-License-Identifier: Apache-2.0
// One block of a grid while it runs: its threads, its shared memory, and what
// is on its way there. See emulator.h. Of this folder alone: block.cc lets the
// threads run and meet, copies.cc has the asynchronous copies and the barriers
// that they arrive at, matrices.cc the operations of warps and warpgroups; each
// with the functions of emulator.h by which kernels get there.

#ifndef TANDEM_KERNELS_CUDA_EMULATOR_BLOCK_H_
#define TANDEM_KERNELS_CUDA_EMULATOR_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cuda/device/tensor_core.h"
#include "kernels/cuda/device/tensor_map.h"
#include "kernels/cuda/emulator/emulator.h"
#include "kernels/cuda/emulator/fiber.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda::emulator {

inline constexpr int kWarp = 32;
inline constexpr int kWarpgroup = 128;
inline constexpr int kPiece = 16;  // bytes that are copied and fenced together

class Block {
 public:
  Block(const Settings& settings, int generation, int threads,
        int shared_bytes);

  // One block of the grid: starts it; goes on until it is done, wrong, or
  // waits for the kernel before.
  enum class Progress : uint8_t { kDone, kFault, kWaits };
  void Begin(const Dim3& index, const Dim3& blocks, const Task& task);
  Progress Go();
  // The kernel before has ended.
  void EndPrevious();
  const std::string& fault() const { return fault_; }

  // ---- What the threads call.

  // The thread's stack is abandoned: nothing on it may own memory.
  [[noreturn]] void Fail(const Grid& g, std::string_view what) {
    Blame(g, std::string(what));
    for (;;) Thread(g).fiber.Leave();
  }
  void Blame(const Grid& g, const std::string& what) {
    if (fault_.empty()) {
      fault_ = what + " (thread " + std::to_string(g.thread()) + " of block " +
               std::to_string(g.block_x()) + ", " +
               std::to_string(g.block_y()) + ", " +
               std::to_string(g.block_z()) + ")";
    }
  }

  // Waits until all `size` threads of this one's group (aligned) are here,
  // each with its arguments; the last to come runs `all` for everyone.
  template <typename Arguments, typename All>
  void Together(Grid& g, int size, const Place& place, Arguments* mine,
                const All& all) {
    const int first = g.thread() / size * size;
    Meeting& meeting = meetings_[{size, first}];
    if (first + size > threads_) Fail(g, "a group of threads is not whole");
    if (meeting.arrived == 0) {
      meeting.line = place.line;
      meeting.file = place.file;
      meeting.arguments.resize(static_cast<size_t>(size));
    } else if (meeting.line != place.line ||
               (meeting.file != place.file &&
                std::strcmp(meeting.file, place.file) != 0)) {
      Blame(g, "threads of a group meet at line " +
                   std::to_string(meeting.line) + " and at line " +
                   std::to_string(place.line) + " of " + place.file);
      Fail(g, "");
    }
    meeting.arguments[static_cast<size_t>(g.thread() - first)] = mine;
    if (++meeting.arrived < size) {
      Thread(g).ready = false;
      do {
        Thread(g).fiber.Leave();
      } while (!Thread(g).ready);
      return;
    }
    all(reinterpret_cast<Arguments* const*>(meeting.arguments.data()));
    meeting.arrived = 0;
    for (int i = first; i < first + size; ++i) {
      thread_[static_cast<size_t>(i)]->ready = true;
    }
  }

  int OffsetOf(Grid& g, const void* p, int bytes) {
    const auto offset = static_cast<const std::byte*>(p) - g.shared();
    if (offset < 0 || offset + bytes > shared_bytes_) {
      Fail(g, "an address is outside of shared memory");
    }
    if (offset % kPiece != 0) Fail(g, "an address is not aligned");
    return static_cast<int>(offset);
  }

  void AwaitPrevious(Grid& g);
  void Copy(Grid& g, void* to, const void* from, int bytes);
  void Commit(Grid& g);
  void Wait(Grid& g, int pending);
  void Fence(Grid& g);
  void MakeBarrier(Grid& g, const AsyncBarrier* b, int arrivals);
  void ArriveAt(Grid& g, const AsyncBarrier* b, int bytes);
  void AwaitEnd(Grid& g, const AsyncBarrier* b, int parity);
  void ArriveWithCopies(Grid& g, const AsyncBarrier* b);
  void BulkCopy(Grid& g, void* to, const void* from, int bytes,
                const AsyncBarrier* b);
  void TileCopy(Grid& g, void* to, const TensorSource& source, int column,
                int row, const AsyncBarrier* b);
  void LoadMatrix(Grid& g, uint32_t (&r)[4], const void* row, bool transposed,
                  const Place& place);
  void Mma(Grid& g, float* d, const uint32_t* a, const uint32_t* b, bool half,
           const Place& place);
  void MmaS8(Grid& g, int32_t* d, const uint32_t* a, const uint32_t* b,
             const Place& place);
  void StoreMatrix(Grid& g, void* column, const uint32_t (&r)[4],
                   const Place& place);
  void Wgmma(Grid& g, float* d, int n, uint64_t a, const uint32_t* registers,
             uint64_t b, bool half, bool columns, const Place& place);
  void WgmmaClose(Grid& g, const Place& place);
  void WgmmaPending(Grid& g, int pending, const Place& place);

 private:
  struct Piece {
    std::byte* to;
    const void* from;
    int bytes;  // the rest are zeros
    int size = kPiece;
  };
  // A barrier in shared memory, in its present phase.
  struct Phase {
    int arrivals = 0;   // that end it
    int missing = 0;    // of them
    int64_t bytes = 0;  // announced and not here
    int parity = 0;
  };
  // Copies on their way to a barrier.
  struct Flight {
    std::vector<Piece> pieces;
    Phase* phase;
    int bytes;
    int arrivals;
    int unfenced;  // of the pieces, once they landed
  };
  struct ThreadState {
    Fiber fiber;
    Grid grid;
    bool ready = true;
    bool held = false;  // waits for the kernel before
    const Phase* awaited = nullptr;
    std::vector<Piece> open;
    std::deque<std::vector<Piece>> groups;
  };
  struct Meeting {
    int arrived = 0;
    int line = 0;
    const char* file = "";
    std::vector<void*> arguments;
  };
  struct WgmmaStep {
    float* d[kWarpgroup];
    const uint32_t* registers[kWarpgroup];  // the first operand, if any
    int n;
    uint64_t a;
    uint64_t b;
    bool half;
    bool columns;  // as WgmmaColumnsDescriptor says
  };
  struct Warpgroup {
    std::vector<WgmmaStep> open;
    std::deque<std::vector<WgmmaStep>> groups;
  };

  ThreadState& Thread(const Grid& g) {
    return *thread_[static_cast<size_t>(g.thread())];
  }
  static void Enter(void* argument) {
    const auto [block, index] = *static_cast<std::pair<Block*, int>*>(argument);
    Grid& g = block->thread_[static_cast<size_t>(index)]->grid;
    block->task_->run(block->task_->kernel.get(), g);
    ThreadState& thread = block->Thread(g);
    if (!thread.open.empty() || !thread.groups.empty()) {
      block->Fail(g, "a thread ends with copies that it did not wait for");
    }
  }
  void Land(const Piece& piece, int unfenced);
  Phase& PhaseOf(Grid& g, const AsyncBarrier* b);
  void TurnIfDone(Phase& phase);
  void Send(Flight flight);
  void LandOne();
  void Execute(Grid& g, const WgmmaStep& step);
  uint16_t FencedElement(Grid& g, int address);
  TensorVector RowOf(Grid& g, uint64_t descriptor, int r, bool half);
  TensorVector ColumnOf(Grid& g, uint64_t descriptor, int n, bool half);
  static TensorVector RowOfRegisters(const WgmmaStep& step, int r);

  const Settings settings_;
  const Generation generation_;
  const int threads_;
  const int shared_bytes_;
  std::mt19937_64 random_;
  std::vector<std::byte> memory_;
  std::byte* shared_;
  std::vector<std::unique_ptr<ThreadState>> thread_;
  std::vector<std::pair<Block*, int>> entry_;
  std::map<std::pair<int, int>, Meeting> meetings_;
  std::vector<Warpgroup> warpgroups_;
  // Of each piece of shared memory: the thread whose copy into it landed but
  // was not fenced, plus one; or kByAnyone.
  std::vector<int> unfenced_;
  static constexpr int kByAnyone = -1;
  bool any_unfenced_ = false;
  std::map<ptrdiff_t, Phase> phases_;
  std::deque<Flight> flights_;
  std::vector<TensorVector> columns_;  // of the step at hand
  const Task* task_ = nullptr;
  std::vector<int> order_;
  int left_ = 0;  // threads
  bool previous_ended_ = false;
  bool waited_ = false;  // some thread of this block
  std::string fault_;
};

}  // namespace tandem::kernels::cuda::emulator

#endif  // TANDEM_KERNELS_CUDA_EMULATOR_BLOCK_H_
