// SPDX-License-Identifier: Apache-2.0
// Percentiles and means of latency samples.

#ifndef TANDEM_CLI_BENCH_STATISTICS_H_
#define TANDEM_CLI_BENCH_STATISTICS_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace tandem::bench {

// Linear between the two nearest ranks (NumPy's default, so vLLM's).
// `sorted` is ascending; 0 where it is empty. `percent` is 0..100.
double Percentile(const std::vector<double>& sorted, double percent);

struct Distribution {
  std::vector<double> sorted;  // the samples, ascending
  double mean = 0;
  double deviation = 0;  // standard deviation of the samples themselves

  size_t count() const { return sorted.size(); }
  double at(double percent) const { return Percentile(sorted, percent); }
  double median() const { return at(50); }
  double max() const { return sorted.empty() ? 0 : sorted.back(); }
};

Distribution Describe(std::vector<double> samples);

}  // namespace tandem::bench

#endif  // TANDEM_CLI_BENCH_STATISTICS_H_
