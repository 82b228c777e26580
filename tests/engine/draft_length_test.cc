// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_length.h"

#include <cmath>

#include "gtest/gtest.h"

namespace tandem::engine {
namespace {

TEST(DraftAcceptanceTest, FollowsWhatItSees) {
  DraftAcceptance acceptance;
  for (int i = 0; i < 40; ++i) acceptance.Saw(true);
  EXPECT_GT(acceptance.chance(), 0.99);
  for (int i = 0; i < 40; ++i) acceptance.Saw(false);
  EXPECT_LT(acceptance.chance(), 0.01);
}

TEST(DraftCostsTest, ExpectedTokensAreTheSumOfAGeometricSeries) {
  EXPECT_EQ(DraftCosts::Expected(0, 0.7), 1);
  EXPECT_NEAR(DraftCosts::Expected(3, 0.5), 1.875, 1e-12);
  EXPECT_NEAR(DraftCosts::Expected(9, 0.9), (1 - std::pow(0.9, 10)) / 0.1,
              1e-12);
}

// A device on which a step of `rows` takes max(1, rows / 8) milliseconds.
double Seconds(int rows) { return 1e-3 * std::max(1.0, rows / 8.0); }

void Learn(DraftCosts& costs, int sequences) {
  for (int round = 0; round < 30; ++round) {
    costs.Saw(sequences, 0, Seconds(sequences));
    for (int drafts = 1; drafts <= 64; ++drafts) {
      costs.Saw(sequences, drafts, Seconds(sequences + drafts));
    }
  }
  costs.Saw(sequences, 0, Seconds(sequences));
}

TEST(DraftCostsTest, NothingIsDraftedUntilAStepWithoutWasMeasured) {
  DraftCosts costs;
  EXPECT_EQ(costs.Length(1, 1, 0, 0.99, 8), 0);
  costs.Saw(1, 0, 1e-3);
  EXPECT_EQ(costs.Length(1, 1, 0, 0.99, 8), 8);
}

TEST(DraftCostsTest, LengthsGrowWithTheChanceAndEndWhereRowsCost) {
  DraftCosts costs;
  Learn(costs, 1);
  EXPECT_EQ(costs.Length(1, 1, 0, 0.01, 16), 0);
  const int half = costs.Length(1, 1, 0, 0.5, 16);
  const int most = costs.Length(1, 1, 0, 0.95, 16);
  EXPECT_GE(half, 3);
  EXPECT_GE(most, half);
  EXPECT_EQ(costs.Length(1, 1, 0, 0.95, 3), 3);
  // Beyond 8 rows each costs as much as all of a small step's eighth.
  EXPECT_EQ(costs.Length(1, 1, 0, 0.5, 60), costs.Length(1, 1, 0, 0.5, 16));
}

TEST(DraftCostsTest, BatchesThatKeepTheDeviceBusyDraftNothing) {
  DraftCosts costs;
  Learn(costs, 64);
  EXPECT_EQ(costs.Length(64, 64, 0, 0.5, 8), 0);
  EXPECT_EQ(costs.Length(64, 64, 0, 0.95, 8), 0);
}

TEST(DraftCostsTest, OneSlowStepIsForgotten) {
  DraftCosts costs;
  for (int i = 0; i < 5; ++i) costs.Saw(1, 0, 1e-3);
  for (int drafts = 1; drafts <= 64; ++drafts) costs.Saw(1, drafts, 1);
  EXPECT_EQ(costs.Length(1, 1, 0, 0.9, 8), 0);
  int steps = 0;
  while (costs.Length(1, 1, 0, 0.9, 8) == 0 && steps < 10'000) {
    costs.Saw(1, 0, 1e-3);
    ++steps;
  }
  EXPECT_GT(steps, 100);
  EXPECT_LT(steps, 2000);
}

TEST(DraftCostsTest, NowAndThenAStepWithoutDraftsIsMeasured) {
  DraftCosts costs;
  int plain = 0;
  for (int i = 0; i < 1000; ++i) {
    const int length = costs.Length(1, 1, 0, 0.99, 6);
    plain += length == 0 ? 1 : 0;
    costs.Saw(1, length, Seconds(1 + length));
  }
  EXPECT_GE(plain, 10);
  EXPECT_LE(plain, 20);
}

}  // namespace
}  // namespace tandem::engine
