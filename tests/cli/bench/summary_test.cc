// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/summary.h"

#include <gtest/gtest.h>

#include "common/error.h"
#include "tests/cli/bench/records.h"

namespace tandem::bench {
namespace {

TEST(SummaryTest, CountsWhatCompletedAndNamesWhatFailed) {
  std::vector<RequestRecord> records = {
      Completed(0, 0, {1, 2}),
      Completed(1, 1.5, {3, 3.5, 4}),
      Failed(2, 2.5,
             MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                       "512 are waiting")),
      Failed(2, 5,
             MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                       "513 are waiting")),
      Failed(3, 4, absl::DeadlineExceededError("too late")),
      Failed(3, 4, absl::OkStatus()),  // ended well, without a finish reason
      RequestRecord()};                // never sent
  records[0].cached_tokens = 4;
  records[1].planned_output_tokens = 9;
  const Summary s = Summarize(records, {{Metric::kTtft, 1500}});
  EXPECT_EQ(s.planned, 7);
  EXPECT_EQ(s.sent, 6);
  EXPECT_EQ(s.completed, 2);
  EXPECT_EQ(s.failed, 4);
  EXPECT_EQ(s.good, 1) << "the second one's TTFT is 2 s";
  EXPECT_EQ(s.short_outputs, 1);
  ASSERT_EQ(s.failures.size(), 3u);
  EXPECT_EQ(s.failures.at("RESOURCE_EXHAUSTED QUEUE_FULL").count, 2);
  EXPECT_EQ(s.failures.at("RESOURCE_EXHAUSTED QUEUE_FULL").example,
            "512 are waiting");
  EXPECT_EQ(s.failures.at("DEADLINE_EXCEEDED").count, 1);
  EXPECT_EQ(s.failures.at("OK without a finish reason").count, 1);
  EXPECT_EQ(s.duration_s, 5);
  EXPECT_EQ(s.prompt_tokens, 20);
  EXPECT_EQ(s.cached_tokens, 4);
  EXPECT_EQ(s.output_tokens, 5);
  EXPECT_DOUBLE_EQ(s.PerSecond(s.completed), 0.4);
  EXPECT_EQ(s.latencies_ms.at(Metric::kTtft).count(), 2u);
  EXPECT_EQ(s.latencies_ms.at(Metric::kItl).count(), 3u);
  // 2 + 2.5 + 0.5 + 3 + 1 + 1 seconds of requests in 5.
  EXPECT_DOUBLE_EQ(s.mean_in_flight, 2);
  EXPECT_EQ(s.peak_in_flight, 4);  // from 3 s to 4 s
  EXPECT_DOUBLE_EQ(s.lateness_ms.max(), 500);
}

TEST(SummaryTest, WaitingForAPlaceIsLatencyButNotLateness) {
  RequestRecord record = Completed(1, 5.25, {6});
  record.due_s = 5;  // the limit on concurrency held it back till then
  const Summary s = Summarize({record}, {});
  EXPECT_DOUBLE_EQ(s.latencies_ms.at(Metric::kTtft).max(), 5000);
  EXPECT_DOUBLE_EQ(s.lateness_ms.max(), 250);
}

TEST(SummaryTest, TheTimelineAddsUp) {
  std::vector<RequestRecord> records;
  int64_t tokens = 0;
  double busy_s = 0;
  for (int i = 0; i < 100; ++i) {
    const double at = 0.037 * i;
    records.push_back(Completed(at, at, {at + 0.1, at + 0.2, at + 0.33}));
    tokens += 3;
    busy_s += 0.33;
  }
  records.push_back(Failed(1, 2.5, absl::InternalError("")));
  busy_s += 1.5;
  const Summary s = Summarize(records, {});
  ASSERT_FALSE(s.timeline.empty());
  EXPECT_LE(s.timeline.size(), 120u);
  int64_t sum = 0;
  int completed = 0, failed = 0;
  double held_s = 0;
  for (const Interval& interval : s.timeline) {
    sum += interval.output_tokens;
    completed += interval.completed;
    failed += interval.failed;
    held_s += interval.in_flight *
              std::min(s.interval_s, s.duration_s - interval.begin_s);
  }
  EXPECT_EQ(sum, tokens);
  EXPECT_EQ(completed, 100);
  EXPECT_EQ(failed, 1);
  EXPECT_NEAR(held_s, busy_s, 1e-6);
}

TEST(SummaryTest, NothingSentGivesZerosAndNoCrash) {
  const Summary s = Summarize(std::vector<RequestRecord>(3), {});
  EXPECT_EQ(s.sent, 0);
  EXPECT_EQ(s.PerSecond(1), 0);
  EXPECT_TRUE(s.timeline.empty());
}

TEST(SummaryTest, PlacesThatAreHandedOnDoNotCountTwice) {
  const Summary s = Summarize(
      {Completed(0, 0, {1}), Completed(1, 1, {2}), Completed(2, 2, {3})}, {});
  EXPECT_EQ(s.peak_in_flight, 1);
}

TEST(IntervalLengthTest, IsRoundAndGivesFewEnough) {
  EXPECT_DOUBLE_EQ(IntervalLength(0.5, 120), 0.01);
  EXPECT_DOUBLE_EQ(IntervalLength(2, 120), 0.02);
  EXPECT_DOUBLE_EQ(IntervalLength(5, 120), 0.05);
  EXPECT_DOUBLE_EQ(IntervalLength(10, 120), 0.1);
  EXPECT_DOUBLE_EQ(IntervalLength(60, 120), 0.5);
  EXPECT_DOUBLE_EQ(IntervalLength(3600, 120), 50);
}

}  // namespace
}  // namespace tandem::bench
