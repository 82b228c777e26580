// SPDX-License-Identifier: Apache-2.0
// Norms and rotary embedding of the heads of Q and K, and the append of K and V
// to the paged cache. A block takes one row and one head of Q, K or V; a thread
// takes pairs (i, i + half). A norm's squares are summed by index modulo 16,
// halves folded onto each other, and its results rounded to the activation
// type. Before or behind it
//
//   a' = a * cos - b * sin, b' = b * cos + a * sin
//
// every product and sum rounded on its own, the results to the activation
// type first (Q's again, times its scale) and then to the cache's, or quantised
// (kernels/quantise.h), which attention always reads.

#ifndef TANDEM_KERNELS_CUDA_ROPE_APPEND_CUH_
#define TANDEM_KERNELS_CUDA_ROPE_APPEND_CUH_

#include <type_traits>

#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

// T: activations; C: the cache's elements; kMaxPairs: a thread's, so head_dim
// is at most 128 times as much.
template <typename T, typename C, int kMaxPairs>
struct RopeAppendKernel {
  static constexpr int kThreads = 64;
  static constexpr bool kQuantised = std::is_same_v<C, Code>;
  // Largest's warps; the head and its sum.
  static constexpr int kWarpBytes = kThreads / 32 * 4;
  static constexpr int SharedBytes(bool norms) {
    return norms || kQuantised ? kWarpBytes + (2 * kMaxPairs * kThreads + 1) * 4
                               : 0;
  }
  RopeAppendParams p;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int row = g.block_x();
    const int head = g.block_y();  // Q's, then K's, then V's
    const int dim = p.kv.head_dim;
    const int half = dim / 2;
    const int kv_heads = p.kv.kv_heads;
    T* const x = Head(row, head);
    const bool rotates = head < p.heads + kv_heads;
    const bool cached = head >= p.heads;
    // A row that fills the step up.
    if (cached && p.slots[row] < 0) return;
    const int64_t angle = int64_t{p.positions[row]} * p.pairs;
    float a[kMaxPairs] = {};
    float b[kMaxPairs] = {};
    ForPairs(g, half, [&](int n, int i) {
      a[n] = ToFloat(x[i]);
      b[n] = ToFloat(x[i + half]);
    });
    const float* const weight = !rotates         ? p.value_norm
                                : head < p.heads ? p.query_norm
                                                 : p.key_norm;
    const bool norms = weight != nullptr;
    if (norms && !p.norms_rotated) Norm(g, dim, weight, a, b);
    if (rotates && p.cos != nullptr) {
      ForPairs(g, p.pairs, [&](int n, int i) {
        const float c = p.cos[angle + i];
        const float s = p.sin[angle + i];
        const float turned = Sub(Mul(a[n], c), Mul(b[n], s));
        b[n] = RoundTo<T>(Add(Mul(b[n], c), Mul(a[n], s)));
        a[n] = RoundTo<T>(turned);
      });
    }
    if (norms && p.norms_rotated) Norm(g, dim, weight, a, b);
    if (!cached) {
      ForPairs(g, half, [&](int n, int i) {
        if (p.query_scale != nullptr) {
          const float scale = p.query_scale[p.positions[row]];
          a[n] = Mul(a[n], scale);
          b[n] = Mul(b[n], scale);
        }
        x[i] = FromFloat<T>(a[n]);
        x[i + half] = FromFloat<T>(b[n]);
      });
      return;
    }
    const int block = p.slots[row] / p.kv.block_size;
    const int slot = p.slots[row] % p.kv.block_size;
    const int side = rotates ? 0 : 1;
    const int kv_head = (head - p.heads) % kv_heads;
    C* const to = reinterpret_cast<C*>(p.kv.data) +
                  p.kv.Offset(p.layer, block, side, kv_head, slot);
    if constexpr (kQuantised) {
      if (p.kv.dtype == DType::kInt4) {
        StoreInt4(
            g, a, b, reinterpret_cast<uint8_t*>(to),
            p.kv.data + p.kv.ScaleOffset(p.layer, block, side, kv_head, slot));
        return;
      }
      const VectorQuantiser quantiser(p.kv.dtype, Largest(g, a, b));
      if (g.thread() == 0) {
        *reinterpret_cast<float*>(
            p.kv.data + p.kv.ScaleOffset(p.layer, block, side, kv_head, slot)) =
            quantiser.scale;
      }
      ForPairs(g, half, [&](int n, int i) {
        to[i] = {quantiser(a[n])};
        to[i + half] = {quantiser(b[n])};
      });
    } else {
      ForPairs(g, half, [&](int n, int i) {
        to[i] = FromFloat<C>(a[n]);
        to[i + half] = FromFloat<C>(b[n]);
      });
    }
  }

 private:
  // Q's are written too.
  TANDEM_DEVICE T* Head(int row, int head) const {
    const int kv_heads = p.kv.kv_heads;
    const int dim = p.kv.head_dim;
    T* const qkv = static_cast<T*>(p.qkv);
    if (p.kv_rows == nullptr) {
      return qkv + (int64_t{row} * (p.heads + 2 * kv_heads) + head) * dim;
    }
    return head < p.heads
               ? qkv + (int64_t{row} * p.heads + head) * dim
               : static_cast<T*>(p.kv_rows) +
                     (int64_t{row} * 2 * kv_heads + head - p.heads) * dim;
  }

  // [head_dim] in shared memory.
  TANDEM_DEVICE static float* Row(Grid& g) {
    return reinterpret_cast<float*>(g.shared() + kWarpBytes) + 1;
  }

  // A thread makes a byte, of two dimensions of one group, and reads all of it.
  TANDEM_DEVICE void StoreInt4(Grid& g, const float (&a)[kMaxPairs],
                               const float (&b)[kMaxPairs], uint8_t* codes,
                               std::byte* scales) const {
    const int dim = p.kv.head_dim;
    float* const row = Row(g);
    ForPairs(g, dim / 2, [&](int n, int i) {
      row[i] = a[n];
      row[i + dim / 2] = b[n];
    });
    g.Barrier();
    ForPairs(g, dim / 2, [&](int, int i) {
      const int begin = 2 * i / kCodeGroup * kCodeGroup;
      const int end = Smaller(begin + kCodeGroup, dim);
      uint32_t most = 0;
      for (int j = begin; j < end; ++j) {
        most = Greater(most, MagnitudeKey(row[j]));
      }
      const VectorQuantiser quantiser(DType::kInt4, most);
      codes[i] = static_cast<uint8_t>(quantiser(row[2 * i]) |
                                      quantiser(row[2 * i + 1]) << 4);
      if (2 * i == begin) {
        *reinterpret_cast<uint16_t*>(scales +
                                     begin / kCodeGroup * p.kv.scale_stride()) =
            static_cast<uint16_t>(FloatToBits(quantiser.scale) >> 16);
      }
    });
  }

  template <typename Function>
  TANDEM_DEVICE void ForPairs(Grid& g, int pairs, const Function& run) const {
#pragma unroll
    for (int n = 0; n < kMaxPairs; ++n) {
      const int i = n * kThreads + g.thread();
      if (i < pairs) run(n, i);
    }
  }

  TANDEM_DEVICE void Norm(Grid& g, int dim, const float* weight,
                          float (&a)[kMaxPairs], float (&b)[kMaxPairs]) const {
    const int half = dim / 2;
    float* const sum = reinterpret_cast<float*>(g.shared() + kWarpBytes);
    float* const row = Row(g);
    ForPairs(g, half, [&](int n, int i) {
      row[i] = a[n];
      row[i + half] = b[n];
    });
    g.Barrier();
    if (g.warp() == 0) {
      float chain = 0.0f;
      for (int i = g.lane(); i < dim && g.lane() < 16; i += 16) {
        chain = Fma(row[i], row[i], chain);
      }
      for (int mask = 8; mask > 0; mask /= 2) {
        chain = Add(chain, g.ShuffleXor(chain, mask));
      }
      if (g.lane() == 0) *sum = chain;
    }
    g.Barrier();
    const float mean = Div(*sum, static_cast<float>(dim));
    const float scale = Div(1.0f, Sqrt(Add(mean, p.norm_eps)));
    ForPairs(g, half, [&](int n, int i) {
      a[n] = RoundTo<T>(Mul(Mul(a[n], scale), weight[i]));
      b[n] = RoundTo<T>(Mul(Mul(b[n], scale), weight[i + half]));
    });
  }

  // The vector's greatest key, in all threads.
  TANDEM_DEVICE uint32_t Largest(Grid& g, const float (&a)[kMaxPairs],
                                 const float (&b)[kMaxPairs]) const {
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < kMaxPairs; ++n) {
      most = Greater(most, Greater(MagnitudeKey(a[n]), MagnitudeKey(b[n])));
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      most = Greater(most, g.ShuffleXor(most, mask));
    }
    uint32_t* const warps = reinterpret_cast<uint32_t*>(g.shared());
    if (g.lane() == 0) warps[g.warp()] = most;
    g.Barrier();
    static_assert(kThreads == 64);
    return Greater(warps[0], warps[1]);
  }
  TANDEM_DEVICE static uint32_t Greater(uint32_t a, uint32_t b) {
    return a > b ? a : b;
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ROPE_APPEND_CUH_
