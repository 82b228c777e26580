// SPDX-License-Identifier: Apache-2.0
// Rules against a plain statement of them that counts the whole history anew
// for every token.

#include "engine/logit_edits.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "common/random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::engine {
namespace {

using kernels::LogitEdit;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr int kVocab = 30;

// The edit of each id by the words of engine/logit_rules.h; ids that are not
// there may not be drawn.
std::map<int, LogitEdit> Statement(const LogitRules& rules,
                                   const std::vector<int32_t>& owed,
                                   const std::vector<int32_t>& history,
                                   int prompt, bool tokens_owed) {
  std::map<int, LogitEdit> all;
  const auto has = [](const std::vector<int32_t>& ids, int id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  for (int id = 0; id < kVocab; ++id) {
    if (!rules.allowed_ids.empty() && !has(rules.allowed_ids, id)) continue;
    LogitEdit edit{.token_id = id};
    bool banned = has(rules.banned_ids, id) || (tokens_owed && has(owed, id));
    for (const auto& word : rules.bad_words) {
      const std::vector<int32_t> start(word.begin(), word.end() - 1);
      banned |= word.back() == id && history.size() >= start.size() &&
                std::equal(start.rbegin(), start.rend(), history.rbegin());
    }
    for (const TokenBias& bias : rules.logit_bias) {
      if (bias.token_id == id) edit.bias += bias.bias;
    }
    if (banned) edit.bias = -INFINITY;
    const auto output = std::count(history.begin() + prompt, history.end(), id);
    if (has(history, id)) edit.repetition = rules.repetition_penalty;
    if (output > 0) {
      edit.penalty = rules.frequency_penalty * static_cast<float>(output) +
                     rules.presence_penalty;
    }
    if (!banned || rules.allowed_ids.empty()) all[id] = edit;
    if (banned) all.erase(id);
  }
  return all;
}

std::map<int, LogitEdit> Given(const LogitEdits& edits,
                               absl::Span<const LogitEdit> list) {
  std::map<int, LogitEdit> all;
  if (!edits.only_edited()) {
    for (int id = 0; id < kVocab; ++id) all[id] = {.token_id = id};
  }
  int last = -1;
  std::map<int, int> seen;
  for (const LogitEdit& edit : list) {
    EXPECT_EQ(++seen[edit.token_id], 1) << "two edits of " << edit.token_id;
    EXPECT_TRUE(!edits.only_edited() || edit.token_id > last);
    last = edit.token_id;
    all[edit.token_id] = edit;
    if (std::isinf(edit.bias)) all.erase(edit.token_id);
  }
  return all;
}

std::string Text(const std::map<int, LogitEdit>& edits) {
  std::string text;
  for (const auto& [id, e] : edits) {
    text += std::to_string(id) + ":" + std::to_string(e.bias) + "," +
            std::to_string(e.repetition) + "," + std::to_string(e.penalty) +
            " ";
  }
  return text;
}

TEST(LogitEdits, FollowTheRulesTokenByTokenAndFromAnyHistory) {
  SeededRandom random(7);
  const auto id = [&] { return static_cast<int32_t>(random.Below(kVocab)); };
  for (int round = 0; round < 300; ++round) {
    LogitRules rules;
    if (random.Below(2) == 0) rules.repetition_penalty = 1.5f;
    if (random.Below(2) == 0) rules.presence_penalty = 0.25f;
    if (random.Below(2) == 0) rules.frequency_penalty = -0.5f;
    for (uint64_t i = random.Below(4); i > 0; --i) {
      rules.logit_bias.push_back({id(), 2.0f});
    }
    for (uint64_t i = random.Below(2) * random.Below(20); i > 0; --i) {
      rules.allowed_ids.push_back(id());
    }
    for (uint64_t i = random.Below(4); i > 0; --i) {
      rules.banned_ids.push_back(id());
    }
    for (uint64_t i = random.Below(6); i > 0; --i) {
      std::vector<int32_t> word(1 + random.Below(3));
      for (int32_t& part : word) part = static_cast<int32_t>(random.Below(3));
      rules.bad_words.push_back(word);
    }
    const std::vector<int32_t> owed = {4, id(), 4, id()};
    const int prompt = 1 + static_cast<int>(random.Below(8));
    std::vector<int32_t> history;
    for (int i = 0; i < prompt; ++i) {
      history.push_back(static_cast<int32_t>(random.Below(3)));
    }
    LogitEdits edits(&rules, owed, history, prompt);
    for (int step = 0; step < 12; ++step) {
      const bool tokens_owed = step < 5;
      const auto expected =
          Text(Statement(rules, owed, history, prompt, tokens_owed));
      ASSERT_EQ(Text(Given(edits, edits.Next(history, tokens_owed))), expected)
          << "round " << round << ", step " << step;
      // As after a failover, which adds the history anew.
      LogitEdits resumed(&rules, owed, history, prompt);
      ASSERT_EQ(Text(Given(resumed, resumed.Next(history, tokens_owed))),
                expected);
      // Guesses count while they are there.
      const size_t known = history.size();
      for (uint64_t i = random.Below(4); i > 0; --i) {
        history.push_back(static_cast<int32_t>(random.Below(6)));
        edits.Guess(history.back());
        ASSERT_EQ(Text(Given(edits, edits.Next(history, tokens_owed))),
                  Text(Statement(rules, owed, history, prompt, tokens_owed)));
      }
      history.resize(known);
      edits.TakeBackGuesses();
      history.push_back(
          random.Below(2) == 0 ? id() : static_cast<int32_t>(random.Below(3)));
      edits.Append(history.back());
    }
  }
}

TEST(LogitEdits, WithoutRulesThereAreNone) {
  const LogitRules rules;
  const std::vector<int32_t> history = {1, 2, 3};
  const std::vector<int32_t> owed = {7, 8, 7};
  LogitEdits edits(&rules, owed, history, 3);
  EXPECT_THAT(edits.Next(history, true),
              ElementsAre(testing::Field(&LogitEdit::token_id, 7),
                          testing::Field(&LogitEdit::token_id, 8)));
  edits.Append(9);
  EXPECT_THAT(edits.Next(history, false), IsEmpty());
}

TEST(LogitEdits, OnlyRulesThatLookBackNeedHistory) {
  EXPECT_FALSE(LogitRules{}.needs_history());
  EXPECT_FALSE((LogitRules{.logit_bias = {{1, 2}},
                           .allowed_ids = {1, 3},
                           .banned_ids = {3},
                           .bad_words = {{4}, {5}}})
                   .needs_history());
  EXPECT_TRUE(LogitRules{.repetition_penalty = 1.1f}.needs_history());
  EXPECT_TRUE(LogitRules{.presence_penalty = -1}.needs_history());
  EXPECT_TRUE(LogitRules{.frequency_penalty = 1}.needs_history());
  EXPECT_TRUE((LogitRules{.bad_words = {{4}, {5, 6}}}).needs_history());
}

}  // namespace
}  // namespace tandem::engine
