// SPDX-License-Identifier: Apache-2.0
// Root-mean-square norm, with the residual added first: one block per row,
// whose layout depends on the row's length and type alone.
//
//   x += delta, rounded to the activation type, in place
//   s = sum of x^2, out = (x * (1 / sqrt(s / dim + eps))) * weight, rounded
//
// Order of the sum. f32: the CPU backend's, a chain of fused multiply-adds
// per index modulo 16, halves folded onto each other. bf16 and f16: a chain
// for each of 256 threads, which own the chunks of eight numbered t, t + 256,
// ...; a warp's chains by xor-butterfly from 16 down, then warps ascending.

#ifndef TANDEM_KERNELS_CUDA_RMS_NORM_CUH_
#define TANDEM_KERNELS_CUDA_RMS_NORM_CUH_

#include <type_traits>

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

template <typename T>
struct RmsNormKernel {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  RmsNormParams p;

  // The row as the sum sees it, then the warps' sums.
  static int SharedBytes(int dim) {
    return Chunks(dim) * kChunk * static_cast<int>(sizeof(T)) +
           kWarps * static_cast<int>(sizeof(float));
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int64_t stride = p.stride == 0 ? p.dim : p.stride;
    const int64_t first = int64_t{g.block_x()} * stride;
    T* const x = static_cast<T*>(p.x) + first;
    const T* const delta =
        p.delta == nullptr ? nullptr : static_cast<const T*>(p.delta) + first;
    T* const row = reinterpret_cast<T*>(g.shared());
    const int padded = Chunks(p.dim) * kChunk;
    float* const sums = reinterpret_cast<float*>(row + padded);
    const bool aligned = Aligned(p.dim) && stride % kChunk == 0;

    float squares = 0.0f;
    for (int i = g.thread() * kChunk; i < p.dim; i += kThreads * kChunk) {
      const int count = Smaller(kChunk, p.dim - i);
      float v[kChunk];
      LoadChunk(x + i, count, aligned, v);
      if (delta != nullptr) {
        float d[kChunk];
        LoadChunk(delta + i, count, aligned, d);
        for (int j = 0; j < kChunk; ++j) v[j] = RoundTo<T>(Add(v[j], d[j]));
        StoreChunk(x + i, count, aligned, v);
      }
      StoreChunk(row + i, kChunk, true, v);
      for (int j = 0; j < kChunk; ++j) squares = Fma(v[j], v[j], squares);
    }
    const float sum = std::is_same_v<T, float>
                          ? SumBySixteen(g, row, padded, sums)
                          : SumByThread(g, squares, sums);
    const float mean = Div(sum, static_cast<float>(p.dim));
    const float scale = Div(1.0f, Sqrt(Add(mean, p.eps)));

    T* const out = static_cast<T*>(p.out) + first;
    for (int i = g.thread() * kChunk; i < p.dim; i += kThreads * kChunk) {
      const int count = Smaller(kChunk, p.dim - i);
      float v[kChunk];
      float w[kChunk];
      LoadChunk(row + i, kChunk, true, v);
      if (p.weight != nullptr) {
        LoadChunk(p.weight + i, count, aligned, w);
        for (int j = 0; j < kChunk; ++j) v[j] = Mul(Mul(v[j], scale), w[j]);
      }
      StoreChunk(out + i, count, aligned, v);
    }
  }

  TANDEM_DEVICE static float SumByThread(Grid& g, float chain, float* sums) {
    for (int mask = 16; mask > 0; mask /= 2) {
      chain = Add(chain, g.ShuffleXor(chain, mask));
    }
    if (g.lane() == 0) sums[g.warp()] = chain;
    g.Barrier();
    float sum = sums[0];
    for (int i = 1; i < kWarps; ++i) sum = Add(sum, sums[i]);
    return sum;
  }

  // The first 16 threads own a chain each; zeros at the row's end change none.
  TANDEM_DEVICE static float SumBySixteen(Grid& g, const T* row, int padded,
                                          float* sums) {
    g.Barrier();
    if (g.warp() == 0) {
      float chain = 0.0f;
      for (int i = g.lane(); i < padded && g.lane() < 16; i += 16) {
        const float v = ToFloat(row[i]);
        chain = Fma(v, v, chain);
      }
      for (int mask = 8; mask > 0; mask /= 2) {
        chain = Add(chain, g.ShuffleXor(chain, mask));
      }
      if (g.lane() == 0) sums[0] = chain;
    }
    g.Barrier();
    return sums[0];
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_RMS_NORM_CUH_
