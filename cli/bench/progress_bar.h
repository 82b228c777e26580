// SPDX-License-Identifier: Apache-2.0
// The line that a person watches while a run goes on.

#ifndef TANDEM_CLI_BENCH_PROGRESS_BAR_H_
#define TANDEM_CLI_BENCH_PROGRESS_BAR_H_

#include <string>

#include "cli/bench/runner.h"

namespace tandem::bench {

// "[#####.....]  50 % 100/200, 16 running, 1 failed, 812 tok/s, 10 s, 10 s
// left", at most `columns` wide: the bar gives way first, then the end is cut.
// `last_arrival_s`: nothing can be over before the plan's last arrival.
std::string ProgressLine(const RunProgress& progress, double last_arrival_s,
                         int columns);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_PROGRESS_BAR_H_
