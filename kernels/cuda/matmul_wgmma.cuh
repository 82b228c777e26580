// SPDX-License-Identifier: Apache-2.0
// Products of many tokens on sm_90a: the chains of matmul.cuh on Hopper's
// warpgroup instructions, and so its bits.
//
// A block stays and takes tile after tile of the outputs. Its last warpgroup
// is the producer: one thread of it keeps a ring of stages full, each the
// packed blocks of 64 inputs (one bulk copy for 64 rows) and those inputs of
// the tile's tokens (one tile copy). The others are consumers: 64 rows each,
// all of the tokens; operands stay in shared memory, where packed blocks lie
// as the instructions want them. e4m3 weights pass through registers, which
// hold them as they were packed, and are widened there (exactly).
//
//   full[i]   ended by the copies into place i
//   empty[i]  ended by all consumers' warps, once their instructions that
//             read place i have run: one stage behind those that are issued
//
// The producer knows no tiles' ends: while consumers write a tile's results,
// the ring fills for the next one.

#ifndef TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_
#define TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_

#include "kernels/cuda/device/async_copy.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/device/wgmma.h"
#include "kernels/cuda/matmul.cuh"

namespace tandem::kernels::cuda {

// T: activations; W: T or E4M3. kTokens: 64, 128 or 256.
template <typename T, typename W, int kConsumers, int kTokens_, int kStages>
struct MatMulWgmmaKernel {
  static constexpr bool kWaits = true;  // in FillRing
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kScaled = sizeof(W) == 1;
  static constexpr int kWBlock = 64 * 64 * static_cast<int>(sizeof(W));
  static constexpr int kXBlock = kTokens * 128;
  static constexpr int kStageBytes = kConsumers * kWBlock + kXBlock;
  // Results leave through shared memory, so many tokens at a time.
  static constexpr int kOutTokens = 64;
  static constexpr int kOutBytes = kOutTokens * 128;  // of a consumer
  static constexpr int kAlignment = 1024;  // the swizzle goes by address
  static constexpr int kSharedBytes = kAlignment + kStages * kStageBytes +
                                      kConsumers * kOutBytes + kStages * 16;
  static_assert(kSharedBytes <= 227 * 1024);
  static_assert(kStageBytes % kAlignment == 0);
  // Stages whose instructions run while the next one's are issued. Registers
  // that are operands must not be written meanwhile, so none with e4m3: there
  // one consumer's instructions run while the other widens weights.
  static constexpr int kInFlight = kScaled ? 0 : 1;
  // What the producer gives back, consumers take: multiples of 8 that make
  // no more than 65536 together.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  TensorMap x;  // tiles of kTokens
  MatMulParams p;

  TANDEM_HOST_DEVICE static constexpr int RowTiles(int rows) {
    return (rows + kRows - 1) / kRows;
  }
  TANDEM_HOST_DEVICE static constexpr int TokenTiles(int tokens) {
    return (tokens + kTokens - 1) / kTokens;
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    if constexpr (TANDEM_WGMMA) Multiply(g);
  }

 private:
  using Place = RingPlace<kStages>;

  TANDEM_DEVICE void Multiply(Grid& g) const {
    std::byte* const ring = AlignShared<kAlignment>(g, g.shared());
    std::byte* const out = ring + kStages * kStageBytes;
    AsyncBarrier* const full =
        reinterpret_cast<AsyncBarrier*>(out + kConsumers * kOutBytes);
    AsyncBarrier* const empty = full + kStages;
    if (g.thread() == 0) {
      for (int i = 0; i < kStages; ++i) {
        InitBarrier(g, full + i, 1);
        InitBarrier(g, empty + i, 4 * kConsumers);
      }
      FenceBarriers(g);
    }
    g.Barrier();
    const int warpgroup = g.warp() / 4;
    if (warpgroup == kConsumers) {
      if constexpr (kConsumers > 1) GiveRegisters<kProducerRegisters>(g);
      if (g.thread() == kConsumers * 128) {
        FillRing<kStages>(
            g,
            {g, RowTiles(p.rows), TokenTiles(p.tokens), WeightBlocks(p.cols)},
            empty, Copies{g, *this, ring, full});
      }
    } else {
      if constexpr (kConsumers > 1) TakeRegisters<kConsumerRegisters>(g);
      Consume(g, warpgroup, ring, full, empty, out + warpgroup * kOutBytes);
    }
  }

  TANDEM_DEVICE int Tiles() const {
    return RowTiles(p.rows) * TokenTiles(p.tokens);
  }

  struct Copies {
    Grid& g;
    const MatMulWgmmaKernel& kernel;
    std::byte* ring;
    AsyncBarrier* full;

    TANDEM_DEVICE void Weights(const StageCursor& at, int slot) const {
      const MatMulParams& params = kernel.p;
      const int row_block = at.tile.row_tile * kConsumers;
      const int blocks =
          Smaller(kConsumers, WeightBlocks(params.rows) - row_block);
      ArriveExpecting(g, full + slot, blocks * kWBlock + kXBlock);
      for (int b = 0; b < blocks; ++b) {
        CopyBulk(g, ring + slot * kStageBytes + b * kWBlock,
                 params.weights +
                     (int64_t{row_block + b} * at.stages + at.stage) * kWBlock,
                 kWBlock, full + slot);
      }
    }
    TANDEM_DEVICE void Tokens(const StageCursor& at, int slot) const {
      CopyTile(g, ring + slot * kStageBytes + kConsumers * kWBlock, kernel.x,
               at.stage * kWeightBlock, at.tile.token_tile * kTokens,
               full + slot);
    }
  };

  // Issues the four steps of a stage.
  TANDEM_DEVICE static void Step(Grid& g, const std::byte* w,
                                 const std::byte* tokens,
                                 float (&d)[kTokens / 8][4]) {
    const uint64_t b = WgmmaDescriptor(SharedAddress(g, tokens));
    if constexpr (kScaled) {
      uint32_t held[4][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t raw[4];
        LoadShared16(g, w + g.warp() % 4 * 1024 + half * 512 + g.lane() * 16,
                     raw);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t(&a)[4] = held[half * 2 + i / 2];
          a[i % 2 * 2] = FromE4M3Pair<T>(raw[i] & 0xffffu);
          a[i % 2 * 2 + 1] = FromE4M3Pair<T>(raw[i] >> 16);
        }
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) WgmmaPin(g, held[step]);
      WgmmaFence(g);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WgmmaStep<T>(g, d, held[step], b + step * 2);
      }
      WgmmaCommit(g);
      WgmmaWait<0>(g);  // they read these registers until then
    } else {
      const uint64_t a = WgmmaDescriptor(SharedAddress(g, w));
      WgmmaFence(g);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        WgmmaStep<T>(g, d, a + step * 2, b + step * 2);
      }
      WgmmaCommit(g);
    }
  }

  TANDEM_DEVICE void Consume(Grid& g, int warpgroup, const std::byte* ring,
                             AsyncBarrier* full, AsyncBarrier* empty,
                             std::byte* out) const {
    const int stages = WeightBlocks(p.cols);
    Place at;
    Place read;  // the oldest place whose instructions may not have run
    const auto release = [&] {
      if constexpr (kScaled) g.WarpBarrier();  // all lanes have read
      if (g.lane() == 0) Arrive(g, empty + read.slot);
      read.Next();
    };
    for (int i = g.block_x(); i < Tiles(); i += g.grid_x()) {
      const TileOrder tile(i, RowTiles(p.rows), TokenTiles(p.tokens));
      float d[kTokens / 8][4];
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) d[n][j] = 0.0f;
      }
      for (int s = 0; s < stages; ++s) {
        const std::byte* const stage = ring + at.slot * kStageBytes;
        AwaitPhase(g, full + at.slot, at.parity);
        Step(g, stage + warpgroup * kWBlock, stage + kConsumers * kWBlock, d);
        at.Next();
        if constexpr (kInFlight > 0) WgmmaWait<kInFlight>(g);
        if (s >= kInFlight) release();
      }
      if constexpr (kInFlight > 0) {
        WgmmaWait<0>(g);
        release();
      }
      WgmmaPin(g, d);
      Write(g, warpgroup, tile, d, out);
    }
  }

  TANDEM_DEVICE void Write(Grid& g, int warpgroup, const TileOrder& tile,
                           const float (&d)[kTokens / 8][4],
                           std::byte* out) const {
    const int first = tile.row_tile * kRows + warpgroup * 64;
    const int row = first + g.warp() % 4 * 16 + g.lane() / 4;
    const RowFinish<T, W> low(p, row);
    const RowFinish<T, W> high(p, row + 8);
#pragma unroll
    for (int t = 0; t < kTokens; t += kOutTokens) {
      // Nobody reads what was there any more.
      g.GroupBarrier<128>(1 + warpgroup);
      const int n0 = t / 8;
      // Lane 8 m + j says where token j of matrix m goes.
      const int m = g.lane() / 8;
      const int warp = g.warp() % 4;
      if (p.gated()) {
#pragma unroll
        for (int n = 0; n < kOutTokens / 8; n += 4) {
          uint32_t r[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float(&chain)[4] = d[n0 + n + i];
            r[i] =
                PackPair<T>(Gated(p.activation, low(chain[0]), high(chain[2])),
                            Gated(p.activation, low(chain[1]), high(chain[3])));
          }
          const int token = (n + m) * 8 + g.lane() % 8;
          StoreMatrix4Transposed(g, out + GatedChunk(token, warp), r);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kOutTokens / 8; n += 2) {
          uint32_t r[4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float(&chain)[4] = d[n0 + n + i];
            r[i * 2] = PackPair<T>(low(chain[0]), low(chain[1]));
            r[i * 2 + 1] = PackPair<T>(high(chain[2]), high(chain[3]));
          }
          const int token = (n + m / 2) * 8 + g.lane() % 8;
          StoreMatrix4Transposed(g, out + PlainChunk(token, warp * 2 + m % 2),
                                 r);
        }
      }
      g.GroupBarrier<128>(1 + warpgroup);
      const int token = tile.token_tile * kTokens + t;
      const int chunks = p.gated() ? 4 : 8;  // of a token
      for (int i = g.thread() % 128; i < kOutTokens * chunks; i += 128) {
        const int of = i / chunks;
        const int chunk = i % chunks;
        const int column = (p.gated() ? first / 2 : first) + chunk * 8;
        if (token + of >= p.tokens || column >= p.outputs) continue;
        WriteChunk(
            g, token + of, column,
            out + (p.gated() ? GatedChunk(of, chunk) : PlainChunk(of, chunk)));
      }
    }
  }

  // Where eight outputs of a token are, such that the eight tokens that are
  // stored together lie in different banks: 128 bytes per token, or 64.
  TANDEM_DEVICE static int PlainChunk(int token, int chunk) {
    return token * 128 + (chunk ^ (token % 8)) * 16;
  }
  TANDEM_DEVICE static int GatedChunk(int token, int chunk) {
    return token * 64 + (chunk ^ (token / 2 % 4)) * 16;
  }

  TANDEM_DEVICE void WriteChunk(Grid& g, int token, int column,
                                const std::byte* from) const {
    const int64_t at = token * p.out_stride + column;
    const int count = Smaller(8, p.outputs - column);
    const bool aligned = count == 8 && p.out_stride % 8 == 0;
    Vector16 v;
    LoadShared16(g, from, v.word);
    if (p.output != MatMulOutput::kWide && aligned) {
      Store16(static_cast<T*>(p.out) + at, v);
      return;
    }
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = LowOfPair<T>(v.word[i / 2] >> (i % 2 * 16));
    }
    if (p.output == MatMulOutput::kWide) {
      StoreChunk(static_cast<float*>(p.out) + at, count, aligned, values);
    } else {
      StoreChunk(static_cast<T*>(p.out) + at, count, aligned, values);
    }
  }
};

template <typename Kernel>
int RunWarpgroups(const Stream& stream, DType activation,
                  const MatMulParams& p) {
  return LaunchStaying<Kernel>(stream, activation, 1, p);
}

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_
