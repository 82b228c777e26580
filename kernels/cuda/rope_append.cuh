// SPDX-License-Identifier: Apache-2.0
// Rotary embedding and the append of K and V to the paged cache. A block takes
// one row and one head of Q, K or V; a thread takes pairs (i, i + half):
//
//   a' = a * cos - b * sin, b' = b * cos + a * sin
//
// every product and sum rounded on its own, the results to the activation
// type first and then to the cache's, which attention always reads.

#ifndef TANDEM_KERNELS_CUDA_ROPE_APPEND_CUH_
#define TANDEM_KERNELS_CUDA_ROPE_APPEND_CUH_

#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

// T: activations; C: the cache's elements.
template <typename T, typename C>
struct RopeAppendKernel {
  static constexpr int kThreads = 64;
  RopeAppendParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int row = g.block_x();
    const int head = g.block_y();  // Q's, then K's, then V's
    const int dim = p.kv.head_dim;
    const int half = dim / 2;
    const int kv_heads = p.kv.kv_heads;
    T* const x = static_cast<T*>(p.qkv) +
                 (int64_t{row} * (p.heads + 2 * kv_heads) + head) * dim;
    const bool rotates = head < p.heads + kv_heads;
    C* cached = nullptr;
    if (head >= p.heads) {
      const int slot = p.slots[row];
      cached = reinterpret_cast<C*>(p.kv.data) +
               p.kv.Offset(p.layer, slot / p.kv.block_size, rotates ? 0 : 1,
                           (head - p.heads) % kv_heads, slot % p.kv.block_size);
    }
    const int64_t angle = int64_t{p.positions[row]} * half;
    for (int i = g.thread(); i < half; i += kThreads) {
      float a = ToFloat(x[i]);
      float b = ToFloat(x[i + half]);
      if (rotates) {
        const float c = p.cos[angle + i];
        const float s = p.sin[angle + i];
        const float turned = Sub(Mul(a, c), Mul(b, s));
        b = RoundTo<T>(Add(Mul(b, c), Mul(a, s)));
        a = RoundTo<T>(turned);
      }
      if (cached == nullptr) {
        x[i] = FromFloat<T>(a);
        x[i + half] = FromFloat<T>(b);
      } else {
        cached[i] = FromFloat<C>(a);
        cached[i + half] = FromFloat<C>(b);
      }
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ROPE_APPEND_CUH_
