// SPDX-License-Identifier: Apache-2.0
// Rows of activations as products with integers take them (launch.h has the
// formats), each quantised by itself: in groups of inputs, or as a whole.

#ifndef TANDEM_KERNELS_CUDA_QUANTISE_ROWS_CUH_
#define TANDEM_KERNELS_CUDA_QUANTISE_ROWS_CUH_

#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/reduce.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/launch.h"
#include "kernels/quantise.h"

namespace tandem::kernels::cuda {

// Grid: tiles of 8 tokens, pieces of kGroups groups. A warp has a token.
template <typename T>
struct QuantiseGroupsKernel {
  static constexpr int kThreads = 32 * kCodeTokens;
  static constexpr int kGroups = 8;
  QuantiseRowsParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int groups = WeightBlocks(p.cols) * kGroupsPerBlock;
    const int end = Smaller((g.block_y() + 1) * kGroups, groups);
    const int token = g.block_x() * kCodeTokens + g.warp();
    const T* const x = static_cast<const T*>(p.x) + token * p.x_stride;
    const int32_t* const order = OrderOf(g.block_x() * kCodeTokens);
    for (int group = g.block_y() * kGroups; group < end; ++group) {
      const int col = group * kCodeGroup + g.lane();
      float value = 0;
      if (token < p.tokens && col < p.cols) {
        value = ToFloat(x[order == nullptr ? col : order[col]]);
      }
      const VectorQuantiser quantiser(DType::kInt8,
                                      GreatestOfWarp(g, MagnitudeKey(value)));
      std::byte* const record =
          p.out + (int64_t{g.block_x()} * groups + group) * kCodeRecordBytes;
      record[g.warp() * kCodeGroup + g.lane()] =
          static_cast<std::byte>(quantiser(value));
      if (g.lane() == 0) {
        reinterpret_cast<float*>(record + kCodeTokens * kCodeGroup)[g.warp()] =
            quantiser.scale;
      }
    }
  }

 private:
  TANDEM_DEVICE const int32_t* OrderOf(int row) const {
    if (p.matrices == nullptr) return p.order;
    // The last tile that begins there or before; they ascend.
    int tile = 0;
    int end = *p.num_tiles;
    if (end == 0) return nullptr;
    while (end - tile > 1) {
      const int middle = tile + (end - tile) / 2;
      (p.tiles[middle].begin <= row ? tile : end) = middle;
    }
    return p.matrices[p.tiles[tile].expert].order;
  }
};

// A block has a token, whose scale is known when all of the row has been seen.
// Its threads read most rows at once; what is wider they read twice, the second
// time backwards, from the part that is in their registers still.
template <typename T>
struct QuantiseWholeRowsKernel {
  static constexpr int kThreads = 512;  // at most
  static constexpr int kSharedBytes = kThreads / 32 * 4;
  static constexpr int kChunks = 2;  // of a thread at a time
  QuantiseRowsParams p;

  // For rows of so many columns: a power of two.
  static int Threads(int cols) {
    int threads = 32;
    while (threads < kThreads && threads * kChunks * kChunk < cols) {
      threads *= 2;
    }
    return threads;
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int padded = WeightBlocks(p.cols) * kWeightBlock;
    const int at_once = kChunks * g.threads() * kChunk;
    const int last_lap = (padded - 1) / at_once * at_once;
    float v[kChunks][kChunk];
    uint32_t most = 0;
    for (int lap = 0; lap <= last_lap; lap += at_once) {
      Load(g, lap, v);
#pragma unroll
      for (int i = 0; i < kChunks * kChunk; ++i) {
        const uint32_t key = MagnitudeKey(v[i / kChunk][i % kChunk]);
        most = key > most ? key : most;
      }
    }
    const VectorQuantiser quantiser(
        DType::kInt8,
        GreatestOfBlock(g, most, reinterpret_cast<uint32_t*>(g.shared())));
    std::byte* const tile =
        p.out + g.block_x() / kCodeTokens * WholeCodeRowsBytes(p.cols);
    const int row = g.block_x() % kCodeTokens;
    Store(g, last_lap, padded, row, quantiser, v, tile);
    for (int lap = last_lap - at_once; lap >= 0; lap -= at_once) {
      Load(g, lap, v);
      Store(g, lap, padded, row, quantiser, v, tile);
    }
    if (g.thread() == 0) {
      reinterpret_cast<float*>(tile + padded * kCodeTokens)[row] =
          quantiser.scale;
    }
  }

 private:
  TANDEM_DEVICE static int Column(Grid& g, int lap, int chunk) {
    return lap + (chunk * g.threads() + g.thread()) * kChunk;
  }

  // Zeros where there is no such token or column.
  TANDEM_DEVICE void Load(Grid& g, int lap, float (&v)[kChunks][kChunk]) const {
    const T* const x = static_cast<const T*>(p.x) + g.block_x() * p.x_stride;
    const bool aligned = Aligned(p.cols) && p.x_stride % kChunk == 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int col = Column(g, lap, i);
      if (g.block_x() < p.tokens && col < p.cols) {
        LoadChunk(x + col, Smaller(kChunk, p.cols - col), aligned, v[i]);
      } else {
        for (float& value : v[i]) value = 0.0f;
      }
    }
  }

  TANDEM_DEVICE static void Store(Grid& g, int lap, int padded, int row,
                                  const VectorQuantiser& quantiser,
                                  const float (&v)[kChunks][kChunk],
                                  std::byte* tile) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const int col = Column(g, lap, i);
      if (col >= padded) continue;
      EightCodes codes{};
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        codes.word[j / 4] |= uint32_t{quantiser(v[i][j])} << (j % 4 * 8);
      }
      *reinterpret_cast<EightCodes*>(
          tile + (col / kCodeGroup * kCodeTokens + row) * kCodeGroup +
          col % kCodeGroup) = codes;
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_QUANTISE_ROWS_CUH_
