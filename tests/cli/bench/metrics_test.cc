// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/bench/statistics.h"
#include "tests/cli/bench/records.h"

namespace tandem::bench {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;

// numpy.percentile([15, 20, 35, 40, 50], q) and of [1, 2, 3, 4].
TEST(PercentileTest, InterpolatesAsNumPyDoes) {
  const std::vector<double> five = {15, 20, 35, 40, 50};
  const std::vector<double> four = {1, 2, 3, 4};
  struct Case {
    const std::vector<double>& samples;
    double percent, value;
  };
  const Case cases[] = {{five, 0, 15},   {five, 5, 16},   {five, 30, 23},
                        {five, 40, 29},  {five, 50, 35},  {five, 100, 50},
                        {four, 50, 2.5}, {four, 90, 3.7}, {four, 99, 3.97}};
  for (const Case& c : cases) {
    EXPECT_NEAR(Percentile(c.samples, c.percent), c.value, 1e-12) << c.percent;
  }
  EXPECT_EQ(Percentile({}, 99), 0);
  EXPECT_EQ(Percentile({7}, 99), 7);
}

TEST(PercentileTest, OfAnEvenGridIsTheGrid) {
  std::vector<double> grid(1001);
  for (size_t i = 0; i < grid.size(); ++i) grid[i] = static_cast<double>(i);
  for (const double percent : {0.1, 25.0, 90.0, 99.0, 99.9}) {
    EXPECT_NEAR(Percentile(grid, percent), 10 * percent, 1e-9);
  }
}

TEST(DescribeTest, MeanAndDeviationOfSamplesInAnyOrder) {
  const Distribution d = Describe({9, 2, 5, 4, 4, 7, 5, 4});
  EXPECT_DOUBLE_EQ(d.mean, 5);
  EXPECT_DOUBLE_EQ(d.deviation, 2);
  EXPECT_DOUBLE_EQ(d.median(), 4.5);
  EXPECT_EQ(d.max(), 9);
  EXPECT_EQ(Describe({}).count(), 0u);
}

TEST(SamplesTest, CountFromTheScheduledArrival) {
  // Sent 2 s late, and that is part of what the user felt.
  RequestRecord record = Completed(1, 3, {3.5, 3.6, 3.9});
  record.ended_s = 4;
  EXPECT_THAT(Samples(record, Metric::kTtft),
              ElementsAre(DoubleNear(2500, 1e-6)));
  EXPECT_THAT(Samples(record, Metric::kTpot),
              ElementsAre(DoubleNear(200, 1e-6)));
  EXPECT_THAT(Samples(record, Metric::kItl),
              ElementsAre(DoubleNear(100, 1e-6), DoubleNear(300, 1e-6)));
  EXPECT_THAT(Samples(record, Metric::kE2el),
              ElementsAre(DoubleNear(3000, 1e-6)));
}

TEST(SamplesTest, SeveralTokensInAMessageAreOneGapAndSeveralTokens) {
  RequestRecord record = Completed(0, 0, {1, 2});
  record.arrivals[1].tokens = 4;
  record.output_tokens = 5;
  EXPECT_THAT(Samples(record, Metric::kItl), ElementsAre(1000));
  EXPECT_THAT(Samples(record, Metric::kTpot), ElementsAre(250));
}

TEST(SamplesTest, OneTokenHasNoTimePerFurtherToken) {
  const RequestRecord record = Completed(0, 0, {1});
  EXPECT_TRUE(Samples(record, Metric::kTpot).empty());
  EXPECT_TRUE(Samples(record, Metric::kItl).empty());
}

TEST(GoodputTest, AllLimitsHoldOrTheRequestIsNotGood) {
  // TTFT 500 ms, TPOT 100 ms, end to end 700 ms.
  const RequestRecord record = Completed(1, 1, {1.5, 1.6, 1.7});
  struct Case {
    std::vector<std::string> limits;
    bool good;
  };
  const Case cases[] = {
      {{}, true},
      {{"ttft:501", "tpot:101", "e2el:701"}, true},
      {{"ttft:499"}, false},
      {{"ttft:501", "tpot:99"}, false},
      {{"ttft:501", "tpot:101", "e2el:699"}, false},
  };
  for (const Case& c : cases) {
    const auto objectives = ParseObjectives(c.limits);
    ASSERT_TRUE(objectives.ok()) << objectives.status();
    EXPECT_EQ(Good(record, *objectives), c.good);
  }
  EXPECT_FALSE(Good(Failed(0, 1, absl::UnavailableError("gone")), {}));
  // What has no sample breaks no limit.
  EXPECT_TRUE(Good(Completed(0, 0, {0.1}), *ParseObjectives({"tpot:0.001"})));
}

TEST(ParseTest, RefusesWhatIsNoLimitMetricOrPercentile) {
  for (const char* const bad : {"ttft", "ttft:", "ttft:-1", "ttft:0", "itl:5",
                                "speed:5", "ttft:5ms", ":5", "ttft:nan", ""}) {
    EXPECT_FALSE(ParseObjectives({bad}).ok()) << bad;
  }
  for (const char* const bad : {"0", "100", "-1", "p99", "", "nan"}) {
    EXPECT_FALSE(ParsePercentiles({bad}).ok()) << bad;
  }
  EXPECT_FALSE(ParseMetrics({"ttft", "ttfb"}).ok());
  EXPECT_EQ(*ParsePercentiles({"99.9", "50", "99.9"}),
            std::vector<double>({50, 99.9}));
  EXPECT_EQ(*ParseMetrics({"itl", "ttft", "itl"}),
            std::vector<Metric>({Metric::kItl, Metric::kTtft}));
}

}  // namespace
}  // namespace tandem::bench
