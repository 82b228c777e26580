// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/arrivals.h"

#include <cmath>

#include "cli/bench/variates.h"

namespace tandem::bench {

std::vector<double> ArrivalTimes(int count, double rate, double burstiness,
                                 Random* random) {
  std::vector<double> times(count, 0.0);
  if (std::isinf(rate)) return times;
  double now = 0;
  for (double& time : times) {
    now += DrawGammaOfMeanOne(burstiness, random) / rate;
    time = now;
  }
  return times;
}

}  // namespace tandem::bench
