// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "common/available_cpus.h"
#include "common/cpu_limits.h"
#include "kernels/cpu/allocator.h"
#include "kernels/cpu/thread_pool.h"

namespace tandem::explain {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::cpu::ThreadPool;

constexpr int64_t kRounds = 20000;               // a fraction of a millisecond
constexpr size_t kSample = size_t{2} << 20;      // bytes of each thread
constexpr size_t kMostRead = size_t{256} << 20;  // beyond any cache's size

double SecondsOf(ThreadPool& pool, absl::FunctionRef<void(int)> body) {
  ThreadPool::Team team(&pool);
  const Clock::time_point begin = Clock::now();
  team.Run(body);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The tenth percentile of samples that take as long as `budget` together.
double Quick(absl::Duration budget, absl::FunctionRef<double()> sample) {
  std::vector<double> seconds;
  double sum = 0;
  while (seconds.size() < 3 || sum < absl::ToDoubleSeconds(budget)) {
    seconds.push_back(sample());
    sum += seconds.back();
  }
  const auto at =
      seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 10);
  std::nth_element(seconds.begin(), at, seconds.end());
  return *at;
}

}  // namespace

absl::StatusOr<Machine> MeasureMachine(const MeasureMachineOptions& options,
                                       MachineProgress progress) {
  if (!CpuHasFma()) {
    return absl::FailedPreconditionError(
        "this CPU has no AVX2 and FMA: its limits cannot be measured");
  }
  const int threads = options.threads > 0 ? options.threads : AvailableCpus();
  ThreadPool pool(threads, std::chrono::microseconds(50));
  Machine machine{.threads = threads};

  progress("multiply-adds");
  const bool wide = CpuHasWideFma();
  const double fma_operations = RunFma(wide, kRounds) * threads;
  machine.flops_per_second =
      fma_operations / Quick(options.budget / 4, [&] {
        return SecondsOf(pool, [&](int) { RunFma(wide, kRounds); });
      });
  machine.matrix_flops_per_second = machine.flops_per_second;
  if (options.integer_dots) {
    progress("integer dot products");
    const IntegerDots how = FastestIntegerDots();
    machine.matrix_flops_per_second =
        RunIntegerDots(how, kRounds) * threads / Quick(options.budget / 4, [&] {
          return SecondsOf(pool, [&](int) { RunIntegerDots(how, kRounds); });
        });
  }

  progress("reads of memory");
  const size_t step = kSample * static_cast<size_t>(threads);
  const size_t bytes =
      std::max(std::min(options.read_bytes, kMostRead), step) / step * step;
  const auto memory =
      kernels::cpu::DeviceMemory::Make(kernels::cpu::HostMemory(), bytes);
  if (!memory.ok()) return memory.status();
  // Pages that were never written are all the same zeros.
  SecondsOf(pool, [&](int member) {
    const size_t share = bytes / static_cast<size_t>(threads);
    std::memset(memory->data() + share * static_cast<size_t>(member), 1, share);
  });
  size_t at = 0;
  const auto read = [&] {
    const double seconds = SecondsOf(pool, [&](int member) {
      ReadMemory(memory->data() + at + kSample * static_cast<size_t>(member),
                 kSample);
    });
    at = (at + step) % bytes;
    return seconds;
  };
  machine.bytes_per_second =
      static_cast<double>(step) / Quick(options.budget / 2, read);
  machine.read_bytes = static_cast<double>(bytes);
  return machine;
}

}  // namespace tandem::explain
