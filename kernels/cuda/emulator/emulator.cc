// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/emulator/emulator.h"

#include <immintrin.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cuda/emulator/fiber.h"

namespace tandem::kernels::cuda {
namespace emulator {
namespace {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kPiece = 16;  // bytes that are copied and fenced together

struct State {
  std::mutex mutex;
  Settings settings;
  std::string fault;
};
State& Shared() {
  static State* const state = new State;
  return *state;
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
               std::strcmp(meeting.file, place.file) != 0) {
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
  meetings_.clear();
  phases_.clear();
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

// ---- Asynchronous copies.

void Block::Land(const Piece& piece, int unfenced) {
  std::memset(piece.to, 0, static_cast<size_t>(piece.size));
  if (piece.bytes > 0) {
    std::memcpy(piece.to, piece.from, static_cast<size_t>(piece.bytes));
  }
  const auto first = unfenced_.begin() + (piece.to - shared_) / kPiece;
  std::fill(first, first + piece.size / kPiece, unfenced);
  any_unfenced_ |= unfenced != 0;
}

void Block::Copy(Grid& g, void* to, const void* from, int bytes) {
  OffsetOf(g, to, kPiece);
  if (reinterpret_cast<uintptr_t>(from) % kPiece != 0) {
    Fail(g, "a copy's source is not aligned");
  }
  if (bytes < 0 || bytes > kPiece) Fail(g, "a copy is of no such size");
  const Piece piece{static_cast<std::byte*>(to), from, bytes};
  if (settings_.landing == Landing::kEarly) {
    Land(piece, g.thread() + 1);
  } else {
    std::memset(to, 0xff, kPiece);
  }
  Thread(g).open.push_back(piece);
}

void Block::Commit(Grid& g) {
  ThreadState& thread = Thread(g);
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

void Block::Wait(Grid& g, int pending) {
  ThreadState& thread = Thread(g);
  while (static_cast<int>(thread.groups.size()) > pending) {
    if (settings_.landing == Landing::kLate) {
      for (const Piece& piece : thread.groups.front()) {
        Land(piece, g.thread() + 1);
      }
    }
    thread.groups.pop_front();
  }
}

void Block::Fence(Grid& g) {
  if (!any_unfenced_) return;
  any_unfenced_ = false;
  for (int& owner : unfenced_) {
    if (owner == g.thread() + 1 || owner == kByAnyone) owner = 0;
    any_unfenced_ |= owner != 0;
  }
}

// ---- Barriers that copies arrive at.

void Block::MakeBarrier(Grid& g, const AsyncBarrier* b, int arrivals) {
  const auto offset = reinterpret_cast<const std::byte*>(b) - g.shared();
  if (offset < 0 || offset + 8 > shared_bytes_ || offset % 8 != 0) {
    Fail(g, "a barrier is outside of shared memory or not aligned");
  }
  phases_[offset] = {arrivals, arrivals, 0, 0};
}

Block::Phase& Block::PhaseOf(Grid& g, const AsyncBarrier* b) {
  const auto found =
      phases_.find(reinterpret_cast<const std::byte*>(b) - g.shared());
  if (found == phases_.end()) Fail(g, "a barrier was never made");
  return found->second;
}

void Block::TurnIfDone(Phase& phase) {
  if (phase.missing > 0 || phase.bytes != 0) return;
  phase.missing = phase.arrivals;
  phase.parity ^= 1;
  for (const auto& thread : thread_) {
    if (thread->awaited == &phase) thread->ready = true;
  }
}

void Block::ArriveAt(Grid& g, const AsyncBarrier* b, int bytes) {
  Phase& phase = PhaseOf(g, b);
  if (phase.missing == 0) Fail(g, "more arrive at a barrier than it waits for");
  --phase.missing;
  phase.bytes += bytes;
  TurnIfDone(phase);
}

void Block::AwaitEnd(Grid& g, const AsyncBarrier* b, int parity) {
  ThreadState& thread = Thread(g);
  Phase& phase = PhaseOf(g, b);
  while (phase.parity == parity) {
    thread.awaited = &phase;
    thread.ready = false;
    thread.fiber.Leave();
  }
  thread.awaited = nullptr;
}

void Block::Send(Flight flight) {
  for (const Piece& piece : flight.pieces) {
    std::memset(piece.to, 0xff, static_cast<size_t>(piece.size));
  }
  flights_.push_back(std::move(flight));
  if (settings_.landing == Landing::kEarly) LandOne();
}

void Block::LandOne() {
  size_t which = 0;
  if (settings_.order == Order::kRandom) which = random_() % flights_.size();
  const Flight flight = std::move(flights_[which]);
  flights_.erase(flights_.begin() + static_cast<ptrdiff_t>(which));
  for (const Piece& piece : flight.pieces) Land(piece, flight.unfenced);
  flight.phase->bytes -= flight.bytes;
  flight.phase->missing -= flight.arrivals;
  TurnIfDone(*flight.phase);
}

void Block::ArriveWithCopies(Grid& g, const AsyncBarrier* b) {
  ThreadState& thread = Thread(g);
  Flight flight{{}, &PhaseOf(g, b), 0, 1, kByAnyone};
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
  for (const std::vector<Piece>& group : thread.groups) {
    flight.pieces.insert(flight.pieces.end(), group.begin(), group.end());
  }
  thread.groups.clear();
  Send(std::move(flight));
}

void Block::BulkCopy(Grid& g, void* to, const void* from, int bytes,
                     const AsyncBarrier* b) {
  OffsetOf(g, to, bytes);
  if (bytes <= 0 || bytes % kPiece != 0 ||
      reinterpret_cast<uintptr_t>(from) % kPiece != 0) {
    Fail(g, "a bulk copy is not of whole pieces");
  }
  Send({{{static_cast<std::byte*>(to), from, bytes, bytes}},
        &PhaseOf(g, b),
        bytes,
        0,
        0});
}

void Block::TileCopy(Grid& g, void* to, const TensorSource& source, int column,
                     int row, const AsyncBarrier* b) {
  const int bytes = source.tile_rows * 128;
  if (OffsetOf(g, to, bytes) % 1024 != 0) Fail(g, "a tile is not aligned");
  if (source.tile_rows > 256 || source.stride % 8 != 0 ||
      reinterpret_cast<uintptr_t>(source.data) % kPiece != 0) {
    Fail(g, "a tensor map is of another layout");
  }
  Flight flight{{}, &PhaseOf(g, b), bytes, 0, 0};
  const std::byte* const data = static_cast<const std::byte*>(source.data);
  for (int r = 0; r < source.tile_rows; ++r) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int first = column + chunk * 8;
      const int valid =
          row + r < source.rows ? std::clamp(source.cols - first, 0, 8) : 0;
      flight.pieces.push_back(
          {static_cast<std::byte*>(to) + ptrdiff_t{128} * r +
               ptrdiff_t{16} * (chunk ^ (r % 8)),
           valid > 0 ? data + ((row + r) * source.stride + first) * 2 : nullptr,
           valid * 2});
    }
  }
  Send(std::move(flight));
}

// ---- Matrices.

void Block::LoadMatrix(Grid& g, uint32_t (&r)[4], const void* row,
                       bool transposed, const Place& place) {
  struct Arguments {
    uint32_t* r;
    const uint16_t* row;
  } mine{r, static_cast<const uint16_t*>(row)};
  OffsetOf(g, row, 16);
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int m = 0; m < 4; ++m) {
        const int i = lane / 4;
        const int j = lane % 4 * 2;
        const auto at = [&](int x, int y) {
          return static_cast<uint32_t>(lanes[m * 8 + x]->row[y]);
        };
        lanes[lane]->r[m] = transposed ? at(j, i) | at(j + 1, i) << 16
                                       : at(i, j) | at(i, j + 1) << 16;
      }
    }
  });
}

void Block::StoreMatrix(Grid& g, void* column, const uint32_t (&r)[4],
                        const Place& place) {
  struct Arguments {
    const uint32_t* r;
    uint16_t* column;
  } mine{r, static_cast<uint16_t*>(column)};
  OffsetOf(g, column, 16);
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int m = 0; m < 4; ++m) {
        for (int i = 0; i < 2; ++i) {
          lanes[m * 8 + lane % 4 * 2 + i]->column[lane / 4] =
              static_cast<uint16_t>(lanes[lane]->r[m] >> (16 * i));
        }
      }
    }
  });
}

namespace {

void SetOperand(TensorVector& vector, int i, uint32_t bits, bool half) {
  const uint16_t element = static_cast<uint16_t>(bits & 0xffffu);
  if (half) {
    vector.SetF16(i, element);
  } else {
    vector.SetBf16(i, element);
  }
}

bool IsZero(const TensorVector& vector) {
  int32_t any = 0;
  for (const int32_t significand : vector.significand) any |= significand;
  return any == 0 && !vector.special;
}

// TensorCoreStep; quick where `row_is_zero`, as padding and masked keys are.
float ChainStep(Generation generation, const TensorVector& row,
                bool row_is_zero, const TensorVector& column, float chain,
                bool half) {
  if (row_is_zero && !column.special && std::isfinite(chain)) {
    return chain == 0 ? 0.0f : chain;
  }
  return TensorCoreStep(generation, row, column, chain, half);
}

}  // namespace

void Block::Mma(Grid& g, float* d, const uint32_t* a, const uint32_t* b,
                bool half, const Place& place) {
  struct Arguments {
    float* d;
    const uint32_t* a;
    const uint32_t* b;
  } mine{d, a, b};
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    TensorVector rows[16];
    TensorVector columns[8];
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 8; ++i) {
        const int row = lane / 4 + i / 2 % 2 * 8;
        const int k = lane % 4 * 2 + i % 2 + i / 4 * 8;
        SetOperand(rows[row], k, lanes[lane]->a[i / 2] >> (i % 2 * 16), half);
      }
      for (int i = 0; i < 4; ++i) {
        const int k = lane % 4 * 2 + i % 2 + i / 2 * 8;
        SetOperand(columns[lane / 4], k, lanes[lane]->b[i / 2] >> (i % 2 * 16),
                   half);
      }
    }
    bool zero[16];
    for (int i = 0; i < 16; ++i) zero[i] = IsZero(rows[i]);
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8;
        float& chain = lanes[lane]->d[i];
        chain = ChainStep(generation_, rows[row], zero[row],
                          columns[lane % 4 * 2 + i % 2], chain, half);
      }
    }
  });
}

// PTX ISA, m16n8k32: byte i of a lane's 16 is of row lane / 4 (+ 8 where i / 4
// is odd) and input lane % 4 * 4 + i % 4 (+ 16 from 8 on); of the second
// operand likewise, with columns for rows.
void Block::MmaS8(Grid& g, int32_t* d, const uint32_t* a, const uint32_t* b,
                  const Place& place) {
  struct Arguments {
    int32_t* d;
    const uint32_t* a;
    const uint32_t* b;
  } mine{d, a, b};
  Together(g, kWarp, place, &mine, [&](Arguments* const* lanes) {
    int8_t rows[16][32];
    int8_t columns[8][32];
    const auto byte = [](const uint32_t* registers, int i) {
      return static_cast<int8_t>(registers[i / 4] >> (i % 4 * 8));
    };
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 16; ++i) {
        rows[lane / 4 + i / 4 % 2 * 8][lane % 4 * 4 + i % 4 + i / 8 * 16] =
            byte(lanes[lane]->a, i);
      }
      for (int i = 0; i < 8; ++i) {
        columns[lane / 4][lane % 4 * 4 + i % 4 + i / 4 * 16] =
            byte(lanes[lane]->b, i);
      }
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int i = 0; i < 4; ++i) {
        for (int k = 0; k < 32; ++k) {
          lanes[lane]->d[i] +=
              rows[lane / 4 + i / 2 * 8][k] * columns[lane % 4 * 2 + i % 2][k];
        }
      }
    }
  });
}

void Block::Execute(Grid& g, const WgmmaStep& step) {
  constexpr uint64_t kStrideAndSwizzle = uint64_t{64} << 32 | uint64_t{1} << 62;
  // Where a byte is: the swizzle goes by the address, bits 4-6 ^= bits 7-9.
  const auto at = [&](int address) {
    address ^= (address >> 7 & 7) << 4;
    if (address < 0 || address + 2 > shared_bytes_) {
      Fail(g, "a descriptor is outside of shared memory");
    }
    if (unfenced_[static_cast<size_t>(address / kPiece)] != 0) {
      Fail(g, "a warpgroup's operand was written but not fenced");
    }
    uint16_t bits;
    std::memcpy(&bits, shared_ + address, 2);
    return bits;
  };
  // Row r of an operand: 128 bytes at r * 128 from the aligned start; the
  // descriptor's start may be some chunks further along the row.
  const auto row = [&](uint64_t descriptor, int r) {
    if ((descriptor & ~uint64_t{0x3fff}) !=
        (kStrideAndSwizzle | uint64_t{1} << 16)) {
      Fail(g, "a descriptor is of another layout");
    }
    const int start = static_cast<int>(descriptor & 0x3fff) * 16;
    TensorVector vector;
    for (int i = 0; i < 16; ++i) {
      SetOperand(vector, i, at(start + r * 128 + i * 2), step.half);
    }
    return vector;
  };
  // Token n of an operand whose rows are inputs.
  const auto column = [&](uint64_t descriptor, int n) {
    if ((descriptor & ~uint64_t{0x3fff3fff}) != kStrideAndSwizzle) {
      Fail(g, "a descriptor is of another layout");
    }
    const int start = static_cast<int>(descriptor & 0x3fff) * 16;
    const int apart = static_cast<int>(descriptor >> 16 & 0x3fff) * 16;
    TensorVector vector;
    for (int i = 0; i < 16; ++i) {
      SetOperand(vector, i, at(start + n / 64 * apart + i * 128 + n % 64 * 2),
                 step.half);
    }
    return vector;
  };
  columns_.clear();
  for (int n = 0; n < step.n; ++n)
    columns_.push_back(step.columns ? column(step.b, n) : row(step.b, n));
  // As of mma.sync, each warp its 16 rows.
  const auto row_of_registers = [&](int r) {
    TensorVector vector;
    for (int k = 0; k < 16; ++k) {
      const int thread = r / 16 * 32 + r % 8 * 4 + k % 8 / 2;
      const uint32_t pair = step.registers[thread][k / 8 * 2 + r % 16 / 8];
      SetOperand(vector, k, pair >> (k % 2 * 16), step.half);
    }
    return vector;
  };
  for (int r = 0; r < 64; ++r) {
    const TensorVector weights =
        step.registers[0] == nullptr ? row(step.a, r) : row_of_registers(r);
    const bool zero = IsZero(weights);
    for (int n = 0; n < step.n; ++n) {
      const int thread = r / 16 * 32 + r % 8 * 4 + n % 8 / 2;
      float& chain = step.d[thread][n / 8 * 4 + r % 16 / 8 * 2 + n % 2];
      chain = ChainStep(generation_, weights, zero,
                        columns_[static_cast<size_t>(n)], chain, step.half);
    }
  }
}

void Block::Wgmma(Grid& g, float* d, int n, uint64_t a,
                  const uint32_t* registers, uint64_t b, bool half,
                  bool columns, const Place& place) {
  struct Arguments {
    float* d;
    const uint32_t* registers;
  } mine{d, registers};
  Together(g, kWarpgroup, place, &mine, [&](Arguments* const* threads) {
    WgmmaStep step{{}, {}, n, a, b, half, columns};
    for (int i = 0; i < kWarpgroup; ++i) {
      step.d[i] = threads[i]->d;
      step.registers[i] = threads[i]->registers;
    }
    Warpgroup& warpgroup =
        warpgroups_[static_cast<size_t>(g.thread() / kWarpgroup)];
    if (settings_.landing == Landing::kEarly) Execute(g, step);
    warpgroup.open.push_back(step);
  });
}

void Block::WgmmaClose(Grid& g, const Place& place) {
  Together(g, kWarpgroup, place, &g, [&](Grid* const*) {
    Warpgroup& warpgroup =
        warpgroups_[static_cast<size_t>(g.thread() / kWarpgroup)];
    warpgroup.groups.push_back(std::move(warpgroup.open));
    warpgroup.open.clear();
  });
}

void Block::WgmmaPending(Grid& g, int pending, const Place& place) {
  Together(g, kWarpgroup, place, &g, [&](Grid* const*) {
    Warpgroup& warpgroup =
        warpgroups_[static_cast<size_t>(g.thread() / kWarpgroup)];
    while (static_cast<int>(warpgroup.groups.size()) > pending) {
      if (settings_.landing == Landing::kLate) {
        for (const WgmmaStep& step : warpgroup.groups.front()) {
          Execute(g, step);
        }
      }
      warpgroup.groups.pop_front();
    }
  });
}

namespace {

Settings CurrentSettings() {
  State& state = Shared();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.settings;
}

}  // namespace

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

uint32_t SharedAddress(Grid& g, const void* p) {
  return static_cast<uint32_t>(static_cast<const std::byte*>(p) - g.shared());
}
void CopyAsync16(Grid& g, void* shared, const void* global, int bytes) {
  g.emulated->Copy(g, shared, global, bytes);
}
void CopyAsyncCommit(Grid& g) { g.emulated->Commit(g); }
void CopyAsyncWaitFor(Grid& g, int pending) { g.emulated->Wait(g, pending); }
void LoadShared16(Grid& g, const void* shared, uint32_t (&r)[4]) {
  g.emulated->OffsetOf(g, shared, 16);
  std::memcpy(r, shared, 16);
}
void LoadMatrix4(Grid& g, uint32_t (&r)[4], const void* row, Place place) {
  g.emulated->LoadMatrix(g, r, row, false, place);
}
void LoadMatrix4Transposed(Grid& g, uint32_t (&r)[4], const void* row,
                           Place place) {
  g.emulated->LoadMatrix(g, r, row, true, place);
}
void StoreMatrix4Transposed(Grid& g, void* column, const uint32_t (&r)[4],
                            Place place) {
  g.emulated->StoreMatrix(g, column, r, place);
}
void MmaBf16(Grid& g, float (&d)[4], const uint32_t (&a)[4],
             const uint32_t (&b)[2], Place place) {
  g.emulated->Mma(g, d, a, b, false, place);
}
void MmaF16(Grid& g, float (&d)[4], const uint32_t (&a)[4],
            const uint32_t (&b)[2], Place place) {
  g.emulated->Mma(g, d, a, b, true, place);
}
void MmaS8(Grid& g, int32_t (&d)[4], const uint32_t (&a)[4],
           const uint32_t (&b)[2], Place place) {
  g.emulated->MmaS8(g, d, a, b, place);
}

void InitBarrier(Grid& g, AsyncBarrier* b, int arrivals) {
  g.emulated->MakeBarrier(g, b, arrivals);
}
void Arrive(Grid& g, AsyncBarrier* b) { g.emulated->ArriveAt(g, b, 0); }
void ArriveExpecting(Grid& g, AsyncBarrier* b, int bytes) {
  g.emulated->ArriveAt(g, b, bytes);
}
void AwaitPhase(Grid& g, AsyncBarrier* b, int parity) {
  g.emulated->AwaitEnd(g, b, parity);
}
void CopyAsyncArrive(Grid& g, AsyncBarrier* b) {
  g.emulated->ArriveWithCopies(g, b);
}
void CopyBulk(Grid& g, void* shared, const void* global, int bytes,
              AsyncBarrier* b) {
  g.emulated->BulkCopy(g, shared, global, bytes, b);
}
void CopyTile(Grid& g, void* shared, const TensorMap& map, int column, int row,
              AsyncBarrier* b) {
  g.emulated->TileCopy(g, shared, map.source, column, row, b);
}

void WaitForPrevious(Grid& g) { g.emulated->AwaitPrevious(g); }

void ProxyFence(Grid& g) { g.emulated->Fence(g); }
void WgmmaFence(Grid&) {}
void WgmmaCommit(Grid& g, Place place) { g.emulated->WgmmaClose(g, place); }
void WgmmaWaitFor(Grid& g, int pending, Place place) {
  g.emulated->WgmmaPending(g, pending, place);
}
void WgmmaAny(Grid& g, float* d, int n, uint64_t a, const uint32_t* registers,
              uint64_t b, bool half, Place place, bool columns) {
  g.emulated->Wgmma(g, d, n, a, registers, b, half, columns, place);
}

float ToFloat(Half value) {
  const int biased = value.bits >> 10 & 0x1f;
  const int fraction = value.bits & 0x3ff;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  if (biased == 0x1f) {
    return std::bit_cast<float>(sign | 0x7f800000u |
                                static_cast<uint32_t>(fraction) << 13);
  }
  const float magnitude =
      biased == 0
          ? static_cast<float>(fraction) * 0x1p-24f
          : std::bit_cast<float>(static_cast<uint32_t>(biased + 112) << 23 |
                                 static_cast<uint32_t>(fraction) << 13);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

template <>
BFloat16 FromFloat<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
Half FromFloat<Half>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00)};
  const int power = std::max(static_cast<int>(magnitude >> 23) - 127, -14);
  // The significand, then how many units of the result it makes.
  const uint32_t significand =
      (magnitude & 0x7fffffu) | (magnitude >= 0x800000u ? 0x800000u : 0u);
  const int drop =
      13 + std::max(0, -14 - (static_cast<int>(magnitude >> 23) - 127));
  if (drop > 24) return {static_cast<uint16_t>(sign)};
  const uint32_t half_unit = 1u << (drop - 1);
  const uint32_t odd = significand >> drop & 1u;
  const uint32_t units = (significand + half_unit - 1 + odd) >> drop;
  return {static_cast<uint16_t>(
      sign | ((static_cast<uint32_t>(power + 14) << 10) + units))};
}

uint32_t MulPairBf16(uint32_t a, uint32_t b) {
  // The device's keeps denormals.
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved & ~0x8040u);
  const uint32_t product = MulPairOf<BFloat16>(a, b);
  _mm_setcsr(saved);
  return product;
}
uint32_t MulPairF16(uint32_t a, uint32_t b) { return MulPairOf<Half>(a, b); }

}  // namespace tandem::kernels::cuda
