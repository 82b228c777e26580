// SPDX-License-Identifier: Apache-2.0
// Single operations of a backend, timed: many on the queue, then one wait.

#ifndef TANDEM_BENCH_GPU_OPERATION_RUNS_H_
#define TANDEM_BENCH_GPU_OPERATION_RUNS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "bench/gpu/arithmetic.h"
#include "kernels/backend.h"

namespace tandem::bench {

// Seconds of out = x * w^T for `tokens` rows, over one matrix after the other.
// `gated`: they are of PackGatedMatrix.
absl::StatusOr<double> TimeMatMul(kernels::Backend& backend,
                                  const std::vector<const kernels::Matrix*>& w,
                                  int tokens, bool gated);

// Seconds of attention alone, one layer: `sequences` spans of `queries` rows,
// the last of which sees `context` keys.
absl::StatusOr<double> TimeAttention(kernels::Backend& backend,
                                     const Shape& shape, int sequences,
                                     int queries, int context,
                                     kernels::DType kv);

}  // namespace tandem::bench

#endif  // TANDEM_BENCH_GPU_OPERATION_RUNS_H_
