// SPDX-License-Identifier: Apache-2.0
// What one row's attention weights are, for those who ask to see them
// (Backend::AttentionWeights). Keys are read a second time, in f32 and without
// SIMD of their own: whatever layout the cache has, and at no cost to rows
// that did not ask.

#ifndef TANDEM_KERNELS_CPU_ATTENTION_WEIGHTS_H_
#define TANDEM_KERNELS_CPU_ATTENTION_WEIGHTS_H_

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/thread_pool.h"

namespace tandem::kernels::cpu {

struct AttentionWeightsStep {
  const int32_t* block_table;
  int heads;
  AttentionOptions options;
  const float* q;  // [heads, head_dim], the row's
  const CpuKvCache* cache;
  int layer;
  AttentionLook look;
};

// Sums over heads go in ascending order, whatever the number of threads.
void RunAttentionWeights(const KernelTable& table, ThreadPool::Team& team,
                         const AttentionWeightsStep& step);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_ATTENTION_WEIGHTS_H_
