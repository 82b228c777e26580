// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_length.h"

#include <algorithm>
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

// Good guesses that cost more than they give: trying them again costs little.
TEST(DraftCostsTest, TryingAgainWhatDoesNotPayCostsAPercent) {
  for (const double draft_step : {0.0, 0.1}) {
    DraftCosts costs(draft_step);
    double seconds = 0;
    double tokens = 0;
    for (int i = 0; i < 20'000; ++i) {
      const int length = costs.Length(1, 1, 0, 0.9, 4);
      // Each guess costs a step.
      const double took = 1e-3 * (1 + length);
      costs.Saw(1, length, took);
      seconds += took;
      tokens += DraftCosts::Expected(length, 0.9);
    }
    EXPECT_LT(seconds, 1.015e-3 * tokens);
  }
}

// All of a batch at once.
TEST(DraftCostsTest, TheLikeliestGuessesOfABatchAreTaken) {
  DraftCosts costs(0.1);
  int lengths[] = {4, 4, 2, 4};
  const double chances[] = {0.9, 0.1, 0.9, 0.6};
  const auto all = absl::MakeSpan(lengths);
  EXPECT_FALSE(costs.Lengths(chances, 4, 64, all));  // nothing was measured
  EXPECT_EQ(lengths[1], 4);
  for (int i = 0; i < 20; ++i) costs.Saw(4, 0, 1e-3);
  EXPECT_TRUE(costs.Lengths(chances, 4, 64, all));
  EXPECT_EQ(lengths[0], 4);
  EXPECT_EQ(lengths[1], 0);
  EXPECT_EQ(lengths[2], 2);
  EXPECT_GT(lengths[3], 0);
  EXPECT_LT(lengths[3], 4);
  // No more than there is room for, and none where they cost what they give.
  std::fill(all.begin(), all.end(), 4);
  EXPECT_TRUE(costs.Lengths(chances, 4, 3, all));
  EXPECT_LE(lengths[0] + lengths[1] + lengths[2] + lengths[3], 3);
  // Where all are likely, as many as there is room for.
  const double likely[] = {0.98, 0.98, 0.98, 0.98};
  std::fill(all.begin(), all.end(), 4);
  EXPECT_TRUE(costs.Lengths(likely, 4, 10, all));
  EXPECT_EQ(lengths[0] + lengths[1] + lengths[2] + lengths[3], 10);
  for (int drafts = 1; drafts <= 16; ++drafts) {
    costs.Saw(4, drafts, 1e-3 * (4 + drafts));
  }
  std::fill(all.begin(), all.end(), 4);
  EXPECT_TRUE(costs.Lengths(chances, 4, 64, all));
  for (const int length : lengths) EXPECT_EQ(length, 0);
  // Neither where none is ever right, nor where all are.
  const double sure[] = {1.0, 0.0, 1.0, 1.0};
  std::fill(all.begin(), all.end(), 4);
  EXPECT_TRUE(costs.Lengths(sure, 4, 64, all));
  EXPECT_EQ(lengths[1], 0);
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
