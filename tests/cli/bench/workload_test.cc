// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/workload.h"

#include <gtest/gtest.h>

#include <set>

namespace tandem::bench {
namespace {

TEST(SyntheticTest, OneSeedGivesOnePlanAndTheRateChangesOnlyTimes) {
  SyntheticOptions options;
  options.num_prompts = 50;
  options.request_rate = 10;
  options.prompt = {.mean_tokens = 100, .range_ratio = 0.5};
  options.num_prefixes = 3;
  options.prefix_tokens = 16;
  const auto first = PlanSynthetic(options);
  options.request_rate = 20;
  const auto faster = PlanSynthetic(options);
  options.seed = 1;
  const auto other = PlanSynthetic(options);
  ASSERT_EQ(first.size(), 50u);
  int equal = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].prompt, faster[i].prompt);
    EXPECT_EQ(first[i].output_tokens, faster[i].output_tokens);
    EXPECT_DOUBLE_EQ(first[i].at_s, 2 * faster[i].at_s);
    equal += PromptTokens(first[i].prompt) == PromptTokens(other[i].prompt);
  }
  EXPECT_LT(equal, 10);
}

TEST(SyntheticTest, PrefixesStandBeforeOrInsideTheLength) {
  SyntheticOptions options;
  options.num_prompts = 200;
  options.prompt = {.mean_tokens = 100};
  options.num_prefixes = 4;
  options.prefix_tokens = 32;
  std::set<uint64_t> prefixes, tails;
  for (const PlannedRequest& request : PlanSynthetic(options)) {
    ASSERT_EQ(request.prompt.size(), 2u);
    EXPECT_EQ(request.prompt[0].tokens, 32);
    EXPECT_EQ(request.prompt[1].tokens, 100);
    prefixes.insert(request.prompt[0].stream);
    tails.insert(request.prompt[1].stream);
  }
  EXPECT_EQ(prefixes.size(), 4u);
  EXPECT_EQ(tails.size(), 200u);

  options.prefix_tokens = 0;
  options.prefix_ratio = 0.75;
  for (const PlannedRequest& request : PlanSynthetic(options)) {
    EXPECT_EQ(request.prompt[0].tokens, 75);
    EXPECT_EQ(request.prompt[1].tokens, 25);
  }
  options.prefix_ratio = 1;  // all shared: no tail, and no empty run
  EXPECT_EQ(PlanSynthetic(options)[0].prompt.size(), 1u);
}

TEST(TracePlanTest, ScalesTimesLengthsAndSharedBlocks) {
  const std::vector<TraceRow> rows = {
      {.at_s = 0,
       .prompt_tokens = 1100,
       .output_tokens = 100,
       .blocks = {7, 8, 9}},
      {.at_s = 4,
       .prompt_tokens = 1100,
       .output_tokens = 1,
       .blocks = {7, 8, 10}},
      {.at_s = 6, .prompt_tokens = 30, .output_tokens = 30}};
  const auto plan = PlanTrace(rows, 0.5, 0.25);
  EXPECT_EQ(plan[1].at_s, 2);
  EXPECT_EQ(plan[0].prompt,
            (std::vector<PromptRun>{{7, 128}, {8, 128}, {9, 19}}));
  EXPECT_EQ(plan[1].prompt[1], plan[0].prompt[1]);
  EXPECT_EQ(plan[0].output_tokens, 25);
  EXPECT_EQ(plan[1].output_tokens, 1) << "never none";
  EXPECT_EQ(plan[2].prompt, (std::vector<PromptRun>{{OwnStream(2), 8}}));
}

TEST(TracePlanTest, RoundingNeverLosesATokenOfAPrompt) {
  for (int prompt = 1; prompt < 3000; prompt += 7) {
    TraceRow row{.prompt_tokens = prompt, .output_tokens = 1};
    row.blocks.assign((prompt + kTraceBlockTokens - 1) / kTraceBlockTokens, 0);
    for (size_t i = 0; i < row.blocks.size(); ++i) {
      row.blocks[i] = static_cast<int64_t>(i);
    }
    for (const double scale : {0.001, 0.1, 0.3333, 1.0, 1.7}) {
      EXPECT_EQ(PromptTokens(PlanTrace({row}, 1, scale)[0].prompt),
                std::max(1L, std::lround(prompt * scale)))
          << prompt << " by " << scale;
    }
  }
}

TEST(ClippingTest, OutputKeepsUpToHalfAndThePromptTheRest) {
  struct Case {
    int prompt, output, kept_prompt, kept_output;
    const char* why;
  };
  const Case cases[] = {
      {60, 40, 60, 40, "fits exactly"},
      {61, 40, 60, 40, "the prompt gives way"},
      {90, 40, 60, 40, "and by more"},
      {90, 70, 50, 50, "both too long: half and half"},
      {30, 90, 30, 70, "a short prompt leaves the rest to the output"},
      {5000, 1, 99, 1, "one position is enough for one token"},
  };
  for (const Case& c : cases) {
    std::vector<PlannedRequest> plan(1);
    plan[0].prompt = {{1, c.prompt}};
    plan[0].output_tokens = c.output;
    const Clipping clipping = ClipToContext(100, &plan);
    EXPECT_EQ(PromptTokens(plan[0].prompt), c.kept_prompt) << c.why;
    EXPECT_EQ(plan[0].output_tokens, c.kept_output) << c.why;
    EXPECT_EQ(clipping.prompts, c.kept_prompt < c.prompt) << c.why;
    EXPECT_EQ(clipping.outputs, c.kept_output < c.output) << c.why;
    EXPECT_EQ(clipping.prompt_tokens, c.prompt - c.kept_prompt) << c.why;
    EXPECT_EQ(clipping.output_tokens, c.output - c.kept_output) << c.why;
  }
}

}  // namespace
}  // namespace tandem::bench
