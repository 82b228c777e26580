// SPDX-License-Identifier: Apache-2.0
// BeamSearch against `transformers`: searches over a model whose logits are a
// hash (tools/oracle/make_beam_goldens.py), and what it says of itself.

#include "engine/beam_search.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::engine {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

uint64_t SplitMix64(uint64_t state) {
  uint64_t z = state + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// What the goldens' model gives, with the case's rules, as a step would.
std::vector<TopLogprob> Candidates(const json& golden, const json& one,
                                   const std::vector<int32_t>& history,
                                   int new_tokens, int count) {
  const uint64_t seed = one["seed"].get<uint64_t>();
  const uint64_t state = SplitMix64(seed * 1000003 + history.size() * 1009 +
                                    static_cast<uint64_t>(history.back()));
  const int vocab = golden["vocab"];
  const auto ends = golden["end_tokens"].get<std::vector<int32_t>>();
  const auto has = [](const json& ids, int32_t id) {
    return std::find(ids.begin(), ids.end(), json(id)) != ids.end();
  };
  std::vector<double> logits;
  double sum = 0;
  for (int32_t id = 0; id < vocab; ++id) {
    double logit = static_cast<double>(
                       SplitMix64(state + static_cast<uint64_t>(id)) >> 40) /
                   4194304.0;
    if (std::find(ends.begin(), ends.end(), id) != ends.end()) logit += 1;
    logits.push_back(static_cast<double>(static_cast<float>(logit)));
    sum += std::exp(logits.back());
  }
  std::vector<TopLogprob> candidates;
  for (int32_t id = 0; id < vocab; ++id) {
    double score = logits[static_cast<size_t>(id)] - std::log(sum);
    if (one.contains("bias")) {
      for (const json& bias : one["bias"]) {
        if (bias[0] == id) score += bias[1].get<double>();
      }
    }
    const bool seen =
        std::find(history.begin(), history.end(), id) != history.end();
    if (seen) score *= one.value("repetition_penalty", 1.0);
    const bool owed =
        new_tokens < one.value("min_tokens", 0) && has(one["ends"], id);
    if (owed || has(one.value("banned", json::array()), id)) {
      score = -std::numeric_limits<double>::infinity();
    }
    candidates.push_back({id, static_cast<float>(score)});
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const TopLogprob& a, const TopLogprob& b) {
                     return a.logprob > b.logprob;
                   });
  candidates.resize(static_cast<size_t>(count));
  return candidates;
}

EarlyStopping EarlyOf(const json& value) {
  if (value == "never") return EarlyStopping::kNever;
  return value.get<bool>() ? EarlyStopping::kAlways : EarlyStopping::kHeuristic;
}

TEST(BeamSearchTest, FindsWhatTransformersFinds) {
  std::ifstream stream(std::string(TANDEM_SOURCE_DIR) +
                       "/tests/golden/beams/tables.json");
  const json golden = json::parse(stream, nullptr, false);
  ASSERT_TRUE(golden.is_object());
  int searches = 0;
  for (const json& one : golden["cases"]) {
    SCOPED_TRACE(one.dump());
    const auto ends = one["ends"].get<std::vector<int32_t>>();
    BeamSearch search({.width = one["width"],
                       .best = one["best"],
                       .length_penalty = one["length_penalty"],
                       .early_stopping = EarlyOf(one["early_stopping"])},
                      ends, one["max_tokens"], -1);
    std::vector<std::vector<int32_t>> beams = {one["prompt"]};
    for (int length = 0; !search.done(); ++length) {
      std::vector<std::vector<TopLogprob>> candidates;
      for (const auto& beam : beams) {
        candidates.push_back(Candidates(golden, one, beam, length,
                                        CandidatesPerBeam(one["width"], ends)));
      }
      std::vector<std::vector<int32_t>> next;
      for (const BeamSearch::Next& beam :
           search.Step(std::vector<absl::Span<const TopLogprob>>(
               candidates.begin(), candidates.end()))) {
        next.push_back(beams[static_cast<size_t>(beam.parent)]);
        next.back().push_back(beam.token_id);
      }
      beams = std::move(next);
    }
    const std::vector<Hypothesis> best = search.Best();
    ASSERT_EQ(best.size(), one["hypotheses"].size());
    for (size_t i = 0; i < best.size(); ++i) {
      const json& expected = one["hypotheses"][i];
      std::vector<int32_t> ids;
      for (const SampledToken& token : best[i].tokens) {
        ids.push_back(token.token_id);
      }
      EXPECT_EQ(ids, expected["ids"].get<std::vector<int32_t>>()) << i;
      EXPECT_NEAR(best[i].score, expected["score"].get<double>(), 1e-4);
      EXPECT_EQ(best[i].stopped, expected["stopped"].get<bool>());
    }
    ++searches;
  }
  EXPECT_EQ(searches, 60);
}

std::vector<BeamSearch::Next> Advance(
    BeamSearch& search, std::vector<std::vector<TopLogprob>> candidates) {
  return search.Step(std::vector<absl::Span<const TopLogprob>>(
      candidates.begin(), candidates.end()));
}

TEST(BeamSearchTest, TiesGoToTheBetterBeamAndThenToTheLowestId) {
  BeamSearch search({.width = 3}, {}, 3, 0);
  const auto first = Advance(search, {{{5, -1}, {9, -1}, {2, -2}}});
  ASSERT_EQ(first.size(), 3u);
  EXPECT_EQ(first[0].token_id, 5);
  EXPECT_EQ(first[1].token_id, 9);
  EXPECT_EQ(first[2].token_id, 2);
  const auto second =
      Advance(search, {{{8, -2}, {6, -3}}, {{7, -2}}, {{1, -1}, {0, -1}}});
  ASSERT_EQ(second.size(), 3u);
  EXPECT_EQ(second[0].parent, 0);
  EXPECT_EQ(second[1].parent, 1);
  EXPECT_EQ(second[2].parent, 2);
  EXPECT_EQ(second[2].token_id, 0);
}

TEST(BeamSearchTest, EqualScoresKeepTheirOrder) {
  BeamSearch search({.width = 2, .best = 2, .length_penalty = 0}, {1}, 9, 0);
  Advance(search, {{{5, -1}, {1, -2}, {6, -3}}});
  Advance(search, {{{1, -1}, {7, -1.5f}}, {{8, -1}}});
  ASSERT_TRUE(search.done());
  const auto best = search.Best();
  ASSERT_EQ(best.size(), 2u);
  EXPECT_EQ(best[0].score, best[1].score);
  EXPECT_EQ(best[0].tokens.size(), 1u) << "it was there before";
}

TEST(BeamSearchTest, WhatCouldOnlyBecomeEqualIsNotWaitedFor) {
  BeamSearch search({.width = 1, .best = 1, .length_penalty = 0}, {1}, 9, 0);
  EXPECT_THAT(Advance(search, {{{1, -1}, {5, -1}}}), IsEmpty());
  EXPECT_TRUE(search.done());
}

// Where short ones are favoured, no beam can become better than it is.
TEST(BeamSearchTest, NeverStoppingEarlyLooksAtTheBestLengthThereIs) {
  for (const double penalty : {-1.0, 1.0}) {
    BeamSearch search({.width = 2,
                       .best = 1,
                       .length_penalty = penalty,
                       .early_stopping = EarlyStopping::kNever},
                      {1}, penalty < 0 ? 4 : 40, 0);
    Advance(search, {{{5, -0.5f}, {1, -3}, {6, -4}}});
    Advance(search, {{{1, -0.4f}, {7, -0.5f}}, {{8, -1}}});
    EXPECT_FALSE(search.done()) << penalty;
  }
}

TEST(BeamSearchTest, TokensBringTheirRankAndAlternatives) {
  BeamSearch search({.width = 2, .best = 2}, {}, 1, 1);
  EXPECT_THAT(Advance(search, {{{5, -1}, {9, -1.5f}, {2, -2}}}), IsEmpty());
  ASSERT_TRUE(search.done());
  const auto best = search.Best();
  ASSERT_EQ(best.size(), 2u);
  EXPECT_EQ(best[1].tokens[0].token_id, 9);
  EXPECT_EQ(best[1].tokens[0].rank, 2);
  EXPECT_EQ(best[1].tokens[0].logprob, -1.5f);
  ASSERT_EQ(best[1].tokens[0].top.size(), 1u);
  EXPECT_EQ(best[1].tokens[0].top[0].token_id, 5);
  EXPECT_EQ(search.tokens(), 2);
}

TEST(BeamSearchTest, FewerCandidatesThanBeamsAreAllThereIs) {
  const float never = -std::numeric_limits<float>::infinity();
  BeamSearch search({.width = 4, .best = 4}, {}, 2, 0);
  EXPECT_EQ(Advance(search, {{{5, -1}, {9, never}}}).size(), 1u);
  EXPECT_THAT(Advance(search, {{{1, -1}, {2, -2}, {3, never}}}), IsEmpty());
  ASSERT_TRUE(search.done());
  EXPECT_EQ(search.Best().size(), 2u);
}

TEST(BeamSearchTest, NonsenseIsRefused) {
  EXPECT_TRUE(CheckBeams({.width = 20}, {}).ok());
  EXPECT_TRUE(CheckBeams({.width = 18, .best = 18}, {{1, 2, 1}}).ok());
  EXPECT_THAT(
      std::string(CheckBeams({.width = 20}, std::vector<int32_t>{1}).message()),
      HasSubstr("together at most 20"));
  EXPECT_FALSE(CheckBeams({.width = 2147483647}, {{1, 2}}).ok());
  EXPECT_FALSE(CheckBeams({.width = 0}, {}).ok());
  EXPECT_FALSE(CheckBeams({.width = 2, .best = 0}, {}).ok());
  EXPECT_FALSE(CheckBeams({.width = 2, .length_penalty = INFINITY}, {}).ok());
}

}  // namespace
}  // namespace tandem::engine
