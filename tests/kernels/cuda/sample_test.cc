// SPDX-License-Identifier: Apache-2.0
// The sampler on the emulated device draws what the CPU backend draws, id by
// id, and reports the same log-probabilities.

#include "tests/kernels/cuda/checks.h"

namespace tandem::kernels::cuda {
namespace {

std::vector<float> WithTies(std::vector<float> logits) {
  for (float& logit : logits) logit = std::round(logit);
  return logits;
}

TEST(CudaSample, DrawsEqualTheCpuBackendsForEveryFilter) {
  struct Case {
    float temperature, top_p, min_p;
    int top_k;
    float typical_p = 1;
  };
  const Case cases[] = {
      {1.0f, 1.0f, 0.0f, 0},         {0.7f, 1.0f, 0.0f, 40},
      {1.5f, 0.9f, 0.0f, 0},         {1.0f, 1.0f, 0.05f, 0},
      {1.2f, 0.95f, 0.02f, 50},      {5.0f, 0.5f, 0.0f, 0},
      {0.1f, 0.99f, 0.0f, 3},        {1.0f, 0.0f, 0.0f, 0},
      {1.0f, 1.0f, 1.0f, 0},         {100.0f, 1.0f, 0.0f, 7},
      {2.0f, 0.7f, 0.3f, 1000},      {0.0f, 0.5f, 0.1f, 3},
      {100.0f, 0.3f, 0.9f, 0},       {1.0f, 0.999f, 0.0f, 1},
      {1e-6f, 0.9f, 0.0f, 0},        {1.0f, 1.0f, 0.0f, 0, 0.2f},
      {1.5f, 0.9f, 0.01f, 30, 0.5f}, {9.0f, 0.9f, 0.0f, 0, 1e-6f}};
  for (const int vocab : {2, 50, 3001}) {
    for (const bool ties : {false, true}) {
      auto logits = RandomFloats(At(vocab), 41, 3.0f);
      if (ties) logits = WithTies(std::move(logits));
      for (const Case& c : cases) {
        ASSERT_TRUE(
            CheckSample(LaunchSample, DrawsOf(logits,
                                              {.temperature = c.temperature,
                                               .top_p = c.top_p,
                                               .min_p = c.min_p,
                                               .typical_p = c.typical_p,
                                               .top_k = c.top_k,
                                               .seed = 99},
                                              vocab > 1000 ? 4 : 8)))
            << (ties ? "ties" : "no ties");
      }
    }
  }
}

// The ids of one thread alone, which refuses those that cannot win early.
TEST(CudaSample, IdsOfOneThreadRaceEachOther) {
  std::vector<float> logits(64, -60.0f);
  for (const size_t id : {0, 16, 32, 48}) {
    logits[id] = static_cast<float>(id) / 100.0f;
  }
  EXPECT_TRUE(CheckSample(
      LaunchSample, DrawsOf(logits, {.temperature = 1.0f, .seed = 3}, 64)));
}

TEST(CudaSample, ManyIdsAreDrawnByMoreThreads) {
  for (const int vocab : {4096, 4097, 9000}) {
    EXPECT_TRUE(CheckSample(LaunchSample, DrawsOf(RandomFloats(At(vocab), 42),
                                                  {.temperature = 1.1f,
                                                   .top_p = 0.9f,
                                                   .min_p = 0.01f,
                                                   .top_k = 900,
                                                   .seed = 12,
                                                   .logprobs = 5},
                                                  3)));
  }
}

TEST(CudaSample, SchedulesDoNotShow) {
  for (const emulator::Settings& settings : kSettings) {
    const ScopedSettings scoped(settings);
    EXPECT_TRUE(CheckSampleDraws(LaunchSample));
  }
}

TEST(CudaSample, EqualLogitsAreToldApartById) {
  // All in one bin until the last levels.
  const std::vector<float> logits(3000, 1.25f);
  for (const SampleParams& base :
       {SampleParams{}, SampleParams{.temperature = 1.0f, .seed = 3},
        SampleParams{.temperature = 1.0f, .top_p = 0.4f, .seed = 4},
        SampleParams{.temperature = 1.0f, .top_k = 1234, .seed = 5}}) {
    ASSERT_TRUE(CheckSample(LaunchSample, DrawsOf(logits, base, 4)));
  }
}

TEST(CudaSample, NeighbouringFloatsAreToldApart) {
  std::vector<float> logits(3000);
  float x = 1.0f;
  for (float& logit : logits) logit = x = std::nextafter(x, 2.0f);
  std::shuffle(logits.begin(), logits.end(), std::mt19937_64(5));
  for (const float temperature : {1.0f, 100.0f}) {
    const SampleParams base{
        .temperature = temperature, .top_p = 0.7f, .top_k = 2000, .seed = 6};
    ASSERT_TRUE(CheckSample(LaunchSample, DrawsOf(logits, base, 4)));
  }
}

TEST(CudaSample, LogProbabilitiesEqualTheCpuBackends) {
  for (const int vocab : {3, 50, 2500}) {
    for (const bool ties : {false, true}) {
      auto logits = RandomFloats(At(vocab), 43, 4.0f);
      if (ties) logits = WithTies(std::move(logits));
      for (const int logprobs : {0, 1, 5, 20, 50}) {
        for (const float temperature : {0.0f, 1.0f}) {
          ASSERT_TRUE(CheckSample(
              LaunchSample,
              DrawsOf(
                  logits,
                  {.temperature = temperature, .seed = 8, .logprobs = logprobs},
                  3)));
        }
      }
    }
  }
}

TEST(CudaSample, EditedLogProbabilitiesEqualTheCpuBackends) {
  for (const int vocab : {3, 50, 2500, 5000}) {
    for (const bool ties : {false, true}) {
      auto logits = RandomFloats(At(vocab), 45, 4.0f);
      if (ties) logits = WithTies(std::move(logits));
      for (const int logprobs : {1, 5, 20}) {
        ASSERT_TRUE(CheckSample(
            LaunchSample,
            DrawsOf(logits, {.logprobs = logprobs, .edited_logprobs = 1}, 4)));
      }
    }
  }
}

TEST(CudaSample, GivenTokensAreScoredAsOnACpu) {
  SampleProblem problem{WithTies(RandomFloats(700, 46, 4.0f)), {}, {}};
  for (const int32_t given : {0, 1, 350, 699}) {
    problem.params.push_back(
        {.temperature = 1.0f, .seed = 8, .logprobs = 5, .given = given});
  }
  EXPECT_TRUE(CheckSample(LaunchSample, problem));
}

TEST(CudaSample, BansThatLeaveNothingAndLogitsThatAreInfinite) {
  SampleProblem all{{1, 5, 4}, {}, {}};
  for (const int edited_logprobs : {0, 1}) {
    for (const float temperature : {0.0f, 1.0f}) {
      for (const int only_edited : {0, 1}) {
        all.params.push_back(
            {.temperature = temperature,
             .logprobs = 2,
             .first_edit = static_cast<int32_t>(all.edits.size()),
             .num_edits = 3,
             .only_edited = only_edited,
             .edited_logprobs = edited_logprobs});
        for (const int32_t id : {0, 1, 2}) {
          all.edits.push_back({.token_id = id, .bias = -INFINITY});
        }
      }
    }
  }
  EXPECT_TRUE(CheckSample(LaunchSample, all));
  std::vector<float> logits = RandomFloats(40, 44);
  for (size_t i = 0; i < logits.size(); i += 3) logits[i] = -INFINITY;
  logits[7] = logits[8] = -0.0f;
  logits[9] = 0.0f;
  EXPECT_TRUE(CheckSample(
      LaunchSample, DrawsOf(logits, {.temperature = 1.0f, .seed = 9}, 8)));
}

}  // namespace
}  // namespace tandem::kernels::cuda
