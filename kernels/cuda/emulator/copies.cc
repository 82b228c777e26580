// SPDX-License-Identifier: Apache-2.0
// What is copied into a block's shared memory behind its threads' backs: copies
// that their thread waits for, in groups, and copies that arrive at barriers.
// Until it lands the destination holds NaNs. See emulator.h.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/cuda/emulator/block.h"

namespace tandem::kernels::cuda {

// ---- What kernels call.

uint32_t SharedAddress(Grid& g, const void* p) {
  return static_cast<uint32_t>(static_cast<const std::byte*>(p) - g.shared());
}
void CopyAsync16(Grid& g, void* shared, const void* global, int bytes) {
  g.emulated->Copy(g, shared, global, bytes);
}
void CopyAsyncCommit(Grid& g) { g.emulated->Commit(g); }
void CopyAsyncWaitFor(Grid& g, int pending) { g.emulated->Wait(g, pending); }
void ProxyFence(Grid& g) { g.emulated->Fence(g); }

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

namespace emulator {

// ---- Copies that a thread waits for.

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

}  // namespace emulator
}  // namespace tandem::kernels::cuda
