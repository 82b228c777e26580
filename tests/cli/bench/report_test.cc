// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/bench/progress_bar.h"
#include "tests/cli/bench/records.h"

namespace tandem::bench {
namespace {

std::vector<RequestRecord> SomeRecords() {
  std::vector<RequestRecord> records;
  for (int i = 0; i < 100; ++i) {
    const double at = 0.1 * i;
    records.push_back(
        Completed(at, at, {at + 0.001 * (i + 1), at + 0.2, at + 0.3}));
    records.back().server.split = i < 30;
    records.back().server.prefill_ms = i;
  }
  records.push_back(Failed(3, 4, absl::UnavailableError("<no> \xff workers")));
  return records;
}

Report SomeReport() {
  Report report;
  report.model = "a<b>&c";
  report.router = "127.0.0.1:50051";
  report.context_length = 1024;
  report.load = "Poisson arrivals, 10 requests/s";
  report.clipping = {
      .prompts = 3, .outputs = 1, .prompt_tokens = 300, .output_tokens = 7};
  report.objectives = {{Metric::kTtft, 50.5}};
  report.metrics = {kMetrics.begin(), kMetrics.end()};
  report.percentiles = {90, 99.9};
  report.summary = Summarize(SomeRecords(), report.objectives);
  return report;
}

void ExpectSays(const std::string& text, const std::string& what) {
  EXPECT_NE(text.find(what), std::string::npos)
      << "should say: " << what << "\n"
      << text;
}

TEST(ReportTest, TheTableSaysWhatFailedAndWhatWasClipped) {
  const std::string table = ReportTable(SomeReport());
  ExpectSays(table, "100 of 101 completed");
  ExpectSays(table, "1 UNAVAILABLE: <no>");
  ExpectSays(table, "3 prompts by 300 tokens, 1 outputs by 7");
  ExpectSays(table, "p99.9");
  ExpectSays(table, "49.5 % of those sent kept ttft within 50.5 ms");
  ExpectSays(table, "30 prompts on a prefill worker, 70 on the decode");
}

TEST(ReportTest, JsonHasTheNamesAndUnitsOfVllmsBench) {
  const std::vector<RequestRecord> records = SomeRecords();
  const auto json = nlohmann::json::parse(ReportJson(SomeReport(), &records));
  EXPECT_EQ(json["completed"], 100);
  EXPECT_EQ(json["failed"], 1);
  EXPECT_EQ(json["failures"]["UNAVAILABLE"]["count"], 1);
  EXPECT_EQ(json["total_output_tokens"], 300);
  EXPECT_NEAR(json["duration"], 10.2, 1e-9);
  EXPECT_NEAR(json["request_throughput"], 100 / 10.2, 1e-9);
  EXPECT_NEAR(json["request_goodput"], 50 / 10.2, 1e-9);
  // TTFT is 1, 2, ... 100 ms.
  EXPECT_NEAR(json["mean_ttft_ms"], 50.5, 1e-6);
  EXPECT_NEAR(json["median_ttft_ms"], 50.5, 1e-6);
  EXPECT_NEAR(json["p90_ttft_ms"], 90.1, 1e-6);
  EXPECT_NEAR(json["p99.9_ttft_ms"], 99.901, 1e-6);
  for (const char* const key :
       {"mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms", "output_throughput",
        "total_token_throughput", "total_input_tokens"}) {
    EXPECT_TRUE(json[key].is_number()) << key;
  }
  EXPECT_EQ(json["requests"].size(), 101u);
  EXPECT_EQ(json["requests"][0]["arrivals"].size(), 3u);
  EXPECT_FALSE(nlohmann::json::parse(ReportJson(SomeReport(), nullptr))
                   .contains("requests"));
}

// Every element that is opened is closed, and no text breaks out of its own.
TEST(ReportTest, SvgIsWellFormed) {
  const std::string svg = ReportSvg(SomeReport());
  ExpectSays(svg, "tandem bench: a&lt;b&gt;&amp;c");
  ExpectSays(svg, "Time to first token");
  ExpectSays(svg, "red: requests failed");
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  std::vector<std::string> open;
  for (size_t at = svg.find('<'); at != std::string::npos;
       at = svg.find('<', at + 1)) {
    const size_t end = svg.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = svg.substr(at + 1, end - at - 1);
    ASSERT_EQ(tag.find('<'), std::string::npos) << tag;
    const std::string name = tag.substr(0, tag.find_first_of(" /"));
    if (tag.front() == '/') {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(tag.substr(1), open.back());
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
  }
  EXPECT_TRUE(open.empty());
}

TEST(ReportTest, SvgTextEndsOnThePage) {
  Report report = SomeReport();
  report.load =
      "arrivals of AzureLLMInferenceTrace_conv_1week.csv, times by 0.5, "
      "lengths by 0.25, at most 64 in flight";
  report.prefill_workers = report.decode_workers = 16;
  const std::string svg = ReportSvg(report);
  const auto number = [&](size_t from, const std::string& name) {
    const size_t at = svg.find(" " + name + "=\"", from) + name.size() + 3;
    return std::stod(svg.substr(at, svg.find('"', at) - at));
  };
  int texts = 0;
  for (size_t at = svg.find("<text "); at != std::string::npos;
       at = svg.find("<text ", at + 1), ++texts) {
    if (svg.find("text-anchor=\"start\"", at) > svg.find('>', at)) continue;
    const size_t begin = svg.find('>', at) + 1;
    const std::string text = svg.substr(begin, svg.find('<', begin) - begin);
    // As wide as letters are on average.
    const double width =
        0.55 * number(at, "font-size") * static_cast<double>(text.size());
    EXPECT_LE(number(at, "x") + width, 960) << text;
  }
  EXPECT_GT(texts, 20);
}

TEST(ReportTest, SvgNamesAsDashedWhatItDrawsAndLabelsTheAxisToItsEnd) {
  Report report = SomeReport();
  report.objectives = {{Metric::kTtft, 50.5}, {Metric::kE2el, 60'000}};
  const std::string svg = ReportSvg(report);
  ExpectSays(svg,
             "; goodput: ttft within 50.5 ms, e2el within 60000 ms; "
             "dashed: ttft within 50.5 ms<");
  ExpectSays(svg, ">99 %<");  // of 100 requests
  EXPECT_EQ(svg.find(">99.0 %<"), std::string::npos);
  // Of 40 requests the last is 97.5 %.
  std::vector<RequestRecord> fewer = SomeRecords();
  fewer.resize(40);
  report.objectives = {{Metric::kE2el, 60'000}};
  report.summary = Summarize(fewer, report.objectives);
  const std::string last = ReportSvg(report);
  ExpectSays(last, ">97.5 %<");
  EXPECT_EQ(last.find("dashed"), std::string::npos);
}

TEST(ReportTest, ARunInWhichNothingCompletedIsReportedToo) {
  Report report = SomeReport();
  report.summary = Summarize({Failed(0, 1, absl::UnavailableError("down"))},
                             report.objectives);
  ExpectSays(ReportTable(report), "0 of 1 completed");
  ExpectSays(ReportSvg(report), "no request completed");
  EXPECT_EQ(nlohmann::json::parse(ReportJson(report, nullptr))["completed"], 0);
}

TEST(ProgressTest, FitsItsColumnsAndGivesUpTheBarFirst) {
  const RunProgress progress = {.elapsed_s = 10,
                                .planned = 200,
                                .sent = 116,
                                .completed = 99,
                                .failed = 1,
                                .output_tokens = 8120};
  EXPECT_EQ(ProgressLine(progress, 0, 78),
            "[######......]  50 % 100/200, 16 running, 1 failed, 812 tok/s, "
            "10 s, 10 s left");
  EXPECT_EQ(ProgressLine(progress, 60, 60),
            "  50 % 100/200, 16 running, 1 failed, 812 tok/s, 10 s, 50 s ");
  for (int columns = 0; columns < 120; ++columns) {
    EXPECT_LE(ProgressLine(progress, 0, columns).size(),
              static_cast<size_t>(columns));
  }
  ExpectSays(ProgressLine({.planned = 5}, 0, 79), "0 % 0/5");
}

}  // namespace
}  // namespace tandem::bench
