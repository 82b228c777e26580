// SPDX-License-Identifier: Apache-2.0
// This machine's limits, measured: how fast all its cores multiply and add,
// and read a set as large as a model's weights.

#ifndef TANDEM_CLI_EXPLAIN_MACHINE_H_
#define TANDEM_CLI_EXPLAIN_MACHINE_H_

#include <cstddef>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cli/explain/roofline.h"

namespace tandem::explain {

struct MeasureMachineOptions {
  int threads = 0;            // 0: one per CPU that this process may run on
  size_t read_bytes = 0;      // cut to what is read in the time, 256 MiB
  bool integer_dots = false;  // for matrices, where the CPU has them
  absl::Duration budget = absl::Milliseconds(1200);  // beside the first touch
};

// Hears what is measured next.
using MachineProgress = absl::FunctionRef<void(std::string_view what)>;

// Tenth percentiles of many samples: on a shared machine the slower ones
// measure the neighbours. FAILED_PRECONDITION: the CPU has no FMA.
absl::StatusOr<Machine> MeasureMachine(const MeasureMachineOptions& options,
                                       MachineProgress progress);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_MACHINE_H_
