// SPDX-License-Identifier: Apache-2.0
// LayerNorm with the residual addition in front. One block of threads takes one
// row, or one head of it. Both sums, of the values and of their squared
// distances from the mean, are those of the CPU backend for every type: by
// index modulo 16, halves folded onto each other.

#ifndef TANDEM_KERNELS_CUDA_LAYER_NORM_CUH_
#define TANDEM_KERNELS_CUDA_LAYER_NORM_CUH_

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/device/vectors.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

template <typename T>
struct LayerNormKernel {
  static constexpr int kThreads = 256;
  LayerNormParams p;

  // The row in f32, then a sum.
  static int SharedBytes(int dim) {
    return (dim + 1) * static_cast<int>(sizeof(float));
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int64_t stride = p.stride == 0 ? p.dim : p.stride;
    const int head = g.block_y() * p.dim;
    const int64_t first = int64_t{g.block_x()} * stride + head;
    T* const x = static_cast<T*>(p.x) + first;
    const T* const delta =
        p.delta == nullptr ? nullptr : static_cast<const T*>(p.delta) + first;
    T* const out = static_cast<T*>(p.out) + first;
    float* const row = reinterpret_cast<float*>(g.shared());
    for (int i = g.thread(); i < p.dim; i += kThreads) {
      float v = ToFloat(x[i]);
      if (delta != nullptr) {
        v = RoundTo<T>(Add(v, ToFloat(delta[i])));
        x[i] = FromFloat<T>(v);
      }
      row[i] = v;
    }
    const float mean =
        Div(Sum(g, row, [](float v, float chain) { return Add(chain, v); }),
            static_cast<float>(p.dim));
    for (int i = g.thread(); i < p.dim; i += kThreads) {
      row[i] = Sub(row[i], mean);
    }
    const float variance =
        Div(Sum(g, row, [](float v, float chain) { return Fma(v, v, chain); }),
            static_cast<float>(p.dim));
    const float scale = Div(1.0f, Sqrt(Add(variance, p.eps)));
    for (int i = g.thread(); i < p.dim; i += kThreads) {
      const float v = Mul(Mul(row[i], scale), p.weight[head + i]);
      out[i] = FromFloat<T>(p.bias == nullptr ? v : Add(v, p.bias[i]));
    }
  }

 private:
  // 16 chains of `step` over the row, then their sum, for all threads.
  template <typename Step>
  TANDEM_DEVICE float Sum(Grid& g, float* row, const Step& step) const {
    g.Barrier();
    if (g.warp() == 0) {
      float chain = 0.0f;
      for (int i = g.lane(); i < p.dim && g.lane() < 16; i += 16) {
        chain = step(row[i], chain);
      }
      for (int mask = 8; mask > 0; mask /= 2) {
        chain = Add(chain, g.ShuffleXor(chain, mask));
      }
      if (g.lane() == 0) row[p.dim] = chain;
    }
    g.Barrier();
    return row[p.dim];
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_LAYER_NORM_CUH_
