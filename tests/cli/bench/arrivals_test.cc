// SPDX-License-Identifier: Apache-2.0
// Against closed forms: the largest distance between the samples' and the
// exact distribution function (Kolmogorov and Smirnov) stays under what one
// in a thousand honest samplers would exceed.

#include "cli/bench/arrivals.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "cli/bench/lengths.h"
#include "cli/bench/variates.h"

namespace tandem::bench {
namespace {

constexpr int kSamples = 20000;

double KolmogorovDistance(std::vector<double> samples,
                          const std::function<double(double)>& exact) {
  std::sort(samples.begin(), samples.end());
  const auto count = static_cast<double>(samples.size());
  double distance = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const double value = exact(samples[i]);
    distance = std::max({distance, value - static_cast<double>(i) / count,
                         static_cast<double>(i + 1) / count - value});
  }
  return distance;
}

double Allowed(int samples) { return 1.95 / std::sqrt(samples); }

std::vector<double> Gaps(const std::vector<double>& times) {
  std::vector<double> gaps(times.size());
  std::adjacent_difference(times.begin(), times.end(), gaps.begin());
  return gaps;
}

TEST(ArrivalsTest, GapsFollowTheirDistribution) {
  struct Case {
    double burstiness;
    std::function<double(double)> exact;  // of gaps with mean 1
    const char* name;
  };
  const Case cases[] = {
      {1, [](double x) { return 1 - std::exp(-x); }, "exponential"},
      // The square of a standard normal.
      {0.5, [](double x) { return std::erf(std::sqrt(x / 2)); }, "chi-square"},
      // The mean of two exponentials.
      {2, [](double x) { return 1 - std::exp(-2 * x) * (1 + 2 * x); },
       "Erlang"},
  };
  for (const Case& c : cases) {
    SeededRandom random(7);
    const double rate = 12.5;
    std::vector<double> gaps =
        Gaps(ArrivalTimes(kSamples, rate, c.burstiness, &random));
    for (double& gap : gaps) gap *= rate;
    EXPECT_LT(KolmogorovDistance(gaps, c.exact), Allowed(kSamples)) << c.name;
    // The test can tell: a tenth off in the rate is seen.
    for (double& gap : gaps) gap *= 1.1;
    EXPECT_GT(KolmogorovDistance(gaps, c.exact), Allowed(kSamples)) << c.name;
  }
}

// Variance over mean of the arrivals in long windows tends to 1 / shape.
TEST(ArrivalsTest, BurstinessIsTheSpreadOfCounts) {
  for (const double burstiness : {0.25, 1.0, 4.0}) {
    SeededRandom random(3);
    const std::vector<double> times =
        ArrivalTimes(200000, 100, burstiness, &random);
    std::vector<double> counts(1000, 0.0);  // windows of 1 s, 100 arrivals
    for (const double time : times) {
      if (time < 1000) ++counts[static_cast<size_t>(time)];
    }
    double mean = 0, variance = 0;
    for (const double count : counts) mean += count / 1000;
    for (const double count : counts) {
      variance += (count - mean) * (count - mean) / 1000;
    }
    EXPECT_NEAR(mean, 100, 2) << burstiness;
    EXPECT_NEAR(variance / mean * burstiness, 1, 0.15) << burstiness;
  }
}

TEST(ArrivalsTest, TimesDoNotDecreaseAndAnInfiniteRateIsAllAtOnce) {
  SeededRandom random(1);
  const std::vector<double> times = ArrivalTimes(1000, 5, 0.1, &random);
  EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
  EXPECT_EQ(
      ArrivalTimes(3, std::numeric_limits<double>::infinity(), 1, &random),
      std::vector<double>({0, 0, 0}));
}

TEST(VariatesTest, NormalFollowsTheErrorFunction) {
  SeededRandom random(5);
  std::vector<double> samples(kSamples);
  for (double& sample : samples) sample = DrawNormal(&random);
  EXPECT_LT(
      KolmogorovDistance(
          samples, [](double x) { return (1 + std::erf(x / M_SQRT2)) / 2; }),
      Allowed(kSamples));
}

TEST(LengthsTest, UniformCoversItsRangeEvenly) {
  SeededRandom random(9);
  // 75..125, ends included.
  const LengthDistribution lengths = {.mean_tokens = 100, .range_ratio = 0.25};
  std::vector<int> seen(51, 0);
  for (int i = 0; i < 51000; ++i) {
    const int length = DrawLength(lengths, &random);
    ASSERT_GE(length, 75);
    ASSERT_LE(length, 125);
    ++seen[length - 75];
  }
  double chi_square = 0;
  for (const int count : seen)
    chi_square += (count - 1000.0) * (count - 1000.0) / 1000;
  EXPECT_LT(chi_square, 86.7);  // 50 degrees of freedom, one in a thousand
  EXPECT_GT(chi_square, 24.7);
}

TEST(LengthsTest, LogNormalHasItsMeanAndItsQuantiles) {
  SeededRandom random(11);
  const LengthDistribution lengths = {
      .kind = LengthDistribution::Kind::kLogNormal,
      .mean_tokens = 1000,
      .sigma = 0.8};
  std::vector<double> samples(kSamples);
  for (double& sample : samples) sample = DrawLength(lengths, &random);
  const double mean =
      std::accumulate(samples.begin(), samples.end(), 0.0) / kSamples;
  // Its standard deviation is 947, so that of the mean 6.7.
  EXPECT_NEAR(mean, 1000, 25);
  const double mu = std::log(1000) - 0.32;
  EXPECT_LT(KolmogorovDistance(samples,
                               [&](double x) {
                                 const double z = (std::log(x) - mu) / 0.8;
                                 return (1 + std::erf(z / M_SQRT2)) / 2;
                               }),
            Allowed(kSamples) + 0.002);  // lengths are whole numbers
}

TEST(LengthsTest, ARatioOfZeroIsAFixedLengthAndNothingIsEmpty) {
  SeededRandom random(1);
  EXPECT_EQ(DrawLength({.mean_tokens = 77}, &random), 77);
  for (int i = 0; i < 100; ++i) {
    EXPECT_GE(DrawLength({.mean_tokens = 1, .range_ratio = 1}, &random), 1);
    EXPECT_GE(DrawLength({.kind = LengthDistribution::Kind::kLogNormal,
                          .mean_tokens = 1,
                          .sigma = 5},
                         &random),
              1);
  }
}

}  // namespace
}  // namespace tandem::bench
