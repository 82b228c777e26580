// SPDX-License-Identifier: Apache-2.0
// Work on rows that do not depend on one another, split over the team where
// that pays.

#ifndef TANDEM_KERNELS_CPU_FOR_ROWS_H_
#define TANDEM_KERNELS_CPU_FOR_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/thread_pool.h"

namespace tandem::kernels::cpu {

// Below this many elements a fork costs more than it saves.
inline constexpr int64_t kForkElements = 16384;

// Rows [0, count) in even shares, on the whole team if they are big enough.
template <typename Body>
void ForRows(ThreadPool& pool, int count, int64_t elements_per_row,
             const Body& body) {
  if (pool.threads() == 1 || count * elements_per_row < kForkElements) {
    for (int row = 0; row < count; ++row) body(row);
    return;
  }
  ThreadPool::Team team(&pool);
  const int shares = std::min(team.threads() * 4, count);
  team.ForEach(shares, [&](int share, int) {
    const int end = static_cast<int>(int64_t{count} * (share + 1) / shares);
    for (int row = static_cast<int>(int64_t{count} * share / shares); row < end;
         ++row) {
      body(row);
    }
  });
}

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_FOR_ROWS_H_
