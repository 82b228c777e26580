// SPDX-License-Identifier: Apache-2.0
// grid.h for the host: runs a kernel's grid on the calling thread, block after
// block, the threads of a block as fibers. It is unkind on purpose:
//
//   shared memory is filled with NaNs before a block starts
//   asynchronous copies land as they are issued, or not before they are
//     waited for, those that arrive at barriers not before every thread waits
//     (until then their destination holds NaNs)
//   warpgroup matrix steps read shared memory as they are issued, or not
//     before they are waited for; and never what was not fenced
//   threads run in ascending, descending or random order
//   barriers and warp operations must be reached by all, at the same place
//   addresses of copies and matrix loads are checked
//   a block of the next kernel starts before one on a HeldStream does, and
//   every block must wait for that
//   a grid or shared memory larger than a GPU's is refused
//
// Matrix steps are those of tensor_core.h for the stream's generation. What
// it does not see: weak memory ordering, blocks that run at the same time,
// speed. A fault ends the launch with kEmulatorFault; LastFault() says why.

#ifndef TANDEM_KERNELS_CUDA_EMULATOR_EMULATOR_H_
#define TANDEM_KERNELS_CUDA_EMULATOR_EMULATOR_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/device/tensor_core.h"
#include "kernels/cuda/device/tensor_map.h"
#include "kernels/cuda/device/types.h"
#include "kernels/cuda/launch.h"

#define TANDEM_DEVICE inline

namespace tandem::kernels::cuda {

class Grid;

namespace emulator {

enum class Landing : uint8_t { kEarly, kLate };
enum class Order : uint8_t { kForward, kReverse, kRandom };

struct Settings {
  Landing landing = Landing::kLate;
  Order order = Order::kForward;
  uint64_t seed = 1;  // of random order
};

// For launches from now on, of all threads: set it while none runs.
void SetSettings(const Settings& settings);

// What was wrong with the last launch that returned kEmulatorFault.
std::string LastFault();

class Block;
class Execution;

// A launch with its own copy of the kernel and what that was given.
struct Task {
  Stream stream;
  Dim3 blocks;
  int threads;
  int shared_bytes;
  std::shared_ptr<const void> kernel;
  void (*run)(const void* kernel, Grid& g);
};

// What a GPU says to a grid or to shared memory of that size: 0, or
// kNoSuchGrid or kInvalidLaunch.
int Refusal(const Task& task);

// Runs it to its end. Returns 0 or kEmulatorFault.
int Run(Task task);

// What Stream::handle may point to. A launch comes as far as its first block
// gets without the one before it, then that one ends: what a kernel does before
// its WaitForPrevious is done too early. Of one thread at a time.
class HeldStream {
 public:
  HeldStream();
  ~HeldStream();
  // Returns the error of this or the launch before.
  int Launch(Task task);
  // Ends the last launch: before anything that is none.
  int Flush();
  // From now on launches are added to `tasks` instead, unless it is null.
  void Record(std::vector<Task>* tasks) { recording_ = tasks; }
  std::vector<Task>* recorded() const { return recording_; }

 private:
  std::unique_ptr<Execution> held_;
  std::vector<Task>* recording_ = nullptr;
};

// Where a thread of a block is in the source: all must be at the same place.
struct Place {
  constexpr Place(const char* in_file, int at_line)
      : file(in_file), line(at_line) {}
  const char* file;
  int line;
};
// As a default argument: where the call is. (clang 14 has no
// std::source_location; gcc 12 says where the function is declared if Place
// is initialised without a constructor.)
#define TANDEM_HERE emulator::Place(__builtin_FILE(), __builtin_LINE())

}  // namespace emulator

inline constexpr int kEmulatorFault = 719;  // cudaErrorLaunchFailure
inline constexpr int kNoSuchGrid = 9;       // cudaErrorInvalidConfiguration

class Grid {
 public:
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int lane() const { return thread_ % 32; }
  int warp() const { return thread_ / 32; }
  int block_x() const { return block_index_.x; }
  int block_y() const { return block_index_.y; }
  int block_z() const { return block_index_.z; }
  int grid_x() const { return blocks_.x; }
  int grid_y() const { return blocks_.y; }
  int grid_z() const { return blocks_.z; }
  std::byte* shared() const { return shared_; }

  void Barrier(emulator::Place place = TANDEM_HERE);
  void WarpBarrier(emulator::Place place = TANDEM_HERE);
  template <int kThreads>
  void GroupBarrier(int /*id*/, emulator::Place place = TANDEM_HERE) {
    Meet(kThreads, place);
  }
  void ThreadFence() const {}
  template <typename V>
  V ShuffleXor(V value, int mask, emulator::Place place = TANDEM_HERE) {
    return Shuffle(value, lane() ^ mask, place);
  }
  template <typename V>
  V Shuffle(V value, int from, emulator::Place place = TANDEM_HERE) {
    static_assert(sizeof(V) == 4);
    return std::bit_cast<V>(
        Exchange(std::bit_cast<uint32_t>(value), from, place));
  }
  bool Any(bool value, emulator::Place place = TANDEM_HERE) {
    uint32_t any = value ? 1 : 0;
    for (int mask = 16; mask > 0; mask /= 2) {
      any |= Exchange(any, lane() ^ mask, place);
    }
    return any != 0;
  }
  // Blocks come one after the other and fibers are not interrupted.
  template <typename V>
  V AtomicAdd(V* to, V value) {
    const V before = *to;
    *to = before + value;
    return before;
  }

 private:
  friend class emulator::Block;
  uint32_t Exchange(uint32_t value, int from, emulator::Place place);
  void Meet(int threads, emulator::Place place);

 public:
  emulator::Block* emulated = nullptr;

 private:
  int thread_ = 0;
  int threads_ = 0;
  Dim3 block_index_;
  Dim3 blocks_;
  std::byte* shared_ = nullptr;
};

// ---- Copies and matrices, as in grid_nvcc.h.

uint32_t SharedAddress(Grid& g, const void* p);
template <int kAlignment>
std::byte* AlignShared(Grid& g, std::byte* p) {
  return p + (kAlignment - SharedAddress(g, p) % kAlignment) % kAlignment;
}

void WaitForPrevious(Grid& g);
inline void LaunchNext(Grid&) {}

void CopyAsync16(Grid& g, void* shared, const void* global, int bytes);
void CopyAsyncCommit(Grid& g);
void CopyAsyncWaitFor(Grid& g, int pending);
template <int kPending>
void CopyAsyncWait(Grid& g) {
  CopyAsyncWaitFor(g, kPending);
}
void LoadShared16(Grid& g, const void* shared, uint32_t (&r)[4]);

void LoadMatrix4(Grid& g, uint32_t (&r)[4], const void* row,
                 emulator::Place place = TANDEM_HERE);
void LoadMatrix4Transposed(Grid& g, uint32_t (&r)[4], const void* row,
                           emulator::Place place = TANDEM_HERE);
void StoreMatrix4Transposed(Grid& g, void* column, const uint32_t (&r)[4],
                            emulator::Place place = TANDEM_HERE);
void MmaBf16(Grid& g, float (&d)[4], const uint32_t (&a)[4],
             const uint32_t (&b)[2], emulator::Place place = TANDEM_HERE);
void MmaF16(Grid& g, float (&d)[4], const uint32_t (&a)[4],
            const uint32_t (&b)[2], emulator::Place place = TANDEM_HERE);
void MmaS8(Grid& g, int32_t (&d)[4], const uint32_t (&a)[4],
           const uint32_t (&b)[2], emulator::Place place = TANDEM_HERE);

// device/async_copy.h's.
void InitBarrier(Grid& g, AsyncBarrier* b, int arrivals);
inline void FenceBarriers(Grid&) {}
void Arrive(Grid& g, AsyncBarrier* b);
void ArriveExpecting(Grid& g, AsyncBarrier* b, int bytes);
void AwaitPhase(Grid& g, AsyncBarrier* b, int parity);
void CopyAsyncArrive(Grid& g, AsyncBarrier* b);
void CopyBulk(Grid& g, void* shared, const void* global, int bytes,
              AsyncBarrier* b);
void CopyTile(Grid& g, void* shared, const TensorMap& map, int column, int row,
              AsyncBarrier* b);

// device/wgmma.h's.
template <int kRegisters>
void GiveRegisters(Grid&) {}
template <int kRegisters>
void TakeRegisters(Grid&) {}
void ProxyFence(Grid& g);
void WgmmaFence(Grid& g);
void WgmmaCommit(Grid& g, emulator::Place place = TANDEM_HERE);
void WgmmaWaitFor(Grid& g, int pending, emulator::Place place);
template <int kPending>
void WgmmaWait(Grid& g, emulator::Place place = TANDEM_HERE) {
  WgmmaWaitFor(g, kPending, place);
}
// `d` [n / 8][4] of each of the 128 threads; the first operand is `registers`
// [4], if there are any, else `a`. `columns`: b is of WgmmaColumnsDescriptor.
void WgmmaAny(Grid& g, float* d, int n, uint64_t a, const uint32_t* registers,
              uint64_t b, bool half, emulator::Place place,
              bool columns = false);

// ---- Arithmetic. Launch() flushes denormals.

inline float Add(float a, float b) { return a + b; }
inline float Sub(float a, float b) { return a - b; }
inline float Mul(float a, float b) { return a * b; }
inline float Div(float a, float b) { return a / b; }
// As the device's: a NaN loses against a number.
inline float Max(float a, float b) { return std::fmax(a, b); }
inline float Min(float a, float b) { return std::fmin(a, b); }
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float Sqrt(float a) { return std::sqrt(a); }
// The device's is within two units of this in the last place.
inline float Exp2(float a) {
  return static_cast<float>(std::exp2(static_cast<double>(a)));
}
inline float RoundEven(float a) { return std::nearbyint(a); }
inline float BitsToFloat(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t BytePermute(uint32_t low, uint32_t high, uint32_t picks) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const auto byte = static_cast<uint32_t>(bytes >> (picks >> 4 * i & 7) * 8);
    picked |= (byte & 0xffu) << 8 * i;
  }
  return picked;
}
inline uint32_t FloatToBits(float value) {
  return std::bit_cast<uint32_t>(value);
}

// ---- Types.

inline float ToFloat(float value) { return value; }
inline float ToFloat(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
float ToFloat(Half value);
template <typename T>
T FromFloat(float value);
template <>
inline float FromFloat<float>(float value) {
  return value;
}
template <>
BFloat16 FromFloat<BFloat16>(float value);
template <>
Half FromFloat<Half>(float value);

template <typename T>
uint32_t PackPairOf(float low, float high) {
  return FromFloat<T>(low).bits | static_cast<uint32_t>(FromFloat<T>(high).bits)
                                      << 16;
}
inline uint32_t PackPairBf16(float low, float high) {
  return PackPairOf<BFloat16>(low, high);
}
inline uint32_t PackPairF16(float low, float high) {
  return PackPairOf<Half>(low, high);
}
template <typename T>
uint32_t MulPairOf(uint32_t a, uint32_t b) {
  const auto half = [](uint32_t pair, int i) {
    return ToFloat(T{static_cast<uint16_t>(pair >> (16 * i))});
  };
  return PackPairOf<T>(half(a, 0) * half(b, 0), half(a, 1) * half(b, 1));
}
uint32_t MulPairBf16(uint32_t a, uint32_t b);
uint32_t MulPairF16(uint32_t a, uint32_t b);

// ---- Launches.

// Ends when the grid has, unless the stream is a HeldStream.
template <typename Kernel>
int Launch(const Stream& stream, const Dim3& blocks, int threads,
           int shared_bytes, const Kernel& kernel) {
  emulator::Task task{stream,
                      blocks,
                      threads,
                      shared_bytes,
                      std::make_shared<Kernel>(kernel),
                      [](const void* k, Grid& g) {
                        if constexpr (!kWaitsItself<Kernel>) {
                          WaitForPrevious(g);
                          LaunchNext(g);
                        }
                        (*static_cast<const Kernel*>(k))(g);
                      }};
  if (const int error = emulator::Refusal(task); error != 0) return error;
  if (stream.handle == nullptr) return emulator::Run(std::move(task));
  return static_cast<emulator::HeldStream*>(stream.handle)
      ->Launch(std::move(task));
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_EMULATOR_EMULATOR_H_
