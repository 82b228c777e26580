// SPDX-License-Identifier: Apache-2.0
// Random variates, written out so that one seed gives one workload with every
// compiler and standard library.

#ifndef TANDEM_CLI_BENCH_VARIATES_H_
#define TANDEM_CLI_BENCH_VARIATES_H_

#include "common/random.h"

namespace tandem::bench {

// Standard normal (Box and Muller; the second of the pair is not kept).
double DrawNormal(Random* random);

// Gamma with this shape and mean 1 (Marsaglia and Tsang). Shape 1 is the
// exponential distribution. REQUIRES: shape > 0.
double DrawGammaOfMeanOne(double shape, Random* random);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_VARIATES_H_
