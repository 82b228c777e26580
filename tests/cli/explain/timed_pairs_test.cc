// SPDX-License-Identifier: Apache-2.0
// Which of the quoted pairs are timed, and what is said of the others.

#include "cli/explain/timed_pairs.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/explain/command.h"
#include "cli/explain/report.h"
#include "tests/cli/explain/tales_model.h"

namespace tandem::explain {
namespace {

// Of a machine that makes so many FLOPs a second without a cache, and a prompt
// token or a step with one in a tenth of a millisecond.
Timing Made(const engine::ModelSpec& spec, Lengths lengths, double flops) {
  const auto steps = static_cast<size_t>(lengths.output);
  Timing timing{.lengths = lengths,
                .with_seconds = std::vector<double>(steps, 1e-4),
                .without_seconds = std::vector<double>(steps),
                .tokens = {}};
  timing.with_seconds[0] = 1e-4 * static_cast<double>(lengths.prompt);
  for (double& seconds : timing.without_seconds) {
    seconds = GenerationWork(spec, {}, lengths, false).flops() / flops /
              static_cast<double>(steps);
  }
  return timing;
}

TEST(TimedPairsTest, SecondsGrowWithArithmeticAndWithSteps) {
  const engine::ModelSpec spec = *engine::LoadModelSpec(kTalesModel);
  const Timing known = Made(spec, {100, 50}, 1e10);
  const Work longer = GenerationWork(spec, {}, {500, 200}, false);
  EXPECT_NEAR(PredictSeconds(spec, {}, known, {500, 200}),
              longer.flops() / 1e10 + 500e-4 + 199e-4, 1e-9);
  EXPECT_NEAR(PredictSeconds(spec, {}, known, {100, 50}),
              known.with_total() + known.without_total(), 1e-9);
}

TEST(TimedPairsTest, PairsAreTimedWhileThereAreSecondsAndPositions) {
  engine::ModelSpec spec = *engine::LoadModelSpec(kTalesModel);
  constexpr double kFlops = 1e10;
  struct Case {
    Lengths request;
    int positions;
    double seconds;
    // Of the four pairs: "timed", or a part of why it was left out.
    std::vector<std::string> pairs;
    int calls;
  };
  const Case cases[] = {
      {{4, 4}, 4096, 1e6, {"timed", "timed", "timed", "timed"}, 4},
      // The request is one of them.
      {{100, 50}, 4096, 0, {"timed", "are 0.0 left", "s, of", "s, of"}, 0},
      {{500, 200}, 4096, 1e6, {"timed", "timed", "timed", "timed"}, 3},
      {{4, 4},
       1024,
       1e6,
       {"timed", "timed", "1500 positions, the model has 1024",
        "3000 positions, the model has 1024"},
       2},
      {{4, 4}, 150, 1e6, {"timed", "700 pos", "1500 pos", "3000 pos"}, 1},
      {{4, 4},
       4096,
       5,
       {"timed", "--pairs-seconds are", "--pairs-seconds are",
        "--pairs-seconds are"},
       1},
  };
  for (const Case& c : cases) {
    spec.max_positions = c.positions;
    int calls = 0;
    const auto pairs =
        TimePairs(spec, {}, Made(spec, c.request, kFlops), c.seconds,
                  [&](Lengths lengths) -> absl::StatusOr<Timing> {
                    ++calls;
                    return Made(spec, lengths, kFlops);
                  });
    ASSERT_TRUE(pairs.ok()) << pairs.status();
    ASSERT_EQ(pairs->size(), kQuotedLengths.size());
    EXPECT_EQ(calls, c.calls);
    for (size_t i = 0; i < pairs->size(); ++i) {
      const TimedPair& pair = (*pairs)[i];
      EXPECT_EQ(pair.lengths, kQuotedLengths[i]);
      EXPECT_NE(pair.timing.has_value(), !pair.left_out.empty());
      const std::string is = pair.timing.has_value() ? "timed" : pair.left_out;
      EXPECT_NE(is.find(c.pairs[i]), std::string::npos)
          << is << ", expected " << c.pairs[i];
    }
  }
}

TEST(TimedPairsTest, ThePairsShareTheSeconds) {
  const engine::ModelSpec spec = *engine::LoadModelSpec(kTalesModel);
  const auto made = [&](Lengths lengths) -> absl::StatusOr<Timing> {
    return Made(spec, lengths, 1e10);
  };
  const Timing request = *made({4, 4});
  double both = 0;
  for (const size_t i : {0, 1}) {
    const Timing timing = *made(kQuotedLengths[i]);
    both += timing.with_total() + timing.without_total();
  }
  for (const double spare : {-0.1, 0.1}) {
    const auto pairs = TimePairs(spec, {}, request, both + spare, made);
    ASSERT_TRUE(pairs.ok()) << pairs.status();
    EXPECT_TRUE((*pairs)[0].timing.has_value());
    EXPECT_EQ((*pairs)[1].timing.has_value(), spare > 0);
  }
}

TEST(TimedPairsTest, AFailureIsTold) {
  const engine::ModelSpec spec = *engine::LoadModelSpec(kTalesModel);
  const auto pairs = TimePairs(spec, {}, Made(spec, {4, 4}, 1e10), 1e6,
                               [](Lengths) -> absl::StatusOr<Timing> {
                                 return absl::InternalError("differ");
                               });
  EXPECT_EQ(pairs.status(), absl::InternalError("differ"));
}

TEST(TimedPairsTest, TextAndJsonSayWhatWasTimedAndWhatWasNot) {
  Explanation e{.model = "tales",
                .spec = *engine::LoadModelSpec(kTalesModel),
                .lengths = {100, 50}};
  e.pairs = {{.lengths = {100, 50}, .timing = Made(e.spec, {100, 50}, 1e10)},
             {.lengths = {500, 200}, .left_out = "about 48 s"},
             {.lengths = {1000, 500}, .left_out = "1500 positions"},
             {.lengths = {2000, 1000}, .left_out = "3000 positions"}};
  const std::string text = ReportText(e, /*color=*/false);
  for (const std::string part :
       {"         14.90", "          41.5\n",
        "     500    200  left out: about 48 s\n",
        "    2000   1000  left out: 3000 positions\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  const auto quoted = nlohmann::json::parse(ReportJson(e))["quoted"];
  EXPECT_NEAR(quoted[0]["timed"]["with_cache_total_seconds"].get<double>(),
              0.0149, 1e-9);
  EXPECT_FALSE(quoted[0].contains("left_out"));
  EXPECT_EQ(quoted[1]["left_out"], "about 48 s");
  EXPECT_FALSE(quoted[1].contains("timed"));
}

TEST(TimedPairsTest, TheCommandTimesThem) {
  ExplainOptions options;
  options.model = kTalesModel;
  options.lengths = {4, 3};
  options.machine = false;
  options.pairs_seconds = 0;
  options.json = true;
  testing::internal::CaptureStdout();
  const absl::Status status = Explain(options);
  const std::string output = testing::internal::GetCapturedStdout();
  ASSERT_TRUE(status.ok()) << status;
  const auto json = nlohmann::json::parse(output);
  EXPECT_EQ(json["timed"]["token_ids"].size(), 3u);
  for (const auto& pair : json["quoted"]) {
    EXPECT_TRUE(pair.contains("left_out")) << pair;
  }
}

}  // namespace
}  // namespace tandem::explain
