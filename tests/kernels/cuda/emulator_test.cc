// SPDX-License-Identifier: Apache-2.0
// The grid emulator: what it computes, and that each of its detectors notices
// the fault that it is there for.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/wgmma.h"
#include "tests/kernels/cuda/any_kernel.h"

namespace tandem::kernels::cuda {
namespace {

using emulator::Landing;
using emulator::Order;
using emulator::Settings;

class CudaEmulator : public ::testing::Test {
 protected:
  ~CudaEmulator() override { emulator::SetSettings({}); }
};

struct WaitingKernel {
  static constexpr bool kWaits = true;
  const std::function<void(Grid&)>* body;
  void operator()(Grid& g) const { (*body)(g); }
};

struct Grids {
  Dim3 blocks = {};
  int threads = 64;
  int shared_bytes = 4096;
  int generation = 90;
};

int RunGrid(const std::function<void(Grid&)>& body, const Grids& grids = {}) {
  Stream stream;
  stream.generation = grids.generation;
  return Launch(stream, grids.blocks, grids.threads, grids.shared_bytes,
                AnyKernel{&body});
}

// The message of the fault that the body must be.
std::string FaultOf(const std::function<void(Grid&)>& body,
                    const Grids& grids = {}) {
  EXPECT_EQ(RunGrid(body, grids), kEmulatorFault);
  return emulator::LastFault();
}

// ---- What it computes.

TEST_F(CudaEmulator, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> seen(2 * 3 * 4 * 96);
  ASSERT_EQ(
      RunGrid(
          [&](Grid& g) {
            EXPECT_EQ(g.grid_x() * 100 + g.grid_y() * 10 + g.grid_z(), 234);
            EXPECT_EQ(g.warp() * 32 + g.lane(), g.thread());
            const int block = (g.block_x() * 3 + g.block_y()) * 4 + g.block_z();
            ++seen[static_cast<size_t>(block * g.threads() + g.thread())];
          },
          {.blocks = {2, 3, 4}, .threads = 96}),
      0);
  EXPECT_EQ(std::count(seen.begin(), seen.end(), 1),
            static_cast<std::ptrdiff_t>(seen.size()));
}

TEST_F(CudaEmulator, GridsAndSharedMemoryHaveTheSizesOfAGpus) {
  const auto nothing = [](Grid&) {};
  EXPECT_EQ(RunGrid(nothing, {.blocks = {65536, 1, 1}, .threads = 1}), 0);
  EXPECT_EQ(RunGrid(nothing, {.blocks = {1, 65535, 1}, .threads = 1}), 0);
  EXPECT_EQ(RunGrid(nothing, {.blocks = {1, 65536, 1}}), kNoSuchGrid);
  EXPECT_EQ(RunGrid(nothing, {.blocks = {1, 1, 65536}}), kNoSuchGrid);
  EXPECT_EQ(RunGrid(nothing, {.blocks = {0, 1, 1}}), kNoSuchGrid);
  EXPECT_EQ(RunGrid(nothing, {.threads = 1025}), kNoSuchGrid);
  struct {
    int generation;
    int most;  // KiB a block
  } const kSharedMemory[] = {{80, 163}, {90, 227}, {100, 227}, {120, 163}};
  for (const auto& [generation, most] : kSharedMemory) {
    const int bytes = most * 1024;
    EXPECT_EQ(
        RunGrid(nothing, {.shared_bytes = bytes, .generation = generation}), 0);
    EXPECT_EQ(
        RunGrid(nothing, {.shared_bytes = bytes + 1, .generation = generation}),
        kInvalidLaunch);
  }
}

TEST_F(CudaEmulator, OrdersAreWhatTheyAreCalled) {
  const auto order_of = [](Order order, uint64_t seed) {
    emulator::SetSettings({Landing::kLate, order, seed});
    std::vector<int> order_of_threads;
    EXPECT_EQ(RunGrid([&](Grid& g) { order_of_threads.push_back(g.thread()); }),
              0);
    return order_of_threads;
  };
  const auto forward = order_of(Order::kForward, 1);
  auto reversed = order_of(Order::kReverse, 1);
  EXPECT_TRUE(std::is_sorted(forward.begin(), forward.end()));
  std::reverse(reversed.begin(), reversed.end());
  EXPECT_EQ(reversed, forward);
  const auto random = order_of(Order::kRandom, 1);
  EXPECT_NE(random, forward);
  EXPECT_EQ(random, order_of(Order::kRandom, 1));
  EXPECT_NE(random, order_of(Order::kRandom, 2));
}

TEST_F(CudaEmulator, ShufflesTakeFromTheLaneThatIsNamed) {
  ASSERT_EQ(RunGrid([](Grid& g) {
              EXPECT_EQ(g.ShuffleXor(g.thread(), 5), g.thread() ^ 5);
              EXPECT_EQ(g.Shuffle(static_cast<float>(g.thread()), 3),
                        static_cast<float>(g.warp() * 32 + 3));
            }),
            0);
}

TEST_F(CudaEmulator, BarriersOrderWritesBeforeReads) {
  for (const Order order : {Order::kForward, Order::kReverse, Order::kRandom}) {
    emulator::SetSettings({Landing::kLate, order, 3});
    ASSERT_EQ(RunGrid([](Grid& g) {
                for (int round = 0; round < 3; ++round) {
                  Floats(g)[g.thread()] =
                      static_cast<float>(g.thread() + round);
                  g.Barrier();
                  EXPECT_EQ(Floats(g)[63 - g.thread()],
                            static_cast<float>(63 - g.thread() + round));
                  g.Barrier();
                }
              }),
              0);
  }
}

TEST_F(CudaEmulator, CopiesEndInZeros) {
  alignas(16) const float source[4] = {1, 2, 3, 4};
  for (const Landing landing : {Landing::kEarly, Landing::kLate}) {
    emulator::SetSettings({landing, Order::kForward, 1});
    ASSERT_EQ(RunGrid([&](Grid& g) {
                if (g.thread() > 4) return;
                float* const to = Floats(g) + g.thread() * 4;
                CopyAsync16(g, to, source, g.thread() * 4);
                CopyAsyncCommit(g);
                CopyAsyncWait<0>(g);
                for (int i = 0; i < 4; ++i) {
                  EXPECT_EQ(to[i], i < g.thread() ? source[i] : 0.0f);
                }
              }),
              0);
  }
}

TEST_F(CudaEmulator, WaitsLeaveTheYoungestGroupsPending) {
  emulator::SetSettings({Landing::kLate, Order::kForward, 1});
  alignas(16) const float source[4] = {1, 2, 3, 4};
  ASSERT_EQ(RunGrid([&](Grid& g) {
              if (g.thread() != 0) return;
              for (int i = 0; i < 3; ++i) {
                CopyAsync16(g, Floats(g) + i * 4, source, 16);
                CopyAsyncCommit(g);
              }
              CopyAsyncWait<1>(g);
              EXPECT_EQ(Floats(g)[0], 1.0f);
              EXPECT_EQ(Floats(g)[4], 1.0f);
              EXPECT_TRUE(std::isnan(Floats(g)[8]));
              CopyAsyncWait<0>(g);
              EXPECT_EQ(Floats(g)[8], 1.0f);
            }),
            0);
}

TEST_F(CudaEmulator, MatrixStepsAreThoseOfTheStreamsGeneration) {
  // 2^25 - 2^25 in one step hides what is below the step's last bit: 2 is 24
  // fraction bits below, 1 is 25.
  const auto step = [](int generation, float small) {
    float got = 0;
    EXPECT_EQ(RunGrid(
                  [&](Grid& g) {
                    // Row 0: inputs 0 .. 7 by lanes 0 .. 3, two each.
                    uint32_t a[4] = {};
                    uint32_t b[2] = {};
                    float d[4] = {};
                    if (g.lane() == 0) {
                      a[0] = PackPairBf16(0x1p25f, -0x1p25f);
                      b[0] = PackPairBf16(1.0f, 1.0f);
                    }
                    if (g.lane() == 1) {
                      a[0] = PackPairBf16(small, 0.0f);
                      b[0] = PackPairBf16(1.0f, 1.0f);
                    }
                    MmaBf16(g, d, a, b);
                    if (g.lane() == 0) got = d[0];
                  },
                  {.threads = 32, .generation = generation}),
              0);
    return got;
  };
  EXPECT_EQ(step(80, 2.0f), 2.0f);
  EXPECT_EQ(step(80, 1.0f), 0.0f);
  EXPECT_EQ(step(90, 1.0f), 1.0f);
  EXPECT_EQ(step(90, 0.5f), 0.0f);
}

// ---- Detectors.

TEST_F(CudaEmulator, SharedMemoryStartsAsNaNsInEveryBlock) {
  ASSERT_EQ(RunGrid(
                [](Grid& g) {
                  EXPECT_TRUE(std::isnan(Floats(g)[g.thread()]));
                  Floats(g)[g.thread()] = 1.0f;
                },
                {.blocks = {3}}),
            0);
}

TEST_F(CudaEmulator, NoticesABarrierThatSomeSkip) {
  EXPECT_TRUE(Says(FaultOf([](Grid& g) {
                     if (g.thread() != 17) g.Barrier();
                   }),
                   "63 of 64"));
}

TEST_F(CudaEmulator, NoticesBarriersAtDifferentPlaces) {
  // Outside of a macro, which has one line.
  const auto body = [](Grid& g) {
    if (g.warp() == 0) {
      g.Barrier();
    } else {
      g.Barrier();
    }
  };
  EXPECT_TRUE(Says(FaultOf(body), "meet at line"));
}

TEST_F(CudaEmulator, NoticesAShuffleInABranch) {
  EXPECT_TRUE(Says(FaultOf([](Grid& g) {
                     if (g.lane() < 16) g.ShuffleXor(1, 1);
                   }),
                   "16 of 32"));
}

TEST_F(CudaEmulator, NoticesAShuffleOfHalfAWarp) {
  EXPECT_TRUE(
      Says(FaultOf([](Grid& g) { g.ShuffleXor(1, 1); }, {.threads = 48}),
           "not whole"));
}

TEST_F(CudaEmulator, ShowsAMissingBarrierInOneOrderAtLeast) {
  int wrong = 0;
  for (const Order order : {Order::kForward, Order::kReverse}) {
    emulator::SetSettings({Landing::kLate, order, 1});
    ASSERT_EQ(RunGrid([&](Grid& g) {
                Floats(g)[g.thread()] = 1.0f;
                // A neighbour's, without waiting for it.
                if (g.thread() > 0 && !(Floats(g)[g.thread() - 1] == 1.0f)) {
                  ++wrong;
                }
              }),
              0);
  }
  EXPECT_EQ(wrong, 63);
}

TEST_F(CudaEmulator, ShowsACopyThatIsReadBeforeItsWait) {
  alignas(16) const float source[4] = {1, 2, 3, 4};
  const auto read_at_once = [&](Landing landing) {
    emulator::SetSettings({landing, Order::kForward, 1});
    float got = 0;
    EXPECT_EQ(RunGrid([&](Grid& g) {
                if (g.thread() != 0) return;
                CopyAsync16(g, g.shared(), source, 16);
                CopyAsyncCommit(g);
                got = Floats(g)[1];
                CopyAsyncWait<0>(g);
              }),
              0);
    return got;
  };
  EXPECT_EQ(read_at_once(Landing::kEarly), 2.0f);
  EXPECT_TRUE(std::isnan(read_at_once(Landing::kLate)));
}

TEST_F(CudaEmulator, ShowsASourceThatChangesUnderACopy) {
  const auto copied = [&](Landing landing) {
    emulator::SetSettings({landing, Order::kForward, 1});
    alignas(16) float source[4] = {1, 2, 3, 4};
    float got = 0;
    EXPECT_EQ(RunGrid([&](Grid& g) {
                if (g.thread() != 0) return;
                CopyAsync16(g, g.shared(), source, 16);
                CopyAsyncCommit(g);
                source[0] = 5;
                CopyAsyncWait<0>(g);
                got = Floats(g)[0];
              }),
              0);
    return got;
  };
  EXPECT_NE(copied(Landing::kEarly), copied(Landing::kLate));
}

TEST_F(CudaEmulator, NoticesCopiesThatNobodyWaitsFor) {
  alignas(16) const float source[4] = {};
  EXPECT_TRUE(Says(FaultOf([&](Grid& g) {
                     CopyAsync16(g, g.shared() + g.thread() * 16, source, 16);
                   }),
                   "did not wait"));
}

TEST_F(CudaEmulator, NoticesAddressesThatHardwareRefuses) {
  alignas(16) const float source[8] = {};
  struct Case {
    int to;
    int from;
    int bytes;
    const char* says;
  };
  for (const Case& c : {Case{4096, 0, 16, "outside"},
                        {-16, 0, 16, "outside"},
                        {8, 0, 16, "not aligned"},
                        {0, 4, 16, "not aligned"},
                        {0, 0, 17, "no such size"}}) {
    EXPECT_TRUE(Says(FaultOf([&](Grid& g) {
                       CopyAsync16(
                           g, g.shared() + c.to,
                           reinterpret_cast<const std::byte*>(source) + c.from,
                           c.bytes);
                     }),
                     c.says))
        << c.to << " " << c.from << " " << c.bytes;
  }
  EXPECT_TRUE(Says(FaultOf([](Grid& g) {
                     uint32_t r[4];
                     LoadMatrix4(g, r, g.shared() + 4096 - 8);
                   }),
                   "outside"));
}

// Zeros times zeros of a warpgroup, with a fence or without, and with a store
// into an operand before the wait or after.
int Warpgroup(bool fenced, bool overwritten, float* got) {
  return RunGrid(
      [=](Grid& g) {
        alignas(16) static const uint16_t ones[8] = {
            0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80};
        for (int i = g.thread(); i < 16384 / 16; i += 128) {
          CopyAsync16(g, g.shared() + i * 16, ones, 16);
        }
        CopyAsyncCommit(g);
        CopyAsyncWait<0>(g);
        if (fenced) ProxyFence(g);
        g.Barrier();
        float d[8][4] = {};
        WgmmaFence(g);
        WgmmaStep<BFloat16>(
            g, d, WgmmaDescriptor(SharedAddress(g, g.shared())),
            WgmmaDescriptor(SharedAddress(g, g.shared() + 8192)));
        WgmmaCommit(g);
        if (overwritten && g.thread() == 0) {
          std::memset(g.shared(), 0, 16);  // of row 0
        }
        WgmmaWait<0>(g);
        if (g.thread() == 0) *got = d[0][0];
        g.Barrier();
      },
      {.threads = 128, .shared_bytes = 16384});
}

TEST_F(CudaEmulator, NoticesWarpgroupOperandsThatWereNotFenced) {
  float got = 0;
  EXPECT_EQ(Warpgroup(true, false, &got), 0) << emulator::LastFault();
  EXPECT_EQ(got, 16.0f);
  EXPECT_EQ(Warpgroup(false, false, &got), kEmulatorFault);
  EXPECT_TRUE(Says(emulator::LastFault(), "not fenced"));
}

TEST_F(CudaEmulator, ShowsWarpgroupOperandsThatAreOverwrittenTooEarly) {
  float early = 0;
  float late = 0;
  emulator::SetSettings({Landing::kEarly, Order::kForward, 1});
  EXPECT_EQ(Warpgroup(true, true, &early), 0) << emulator::LastFault();
  emulator::SetSettings({Landing::kLate, Order::kForward, 1});
  EXPECT_EQ(Warpgroup(true, true, &late), 0) << emulator::LastFault();
  EXPECT_EQ(early, 16.0f);
  EXPECT_EQ(late, 8.0f);
}

TEST_F(CudaEmulator, AFaultEndsThatLaunchAlone) {
  FaultOf([](Grid& g) {
    if (g.thread() == 0) g.Barrier();
  });
  EXPECT_EQ(RunGrid([](Grid& g) { g.Barrier(); }), 0);
}

// ---- What a kernel may do before the one in front of it has ended.

// Ten blocks that each add one to what they see of `x`, behind a kernel that
// sets all to `seven`.
struct Chain {
  std::vector<int> x = std::vector<int>(10);
  std::vector<int> y = std::vector<int>(10);
  int error = 0;

  explicit Chain(const std::function<void(Grid&, Chain&)>& second,
                 bool after_kernel = true) {
    emulator::HeldStream held;
    Stream stream;
    stream.generation = 90;
    stream.handle = &held;
    const std::function<void(Grid&)> first = [this](Grid& g) {
      if (g.thread() == 0) x[static_cast<size_t>(g.block_x())] = 7;
    };
    const std::function<void(Grid&)> body = [&](Grid& g) { second(g, *this); };
    error = Launch(stream, {10, 1, 1}, 64, 256, AnyKernel{&first});
    stream.after_kernel = after_kernel;
    if (error == 0) {
      error = Launch(stream, {10, 1, 1}, 64, 256, WaitingKernel{&body});
    }
    if (error == 0) error = held.Flush();
  }
  void Store(Grid& g, int value) {
    if (g.thread() == 0) y[static_cast<size_t>(g.block_x())] = value + 1;
  }
  int Load(Grid& g) const { return x[static_cast<size_t>(g.block_x())]; }
};

TEST_F(CudaEmulator, AKernelThatWaitsSeesWhatTheOneBeforeWrote) {
  for (const Order order : {Order::kForward, Order::kReverse, Order::kRandom}) {
    emulator::SetSettings({Landing::kLate, order, 5});
    const Chain chain([](Grid& g, Chain& c) {
      g.Barrier();
      WaitForPrevious(g);
      c.Store(g, c.Load(g));
    });
    EXPECT_EQ(chain.error, 0) << emulator::LastFault();
    EXPECT_EQ(chain.y, std::vector<int>(10, 8));
  }
}

TEST_F(CudaEmulator, ShowsReadsBeforeTheKernelInFrontHasEnded) {
  const auto early = [](Grid& g, Chain& c) {
    const int seen = c.Load(g);
    WaitForPrevious(g);
    c.Store(g, seen);
  };
  const Chain chain(early);
  EXPECT_EQ(chain.error, 0) << emulator::LastFault();
  EXPECT_EQ(std::count(chain.y.begin(), chain.y.end(), 1), 1);
  // Behind anything else, or on a device that knows no such start, it is late.
  EXPECT_EQ(Chain(early, false).y, std::vector<int>(10, 8));
}

TEST_F(CudaEmulator, NoticesABlockThatDoesNotWait) {
  const Chain chain([](Grid& g, Chain&) {
    if (g.block_x() != 4) WaitForPrevious(g);
  });
  EXPECT_EQ(chain.error, kEmulatorFault);
  EXPECT_TRUE(Says(emulator::LastFault(), "without having waited"))
      << emulator::LastFault();
}

TEST_F(CudaEmulator, OneThreadMayWaitForItsBlock) {
  const Chain chain([](Grid& g, Chain& c) {
    if (g.thread() == 63) WaitForPrevious(g);
    g.Barrier();
    c.Store(g, c.Load(g));
  });
  EXPECT_EQ(chain.error, 0) << emulator::LastFault();
  EXPECT_EQ(chain.y, std::vector<int>(10, 8));
}

}  // namespace
}  // namespace tandem::kernels::cuda
