// SPDX-License-Identifier: Apache-2.0
// Products with int8, int4 and W8A8 weights (kernels/quantise.h): of each group
// of 32 inputs the integer matrix instruction m16n8k32 gives the exact sum. Of
// int8 and int4 a fused multiply-add with both scales puts it behind the
// output's chain, group by group in ascending order; of W8A8, whose scales are
// those of whole rows, the instruction itself adds all groups' sums, and the
// token's scale multiplies the last of them. The row's scale multiplies the
// finished chain. So neither tiles nor tokens show in the bits, and those of an
// f32 model are the CPU backend's.
//
// Tokens are quantised first, by a kernel of their own (quantise_rows.cuh),
// into what the instruction's second operand is. Input 8t + j of a group is the
// instruction's 4t + j (j < 4) or 16 + 4t + j - 4, on both sides.
//
// A block of threads owns kRows x kTokens outputs and all of cols; both
// operands stream through a ring of kStages stages of 64 columns, as in
// matmul.cuh.

#ifndef TANDEM_KERNELS_CUDA_MATMUL_CODES_CUH_
#define TANDEM_KERNELS_CUDA_MATMUL_CODES_CUH_

#include <type_traits>

#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/matmul.cuh"

namespace tandem::kernels::cuda {

// What runs for up to so many tokens.
using MatMulCodes8 = MatMulTiles<2, 1, 1, 1, 1, 8>;
using MatMulCodes32 = MatMulTiles<2, 2, 1, 2, 1, 6>;
using MatMulCodes128 = MatMulTiles<4, 2, 2, 8, 1, 3>;

// T: activations.
template <typename T, WeightType kWeight, typename Tiles>
struct MatMulCodesKernel {
  static constexpr int kThreads = Tiles::kThreads;
  static constexpr bool kFourBit = IsFourBit(kWeight);
  static constexpr bool kZeros = kWeight == WeightType::kInt4Zeros;
  static constexpr bool kWhole = kWeight == WeightType::kW8A8;
  static constexpr int kTileBytes = kFourBit ? 512 : 1024;  // of 16 rows
  static constexpr int kCodeBytes = Tiles::kRows / 16 * kTileBytes;
  static constexpr int kScaleBytes =
      kWhole ? 0 : kGroupsPerBlock * Tiles::kRows * 2;
  static constexpr int kZeroBytes = kZeros ? kGroupsPerBlock * Tiles::kRows : 0;
  static constexpr int kWeightBytes = kCodeBytes + kScaleBytes + kZeroBytes;
  static constexpr int kRecordBytes =
      kWhole ? kCodeTokens * kCodeGroup : kCodeRecordBytes;
  static constexpr int kTokenTileBytes = kGroupsPerBlock * kRecordBytes;
  static constexpr int kStageBytes =
      kWeightBytes + Tiles::kTokens / kCodeTokens * kTokenTileBytes;
  // The results pass through shared memory, so that a warp writes whole rows.
  static constexpr int kOutStride = Tiles::kRows + 8;
  static constexpr int kOutBytes =
      Tiles::kTokens * kOutStride * static_cast<int>(sizeof(T));
  // Behind it all the scales of W8A8's tokens.
  static constexpr int kScalesAt = kStageBytes * Tiles::kStages > kOutBytes
                                       ? kStageBytes* Tiles::kStages
                                       : kOutBytes;
  static constexpr int kSharedBytes =
      kScalesAt + (kWhole ? Tiles::kTokens * 4 : 0);

  // What an output is before its token's and its row's scales.
  using Sum = std::conditional_t<kWhole, int32_t, float>;

  MatMulParams p;  // x: what LaunchQuantiseRows gives

  TANDEM_HOST_DEVICE static constexpr int RowTiles(int rows) {
    return (rows + Tiles::kRows - 1) / Tiles::kRows;
  }
  TANDEM_HOST_DEVICE static constexpr int TokenTiles(int tokens) {
    return (tokens + Tiles::kTokens - 1) / Tiles::kTokens;
  }

  // Of kCodeTokens tokens.
  TANDEM_DEVICE int64_t TokenBytes() const {
    return kWhole ? WholeCodeRowsBytes(p.cols)
                  : int64_t{WeightBlocks(p.cols)} * kTokenTileBytes;
  }

  // 16 bytes, or zeros.
  TANDEM_DEVICE static void Copy(Grid& g, std::byte* to, const std::byte* base,
                                 int64_t offset, bool valid) {
    CopyAsync16(g, to, base + (valid ? offset : 0), valid ? 16 : 0);
  }

  TANDEM_DEVICE void CopyStage(Grid& g, int row, int token, int block,
                               std::byte* to) const {
    const int blocks = WeightBlocks(p.cols);
    const auto begin = [&](int r) {  // of the block that row r is in
      return (int64_t{r / kWeightBlock} * blocks + block) * BlockBytes(kWeight);
    };
    const int end_row = WeightBlocks(p.rows) * kWeightBlock;
#pragma unroll
    for (int i = g.thread(); i < kCodeBytes / 16; i += kThreads) {
      const int r = row + i * 16 / kTileBytes * 16;
      Copy(g, to + i * 16, p.weights,
           begin(r) + r % kWeightBlock / 16 * kTileBytes + i * 16 % kTileBytes,
           r < end_row);
    }
    for (int i = g.thread(); i < kScaleBytes / 16; i += kThreads) {
      const int group = i * 8 / Tiles::kRows;
      const int r = row + i * 8 % Tiles::kRows;
      Copy(g, to + kCodeBytes + i * 16, p.weights,
           begin(r) + BlockBytes(kWeight) - kBlockScaleBytes +
               (group * kWeightBlock + r % kWeightBlock) * 2,
           r < end_row);
    }
    for (int i = g.thread(); i < kZeroBytes / 16; i += kThreads) {
      const int group = i * 16 / Tiles::kRows;
      const int r = row + i * 16 % Tiles::kRows;
      Copy(g, to + kCodeBytes + kScaleBytes + i * 16, p.weights,
           begin(r) + BlockBytes(kWeight) - kBlockScaleBytes - kBlockZeroBytes +
               group * kWeightBlock + r % kWeightBlock,
           r < end_row);
    }
    constexpr int kPieces = kTokenTileBytes / 16;
    const int first = token / kCodeTokens;
    const int end = (p.tokens + kCodeTokens - 1) / kCodeTokens;
    for (int i = g.thread(); i < Tiles::kTokens / kCodeTokens * kPieces;
         i += kThreads) {
      const int tile = first + i / kPieces;
      Copy(g, to + kWeightBytes + i * 16, static_cast<const std::byte*>(p.x),
           tile * TokenBytes() + block * kTokenTileBytes + i % kPieces * 16,
           tile < end);
    }
  }

  // [kTokens], of W8A8.
  TANDEM_DEVICE void CopyTokenScales(Grid& g, int token, std::byte* to) const {
    constexpr int kPieces = kCodeScaleBytes / 16;
    const int end = (p.tokens + kCodeTokens - 1) / kCodeTokens;
    for (int i = g.thread(); i < Tiles::kTokens / kCodeTokens * kPieces;
         i += kThreads) {
      const int tile = token / kCodeTokens + i / kPieces;
      Copy(g, to + i * 16, static_cast<const std::byte*>(p.x),
           (tile + 1) * TokenBytes() - kCodeScaleBytes + i % kPieces * 16,
           tile < end);
    }
  }

  // Four bytes 0 .. 15 less a zero of 0 .. 16, each by itself: with its highest
  // bit set none borrows from its neighbour, and what is left of the bit is the
  // sign's opposite.
  TANDEM_DEVICE static uint32_t LessZero(uint32_t codes, uint32_t zero) {
    constexpr uint32_t kHighest = 0x80808080u;
    return ((codes | kHighest) - zero * 0x01010101u) ^ kHighest;
  }

  // Twice the numbers of eight e2m1: those of the low halves of a word's bytes,
  // and of the high ones.
  TANDEM_DEVICE static void TwiceE2m1(uint32_t codes, uint32_t& low,
                                      uint32_t& high) {
    constexpr uint32_t kMagnitudes[2] = {0x03020100u, 0x0c080604u};
    const uint32_t picks = codes & 0x77777777u;
    // Of the low and the high half of a byte, then of the next byte's.
    const uint32_t first =
        BytePermute(kMagnitudes[0], kMagnitudes[1], picks & 0xffffu);
    const uint32_t second =
        BytePermute(kMagnitudes[0], kMagnitudes[1], picks >> 16);
    low = Signed(BytePermute(first, second, 0x6420u), codes >> 3);
    high = Signed(BytePermute(first, second, 0x7531u), codes >> 7);
  }
  // Bytes are negative where the lowest bit of a byte of `signs` is set; those
  // are not 0.
  TANDEM_DEVICE static uint32_t Signed(uint32_t magnitudes, uint32_t signs) {
    const uint32_t ones = signs & 0x01010101u;
    return (magnitudes ^ ones * 0xffu) + ones;
  }

  // The instruction's rows from the 16 weight rows at `tile`. int4: 16 times
  // each code, which needs no sign to be spread; with zeros, code less zero.
  // `zeros`: the thread's first row's.
  TANDEM_DEVICE static void LoadCodes(Grid& g, const std::byte* tile, int group,
                                      const std::byte* zeros,
                                      uint32_t (&a)[4]) {
    if constexpr (kFourBit) {
      uint32_t raw[4];
      LoadShared16(g, tile + g.lane() * 16, raw);
      const uint32_t low_row = group == 0 ? raw[0] : raw[2];
      const uint32_t high_row = group == 0 ? raw[1] : raw[3];
      if constexpr (kWeight == WeightType::kE2m1) {
        TwiceE2m1(low_row, a[0], a[2]);
        TwiceE2m1(high_row, a[1], a[3]);
      } else if constexpr (kZeros) {
        constexpr uint32_t kLow = 0x0f0f0f0fu;
        const uint32_t zero[2] = {static_cast<uint32_t>(zeros[0]),
                                  static_cast<uint32_t>(zeros[8])};
        a[0] = LessZero(low_row & kLow, zero[0]);
        a[1] = LessZero(high_row & kLow, zero[1]);
        a[2] = LessZero(low_row >> 4 & kLow, zero[0]);
        a[3] = LessZero(high_row >> 4 & kLow, zero[1]);
      } else {
        constexpr uint32_t kHigh = 0xf0f0f0f0u;
        a[0] = low_row << 4 & kHigh;
        a[1] = high_row << 4 & kHigh;
        a[2] = low_row & kHigh;
        a[3] = high_row & kHigh;
      }
    } else {
      LoadShared16(g, tile + group * 512 + g.lane() * 16, a);
    }
  }

  TANDEM_DEVICE static void Step(
      Grid& g, const std::byte* stage, int warp_row, int warp_token, int group,
      Sum (&sums)[Tiles::kTilesM][Tiles::kTilesN][4]) {
    uint32_t b[Tiles::kTilesN][2];
    [[maybe_unused]] float token_scale[Tiles::kTilesN][2];
#pragma unroll
    for (int n = 0; n < Tiles::kTilesN; ++n) {
      const std::byte* const record =
          stage + kWeightBytes +
          (warp_token / kCodeTokens + n) * kTokenTileBytes +
          group * kRecordBytes;
      const uint32_t* const codes =
          reinterpret_cast<const uint32_t*>(record) + g.lane() * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) b[n][i] = codes[i];
      if constexpr (!kWhole) {
        const float* const scales =
            reinterpret_cast<const float*>(record + kCodeTokens * kCodeGroup) +
            g.lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) token_scale[n][i] = scales[i];
      }
    }
#pragma unroll
    for (int m = 0; m < Tiles::kTilesM; ++m) {
      const int row = warp_row + m * 16;
      uint32_t a[4];
      LoadCodes(g, stage + row / 16 * kTileBytes, group,
                stage + kCodeBytes + kScaleBytes + group * Tiles::kRows + row +
                    g.lane() / 4,
                a);
      if constexpr (kWhole) {
#pragma unroll
        for (int n = 0; n < Tiles::kTilesN; ++n) MmaS8(g, sums[m][n], a, b[n]);
      } else {
        const Half* const scales =
            reinterpret_cast<const Half*>(stage + kCodeBytes) +
            group * Tiles::kRows + row + g.lane() / 4;
        const float row_scale[2] = {ToFloat(scales[0]), ToFloat(scales[8])};
#pragma unroll
        for (int n = 0; n < Tiles::kTilesN; ++n) {
          AddGroup(g, a, b[n], row_scale, token_scale[n], sums[m][n]);
        }
      }
    }
  }

  // An instruction's results behind their chains.
  TANDEM_DEVICE static void AddGroup(Grid& g, const uint32_t (&a)[4],
                                     const uint32_t (&b)[2],
                                     const float (&row_scale)[2],
                                     const float (&token_scale)[2],
                                     float (&chain)[4]) {
    int32_t dot[4] = {};
    MmaS8(g, dot, a, b);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = static_cast<float>(
          kWeight == WeightType::kInt4 ? dot[i] >> 4 : dot[i]);
      chain[i] = Fma(sum, Mul(row_scale[i / 2], token_scale[i % 2]), chain[i]);
    }
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const TileOrder tile(g.block_x(), RowTiles(p.rows), TokenTiles(p.tokens));
    Tile(g, tile.row_tile, tile.token_tile * Tiles::kTokens);
  }

  // The outputs of kTokens tokens from `token` on, a multiple of kCodeTokens.
  TANDEM_DEVICE void Tile(Grid& g, int row_tile, int token) const {
    std::byte* const ring = g.shared();
    const int row = row_tile * Tiles::kRows;
    const int warp_row = g.warp() % Tiles::kWarpsM * (16 * Tiles::kTilesM);
    const int warp_token = g.warp() / Tiles::kWarpsM * (8 * Tiles::kTilesN);
    const int stages = WeightBlocks(p.cols);
    Sum sums[Tiles::kTilesM][Tiles::kTilesN][4] = {};

    if constexpr (kWhole) CopyTokenScales(g, token, ring + kScalesAt);
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
#pragma unroll
      for (int group = 0; group < kGroupsPerBlock; ++group) {
        Step(g, ring + slot * kStageBytes, warp_row, warp_token, group, sums);
      }
      slot = slot == Tiles::kStages - 1 ? 0 : slot + 1;
    }
    CopyAsyncWait<0>(g);
    g.Barrier();
    WriteResults(g, row, token, warp_row, warp_token, sums);
  }

  // What the row's scale multiplies; t: a token of the tile.
  TANDEM_DEVICE static float Finished(Grid&, float chain, int) { return chain; }
  TANDEM_DEVICE static float Finished(Grid& g, int32_t sum, int t) {
    return Mul(static_cast<float>(sum),
               reinterpret_cast<const float*>(g.shared() + kScalesAt)[t]);
  }

  TANDEM_DEVICE void WriteResults(
      Grid& g, int row, int token, int warp_row, int warp_token,
      const Sum (&sums)[Tiles::kTilesM][Tiles::kTilesN][4]) const {
    T* const results = reinterpret_cast<T*>(g.shared());
    const int group = g.lane() / 4;
#pragma unroll
    for (int m = 0; m < Tiles::kTilesM; ++m) {
      const int first = warp_row + m * 16;
      const RowFinish<T, Code> finish_low(p, row + first + group);
      const RowFinish<T, Code> finish_high(p, row + first + group + 8);
#pragma unroll
      for (int n = 0; n < Tiles::kTilesN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int t = warp_token + n * 8 + g.lane() % 4 * 2 + i;
          const float low = finish_low(Finished(g, sums[m][n][i], t));
          const float high = finish_high(Finished(g, sums[m][n][i + 2], t));
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
    g.Barrier();
    const int part = p.gated() ? 2 : 1;
    WriteTile<T, Tiles::kTokens, kOutStride, kThreads>(
        g, p, row / part, Tiles::kRows / part, token, results);
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_MATMUL_CODES_CUH_
