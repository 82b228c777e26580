// SPDX-License-Identifier: Apache-2.0
// out = x [tokens, cols] * w^T (+ bias) on mma.sync, for every
// number of tokens: one kernel, whose tiles never show in the bits since each
// output is one chain (numerics.h). Weights are the 16-row operand and tokens
// the narrow one, so few tokens waste no rows of the tensor core.
//
// A block of threads owns kRows x kTokens outputs and all of cols. Both
// operands stream through a ring of kStages stages of shared memory that
// asynchronous copies fill kStages - 1 ahead. On sm_90 and later the kernels
// of matmul_stream.cuh and matmul_wgmma.cuh take over, with what is here of
// registers and results.
//
// A stage is kBlocks blocks of 64 columns: of w 128 bytes (e4m3: 64) per row
// as packed_weights.h has them, of x 128 bytes per token, swizzled likewise.

#ifndef TANDEM_KERNELS_CUDA_MATMUL_CUH_
#define TANDEM_KERNELS_CUDA_MATMUL_CUH_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device/async_copy.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_map.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numerics.h"
#include "kernels/cuda/packed_weights.h"

namespace tandem::kernels::cuda {

// kWarpsM x kWarpsN warps of kTilesM x kTilesN instructions' 16 x 8 outputs.
template <int kWarpsM_, int kWarpsN_, int kTilesM_, int kTilesN_, int kBlocks_,
          int kStages_>
struct MatMulTiles {
  static constexpr int kWarpsM = kWarpsM_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kTilesM = kTilesM_;
  static constexpr int kTilesN = kTilesN_;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kStages = kStages_;
  static constexpr int kRows = 16 * kWarpsM * kTilesM;
  static constexpr int kTokens = 8 * kWarpsN * kTilesN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static_assert(kWeightBlock % kRows == 0 || kRows % kWeightBlock == 0);
  static_assert(kTilesN == 1 || kTilesN % 2 == 0);
};

// What runs for up to so many tokens. Rows per block are few where tokens
// are, so that 4096 rows still reach 128 of an H200's 132 multiprocessors.
using MatMul8 = MatMulTiles<2, 1, 1, 1, 2, 8>;
using MatMul16 = MatMulTiles<2, 1, 1, 2, 2, 7>;
using MatMul32 = MatMulTiles<2, 2, 1, 2, 2, 6>;
using MatMul64 = MatMulTiles<2, 4, 1, 2, 2, 4>;
using MatMul128 = MatMulTiles<4, 2, 2, 8, 1, 3>;

// The order in which blocks take tiles: token tiles in groups, so that those
// running at one time share weights and tokens in the L2 cache.
struct TileOrder {
  static constexpr int kGroup = 8;
  int row_tile;
  int token_tile;

  TANDEM_DEVICE TileOrder(int index, int row_tiles, int token_tiles) {
    const int group = index / (kGroup * row_tiles);
    const int first = group * kGroup;
    const int width =
        token_tiles - first < kGroup ? token_tiles - first : kGroup;
    const int within = index - first * row_tiles;
    row_tile = within / width;
    token_tile = first + within % width;
  }
};

// The stages of a block that takes every grid_x-th tile, one after the other.
struct StageCursor {
  int tiles;
  int row_tiles;
  int token_tiles;
  int stages;  // of a tile
  int step;
  int index;
  TileOrder tile;
  int stage = 0;

  TANDEM_DEVICE StageCursor(Grid& g, int of_rows, int of_tokens, int of_stages)
      : tiles(of_rows * of_tokens),
        row_tiles(of_rows),
        token_tiles(of_tokens),
        stages(of_stages),
        step(g.grid_x()),
        index(g.block_x()),
        tile(index, row_tiles, token_tiles) {}
  TANDEM_DEVICE bool Done() const { return index >= tiles; }
  TANDEM_DEVICE void Next() {
    if (++stage < stages) return;
    stage = 0;
    index += step;
    tile = TileOrder(index, row_tiles, token_tiles);
  }
};

// What the copying thread of a block does: copies.Weights(cursor, place)
// announces a stage's bytes and fetches its weights, copies.Tokens(cursor,
// place) its tokens. Weights depend on no kernel: a ring full of them is
// fetched while the kernel before this one ends.
template <int kStages, typename Copies>
TANDEM_DEVICE void FillRing(Grid& g, const StageCursor& first,
                            AsyncBarrier* empty, const Copies& copies) {
  StageCursor weights = first;
  RingPlace<kStages> place;
  for (int i = 0; i < kStages && !weights.Done(); ++i) {
    copies.Weights(weights, place.slot);
    weights.Next();
    place.Next();
  }
  WaitForPrevious(g);
  LaunchNext(g);
  StageCursor tokens = first;
  RingPlace<kStages> lap;
  for (int i = 0; i < kStages && !tokens.Done(); ++i) {
    copies.Tokens(tokens, lap.slot);
    tokens.Next();
    lap.Next();
  }
  for (; !weights.Done(); weights.Next()) {
    AwaitPhase(g, empty + place.slot, place.parity ^ 1);
    copies.Weights(weights, place.slot);
    copies.Tokens(weights, place.slot);
    place.Next();
  }
}

// Copies tokens' inputs [col, col + 64) into `to`, 128 swizzled bytes each;
// zeros beyond the last token and column. Rows of odd sizes cannot be copied
// 16 bytes at a time and take the slow way.
template <typename T, int kTokens, int kThreads>
TANDEM_DEVICE void CopyTokens(Grid& g, const MatMulParams& p, int token,
                              int col, std::byte* to) {
  const T* const x = static_cast<const T*>(p.x);
  const bool aligned = p.x_stride % 8 == 0 && p.cols % 8 == 0;
#pragma unroll
  for (int i = g.thread(); i < kTokens * 8; i += kThreads) {
    const int r = i / 8;
    const int c = i % 8;
    std::byte* const chunk = to + r * 128 + (c ^ (r % 8)) * 16;
    const int first = col + c * 8;
    int valid = token + r < p.tokens ? p.cols - first : 0;
    valid = valid < 0 ? 0 : valid > 8 ? 8 : valid;
    const T* const from = valid > 0 ? x + (token + r) * p.x_stride + first : x;
    if (aligned) {
      CopyAsync16(g, chunk, from, valid * 2);
    } else {
      T* const elements = reinterpret_cast<T*>(chunk);
      for (int e = 0; e < 8; ++e) {
        elements[e] = e < valid ? from[e] : T{0};
      }
    }
  }
}

// Makes a finished chain of packed row `row` what the caller sees: a value of
// T. Of rows behind the last, anything.
template <typename T, typename W>
class RowFinish {
 public:
  TANDEM_DEVICE RowFinish(const MatMulParams& p, int row)
      : biased_(p.bias != nullptr) {
    if (row >= p.rows) return;
    if constexpr (sizeof(W) == 1) scale_ = p.scales[row];
    const int at =
        p.gated() ? SourceRow(row, 2 * p.outputs, RowOrder::kGated) : row;
    if (biased_ && at >= 0) bias_ = p.bias[at];
  }

  TANDEM_DEVICE float operator()(float chain) const {
    if constexpr (sizeof(W) == 1) chain = Mul(chain, scale_);
    const float rounded = RoundTo<T>(chain);
    return biased_ ? RoundTo<T>(Add(rounded, bias_)) : rounded;
  }

 private:
  const bool biased_;
  float scale_ = 1.0f;
  float bias_ = 0.0f;
};

// Whether the copy engine can fetch the tokens.
inline bool TokensAreTiles(const MatMulParams& p) {
  return p.x_stride % 8 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
}

// Starts a kernel whose blocks stay, so many on a multiprocessor.
template <typename Kernel>
int LaunchStaying(const Stream& stream, DType activation, int per_processor,
                  const MatMulParams& p) {
  Kernel kernel;
  kernel.p = p;
  const int error = MakeTensorMap({.data = p.x,
                                   .type = activation,
                                   .rows = p.tokens,
                                   .cols = p.cols,
                                   .stride = p.x_stride,
                                   .tile_rows = Kernel::kTokens},
                                  &kernel.x);
  if (error != 0) return error;
  const int tiles = Kernel::RowTiles(p.rows) * Kernel::TokenTiles(p.tokens);
  return Launch(stream,
                {std::min(tiles, per_processor * stream.multiprocessors), 1, 1},
                Kernel::kThreads, Kernel::kSharedBytes, kernel);
}

// Writes columns [first, first + width) of p.out, held in shared memory as
// [kTokens][kStride].
template <typename T, int kTokens, int kStride, int kThreads>
TANDEM_DEVICE void WriteTile(Grid& g, const MatMulParams& p, int first,
                             int width, int token, const T* results) {
  for (int i = g.thread(); i < kTokens * width; i += kThreads) {
    const int t = i / width;
    const int r = i % width;
    if (token + t >= p.tokens || first + r >= p.outputs) continue;
    const int64_t at = (token + t) * p.out_stride + first + r;
    const T result = results[t * kStride + r];
    if (p.output == MatMulOutput::kWide) {
      static_cast<float*>(p.out)[at] = ToFloat(result);
    } else {
      static_cast<T*>(p.out)[at] = result;
    }
  }
}

// T: activations; W: T or E4M3.
template <typename T, typename W, typename Tiles>
struct MatMulKernel {
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr int kTokens = Tiles::kTokens;
  static constexpr bool kScaled = sizeof(W) == 1;
  static constexpr int kRowBytes = 64 * static_cast<int>(sizeof(W));
  static constexpr int kWBlock = Tiles::kRows * kRowBytes;
  static constexpr int kXBlock = Tiles::kTokens * 128;
  static constexpr int kStageBytes = Tiles::kBlocks * (kWBlock + kXBlock);
  // The results pass through shared memory, so that a warp writes whole rows.
  static constexpr int kOutStride = Tiles::kRows + 8;
  static constexpr int kOutBytes = Tiles::kTokens * kOutStride * 2;
  static constexpr int kSharedBytes = kStageBytes * Tiles::kStages > kOutBytes
                                          ? kStageBytes* Tiles::kStages
                                          : kOutBytes;

  MatMulParams p;

  TANDEM_HOST_DEVICE static constexpr int RowTiles(int rows) {
    return (rows + Tiles::kRows - 1) / Tiles::kRows;
  }
  TANDEM_HOST_DEVICE static constexpr int TokenTiles(int tokens) {
    return (tokens + Tiles::kTokens - 1) / Tiles::kTokens;
  }

  TANDEM_DEVICE void CopyStage(Grid& g, int row, int token, int stage,
                               std::byte* to) const {
    const int blocks = WeightBlocks(p.cols);
    constexpr int kPerBlock = kWBlock / 16;
#pragma unroll
    for (int i = g.thread(); i < Tiles::kBlocks * kPerBlock; i += kThreads) {
      const int j = i / kPerBlock;
      const int offset = i % kPerBlock * 16;
      const int r = row + offset / kRowBytes;
      const int block = stage * Tiles::kBlocks + j;
      const bool valid =
          block < blocks && r / kWeightBlock < WeightBlocks(p.rows);
      const std::byte* const from =
          p.weights + (valid ? (int64_t{r / kWeightBlock} * blocks + block) *
                                       (kWeightBlock * kRowBytes) +
                                   r % kWeightBlock / 16 * (16 * kRowBytes) +
                                   offset % (16 * kRowBytes)
                             : 0);
      CopyAsync16(g, to + i * 16, from, valid ? 16 : 0);
    }
#pragma unroll
    for (int j = 0; j < Tiles::kBlocks; ++j) {
      CopyTokens<T, Tiles::kTokens, kThreads>(
          g, p, token, (stage * Tiles::kBlocks + j) * kWeightBlock,
          to + Tiles::kBlocks * kWBlock + j * kXBlock);
    }
  }

  // Two steps' operands, columns [32 half, 32 half + 32), of the 16 weight
  // rows at `tile`.
  TANDEM_DEVICE static void LoadWeights(Grid& g, const std::byte* tile,
                                        int half, uint32_t (&a)[2][4]) {
    const int lane = g.lane();
    if constexpr (kScaled) {
      uint32_t raw[4];
      LoadShared16(g, tile + half * 512 + lane * 16, raw);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i / 2][i % 2 * 2] = FromE4M3Pair<T>(raw[i] & 0xffffu);
        a[i / 2][i % 2 * 2 + 1] = FromE4M3Pair<T>(raw[i] >> 16);
      }
    } else {
      const int r = lane % 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = half * 4 + i * 2 + lane / 16;
        LoadMatrix4(g, a[i], tile + r * 128 + (chunk ^ (r % 8)) * 16);
      }
    }
  }

  // The same two steps of the warp's tokens.
  TANDEM_DEVICE static void LoadTokens(Grid& g, const std::byte* tile, int half,
                                       uint32_t (&b)[2][Tiles::kTilesN][2]) {
    const int lane = g.lane();
    uint32_t m[4];
    if constexpr (Tiles::kTilesN == 1) {
      const int r = lane % 8;
      LoadMatrix4(g, m, tile + r * 128 + ((half * 4 + lane / 8) ^ r) * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][0][i % 2] = m[i];
    } else {
      const int r = lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = half * 4 + i * 2 + lane / 8 % 2;
#pragma unroll
        for (int n = 0; n < Tiles::kTilesN; n += 2) {
          LoadMatrix4(g, m, tile + (n * 8 + r) * 128 + (chunk ^ (r % 8)) * 16);
          b[i][n][0] = m[0];
          b[i][n][1] = m[1];
          b[i][n + 1][0] = m[2];
          b[i][n + 1][1] = m[3];
        }
      }
    }
  }

  // The steps of a stage at `w`, of which so many blocks are there.
  TANDEM_DEVICE static void Steps(
      Grid& g, const std::byte* w, int warp_row, int warp_token, int blocks,
      float (&d)[Tiles::kTilesM][Tiles::kTilesN][4]) {
    const std::byte* const x = w + Tiles::kBlocks * kWBlock;
#pragma unroll
    for (int half = 0; half < Tiles::kBlocks * 2; ++half) {
      if (half / 2 >= blocks) break;
      const std::byte* const w_tile =
          w + half / 2 * kWBlock + warp_row * kRowBytes;
      const std::byte* const x_tile = x + half / 2 * kXBlock + warp_token * 128;
      uint32_t a[Tiles::kTilesM][2][4];
      uint32_t b[2][Tiles::kTilesN][2];
      LoadTokens(g, x_tile, half % 2, b);
#pragma unroll
      for (int m = 0; m < Tiles::kTilesM; ++m) {
        LoadWeights(g, w_tile + m * 16 * kRowBytes, half % 2, a[m]);
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int m = 0; m < Tiles::kTilesM; ++m) {
#pragma unroll
          for (int n = 0; n < Tiles::kTilesN; ++n) {
            MatrixStep<T>(g, d[m][n], a[m][step], b[step][n]);
          }
        }
      }
    }
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const TileOrder tile(g.block_x(), RowTiles(p.rows), TokenTiles(p.tokens));
    Tile(g, tile.row_tile, tile.token_tile * Tiles::kTokens);
  }

  // The outputs of kTokens tokens from `token` on.
  TANDEM_DEVICE void Tile(Grid& g, int row_tile, int token) const {
    std::byte* const ring = g.shared();
    const int row = row_tile * Tiles::kRows;
    const int warp_row = g.warp() % Tiles::kWarpsM * (16 * Tiles::kTilesM);
    const int warp_token = g.warp() / Tiles::kWarpsM * (8 * Tiles::kTilesN);
    const int stages =
        (WeightBlocks(p.cols) + Tiles::kBlocks - 1) / Tiles::kBlocks;
    float d[Tiles::kTilesM][Tiles::kTilesN][4] = {};

#pragma unroll
    for (int s = 0; s < Tiles::kStages - 1; ++s) {
      if (s < stages) CopyStage(g, row, token, s, ring + s * kStageBytes);
      CopyAsyncCommit(g);
    }
    int slot = 0;
    for (int s = 0; s < stages; ++s) {
      CopyAsyncWait<Tiles::kStages - 2>(g);
      // Everyone's copies of this stage have landed, and everyone is through
      // with the stage before, whose place the next copies take.
      g.Barrier();
      const int next = s + Tiles::kStages - 1;
      if (next < stages) {
        const int next_slot = slot == 0 ? Tiles::kStages - 1 : slot - 1;
        CopyStage(g, row, token, next, ring + next_slot * kStageBytes);
      }
      CopyAsyncCommit(g);
      Steps(g, ring + slot * kStageBytes, warp_row, warp_token, Tiles::kBlocks,
            d);
      slot = slot == Tiles::kStages - 1 ? 0 : slot + 1;
    }
    CopyAsyncWait<0>(g);
    g.Barrier();
    WriteResults<kThreads>(g, row, token, warp_row, warp_token, d,
                           reinterpret_cast<T*>(ring), [&g] { g.Barrier(); });
  }

  // Through `results` [kTokens][kOutStride] in shared memory, which the first
  // kWriters threads share; meet() is their barrier.
  template <int kWriters, typename Meet>
  TANDEM_DEVICE void WriteResults(
      Grid& g, int row, int token, int warp_row, int warp_token,
      const float (&d)[Tiles::kTilesM][Tiles::kTilesN][4], T* results,
      const Meet& meet) const {
    const int group = g.lane() / 4;
#pragma unroll
    for (int m = 0; m < Tiles::kTilesM; ++m) {
      const int first = warp_row + m * 16;
      const RowFinish<T, W> finish_low(p, row + first + group);
      const RowFinish<T, W> finish_high(p, row + first + group + 8);
#pragma unroll
      for (int n = 0; n < Tiles::kTilesN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = warp_token + n * 8 + g.lane() % 4 * 2 + i;
          const float low = finish_low(d[m][n][i]);
          const float high = finish_high(d[m][n][i + 2]);
          T* const to = results + t * kOutStride;
          if (p.gated()) {
            to[first / 2 + group] =
                FromFloat<T>(Gated(p.activation, low, high));
          } else {
            to[first + group] = FromFloat<T>(low);
            to[first + group + 8] = FromFloat<T>(high);
          }
        }
      }
    }
    meet();
    const int part = p.gated() ? 2 : 1;
    WriteTile<T, Tiles::kTokens, kOutStride, kWriters>(
        g, p, row / part, Tiles::kRows / part, token, results);
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_MATMUL_CUH_
