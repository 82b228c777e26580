// SPDX-License-Identifier: Apache-2.0
// Products of few tokens on sm_90 and later: the chains and the registers of
// matmul.cuh. With few tokens a product is a copy of the weights, and what
// counts is that all multiprocessors have enough of it on its way: a block
// stays and takes tile after tile, and one thread of its last warp keeps a
// ring of bulk copies full, across tiles; the other warps do nothing but
// matrix steps. Nobody computes addresses of single chunks, and no barrier
// stops all warps.
//
//   full[i]   ended by the copies into place i
//   empty[i]  ended by all consumer warps, when they have read place i

#ifndef TANDEM_KERNELS_CUDA_MATMUL_STREAM_CUH_
#define TANDEM_KERNELS_CUDA_MATMUL_STREAM_CUH_

#include "kernels/cuda/device/async_copy.h"
#include "kernels/cuda/matmul.cuh"

namespace tandem::kernels::cuda {

template <typename T, typename W, typename Tiles>
struct MatMulStreamKernel {
  using Base = MatMulKernel<T, W, Tiles>;
  static constexpr bool kWaits = true;  // in FillRing
  static constexpr int kConsumers = Tiles::kThreads;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kTokens = Tiles::kTokens;
  static constexpr int kStageBytes = Base::kStageBytes;
  // Two blocks fit a multiprocessor, as long as each has enough in flight.
  static constexpr int kBlocksPerMultiprocessor = kTokens < 64 ? 2 : 1;
  static constexpr int kAlignment = 1024;  // tiles of tokens
  static constexpr int kRestBytes = kAlignment + Base::kOutBytes + 512;
  static constexpr int kStages =
      (226 * 1024 / kBlocksPerMultiprocessor - kRestBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kRestBytes;
  static_assert(kStages <= 32);
  static_assert(Base::kWBlock % kAlignment == 0);

  TensorMap x;  // tiles of kTokens
  MatMulParams p;

  TANDEM_HOST_DEVICE static constexpr int RowTiles(int rows) {
    return Base::RowTiles(rows);
  }
  TANDEM_HOST_DEVICE static constexpr int TokenTiles(int tokens) {
    return Base::TokenTiles(tokens);
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    if constexpr (TANDEM_BULK_COPIES) Multiply(g);
  }

 private:
  using Place = RingPlace<kStages>;

  TANDEM_DEVICE void Multiply(Grid& g) const {
    std::byte* const ring = AlignShared<kAlignment>(g, g.shared());
    std::byte* const out = ring + kStages * kStageBytes;
    AsyncBarrier* const full =
        reinterpret_cast<AsyncBarrier*>(out + Base::kOutBytes);
    AsyncBarrier* const empty = full + kStages;
    if (g.thread() == 0) {
      for (int i = 0; i < kStages; ++i) {
        InitBarrier(g, full + i, 1);
        InitBarrier(g, empty + i, kConsumers / 32);
      }
      FenceBarriers(g);
    }
    g.Barrier();
    if (g.thread() >= kConsumers) {
      if (g.thread() == kConsumers) {
        FillRing<kStages>(
            g,
            {g, RowTiles(p.rows), TokenTiles(p.tokens),
             (WeightBlocks(p.cols) + Tiles::kBlocks - 1) / Tiles::kBlocks},
            empty, Copies{g, *this, ring, full});
      }
    } else {
      Consume(g, ring, full, empty, reinterpret_cast<T*>(out));
    }
  }

  TANDEM_DEVICE int TileCount() const {
    return RowTiles(p.rows) * TokenTiles(p.tokens);
  }
  struct Copies {
    Grid& g;
    const MatMulStreamKernel& kernel;
    std::byte* ring;
    AsyncBarrier* full;

    // Of the 64-column blocks of a stage, how many the matrix has.
    TANDEM_DEVICE int Blocks(const StageCursor& at) const {
      return Smaller(Tiles::kBlocks,
                     WeightBlocks(kernel.p.cols) - at.stage * Tiles::kBlocks);
    }
    TANDEM_DEVICE void Weights(const StageCursor& at, int slot) const {
      constexpr int kColumnBytes = kWeightBlock * Base::kRowBytes;
      const MatMulParams& params = kernel.p;
      const int row = at.tile.row_tile * Tiles::kRows;
      const std::byte* const from =
          params.weights +
          (int64_t{row / kWeightBlock} * WeightBlocks(params.cols) +
           at.stage * Tiles::kBlocks) *
              kColumnBytes +
          row % kWeightBlock * Base::kRowBytes;
      const int blocks = Blocks(at);
      ArriveExpecting(g, full + slot, blocks * (Base::kWBlock + Base::kXBlock));
      for (int b = 0; b < blocks; ++b) {
        CopyBulk(g, ring + slot * kStageBytes + b * Base::kWBlock,
                 from + int64_t{b} * kColumnBytes, Base::kWBlock, full + slot);
      }
    }
    TANDEM_DEVICE void Tokens(const StageCursor& at, int slot) const {
      std::byte* const to =
          ring + slot * kStageBytes + Tiles::kBlocks * Base::kWBlock;
      const int blocks = Blocks(at);
      for (int b = 0; b < blocks; ++b) {
        CopyTile(g, to + b * Base::kXBlock, kernel.x,
                 (at.stage * Tiles::kBlocks + b) * kWeightBlock,
                 at.tile.token_tile * kTokens, full + slot);
      }
    }
  };

  TANDEM_DEVICE void Consume(Grid& g, const std::byte* ring, AsyncBarrier* full,
                             AsyncBarrier* empty, T* out) const {
    const int warp_row = g.warp() % Tiles::kWarpsM * (16 * Tiles::kTilesM);
    const int warp_token = g.warp() / Tiles::kWarpsM * (8 * Tiles::kTilesN);
    const int columns = WeightBlocks(p.cols);
    const Base base{p};
    Place at;
    for (int i = g.block_x(); i < TileCount(); i += g.grid_x()) {
      const TileOrder tile(i, RowTiles(p.rows), TokenTiles(p.tokens));
      float d[Tiles::kTilesM][Tiles::kTilesN][4] = {};
      for (int first = 0; first < columns; first += Tiles::kBlocks) {
        const std::byte* const w = ring + at.slot * kStageBytes;
        AwaitPhase(g, full + at.slot, at.parity);
        Base::Steps(g, w, warp_row, warp_token,
                    Smaller(Tiles::kBlocks, columns - first), d);
        g.WarpBarrier();
        if (g.lane() == 0) Arrive(g, empty + at.slot);
        at.Next();
      }
      const auto meet = [&g] { g.GroupBarrier<kConsumers>(1); };
      meet();  // nobody reads the results before any more
      base.template WriteResults<kConsumers>(
          g, tile.row_tile * Tiles::kRows, tile.token_tile * kTokens, warp_row,
          warp_token, d, out, meet);
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_MATMUL_STREAM_CUH_
