// SPDX-License-Identifier: Apache-2.0
#include "engine/drafter.h"

#include <algorithm>

#include "common/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::engine {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::vector<int32_t> Proposed(NgramDrafter& drafter,
                              const std::vector<int32_t>& history, int most) {
  std::vector<int32_t> out(static_cast<size_t>(most), -1);
  out.resize(
      static_cast<size_t>(drafter.Propose(history, absl::MakeSpan(out))));
  return out;
}

std::vector<int32_t> Proposed(int min, int max,
                              const std::vector<int32_t>& history, int most) {
  NgramDrafter drafter(min, max);
  return Proposed(drafter, history, most);
}

TEST(NgramDrafterTest, ProposesWhatFollowedTheSuffix) {
  EXPECT_THAT(Proposed(2, 3, {1, 2, 3, 4, 5, 9, 2, 3}, 2), ElementsAre(4, 5));
  EXPECT_THAT(Proposed(2, 3, {1, 2, 3, 4, 5, 9, 8, 3}, 2), IsEmpty());
  EXPECT_THAT(Proposed(1, 3, {1, 2, 3, 4, 5, 9, 8, 3}, 2), ElementsAre(4, 5));
  EXPECT_THAT(Proposed(3, 3, {1, 2, 3, 4, 5, 9, 2, 3}, 2), IsEmpty());
  EXPECT_THAT(Proposed(2, 2, {1}, 2), IsEmpty());
  EXPECT_THAT(Proposed(2, 2, {1, 1, 1}, 0), IsEmpty());
}

TEST(NgramDrafterTest, TheLongestSuffixCountsAndThenTheLatest) {
  // 2 3 stood before 4 with a 1 before it, and later before 5 without.
  const std::vector<int32_t> history = {1, 2, 3, 4, 7, 2, 3, 5, 0, 1, 2, 3};
  EXPECT_THAT(Proposed(1, 3, history, 1), ElementsAre(4));
  EXPECT_THAT(Proposed(1, 2, history, 1), ElementsAre(5));
}

TEST(NgramDrafterTest, APeriodGoesOnBeyondTheHistory) {
  EXPECT_THAT(Proposed(2, 4, {7, 1, 2, 1, 2}, 5), ElementsAre(1, 2, 1, 2, 1));
  EXPECT_THAT(Proposed(1, 4, {7, 7}, 3), ElementsAre(7, 7, 7));
}

// Of the longest match; of the latest one.
std::vector<int32_t> Searched(int min, int max,
                              const std::vector<int32_t>& history, int most) {
  const size_t length = history.size();
  size_t best = 0, place = 0;
  for (size_t end = 1; end < length; ++end) {
    size_t matched = 0;
    while (matched < std::min<size_t>(end, static_cast<size_t>(max)) &&
           history[end - 1 - matched] == history[length - 1 - matched]) {
      ++matched;
    }
    if (matched >= static_cast<size_t>(min) && matched >= best) {
      best = matched;
      place = end;
    }
  }
  std::vector<int32_t> all = history;
  for (int i = 0; best > 0 && i < most; ++i) {
    all.push_back(all[place + static_cast<size_t>(i)]);
  }
  return {all.begin() + static_cast<std::ptrdiff_t>(length), all.end()};
}

// Where the history's last `count` tokens stood before.
std::ptrdiff_t Places(int count, const std::vector<int32_t>& history) {
  std::ptrdiff_t places = 0;
  const auto suffix =
      history.end() - std::min<std::ptrdiff_t>(count, std::ssize(history));
  for (auto at = history.begin(); at != suffix; ++at) {
    places += std::equal(suffix, history.end(), at) ? 1 : 0;
  }
  return places;
}

TEST(NgramDrafterTest, TheIndexFindsWhatASearchFinds) {
  SeededRandom random(1);
  int found = 0;
  for (int round = 0; round < 10; ++round) {
    const int min = 2 + static_cast<int>(random.Below(3));
    const int max = min + static_cast<int>(random.Below(3));
    const uint64_t ids = 12 + random.Below(20);
    NgramDrafter drafter(min, max);
    std::vector<int32_t> history;
    while (history.size() < 1500) {
      // Parts of what was, and news; several tokens at a time, as they come.
      size_t from = history.empty() ? 0 : random.Below(history.size());
      for (uint64_t i = random.Below(12); i > 0; --i) {
        history.push_back(from < history.size() && random.Below(8) != 0
                              ? history[from++]
                              : static_cast<int32_t>(random.Below(ids)));
      }
      if (history.empty()) continue;
      const auto expected = Searched(min, max, history, 4);
      const auto got = Proposed(drafter, history, 4);
      // Of many places the latest are looked at: there is a match all the same.
      ASSERT_EQ(got.empty(), expected.empty());
      if (Places(min, history) > 32) continue;
      ASSERT_EQ(got, expected) << history.size();
      found += got.empty() ? 0 : 1;
    }
  }
  EXPECT_GT(found, 1000);
}

}  // namespace
}  // namespace tandem::engine
