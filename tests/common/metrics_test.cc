// SPDX-License-Identifier: Apache-2.0
#include "common/metrics.h"

#include <cstdlib>
#include <regex>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The text up to the process's own metrics, whose values change.
std::string OwnText(const Metrics& metrics) {
  const std::string text = metrics.Text();
  return text.substr(0, text.find("# HELP process_"));
}

TEST(MetricsTest, TextIsWhatPrometheusReads) {
  Metrics metrics("decode", "tales");
  metrics.AddCounter("tandem_generation_tokens_total", "Tokens generated")
      .Add(41);
  metrics.AddGauge("tandem_num_requests_running", "Running").Set(3);
  CounterSet& outcomes = metrics.AddCounters("tandem_handoff_total", "Handoffs",
                                             "outcome", 4, {{"way", "shm"}});
  outcomes["ok"].Add(2);
  metrics.AddHistogram("tandem_step_seconds", "Step", {0.5, 1}).Observe(0.75);
  const std::string text = OwnText(metrics);
  for (const char* line :
       {"# TYPE tandem_generation_tokens_total counter\n",
        "tandem_generation_tokens_total{model_name=\"tales\",role=\"decode\"} "
        "41\n",
        "tandem_num_requests_running{model_name=\"tales\",role=\"decode\"} "
        "3\n",
        "tandem_handoff_total{model_name=\"tales\",role=\"decode\",outcome="
        "\"ok\",way=\"shm\"} 2\n",
        "tandem_step_seconds_bucket{model_name=\"tales\",role=\"decode\",le="
        "\"0.5\"} 0\n",
        "tandem_step_seconds_bucket{model_name=\"tales\",role=\"decode\",le="
        "\"1\"} 1\n",
        "tandem_step_seconds_bucket{model_name=\"tales\",role=\"decode\",le="
        "\"+Inf\"} 1\n",
        "tandem_step_seconds_sum{model_name=\"tales\",role=\"decode\"} "
        "0.75\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(MetricsTest, LabelValuesBeyondTheBoundAreCountedAsOther) {
  Metrics metrics("router", "");
  CounterSet& set = metrics.AddCounters("tandem_x_total", "X", "worker", 2);
  for (const char* worker : {"a", "b", "c", "d", "a", "other"}) {
    set[worker].Add();
  }
  EXPECT_EQ(set["a"].value(), 2);
  EXPECT_EQ(set["b"].value(), 1);
  EXPECT_EQ(set["other"].value(), 3);
  const std::string text = metrics.Text();
  EXPECT_THAT(text, Not(HasSubstr("worker=\"c\"")));
  EXPECT_THAT(text, HasSubstr("worker=\"other\"} 3\n"));
  EXPECT_THAT(text, Not(HasSubstr("model_name")));
}

TEST(MetricsTest, VllmNamesAreSumsOfOursFromOneKindOfProcess) {
  Metrics router("router", "tales"), worker("decode", "tales");
  for (Metrics* metrics : {&router, &worker}) {
    metrics->ExportVllmNames();
    CounterSet& tokens = metrics->AddCounters("tandem_prompt_tokens_total",
                                              "Tokens", "source", 2);
    tokens["cached"].Add(3);
    tokens["computed"].Add(4);
    metrics->AddGauge("tandem_num_requests_running", "Running").Set(5);
    metrics
        ->AddHistogram("tandem_time_to_first_token_seconds", "First", {0.5, 1})
        .Observe(0.75);
    metrics
        ->AddCounters("tandem_requests_finished_total", "Ended",
                      "finish_reason", 2)["stop"]
        .Add(2);
    metrics
        ->AddGauge("tandem_cache_config_info", "Cache",
                   {{"block_size", "16"}, {"num_blocks", "9"}, {"dtype", "x"}})
        .Set(1);
  }
  const std::string labels = "{engine=\"0\",model_name=\"tales\"";
  const std::string of_router = OwnText(router);
  for (const std::string& line :
       {"vllm:prompt_tokens_total" + labels + "} 7\n",
        "vllm:prompt_tokens_cached_total" + labels + "} 3\n",
        "# TYPE vllm:time_to_first_token_seconds histogram\n" + std::string(),
        "vllm:time_to_first_token_seconds_bucket" + labels + ",le=\"0.5\"} 0\n",
        "vllm:time_to_first_token_seconds_bucket" + labels + ",le=\"1\"} 1\n",
        "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\","
        "model_name=\"tales\"} 2\n" +
            std::string()}) {
    EXPECT_THAT(of_router, HasSubstr("\n" + line));
  }
  EXPECT_THAT(of_router, Not(HasSubstr("vllm:num_requests_running")));
  const std::string of_worker = OwnText(worker);
  EXPECT_THAT(of_worker,
              HasSubstr("\nvllm:num_requests_running" + labels + "} 5\n"));
  EXPECT_THAT(of_worker, HasSubstr("\nvllm:cache_config_info{block_size=\"16\","
                                   "cache_dtype=\"x\",engine=\"0\",model_name="
                                   "\"tales\",num_gpu_blocks=\"9\"} 1\n"));
  EXPECT_THAT(of_worker, Not(HasSubstr("vllm:prompt_tokens")));
  EXPECT_THAT(OwnText(Metrics("router", "")), Not(HasSubstr("vllm:")));
}

TEST(MetricsTest, TheProcessDescribesItself) {
  const std::string text = Metrics("router", "").Text();
  const auto value = [&](const std::string& name) {
    std::smatch match;
    const std::regex line("\n" + name + "\\{role=\"router\"\\} ([^\n]+)\n");
    EXPECT_TRUE(std::regex_search(text, match, line)) << name;
    return match.empty() ? -1 : std::strtod(match[1].str().c_str(), nullptr);
  };
  EXPECT_GE(value("process_cpu_seconds_total"), 0);
  EXPECT_GT(value("process_resident_memory_bytes"), 1e6);
  EXPECT_GT(value("process_virtual_memory_bytes"),
            value("process_resident_memory_bytes"));
  EXPECT_GE(value("process_open_fds"), 3);
  EXPECT_GE(value("process_max_fds"), value("process_open_fds"));
  EXPECT_GT(value("process_start_time_seconds"), 1.6e9);
  EXPECT_EQ(value("process_threads"), 1);
}

TEST(MetricsTest, BucketsAreSortedAndCoverTheirRange) {
  EXPECT_EQ(kTimeToFirstTokenBuckets.front(), 0.001);
  EXPECT_EQ(kTimeToFirstTokenBuckets.back(), 2560);
  EXPECT_EQ(kTokenTimeBuckets.front(), 0.01);
  EXPECT_EQ(kTokenTimeBuckets.back(), 80);
  EXPECT_EQ(kRequestTimeBuckets.front(), 0.3);
  EXPECT_EQ(kRequestTimeBuckets.back(), 7680);
  for (const Buckets* buckets : {&kTimeToFirstTokenBuckets, &kTokenTimeBuckets,
                                 &kRequestTimeBuckets, &kStageTimeBuckets}) {
    EXPECT_TRUE(std::is_sorted(buckets->begin(), buckets->end()));
  }
  EXPECT_EQ(TokenCountBuckets(300),
            (Buckets{1, 2, 5, 10, 20, 50, 100, 200, 500}));
}

}  // namespace
}  // namespace tandem
