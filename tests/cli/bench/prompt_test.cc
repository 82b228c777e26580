// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/prompt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "common/random.h"

namespace tandem::bench {
namespace {

const Vocabulary& SomeVocabulary() {
  static const Vocabulary vocabulary(1000, {2});
  return vocabulary;
}

TEST(VocabularyTest, DrawsEveryIdButTheOnesLeftOutEvenly) {
  // Unsorted, twice, and beyond the vocabulary.
  const Vocabulary vocabulary(10, {7, 0, 7, 12});
  SeededRandom random(1);
  std::vector<int> seen(10, 0);
  for (int i = 0; i < 80000; ++i) ++seen[vocabulary.Pick(random.Next())];
  for (const uint32_t id : {1, 2, 3, 4, 5, 6, 8, 9}) {
    EXPECT_NEAR(seen[id], 10000, 4 * std::sqrt(10000)) << id;
  }
  EXPECT_EQ(seen[0], 0);
  EXPECT_EQ(seen[7], 0);
  EXPECT_EQ(vocabulary.Pick(0), 1u);
  EXPECT_EQ(vocabulary.Pick(UINT64_MAX), 9u);
}

TEST(PromptTest, EqualRunsGiveEqualTokensAndOthersDoNot) {
  const std::vector<uint32_t> first = PromptIds(
      {{PrefixStream(0), 40}, {OwnStream(1), 20}}, 5, SomeVocabulary());
  const std::vector<uint32_t> second = PromptIds(
      {{PrefixStream(0), 40}, {OwnStream(2), 20}}, 5, SomeVocabulary());
  ASSERT_EQ(first.size(), 60u);
  const auto differs =
      std::mismatch(first.begin(), first.end(), second.begin()).first;
  EXPECT_GE(differs - first.begin(), 40);
  EXPECT_LT(differs - first.begin(), 43) << "tails of their own";
  EXPECT_NE(PromptIds({{OwnStream(1), 20}}, 6, SomeVocabulary()),
            PromptIds({{OwnStream(1), 20}}, 5, SomeVocabulary()))
      << "another seed";
  // A shorter run is the beginning of a longer one.
  const std::vector<uint32_t> shorter =
      PromptIds({{PrefixStream(0), 30}}, 5, SomeVocabulary());
  EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), first.begin()));
}

TEST(PromptTest, StreamsOfNeighboursHaveNothingInCommon) {
  std::set<std::vector<uint32_t>> beginnings;
  for (uint64_t i = 0; i < 1000; ++i) {
    for (const uint64_t stream : {i, OwnStream(i), PrefixStream(i)}) {
      beginnings.insert(PromptIds({{stream, 8}}, 0, SomeVocabulary()));
    }
  }
  EXPECT_EQ(beginnings.size(), 3000u);
}

TEST(PromptTest, TruncationDropsFromTheEnd) {
  struct Case {
    int tokens;
    std::vector<PromptRun> left;
  };
  const Case cases[] = {
      {9, {{1, 5}, {2, 3}}}, {8, {{1, 5}, {2, 3}}}, {6, {{1, 5}, {2, 1}}},
      {5, {{1, 5}}},         {2, {{1, 2}}},         {0, {}},
  };
  for (const Case& c : cases) {
    std::vector<PromptRun> runs = {{1, 5}, {2, 3}};
    TruncatePrompt(&runs, c.tokens);
    EXPECT_EQ(runs, c.left) << c.tokens;
    EXPECT_EQ(PromptTokens(runs), std::min(c.tokens, 8));
  }
}

}  // namespace
}  // namespace tandem::bench
