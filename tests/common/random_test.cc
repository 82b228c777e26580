// SPDX-License-Identifier: Apache-2.0
#include "common/random.h"

#include <array>
#include <set>

#include "gtest/gtest.h"

namespace tandem {
namespace {

TEST(SeededRandomTest, MatchesThePublishedSplitMix64Sequence) {
  // First outputs of the reference implementation for seed 1234567.
  SeededRandom random(1234567);
  const std::array<uint64_t, 5> expected = {
      6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
      4593380528125082431u, 16408922859458223821u};
  for (uint64_t value : expected) EXPECT_EQ(random.Next(), value);
}

TEST(SeededRandomTest, BelowIsUniformAndInRange) {
  SeededRandom random(7);
  std::array<int, 10> counts{};
  for (int i = 0; i < 100'000; ++i) ++counts[random.Below(10)];
  double chi_square = 0;
  for (int count : counts) {
    chi_square += (count - 10'000.0) * (count - 10'000.0) / 10'000.0;
  }
  EXPECT_LT(chi_square, 27.88);  // 9 degrees of freedom, p = 0.001
}

TEST(SystemRandomTest, ValuesDiffer) {
  SystemRandom random;
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(random.Next());
  EXPECT_EQ(seen.size(), 1000u);
  for (int n : {0, 1, 7, 8, 9, 16, 32}) {
    EXPECT_EQ(random.Bytes(n).size(), static_cast<size_t>(n));
  }
}

}  // namespace
}  // namespace tandem
