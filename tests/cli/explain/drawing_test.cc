// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/drawing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_split.h"
#include "cli/explain/command.h"
#include "cli/explain/report.h"

namespace tandem::explain {
namespace {

int CountOf(const std::string& text, std::string_view part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + part.size())) {
    ++count;
  }
  return count;
}

std::vector<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n');
}

TEST(DrawingTest, GridOfThreeAndFourSteps) {
  EXPECT_EQ(DrawGrid(GridLengths({100, 50}), /*color=*/false),
            "  position 0 1 2 3 4 5\n"
            "  step 1    ■ ■ ■\n"
            "  step 2    □ □ □ ■\n"
            "  step 3    □ □ □ □ ■\n"
            "  step 4    □ □ □ □ □ ■\n"
            "  ■ 6 computed   □ 12 recomputed without a cache, read from it "
            "with one\n");
  const std::string colored = DrawGrid(GridLengths({100, 50}), /*color=*/true);
  // With the legend's.
  EXPECT_EQ(CountOf(colored, "\033[32m■\033[0m"), 6 + 1);
  EXPECT_EQ(CountOf(colored, "\033[31m□\033[0m"), 12 + 1);
}

TEST(DrawingTest, GridIsOfTheRequestWhereEachCellCanBeSeen) {
  EXPECT_EQ(DrawGrid(GridLengths({5, 3}), /*color=*/false),
            "  position 0 1 2 3 4 5 6\n"
            "  step 1    ■ ■ ■ ■ ■\n"
            "  step 2    □ □ □ □ □ ■\n"
            "  step 3    □ □ □ □ □ □ ■\n"
            "  ■ 7 computed   □ 11 recomputed without a cache, read from it "
            "with one\n");
  EXPECT_EQ(GridLengths({10, 1}).prompt, 10);
  EXPECT_EQ(GridLengths({1, 10}).output, 10);
  EXPECT_EQ(GridLengths({10, 2}).prompt, 3);
}

TEST(DrawingTest, CurvesBeginAtThePromptAndEndAtTheirSums) {
  const std::string text = DrawCurves({100, 50}, /*color=*/false);
  const std::vector<std::string> lines = Lines(text);
  ASSERT_EQ(lines.size(), 12u + 3 + 1);
  EXPECT_EQ(CountOf(text, "●"), 64 + 1) << "a column each, and the legend";
  // Without a cache: from the lowest line, left, to the highest, right.
  EXPECT_EQ(lines[0].substr(0, 11), "      6 225");
  EXPECT_TRUE(lines[0].ends_with("●")) << lines[0];
  EXPECT_EQ(lines[11].find("          0 ┤●"), 0u) << lines[11];
  EXPECT_TRUE(lines[11].ends_with("○")) << "149 of 6 225: " << lines[11];
  EXPECT_NE(text.find("● without a cache: 6 225   ○ with one: 149"),
            std::string::npos);
  EXPECT_EQ(text.find('\033'), std::string::npos);
  EXPECT_EQ(CountOf(DrawCurves({100, 50}, true), "\033[31m●\033[0m"), 64 + 1);
}

TEST(DrawingTest, OneOutputTokenIsACurveToo) {
  EXPECT_NE(DrawCurves({7, 1}, false).find("without a cache: 7 "),
            std::string::npos);
}

TEST(DrawingTest, SvgHasBothCurvesAndEveryCell) {
  Explanation e{.model = "Llama 3.1 <8B>", .spec = *LoadConfig("")};
  e.lengths = {100, 50};
  const std::string svg = ReportSvg(e);
  EXPECT_EQ(CountOf(svg, "<path "), 2);
  EXPECT_EQ(CountOf(svg, "fill=\"#059669\"/>"), 6);
  EXPECT_EQ(CountOf(svg, "fill=\"#fecaca\"/>"), 12);
  for (const std::string_view part :
       {"Llama 3.1 &lt;8B&gt;", "without a cache: 6 225", "with one: 149",
        "6 cells computed", "12 recomputed, or read",
        "131072 bytes of KV per token in bf16"}) {
    EXPECT_NE(svg.find(part), std::string::npos) << part;
  }
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
}

}  // namespace
}  // namespace tandem::explain
