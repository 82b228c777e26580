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
template <typename T, int kWarpgroups, int kTokens_, int kStages>
struct MatMulWgmmaKernel {
  static constexpr int kThreads = 128 * kWarpgroups;
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kTokens = kTokens_;
  static constexpr int kInstructionTokens = kTokens < 128 ? kTokens : 128;
  static constexpr int kInstructions = kTokens / kInstructionTokens;
  static constexpr int kWBlock = 64 * 128;
  static constexpr int kStageBytes = kWarpgroups * kWBlock + kTokens * 128;
  static constexpr int kOutStride = kRows + 8;
  static constexpr int kOutBytes = kTokens * kOutStride * 2;
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
    T* const results = reinterpret_cast<T*>(ring);
    const int first = warpgroup * 64 + g.warp() % 4 * 16;
    const int group = g.lane() / 4;
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float(&chain)[4] =
            d[n * 8 / kInstructionTokens][n % (kInstructionTokens / 8)];
        const float low = FinishChain<T, T>(p, row + first + group, chain[i]);
        const float high =
            FinishChain<T, T>(p, row + first + group + 8, chain[i + 2]);
        T* const to = results + (n * 8 + g.lane() % 4 * 2 + i) * kOutStride;
        if (p.gated()) {
          to[first / 2 + group] = FromFloat<T>(SiluTimes(low, high));
        } else {
          to[first + group] = FromFloat<T>(low);
          to[first + group + 8] = FromFloat<T>(high);
        }
      }
    }
    g.Barrier();
    const int part = p.gated() ? 2 : 1;
    WriteTile<T, kTokens, kOutStride, kThreads>(g, p, row / part, kRows / part,
                                                token, results);
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_MATMUL_WGMMA_CUH_
