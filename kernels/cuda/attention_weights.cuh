// SPDX-License-Identifier: Apache-2.0
// One row's attention weights, for those who ask to see them: its keys are
// read again, first for each head's softmax, then for the sum over heads. Sums
// have one order: over keys by their distance from the first modulo the
// threads of a block, over heads ascending.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_WEIGHTS_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_WEIGHTS_CUH_

#include <type_traits>

#include "kernels/cuda/device/codes.h"
#include "kernels/cuda/device/grid.h"
#include "kernels/cuda/device/tensor_ops.h"
#include "kernels/cuda/launch.h"

namespace tandem::kernels::cuda {

inline constexpr int kWeightsThreads = 128;

// T of activations; KV: what the cache holds, T or Code, or any with f32.
template <typename T, typename KV>
struct WeightsReader {
  AttentionWeightsParams p;

  TANDEM_DEVICE int first_key() const {
    return p.window > 0 && p.position + 1 > p.window ? p.position + 1 - p.window
                                                     : 0;
  }

  // Of `key` and the row's query of `head`.
  TANDEM_DEVICE float Score(int head, int key) const {
    const KvView& kv = p.kv;
    const int kv_head = head / (p.heads / kv.kv_heads);
    const int block = p.block_table[key / kv.block_size];
    const int slot = key % kv.block_size;
    const KvVector<const KV> k{
        reinterpret_cast<const KV*>(kv.data) +
            kv.Offset(p.layer, block, 0, kv_head, slot),
        kv.data + kv.ScaleOffset(p.layer, block, 0, kv_head, slot),
        kv.scale_stride(), kv.dtype};
    const T* const q = static_cast<const T*>(p.q) + int64_t{head} * kv.head_dim;
    float chain = 0;
    for (int i = 0; i < kv.head_dim; ++i) {
      const float key_element =
          std::is_same_v<KV, Code> ? RoundTo<T>(k[i]) : k[i];
      chain = Fma(ToFloat(q[i]), key_element, chain);
    }
    const float score = Mul(chain, p.scale);
    return p.soft_cap > 0 ? SoftCap(score, p.soft_cap) : score;
  }
};

// Grid: heads. states [heads][2] = the maximum of all scores, and the sum of
// Exp(score - maximum), a sink's among them.
template <typename T, typename KV>
struct WeightsStatesKernel {
  static constexpr int kThreads = kWeightsThreads;
  static constexpr int kSharedBytes = 2 * kThreads * 4;
  WeightsReader<T, KV> reader;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const AttentionWeightsParams& p = reader.p;
    const int head = g.block_x();
    float* const maxima = reinterpret_cast<float*>(g.shared());
    float* const sums = maxima + kThreads;
    float maximum = -kInfinity;
    float sum = 0;
    for (int key = reader.first_key() + g.thread(); key <= p.position;
         key += kThreads) {
      const float score = reader.Score(head, key);
      const float most = Max(maximum, score);
      sum = Add(Mul(sum, Exp(Sub(maximum, most))), Exp(Sub(score, most)));
      maximum = most;
    }
    maxima[g.thread()] = maximum;
    sums[g.thread()] = sum;
    g.Barrier();
    if (g.thread() != 0) return;
    float most = maxima[0];
    for (int i = 1; i < kThreads; ++i) most = Max(most, maxima[i]);
    float total = 0;
    for (int i = 0; i < kThreads; ++i) {
      total = Add(total, Mul(sums[i], Exp(Sub(maxima[i], most))));
    }
    if (p.sinks != nullptr) {
      const float all = Max(most, p.sinks[head]);
      total =
          Add(Mul(total, Exp(Sub(most, all))), Exp(Sub(p.sinks[head], all)));
      most = all;
    }
    p.states[2 * head] = most;
    p.states[2 * head + 1] = total;
  }
};

// Grid: pieces of kThreads keys, a key for each thread.
template <typename T, typename KV>
struct WeightsSumKernel {
  static constexpr int kThreads = kWeightsThreads;
  WeightsReader<T, KV> reader;

  TANDEM_DEVICE void operator()(Grid& g) const {
    const AttentionWeightsParams& p = reader.p;
    const int key = g.block_x() * kThreads + g.thread();
    if (key > p.position) return;
    float sum = 0;
    for (int head = 0; head < p.heads && key >= reader.first_key(); ++head) {
      const float weight =
          Exp(Sub(reader.Score(head, key), p.states[2 * head]));
      sum = Add(sum, Div(weight, p.states[2 * head + 1]));
    }
    const float weight = Mul(sum, p.factor);
    p.out[key] = p.add ? Add(p.out[key], weight) : weight;
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_WEIGHTS_CUH_
