// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string_view>

#include "absl/strings/str_split.h"
#include "cli/explain/command.h"

namespace tandem::explain {
namespace {

Explanation Llama() {
  Explanation e{.model = "Llama 3.1 8B",
                .spec = *LoadConfig(""),
                .formats = {},
                .lengths = {500, 200}};
  e.machine = Machine{.threads = 2,
                      .flops_per_second = 200e9,
                      .matrix_flops_per_second = 200e9,
                      .bytes_per_second = 10e9,
                      .read_bytes = 1e9};
  return e;
}

// Characters, each of one column here.
size_t Columns(std::string_view line) {
  size_t columns = 0;
  for (const char c : line) columns += (c & 0xc0) != 0x80;
  return columns;
}

void ExpectFits(const std::string& text) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    EXPECT_LE(Columns(std::string(line)), 80u) << line;
  }
}

TEST(ExplainReportTest, NumbersAreShort) {
  EXPECT_EQ(Count(6225), "6 225");
  EXPECT_EQ(Count(624750), "624 750");
  EXPECT_EQ(Count(2499500), "2 499 500");
  EXPECT_EQ(Count(150), "150");
  EXPECT_EQ(Short(0), "0");
  EXPECT_EQ(Short(999), "999");
  EXPECT_EQ(Short(9994), "9.99 k");
  EXPECT_EQ(Short(9996), "10.0 k");
  EXPECT_EQ(Short(1.25e9), "1.25 G");
  EXPECT_EQ(Short(999.7e6), "1.00 G");
}

TEST(ExplainReportTest, TextHasTheFiguresAndFits) {
  const std::string text = ReportText(Llama(), /*color=*/false);
  ExpectFits(text);
  for (const std::string_view part :
       {"6 225          150     41.5", "119 900          700      171",
        "624 750        1 500      416", "2 499 500        3 000      833",
        "8.03 G parameters", "131072 B", "ridge 20.0 FLOP/byte",
        // 119 900 and 699 positions, times 32 layers and 8 KV heads.
        "K/V rows computed                          30.7 M        178 944"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  EXPECT_EQ(text.find('\033'), std::string::npos);
  EXPECT_NE(ReportText(Llama(), /*color=*/true).find("\033[1m"),
            std::string::npos);
}

TEST(ExplainReportTest, LongestRequestFitsTheColumnsToo) {
  Explanation e = Llama();
  e.lengths = {2000, 3000};
  e.spec.layers = 126;
  e.spec.heads = e.spec.kv_heads = 128;
  ExpectFits(ReportText(e, false));
}

TEST(ExplainReportTest, ExpertsInAFormatOfTheirOwnAreNamed) {
  Explanation e = Llama();
  EXPECT_EQ(ReportText(e, false).find("experts"), std::string::npos);
  e.formats.experts = kernels::DType::kInt4;
  const std::string text = ReportText(e, false);
  ExpectFits(text);
  EXPECT_NE(text.find("weights bf16, experts int4, KV cache bf16"),
            std::string::npos)
      << text;
}

TEST(ExplainReportTest, PhasesAreBoundByWhatIntensitySays) {
  const Explanation e = Llama();
  const std::vector<Phase> phases = Phases(e.spec, e.formats, e.lengths);
  ASSERT_EQ(phases.size(), 4u);
  EXPECT_TRUE(IsComputeBound(phases[0].work, *e.machine));
  EXPECT_FALSE(IsComputeBound(phases[1].work, *e.machine));
  // 15.0 GB of matrices and 600 positions of 128 KiB at 10 GB/s.
  EXPECT_NEAR(PredictSeconds(phases[1].work, *e.machine),
              1.5009 + 600 * 131072 / 10e9, 0.001);
  // 2 x 7.5e9 parameters at 200 GFLOP/s, less than a hundredth of attention.
  EXPECT_NEAR(PredictSeconds(phases[0].work, *e.machine) / 500, 0.070, 0.002);
  EXPECT_EQ(phases[3].work.weight_bytes, phases[1].work.weight_bytes);
}

TEST(ExplainReportTest, JsonHasCountsAndPredictions) {
  const auto json = nlohmann::json::parse(ReportJson(Llama()));
  EXPECT_EQ(json["kv_bytes_per_token"]["bf16"], 131072);
  EXPECT_EQ(json["quoted"].size(), 4u);
  EXPECT_EQ(json["quoted"][3]["per_layer_and_head"]["kv_rows_without_cache"],
            2499500);
  EXPECT_EQ(json["request"]["without_cache"]["kv_rows"], 119900 * 32 * 8);
  EXPECT_EQ(json["request"]["with_cache"]["kv_rows"], 699 * 32 * 8);
  EXPECT_EQ(json["machine"]["phases"][0]["compute_bound"], true);
  EXPECT_EQ(json["machine"]["ridge"], 20);
}

}  // namespace
}  // namespace tandem::explain
