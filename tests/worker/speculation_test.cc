// SPDX-License-Identifier: Apache-2.0
#include "worker/speculation.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem::worker {
namespace {

using testing::HasSubstr;

TEST(SpeculativeConfigTest, ReadsWhatVllmReads) {
  const struct {
    const char* text;
    int tokens, min, max;
  } kCases[] = {
      {"", 0, 5, 5},
      {R"({"method": "ngram", "num_speculative_tokens": 4})", 4, 5, 5},
      {R"({"method": "ngram", "num_speculative_tokens": 64,
           "prompt_lookup_max": 4})",
       64, 4, 4},
      {R"({"method": "ngram", "num_speculative_tokens": 1,
           "prompt_lookup_min": 2})",
       1, 2, 2},
      {R"({"method": "ngram", "num_speculative_tokens": 3,
           "prompt_lookup_min": 2, "prompt_lookup_max": 7})",
       3, 2, 7}};
  for (const auto& c : kCases) {
    const auto got = ParseSpeculativeConfig(c.text);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->speculation.num_tokens, c.tokens) << c.text;
    EXPECT_EQ(got->speculation.lookup_min, c.min) << c.text;
    EXPECT_EQ(got->speculation.lookup_max, c.max) << c.text;
    EXPECT_TRUE(got->speculation.adapt);
    EXPECT_EQ(got->draft_model, "");
  }
}

TEST(SpeculativeConfigTest, AModelIsADraftModel) {
  const struct {
    const char* text;
    int tokens, blocks;
  } kCases[] = {{R"({"method": "draft_model", "model": "/m",
           "num_speculative_tokens": 4})",
                 4, 0},
                {R"({"model": "/m", "num_speculative_tokens": 2,
           "num_kv_blocks": 100})",
                 2, 100}};
  for (const auto& c : kCases) {
    const auto got = ParseSpeculativeConfig(c.text);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->speculation.num_tokens, c.tokens);
    EXPECT_EQ(got->draft_model, "/m");
    EXPECT_EQ(got->draft_num_blocks, c.blocks);
  }
}

TEST(SpeculativeConfigTest, LengthsNeedNotAdapt) {
  for (const char* const more : {R"("method": "ngram", "adaptive": )",
                                 R"("model": "/m", "adaptive": )"}) {
    for (const bool adaptive : {false, true}) {
      const auto got = ParseSpeculativeConfig(
          absl::StrCat(R"({"num_speculative_tokens": 4, )", more,
                       adaptive ? "true}" : "false}"));
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_EQ(got->speculation.adapt, adaptive);
    }
  }
}

TEST(SpeculativeConfigTest, SaysWhatIsWrong) {
  const struct {
    const char* text;
    const char* complaint;
  } kCases[] = {
      {"ngram", "is not a JSON object"},
      {"[1]", "is not a JSON object"},
      {"{}", "method is missing"},
      {R"({"method": "ngram"})", "num_speculative_tokens is missing"},
      {R"({"method": "eagle", "num_speculative_tokens": 4})",
       "method is \"eagle\", expected \"ngram\" or \"draft_model\""},
      {R"({"method": 3, "num_speculative_tokens": 4})", "method is 3"},
      {R"({"method": "draft_model", "num_speculative_tokens": 4})",
       "method \"draft_model\" needs \"model\""},
      {R"({"model": "", "num_speculative_tokens": 4})", "model is \"\""},
      {R"({"method": "ngram", "model": "/m", "num_speculative_tokens": 4})",
       "model is for method \"draft_model\", not for \"ngram\""},
      {R"({"method": "ngram", "quantization": "int8",
           "num_speculative_tokens": 4})",
       "quantization is for method \"draft_model\""},
      {R"({"method": "ngram", "num_kv_blocks": 5,
           "num_speculative_tokens": 4})",
       "num_kv_blocks is for method \"draft_model\""},
      {R"({"model": "/m", "num_speculative_tokens": 4, "num_kv_blocks": 0})",
       "num_kv_blocks is 0"},
      {R"({"method": "ngram", "adaptive": 1})", "adaptive is 1"},
      {R"({"model": "/m"})", "num_speculative_tokens is missing"},
      {R"({"model": "/m", "num_speculative_tokens": 4,
           "prompt_lookup_min": 2})",
       "prompt_lookup_max are for method \"ngram\", not for \"draft_model\""},
      {R"({"method": "ngram", "num_speculative_tokens": 0})",
       "num_speculative_tokens is 0, expected a number of 1 to 64"},
      {R"({"method": "ngram", "num_speculative_tokens": 65})", "is 65"},
      {R"({"method": "ngram", "num_speculative_tokens": 2.5})", "is 2.5"},
      {R"({"method": "ngram", "num_speculative_tokens": "2"})", "is \"2\""},
      {R"({"method": "ngram", "num_speculative_tokens": 99999999999})",
       "is 99999999999"},
      {R"({"method": "ngram", "num_speculative_tokens": 2,
           "prompt_lookup_max": 65})",
       "prompt_lookup_max is 65"},
      {R"({"method": "ngram", "num_speculative_tokens": 2,
           "prompt_lookup_max": 2, "prompt_lookup_min": 3})",
       "prompt_lookup_min is 3, prompt_lookup_max is 2"},
      {R"({"method": "ngram", "num_speculative_token": 2})",
       "there is no 'num_speculative_token'"}};
  for (const auto& c : kCases) {
    const auto got = ParseSpeculativeConfig(c.text);
    ASSERT_EQ(got.status().code(), absl::StatusCode::kInvalidArgument)
        << c.text;
    EXPECT_THAT(std::string(got.status().message()), HasSubstr(c.complaint));
    EXPECT_THAT(std::string(got.status().message()),
                HasSubstr("--speculative-config"));
  }
}

TEST(SpeculativeConfigTest, StepsHoldRoomForGuesses) {
  const engine::Speculation none;
  engine::Speculation five;
  five.num_tokens = 5;
  EXPECT_EQ(MaxDraws(none, 64, 512), 64);
  EXPECT_EQ(MaxDraws(five, 1, 512), 6);
  EXPECT_EQ(MaxDraws(five, 64, 512), 64 + 192);
  EXPECT_EQ(MaxDraws(five, 64, 70), 70);
  EXPECT_EQ(MaxDraws(five, 64, 64), 64);
}

}  // namespace
}  // namespace tandem::worker
