// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/lengths.h"

#include <algorithm>
#include <cmath>

#include "cli/bench/variates.h"

namespace tandem::bench {

int DrawLength(const LengthDistribution& lengths, Random* random) {
  const double mean = lengths.mean_tokens;
  double drawn = mean;
  if (lengths.kind == LengthDistribution::Kind::kLogNormal) {
    // The mean of exp(mu + sigma Z) is exp(mu + sigma^2 / 2).
    const double mu = std::log(mean) - lengths.sigma * lengths.sigma / 2;
    drawn = std::round(std::exp(mu + lengths.sigma * DrawNormal(random)));
  } else if (lengths.range_ratio > 0) {
    const double low = std::floor(mean * (1 - lengths.range_ratio));
    const double high = std::ceil(mean * (1 + lengths.range_ratio));
    const auto choices = static_cast<uint64_t>(high - low) + 1;
    drawn = low + static_cast<double>(random->Below(choices));
  }
  return static_cast<int>(std::clamp<double>(drawn, 1, kMaxTokens));
}

}  // namespace tandem::bench
