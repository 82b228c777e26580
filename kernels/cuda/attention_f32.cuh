// SPDX-License-Identifier: Apache-2.0
// Attention of f32 models, with the arithmetic of the CPU backend
// (kernels/cpu/attention.cc) to the bit: per segment a score is one chain
// times the scale, weights are Exp(score - maximum), their sum is taken by
// position modulo 16 and folded in halves, values are one chain over
// positions; segments are merged in ascending order. For tests and small
// models: a block of threads has one head of one row.
//
// Grid: rows x heads.

#ifndef TANDEM_KERNELS_CUDA_ATTENTION_F32_CUH_
#define TANDEM_KERNELS_CUDA_ATTENTION_F32_CUH_

#include <type_traits>

#include "kernels/cuda/attention.cuh"
#include "kernels/cuda/device/codes.h"

namespace tandem::kernels::cuda {

// KV: float, BFloat16, Half or Code, what the cache holds.
template <typename KV>
struct AttentionF32Kernel {
  static constexpr int kThreads = 128;
  static constexpr int kPerThread = (kMaxHeadDim + kThreads - 1) / kThreads;
  static constexpr int kSharedBytes =
      (kMaxHeadDim + kSegmentKeys + kThreads) * 4;

  AttentionKernelParams p;
  int num_spans;

  TANDEM_DEVICE KvVector<const KV> At(const void* side, const void* scales,
                                      const int32_t* table, int kv_head,
                                      int key) const {
    const int block = key / p.block_size;
    const int slot = key - block * p.block_size;
    const int64_t begin = table[block] * p.block_stride;
    return {static_cast<const KV*>(side) + begin + kv_head * p.head_stride +
                int64_t{slot} * p.slot_stride,
            static_cast<const std::byte*>(scales) + begin +
                kv_head * p.head_scales + int64_t{slot} * KvScaleBytes(p.kv),
            p.scale_stride, p.kv};
  }

  TANDEM_DEVICE void operator()(Grid& g) const {
    const int row = g.block_x();
    const int head = g.block_y();
    const int kv_head = head / p.group;
    // Spans ascend by row; rows behind the last one are padding.
    int s = 0;
    while (s < num_spans && row >= p.spans[s].first_row + p.spans[s].num_rows) {
      ++s;
    }
    if (s == num_spans || row < p.spans[s].first_row) return;
    const int position = p.spans[s].first_position + row - p.spans[s].first_row;
    const int32_t* const table = p.block_tables + p.spans[s].block_table;
    const KeyRange range(position, position, p.window);

    float* const q = reinterpret_cast<float*>(g.shared());
    float* const weights = q + kMaxHeadDim;
    float* const lanes = weights + kSegmentKeys;
    for (int i = g.thread(); i < p.head_dim; i += kThreads) {
      q[i] = static_cast<const float*>(
          p.q)[row * p.q_stride + head * p.head_dim + i];
    }
    float merged_maximum = 0;
    float merged_sum = 0;
    float merged[kPerThread] = {};
    for (int segment = range.first_segment; segment < range.end_segment;
         ++segment) {
      const int begin = Larger(segment * kSegmentKeys, range.begin);
      const int end = Smaller((segment + 1) * kSegmentKeys, range.end);
      g.Barrier();
      float most = -kInfinity;
      for (int key = begin + g.thread(); key < end; key += kThreads) {
        const auto k = At(p.k, p.k_scales, table, kv_head, key);
        float chain = 0;
        for (int i = 0; i < p.head_dim; ++i) {
          chain = Fma(q[i], k[i], chain);
        }
        float score = Mul(chain, p.scale);
        if (p.soft_cap > 0) score = SoftCap(score, p.soft_cap);
        weights[key - begin] = score;
        most = Max(most, score);
      }
      lanes[g.thread()] = most;
      g.Barrier();
      for (int i = 0; i < kThreads; ++i) most = Max(most, lanes[i]);
      for (int key = begin + g.thread(); key < end; key += kThreads) {
        weights[key - begin] = Exp(Sub(weights[key - begin], most));
      }
      g.Barrier();
      if (g.thread() < 16) {
        float sum = 0;
        for (int key = begin / 16 * 16 + g.thread(); key < end; key += 16) {
          if (key >= begin) sum = Add(sum, weights[key - begin]);
        }
        lanes[g.thread()] = sum;
      }
      g.Barrier();
      float fold[16];
      for (int i = 0; i < 16; ++i) fold[i] = lanes[i];
      for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) fold[i] = Add(fold[i], fold[i + width]);
      }
      const float sum = fold[0];
      float before = 0;
      float after = 1;
      if (segment == range.first_segment) {
        merged_maximum = most;
        merged_sum = sum;
      } else {
        const float maximum = Max(merged_maximum, most);
        before = Exp(Sub(merged_maximum, maximum));
        after = Exp(Sub(most, maximum));
        merged_sum = Add(Mul(merged_sum, before), Mul(sum, after));
        merged_maximum = maximum;
      }
      for (int n = 0; n < kPerThread; ++n) {
        const int i = n * kThreads + g.thread();
        if (i >= p.head_dim) break;
        float value = 0;
        for (int key = begin; key < end; ++key) {
          value = Fma(weights[key - begin],
                      At(p.v, p.v_scales, table, kv_head, key)[i], value);
        }
        merged[n] = segment == range.first_segment
                        ? value
                        : Fma(value, after, Mul(merged[n], before));
      }
    }
    float factor = Div(1.0f, merged_sum);
    if (p.sinks != nullptr) {
      const float maximum = Max(merged_maximum, p.sinks[head]);
      const float weight = Exp(Sub(merged_maximum, maximum));
      factor = Div(weight, Add(Mul(merged_sum, weight),
                               Exp(Sub(p.sinks[head], maximum))));
    }
    float* const out =
        static_cast<float*>(p.out) + row * p.out_stride + head * p.head_dim;
    for (int n = 0; n < kPerThread; ++n) {
      const int i = n * kThreads + g.thread();
      if (i < p.head_dim) out[i] = Mul(merged[n], factor);
    }
  }
};

}  // namespace tandem::kernels::cuda

#endif  // TANDEM_KERNELS_CUDA_ATTENTION_F32_CUH_
