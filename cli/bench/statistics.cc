// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/statistics.h"

#include <algorithm>
#include <cmath>

namespace tandem::bench {

double Percentile(const std::vector<double>& sorted, double percent) {
  if (sorted.empty()) return 0;
  const double rank = percent / 100 * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(rank);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  const double share = rank - static_cast<double>(below);
  return sorted[below] + share * (sorted[above] - sorted[below]);
}

Distribution Describe(std::vector<double> samples) {
  Distribution result;
  result.sorted = std::move(samples);
  if (result.sorted.empty()) return result;
  std::sort(result.sorted.begin(), result.sorted.end());
  const auto count = static_cast<double>(result.sorted.size());
  for (const double sample : result.sorted) result.mean += sample / count;
  double squares = 0;
  for (const double sample : result.sorted) {
    squares += (sample - result.mean) * (sample - result.mean);
  }
  result.deviation = std::sqrt(squares / count);
  return result;
}

}  // namespace tandem::bench
