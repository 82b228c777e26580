// SPDX-License-Identifier: Apache-2.0
// The embedded model through the worker's executor, both ways.

#include "cli/explain/timing.h"

#include <gtest/gtest.h>

#include <string>

#include "cli/explain/report.h"
#include "cli/explain/timed_pairs.h"
#include "tests/cli/explain/tales_model.h"

namespace tandem::explain {
namespace {

TEST(TimingTest, BothWaysDrawTheSameTokens) {
  const auto spec = engine::LoadModelSpec(kTalesModel);
  ASSERT_TRUE(spec.ok()) << spec.status();
  const auto timer =
      RequestTimer::Load(*spec, {.directory = kTalesModel, .threads = 1});
  ASSERT_TRUE(timer.ok()) << timer.status();
  double share = 0;
  const auto timing = (*timer)->Time({21, 12}, [&](double now) {
    EXPECT_GT(now, share);
    share = now;
  });
  ASSERT_TRUE(timing.ok()) << timing.status();
  EXPECT_DOUBLE_EQ(share, 1) << "as many rows as were counted";
  EXPECT_EQ(timing->tokens.size(), 12u);
  EXPECT_EQ(timing->with_seconds.size(), 12u);
  EXPECT_EQ(timing->without_seconds.size(), 12u);
  EXPECT_GT(timing->prefill_per_token(), 0);
  EXPECT_GT(timing->decode_per_token(), 0);
  // The embedding is kept as in the checkpoint: bf16, as predicted for.
  EXPECT_EQ(timing->with_work, GenerationWork(*spec, {}, {21, 12}, true));
  EXPECT_EQ(timing->without_work, GenerationWork(*spec, {}, {21, 12}, false));
  // Longer than the one before.
  const auto next = (*timer)->Time({40, 3}, [](double) {});
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->with_work, GenerationWork(*spec, {}, {40, 3}, true));
}

// The embedded model has 1024 positions, the longest quoted pair 3000.
TEST(TimingTest, APairMayBeLongerThanTheModelsContext) {
  const auto spec = engine::LoadModelSpec(kTalesModel);
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_LT(spec->max_positions, 1030);
  const engine::ModelSpec stretched = WithPositionsForPairs(*spec);
  EXPECT_EQ(stretched.max_positions, 3000);
  const auto timer =
      RequestTimer::Load(stretched, {.directory = kTalesModel, .threads = 1});
  ASSERT_TRUE(timer.ok()) << timer.status();
  const auto timing = (*timer)->Time({1030, 2}, [](double) {});
  ASSERT_TRUE(timing.ok()) << timing.status();
  EXPECT_EQ(timing->without_work.positions_computed, 1030 + 1031);
  EXPECT_EQ(timing->with_work.positions_computed, 1031);
  engine::ModelSpec other = *spec;
  for (const auto kind :
       {engine::RopeSpec::Kind::kNone, engine::RopeSpec::Kind::kDynamic,
        engine::RopeSpec::Kind::kLongRope}) {
    other.rope.kind = kind;
    EXPECT_EQ(WithPositionsForPairs(other).max_positions, spec->max_positions);
  }
}

TEST(TimingTest, FiguresPerToken) {
  const Timing timing{.lengths = {4, 4},
                      .with_seconds = {8e-3, 3e-3, 1e-3, 2e-3},
                      .without_seconds = {8e-3, 9e-3, 11e-3, 14e-3},
                      .tokens = {1, 2, 3, 4}};
  EXPECT_DOUBLE_EQ(timing.prefill_per_token(), 2e-3);
  EXPECT_DOUBLE_EQ(timing.decode_per_token(), 2e-3);
  EXPECT_DOUBLE_EQ(timing.with_total(), 14e-3);
  EXPECT_DOUBLE_EQ(timing.without_total(), 42e-3);
  Explanation e{.model = "tales",
                .spec = *engine::LoadModelSpec(kTalesModel),
                .lengths = {4, 4},
                .timing = timing};
  const std::string text = ReportText(e, /*color=*/false);
  for (const std::string part :
       {"prompt of 4, output of 4\n",
        "all steps, ms                               42.00          14.00"
        "       3.0",
        "last step, ms                               14.00           2.00"
        "       7.0",
        "prefill 2.00 ms/token, decode 2.00 ms/token: 1.0 times as much",
        "the same 4 tokens both ways"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

}  // namespace
}  // namespace tandem::explain
