// SPDX-License-Identifier: Apache-2.0
// Splits a step's attention over threads: by tiles of queries and KV heads
// and, where those are too few to keep all threads busy, by segments of keys.

#ifndef TANDEM_KERNELS_CPU_ATTENTION_PLAN_H_
#define TANDEM_KERNELS_CPU_ATTENTION_PLAN_H_

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/kv_layout.h"
#include "kernels/cpu/thread_pool.h"

namespace tandem::kernels::cpu {

struct AttentionStep {
  Rows rows;
  int heads;
  AttentionOptions options;
  const float* q;
  int64_t q_stride;
  const CpuKvCache* cache;
  int layer;
  float* out;
};

void RunAttention(const KernelTable& table, ThreadPool::Team& team,
                  const AttentionStep& step);

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_ATTENTION_PLAN_H_
