// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory and the copies that arrive at them, emulated:
// what they do, and that each detector notices the fault it is there for.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/device/async_copy.h"
#include "kernels/cuda/device/wgmma.h"
#include "tests/kernels/cuda/any_kernel.h"

namespace tandem::kernels::cuda {
namespace {

using emulator::Landing;
using emulator::Order;

class CudaAsync : public ::testing::Test {
 protected:
  ~CudaAsync() override { emulator::SetSettings({}); }
};

constexpr int kBarriers = 32 * 1024;  // offset, behind the operands

int RunGrid(int threads, const std::function<void(Grid&)>& body) {
  Stream stream;
  stream.generation = 90;
  return Launch(stream, {}, threads, kBarriers + 64, AnyKernel{&body});
}
std::string FaultOf(int threads, const std::function<void(Grid&)>& body) {
  EXPECT_EQ(RunGrid(threads, body), kEmulatorFault);
  return emulator::LastFault();
}

AsyncBarrier* BarrierOf(Grid& g, int i) {
  return reinterpret_cast<AsyncBarrier*>(g.shared() + kBarriers) + i;
}

void MakeBarriers(Grid& g, int count, int arrivals) {
  if (g.thread() == 0) {
    for (int i = 0; i < count; ++i) InitBarrier(g, BarrierOf(g, i), arrivals);
    FenceBarriers(g);
  }
  g.Barrier();
}

// Warp 1 copies `rounds` numbers through a ring of two places to warp 0,
// which sums them up.
float SumThroughARing() {
  constexpr int kRounds = 5;
  alignas(16) static const float source[kRounds][4] = {
      {1}, {10}, {100}, {1000}, {10000}};
  float sum = 0;
  EXPECT_EQ(RunGrid(64,
                    [&](Grid& g) {
                      MakeBarriers(g, 4, 1);
                      if (g.lane() != 0) return;
                      for (int i = 0; i < kRounds; ++i) {
                        const int place = i % 2;
                        const int parity = i / 2 % 2;
                        AsyncBarrier* const full = BarrierOf(g, place);
                        AsyncBarrier* const empty = BarrierOf(g, 2 + place);
                        if (g.warp() == 1) {
                          AwaitPhase(g, empty, parity ^ 1);
                          ArriveExpecting(g, full, 16);
                          CopyBulk(g, Floats(g) + ptrdiff_t{4} * place,
                                   source[i], 16, full);
                        } else {
                          AwaitPhase(g, full, parity);
                          sum += Floats(g)[ptrdiff_t{4} * place];
                          Arrive(g, empty);
                        }
                      }
                    }),
            0)
      << emulator::LastFault();
  return sum;
}

TEST_F(CudaAsync, ARingHandsOverEachPlace) {
  for (const Landing landing : {Landing::kEarly, Landing::kLate}) {
    for (const Order order :
         {Order::kForward, Order::kReverse, Order::kRandom}) {
      emulator::SetSettings({landing, order, 5});
      EXPECT_EQ(SumThroughARing(), 11111.0f);
    }
  }
}

TEST_F(CudaAsync, ReadingBeforeACopyIsHereShows) {
  alignas(16) static const float source[4] = {7};
  for (const Landing landing : {Landing::kEarly, Landing::kLate}) {
    emulator::SetSettings({landing, Order::kForward, 1});
    ASSERT_EQ(RunGrid(32,
                      [&](Grid& g) {
                        MakeBarriers(g, 1, 1);
                        if (g.thread() != 0) return;
                        ArriveExpecting(g, BarrierOf(g, 0), 16);
                        CopyBulk(g, g.shared(), source, 16, BarrierOf(g, 0));
                        EXPECT_EQ(std::isnan(Floats(g)[0]),
                                  landing == Landing::kLate);
                        AwaitPhase(g, BarrierOf(g, 0), 0);
                        EXPECT_EQ(Floats(g)[0], 7.0f);
                      }),
              0)
        << emulator::LastFault();
  }
}

TEST_F(CudaAsync, NoticesAPhaseThatNeverEnds) {
  EXPECT_TRUE(Says(FaultOf(32,
                           [](Grid& g) {
                             MakeBarriers(g, 1, 33);
                             Arrive(g, BarrierOf(g, 0));
                             AwaitPhase(g, BarrierOf(g, 0), 0);
                           }),
                   "lacks 1 arrivals"));
  EXPECT_TRUE(Says(FaultOf(32,
                           [](Grid& g) {
                             MakeBarriers(g, 1, 1);
                             if (g.thread() != 0) return;
                             ArriveExpecting(g, BarrierOf(g, 0), 64);
                             AwaitPhase(g, BarrierOf(g, 0), 0);
                           }),
                   "64 bytes"));
}

TEST_F(CudaAsync, NoticesCopiesThatNobodyWaitsFor) {
  alignas(16) static const float source[4] = {};
  EXPECT_TRUE(Says(FaultOf(32,
                           [](Grid& g) {
                             MakeBarriers(g, 1, 1);
                             if (g.thread() != 0) return;
                             ArriveExpecting(g, BarrierOf(g, 0), 16);
                             CopyBulk(g, g.shared(), source, 16,
                                      BarrierOf(g, 0));
                           }),
                   "on their way"));
}

TEST_F(CudaAsync, NoticesABarrierThatWasNotMade) {
  EXPECT_TRUE(
      Says(FaultOf(32, [](Grid& g) { Arrive(g, BarrierOf(g, 0)); }), "made"));
}

TEST_F(CudaAsync, TilesLieSwizzledAndEndInZeros) {
  constexpr int kRows = 5;
  constexpr int kCols = 72;
  alignas(16) static uint16_t matrix[kRows][80];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kCols; ++c) {
      matrix[r][c] = static_cast<uint16_t>(100 * r + c + 1);
    }
  }
  TensorMap map;
  ASSERT_EQ(MakeTensorMap({matrix, DType::kBF16, kRows, kCols, 80, 16}, &map),
            0);
  ASSERT_EQ(RunGrid(32,
                    [&](Grid& g) {
                      MakeBarriers(g, 1, 1);
                      if (g.thread() != 0) return;
                      ArriveExpecting(g, BarrierOf(g, 0), 16 * 128);
                      CopyTile(g, g.shared(), map, 64, 2, BarrierOf(g, 0));
                      AwaitPhase(g, BarrierOf(g, 0), 0);
                      const auto* const got =
                          reinterpret_cast<const uint16_t*>(g.shared());
                      for (int r = 0; r < 16; ++r) {
                        for (int c = 0; c < 64; ++c) {
                          const int at = r * 64 + (c / 8 ^ r % 8) * 8 + c % 8;
                          EXPECT_EQ(got[at], r + 2 < kRows && c + 64 < kCols
                                                 ? matrix[r + 2][c + 64]
                                                 : 0);
                        }
                      }
                    }),
            0)
      << emulator::LastFault();
}

TEST_F(CudaAsync, MatricesAreStoredTurnedOver) {
  ASSERT_EQ(RunGrid(32,
                    [](Grid& g) {
                      const int row = g.lane() / 4;
                      const int column = g.lane() % 4 * 2;
                      uint32_t r[4];
                      for (uint32_t m = 0; m < 4; ++m) {
                        const auto at = [&](int j) {
                          return 1000 * m + static_cast<uint32_t>(row * 8 + j);
                        };
                        r[m] = at(column) | at(column + 1) << 16;
                      }
                      StoreMatrix4Transposed(
                          g, g.shared() + ptrdiff_t{16} * g.lane(), r);
                      g.WarpBarrier();
                      const auto* const got =
                          reinterpret_cast<const uint16_t*>(g.shared());
                      for (int i = 0; i < 8; ++i) {
                        EXPECT_EQ(got[g.lane() * 8 + i],
                                  1000 * (g.lane() / 8) + i * 8 + g.lane() % 8);
                      }
                    }),
            0);
}

// One step of a warpgroup over ones that CopyAsync16 brought, with weights of
// one in shared memory or in registers.
int WarpgroupStep(bool fenced, bool registers, bool changed, float* got) {
  alignas(16) static const uint16_t ones[8] = {0x3f80, 0x3f80, 0x3f80, 0x3f80,
                                               0x3f80, 0x3f80, 0x3f80, 0x3f80};
  return RunGrid(128, [=](Grid& g) {
    MakeBarriers(g, 1, 128);
    for (int i = g.thread(); i < 16384 / 16; i += 128) {
      CopyAsync16(g, g.shared() + ptrdiff_t{16} * i, ones, 16);
    }
    CopyAsyncArrive(g, BarrierOf(g, 0));
    AwaitPhase(g, BarrierOf(g, 0), 0);
    if (fenced) ProxyFence(g);
    const uint64_t b = WgmmaDescriptor(SharedAddress(g, g.shared() + 8192));
    float d[8][4] = {};
    uint32_t a[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    WgmmaFence(g);
    if (registers) {
      WgmmaStep<BFloat16>(g, d, a, b);
    } else {
      WgmmaStep<BFloat16>(g, d, WgmmaDescriptor(SharedAddress(g, g.shared())),
                          b);
    }
    WgmmaCommit(g);
    if (changed) a[0] = a[1] = a[2] = a[3] = 0;
    WgmmaWait<0>(g);
    if (g.thread() == 0) *got = d[7][3];
    g.Barrier();
  });
}

TEST_F(CudaAsync, WarpgroupsReadWhatArrivedAndWasFenced) {
  for (const Landing landing : {Landing::kEarly, Landing::kLate}) {
    emulator::SetSettings({landing, Order::kForward, 1});
    for (const bool registers : {false, true}) {
      float got = 0;
      ASSERT_EQ(WarpgroupStep(true, registers, false, &got), 0)
          << emulator::LastFault();
      EXPECT_EQ(got, 16.0f);
      EXPECT_EQ(WarpgroupStep(false, registers, false, &got), kEmulatorFault);
      EXPECT_TRUE(Says(emulator::LastFault(), "not fenced"));
    }
  }
}

TEST_F(CudaAsync, ShowsRegistersThatChangeUnderAStep) {
  emulator::SetSettings({Landing::kLate, Order::kForward, 1});
  float got = 1;
  ASSERT_EQ(WarpgroupStep(true, true, true, &got), 0) << emulator::LastFault();
  EXPECT_EQ(got, 0.0f);
}

}  // namespace
}  // namespace tandem::kernels::cuda
