// SPDX-License-Identifier: Apache-2.0
// Products of many tokens on sm_90a: the chains of matmul.cuh on Hopper's
// warpgroup instructions, and so its bits. Warpgroups own 64 rows of weights
// each and share the tokens; both operands stay in shared memory, where the
// packed blocks already lie as the instructions want them.
//
// The instructions of a stage run while the next stage is waited for. So a
// stage's place may be filled again two barriers later: one for its
// instructions to be waited for, one for all warpgroups to know.

#ifndef TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_
#define TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_

#include "kernels/cuda/device/wgmma.h"
#include "kernels/cuda/matmul.cuh"

namespace tandem::kernels::cuda {

// kTokens: 64, or a multiple of 128.
template <typename T, typename Out, int kWarpgroups, int kTokens_, int kStages>
struct MatMulWgmmaKernel {
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kTokens = kTokens_;
  static constexpr int kInstructionTokens = kTokens < 128 ? kTokens : 128;
  static constexpr int kInstructions = kTokens / kInstructionTokens;
  static constexpr int kWBlock = 64 * 128;
  static constexpr int kStageBytes = kWarpgroups * kWBlock + kTokens * 128;
  static constexpr int kOutStride = kRows + 16 / sizeof(Out);
  static constexpr int kOutBytes =
      kTokens * kOutStride * static_cast<int>(sizeof(Out));
  static constexpr int kAlignment = 1024;  // the swizzle goes by address
  static constexpr int kSharedBytes =
      kAlignment +
      (kStageBytes * kStages > kOutBytes ? kStageBytes * kStages : kOutBytes);
  static_assert(kTokens == 64 || kTokens % 128 == 0);

  MatMulParams p;

  TANDEM_HOST_DEVICE static constexpr int RowTiles(int rows) {
    return (rows + kRows - 1) / kRows;
  }
  TANDEM_HOST_DEVICE static constexpr int TokenTiles(int tokens) {
    return (tokens + kTokens - 1) / kTokens;
  }

  TANDEM_DEVICE void CopyStage(Grid& g, int row, int token, int stage,
                               std::byte* to) const {
    const int blocks = WeightBlocks(p.cols);
#pragma unroll
    for (int w = 0; w < kWarpgroups; ++w) {
      const int row_block = row / kWeightBlock + w;
      const bool valid = row_block < WeightBlocks(p.rows);
      const std::byte* const from =
          p.weights +
          (valid ? (int64_t{row_block} * blocks + stage) * kWBlock : 0);
#pragma unroll
      for (int i = g.thread(); i < kWBlock / 16; i += kThreads) {
        CopyAsync16(g, to + w * kWBlock + i * 16, from + (valid ? i * 16 : 0),
                    valid ? 16 : 0);
      }
    }
    CopyTokens<T, kTokens, kThreads>(g, p, token, stage * kWeightBlock,
                                     to + kWarpgroups * kWBlock);
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    if constexpr (TANDEM_WGMMA) Multiply(g);
  }

 private:
  TANDEM_DEVICE void Multiply(Grid& g) const {
    std::byte* const ring = AlignShared<kAlignment>(g, g.shared());
    const TileOrder tile(g.block_x(), RowTiles(p.rows), TokenTiles(p.tokens));
    const int row = tile.row_tile * kRows;
    const int token = tile.token_tile * kTokens;
    const int warpgroup = g.warp() / 4;
    const int stages = WeightBlocks(p.cols);
    float d[kInstructions][kInstructionTokens / 8][4] = {};

    constexpr int kAhead = kStages - 2;
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (s < stages) CopyStage(g, row, token, s, ring + s * kStageBytes);
      CopyAsyncCommit(g);
    }
    int slot = 0;
    int free_slot = kAhead;
    for (int s = 0; s < stages; ++s) {
      CopyAsyncWait<kAhead - 1>(g);
      ProxyFence(g);
      g.Barrier();
      if (s + kAhead < stages) {
        CopyStage(g, row, token, s + kAhead, ring + free_slot * kStageBytes);
      }
      CopyAsyncCommit(g);
      const std::byte* const w = ring + slot * kStageBytes;
      const uint64_t a =
          WgmmaDescriptor(SharedAddress(g, w + warpgroup * kWBlock));
      const uint64_t b =
          WgmmaDescriptor(SharedAddress(g, w + kWarpgroups * kWBlock));
      WgmmaFence(g);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < kInstructions; ++i) {
          WgmmaStep<T>(g, d[i], a + step * 2,
                       b + step * 2 + i * (kInstructionTokens * 128 / 16));
        }
      }
      WgmmaCommit(g);
      WgmmaWait<1>(g);
      slot = slot == kStages - 1 ? 0 : slot + 1;
      free_slot = free_slot == kStages - 1 ? 0 : free_slot + 1;
    }
    WgmmaWait<0>(g);
    CopyAsyncWait<0>(g);
    g.Barrier();
    Out* const results = reinterpret_cast<Out*>(ring);
    const int first = warpgroup * 64 + g.warp() % 4 * 16 + g.lane() / 4;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = first + i / 2 * 8;
        const int t = n * 8 + g.lane() % 4 * 2 + i % 2;
        const float chain =
            d[n * 8 / kInstructionTokens][n % (kInstructionTokens / 8)][i];
        results[t * kOutStride + r] =
            FromFloat<Out>(FinishChain<T, T>(p, row + r, chain));
      }
    }
    g.Barrier();
    WriteTile<Out, kRows, kTokens, kOutStride, kThreads>(g, p, row, token,
                                                         results);
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_
