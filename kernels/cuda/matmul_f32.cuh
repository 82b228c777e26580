// SPDX-License-Identifier: Apache-2.0
// Products of f32 models: each output one chain of fused multiply-adds over
// its inputs in ascending order, the bits of the CPU backend. For tests and
// small models: a thread has one row of weights and a few tokens.

#ifndef TANDEM_KERNELS_CUDA_MATMUL_F32_CUH_
#define TANDEM_KERNELS_CUDA_MATMUL_F32_CUH_

#include "kernels/cuda/matmul.cuh"

namespace tandem::kernels::cuda {

template <WeightType kWeight>
struct MatMulF32Kernel {
  static constexpr int kRows = kWeightBlock;
  static constexpr int kTokens = 8;
  static constexpr int kThreads = 128;
  static constexpr int kPerThread = kTokens * kRows / kThreads;
  static constexpr int kSharedBytes = kTokens * kWeightBlock * 4;

  MatMulParams p;

  TANDEM_DEVICE static float Weight(const std::byte* block, int row, int col) {
    const std::byte* const at =
        block + PackedOffset(row, col, kWeightBlock, kWeight);
    if constexpr (kWeight == WeightType::kF32) {
      return *reinterpret_cast<const float*>(at);
    } else if constexpr (kWeight == WeightType::kE4M3) {
      return LowOfPair<BFloat16>(
          FromE4M3Pair<BFloat16>(*reinterpret_cast<const uint8_t*>(at)));
    } else if constexpr (kWeight == WeightType::kBF16) {
      return ToFloat(*reinterpret_cast<const BFloat16*>(at));
    } else {
      return ToFloat(*reinterpret_cast<const Half*>(at));
    }
  }

  TANDEM_HOST_DEVICE static constexpr int RowTiles(int rows) {
    return WeightBlocks(rows);
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    Tile(g, g.block_y(), g.block_x() * kTokens);
  }

  // The outputs of kTokens tokens from token0 on.
  TANDEM_DEVICE void Tile(Grid& g, int row_tile, int token0) const {
    const int row = row_tile * kRows + g.thread() % kRows;
    const int mine = g.thread() / kRows * kPerThread;
    const float* const x = static_cast<const float*>(p.x);
    float* const inputs = reinterpret_cast<float*>(g.shared());
    float chain[kPerThread] = {};
    const int blocks = WeightBlocks(p.cols);
    for (int b = 0; b < blocks; ++b) {
      const int col = b * kWeightBlock;
      const int count = Smaller(kWeightBlock, p.cols - col);
      g.Barrier();
      for (int i = g.thread(); i < kTokens * kWeightBlock; i += kThreads) {
        const int t = i / kWeightBlock;
        const int c = i % kWeightBlock;
        inputs[i] = token0 + t < p.tokens && c < count
                        ? x[(token0 + t) * p.x_stride + col + c]
                        : 0.0f;
      }
      g.Barrier();
      const std::byte* const block =
          p.weights + (int64_t{row_tile} * blocks + b) * BlockBytes(kWeight);
#pragma unroll 4
      for (int c = 0; c < count; ++c) {
        const float w = Weight(block, g.thread() % kRows, c);
#pragma unroll
        for (int t = 0; t < kPerThread; ++t) {
          chain[t] = Fma(inputs[(mine + t) * kWeightBlock + c], w, chain[t]);
        }
      }
    }
    const int at = p.gated() ? SourceRow(row, 2 * p.outputs, RowOrder::kGated)
                   : row < p.rows ? row
                                  : -1;
    const bool gate = row % 16 < 8;
    const int column = p.gated() ? row / 16 * 8 + row % 8 : row;
#pragma unroll
    for (int t = 0; t < kPerThread; ++t) {
      float result = chain[t];
      if (at >= 0) {
        if constexpr (kWeight == WeightType::kE4M3) {
          result = Mul(result, p.scales[row]);
        }
        if (p.bias != nullptr) result = Add(result, p.bias[at]);
      }
      if (p.gated()) {
        result = Gated(p.activation, result, g.ShuffleXor(result, 8));
      }
      if (at < 0 || (p.gated() && !gate)) continue;
      if (token0 + mine + t >= p.tokens) continue;
      static_cast<float*>(p.out)[(token0 + mine + t) * p.out_stride + column] =
          result;
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_MATMUL_F32_CUH_
