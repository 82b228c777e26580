// SPDX-License-Identifier: Apache-2.0
// The CPU backend made to behave like a GPU, for tests: every operation
// finishes late (up to 2 ms, seeded), and everything that it allocates
// (buffers, matrices, KV caches) is mapped without any access except while a
// queue is running an operation. Host code that peeks at device memory, or
// that counts on an operation having run when the call returned, dies here.

#ifndef TANDEM_KERNELS_TESTING_LATE_BACKEND_H_
#define TANDEM_KERNELS_TESTING_LATE_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"

namespace tandem::kernels::testing {

struct LateOptions {
  CpuOptions cpu;  // its allocator is ignored
  uint64_t seed = 1;
  int max_delay_microseconds = 2000;
  // Address space for all device memory; touched only as far as used.
  size_t arena_bytes = size_t{1} << 30;
};

absl::StatusOr<std::unique_ptr<Backend>> NewLateBackend(
    const LateOptions& options);

}  // namespace tandem::kernels::testing

#endif  // TANDEM_KERNELS_TESTING_LATE_BACKEND_H_
