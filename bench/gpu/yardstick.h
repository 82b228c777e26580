// SPDX-License-Identifier: Apache-2.0
// The machine's limits, measured in the same run as what is compared with
// them: a copy within device memory, and the vendor's matrix products. On a
// GPU through the CUDA runtime and libcublasLt (yardstick_cuda.cc); a stand-in
// (yardstick_host.cc) where the program itself is tested.

#ifndef TANDEM_BENCH_GPU_YARDSTICK_H_
#define TANDEM_BENCH_GPU_YARDSTICK_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem::bench {

class Yardstick {
 public:
  virtual ~Yardstick() = default;
  // Of the machine and its software, for the table: {"driver", "580.1"}.
  virtual std::vector<std::pair<std::string, std::string>> Facts() = 0;
  // Bytes read and written per second by a copy of gigabytes.
  virtual absl::StatusOr<double> CopyBandwidth() = 0;
  // Seconds of out [tokens, rows] = x * w^T in bf16 by the fastest of the
  // algorithms that the vendor's library proposes, whatever its order of
  // sums. Weights come from memory, not from a cache.
  virtual absl::StatusOr<double> BestMatMul(int tokens, int rows, int cols) = 0;
};

std::unique_ptr<Yardstick> NewHostYardstick();
// Null where the program was built without CUDA.
std::unique_ptr<Yardstick> NewCudaYardstick();

}  // namespace tandem::bench

#endif  // TANDEM_BENCH_GPU_YARDSTICK_H_
