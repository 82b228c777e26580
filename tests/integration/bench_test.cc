// SPDX-License-Identifier: Apache-2.0
// `tandem bench` as a user runs it, against real processes.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tests/integration/cluster.h"
#include "tests/integration/shell.h"

namespace tandem::integration {
namespace {

using nlohmann::json;

// Of both streams.
Result Bench(const std::string& arguments) {
  return Shell(Tandem(absl::StrCat("bench ", arguments, " 2>&1")));
}

std::string TempFile(const std::string& name, const std::string& text = "") {
  const std::string path = absl::StrCat(testing::TempDir(), "/", name);
  std::ofstream(path) << text;
  return path;
}

json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file, nullptr, /*allow_exceptions=*/false);
}

class BenchTest : public testing::Test {
 protected:
  void SetUp() override {
    const absl::Status status = cluster_.Start();
    ASSERT_TRUE(status.ok()) << status;
    router_ = absl::StrCat("--router 127.0.0.1:", cluster_.grpc_port(), " ");
  }
  void TearDown() override { EXPECT_EQ(cluster_.WhatIsLeft(), ""); }

  Cluster cluster_{{}};
  std::string router_;
};

TEST_F(BenchTest, AnEarlierResultStaysUntilThereIsANewOne) {
  const std::string report = TempFile("earlier.json", "earlier, and longer\n");
  const std::string picture = TempFile("earlier.svg", "earlier\n");
  const std::string files =
      absl::StrCat(" --num-prompts 1 --json ", report, " --svg ", picture);
  const auto text = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_EQ(Bench("--router 127.0.0.1:1" + files).code, 1);
  EXPECT_EQ(text(report), "earlier, and longer\n");
  EXPECT_EQ(text(picture), "earlier\n");
  ASSERT_EQ(Bench(router_ + files).code, 0);
  EXPECT_EQ(ReadJson(report)["completed"], 1);
  EXPECT_TRUE(text(picture).starts_with("<svg"));
}

TEST_F(BenchTest, EveryTokenAskedForIsCountedInAnOpenLoop) {
  const std::string report = TempFile("open.json");
  const std::string picture = TempFile("open.svg");
  const Result run = Bench(router_ +
                           "--request-rate 40 --num-prompts 60 "
                           "--random-input-len 96 --random-output-len 16 "
                           "--random-range-ratio 0.5 --seed 3 "
                           "--goodput ttft:60000 tpot:60000 --save-detailed "
                           "--json " +
                           report + " --svg " + picture);
  ASSERT_EQ(run.code, 0) << run.output;
  EXPECT_NE(run.output.find("60 of 60 completed"), std::string::npos)
      << run.output;
  EXPECT_NE(run.output.find("Poisson arrivals, 40 requests/s"),
            std::string::npos);
  const json figures = ReadJson(report);
  ASSERT_TRUE(figures.is_object());
  EXPECT_EQ(figures["completed"], 60);
  EXPECT_EQ(figures["failed"], 0);
  EXPECT_EQ(figures["good_share"], 1.0);
  int64_t tokens = 0;
  for (const json& request : figures["requests"]) {
    int of_request = 0;
    double last_s = request["sent_s"];
    for (const json& arrival : request["arrivals"]) {
      of_request += arrival[1].get<int>();
      EXPECT_GE(arrival[0].get<double>(), last_s);
      last_s = arrival[0];
    }
    EXPECT_GE(of_request, 8);
    EXPECT_LE(of_request, 24);
    EXPECT_GE(request["prompt_tokens"], 48);
    EXPECT_LE(request["prompt_tokens"], 144);
    tokens += of_request;
  }
  EXPECT_EQ(figures["total_output_tokens"], tokens);
  for (const char* const metric : {"ttft", "tpot", "itl", "e2el"}) {
    const double median = figures[absl::StrCat("median_", metric, "_ms")];
    const double p99 = figures[absl::StrCat("p99_", metric, "_ms")];
    EXPECT_GT(median, 0) << metric;
    EXPECT_GE(p99, median) << metric;
  }
  std::ifstream svg(picture);
  const std::string text(std::istreambuf_iterator<char>(svg), {});
  EXPECT_NE(text.find("</svg>"), std::string::npos);
}

TEST_F(BenchTest, SharedPrefixesAreFoundAndAnEarlierRunIsNot) {
  const std::string report = TempFile("closed.json");
  const std::string arguments =
      router_ + "--max-concurrency 4 --num-prompts 24 --random-input-len 32 " +
      "--random-prefix-len 160 --random-output-len 4 --no-detokenize --json " +
      report;
  int64_t cached[2];
  for (int64_t& run_cached : cached) {
    const Result run = Bench(arguments);
    ASSERT_EQ(run.code, 0) << run.output;
    const json figures = ReadJson(report);
    EXPECT_EQ(figures["completed"], 24);
    EXPECT_EQ(figures["total_input_tokens"], 24 * 192);
    EXPECT_LE(figures["max_concurrent_requests"], 4);
    run_cached = figures["total_cached_tokens"];
  }
  // The first few run before the prefix is there; all others find it whole.
  // Were the second run's own prompts cached, it would be 176 of each.
  for (const int64_t run_cached : cached) {
    EXPECT_GE(run_cached, 12 * 160);
    EXPECT_LE(run_cached, 23 * 160);
  }
}

TEST_F(BenchTest, TracesRunWithClippingCounted) {
  const std::string trace = TempFile(
      "trace.jsonl",
      R"({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]})"
      "\n"
      R"({"timestamp": 900, "input_length": 600, "output_length": 5, "hash_ids": [0, 2]})"
      "\n"
      R"({"timestamp": 1000, "input_length": 9000, "output_length": 5, "hash_ids": [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]})"
      "\n");
  const std::string report = TempFile("trace.json");
  const Result run =
      Bench(router_ + "--trace " + trace +
            " --time-scale 0.5 --max-concurrency 1 --json " + report);
  ASSERT_EQ(run.code, 0) << run.output;
  EXPECT_NE(run.output.find("clipped       1 prompts by 7981 tokens"),
            std::string::npos)
      << run.output;
  const std::string name = trace.substr(trace.rfind('/') + 1);
  EXPECT_NE(run.output.find("arrivals of " + name), std::string::npos)
      << run.output;
  const json figures = ReadJson(report);
  EXPECT_EQ(figures["completed"], 3);
  EXPECT_EQ(figures["total_output_tokens"], 15);
  // Block 0 twice, and block 1 in the clipped one.
  EXPECT_GE(figures["total_cached_tokens"], 512 * 2);
}

TEST_F(BenchTest, FailuresAreCountedByTheirStatus) {
  const Result run = Bench(router_ +
                           "--max-concurrency 2 --num-prompts 4 --timeout "
                           "0.02 --random-output-len 512 "
                           "--random-input-len 500");
  EXPECT_EQ(run.code, 1) << run.output;
  EXPECT_NE(run.output.find("0 of 4 completed"), std::string::npos);
  // Whichever side sees it first.
  EXPECT_NE(run.output.find("DEADLINE_EXCEEDED"), std::string::npos)
      << run.output;
  EXPECT_NE(run.output.find("no request completed"), std::string::npos);
}

TEST(BenchUsageTest, MistakesAreNamedBeforeAnythingIsSent) {
  const std::string bad_trace = TempFile("bad.csv", "one,two\n1,2\n");
  struct Case {
    std::string arguments;
    int code;
    std::string says;
  };
  const Case cases[] = {
      {"--help", 0, "--request-rate"},
      {"--request-rate fast", 2, "'fast' is neither a number above 0 nor inf"},
      {"--request-rate 0", 2, "--request-rate: '0'"},
      {"--burstiness 2", 2, "--burstiness needs a --request-rate"},
      {"--goodput ttft", 2, "--goodput: 'ttft'"},
      {"--goodput ttft:1 tpot", 2, "--goodput: 'tpot'"},
      {"--metric-percentiles 100", 2, "above 0 and below 100"},
      {"--percentile-metrics speed", 2, "none of ttft, tpot, itl, e2el"},
      {"--trace x --request-rate 4", 2, "exclude each other"},
      {"--time-scale 2", 2, "--time-scale needs --trace"},
      {"--random-sigma 1", 2, "needs --random-distribution lognormal"},
      {"--save-detailed", 2, "--save-detailed needs --json"},
      {"--trace /no/such/file", 1, "cannot read /no/such/file"},
      {"--trace " + bad_trace, 1, "bad.csv:1: the header is 'one,two'"},
      {"--json /no/such/dir/x.json", 1, "cannot write /no/such/dir/x.json"},
      {"--router 127.0.0.1:1", 1, "no router answers at 127.0.0.1:1"},
  };
  for (const Case& c : cases) {
    const Result result = Bench(c.arguments);
    EXPECT_EQ(result.code, c.code) << c.arguments << ": " << result.output;
    EXPECT_NE(result.output.find(c.says), std::string::npos)
        << c.arguments << ": " << result.output;
  }
}

}  // namespace
}  // namespace tandem::integration
