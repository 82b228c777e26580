// SPDX-License-Identifier: Apache-2.0
// When requests arrive in an open loop: a renewal process whose gaps are
// gamma distributed, which has Poisson arrivals as its special case.

#ifndef TANDEM_CLI_BENCH_ARRIVALS_H_
#define TANDEM_CLI_BENCH_ARRIVALS_H_

#include <vector>

#include "common/random.h"

namespace tandem::bench {

// `count` arrivals in seconds from the start, not decreasing, at `rate` a
// second on average. `burstiness` is the shape of the gaps, in vLLM's sense:
// 1 is Poisson, less comes in bursts, more is more even. An infinite rate
// puts all of them at 0. REQUIRES: rate > 0, burstiness > 0.
std::vector<double> ArrivalTimes(int count, double rate, double burstiness,
                                 Random* random);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_ARRIVALS_H_
