// SPDX-License-Identifier: Apache-2.0
#include "cli/svg.h"

#include <gtest/gtest.h>

namespace tandem::cli {
namespace {

TEST(SvgTest, EscapesTextAndRoundsPixels) {
  Svg svg(100, 50.5);
  svg.Text({1, 2.25}, "a<b> & \"c\"\n");
  const std::string text = std::move(svg).Take();
  EXPECT_NE(text.find(">a&lt;b&gt; &amp; &quot;c&quot; </text>"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("height=\"50.5\""), std::string::npos);
  EXPECT_NE(text.find("x=\"1\" y=\"2.2\""), std::string::npos) << text;
}

TEST(AxisTest, MapsAndClamps) {
  const Axis linear(0, 10, 100, 0);
  EXPECT_DOUBLE_EQ(linear(2.5), 75);
  EXPECT_DOUBLE_EQ(linear(-5), 100);
  EXPECT_DOUBLE_EQ(linear(50), 0);
  const Axis decades(1, 1000, 0, 300, /*logarithmic=*/true);
  EXPECT_NEAR(decades(10), 100, 1e-9);
  EXPECT_NEAR(decades(0.001), 0, 1e-9);
  EXPECT_DOUBLE_EQ(Axis(3, 3, 7, 9)(3), 7) << "an empty axis";
}

TEST(TicksTest, AreRoundAndEncloseTheValues) {
  EXPECT_EQ(LinearTicks(10, 5), std::vector<double>({0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(LinearTicks(7, 4), std::vector<double>({0, 2, 4, 6, 8}));
  EXPECT_EQ(LinearTicks(0, 4).front(), 0);
  for (double high = 1e-4; high < 1e7; high *= 1.37) {
    const std::vector<double> ticks = LinearTicks(high, 5);
    EXPECT_GE(ticks.back(), high * (1 - 1e-9));
    EXPECT_GE(ticks.size(), 3u) << high;
    EXPECT_LE(ticks.size(), 7u) << high;
  }
  EXPECT_EQ(LogarithmicTicks(1.5, 30),
            std::vector<double>({1, 2, 5, 10, 20, 50}));
  EXPECT_EQ(LogarithmicTicks(0.5, 20000).size(), 7u) << "0.1 to 100 000";
  for (double low = 1e-3; low < 1e4; low *= 2.3) {
    for (double high = low; high < 1e6; high *= 7.1) {
      const std::vector<double> ticks = LogarithmicTicks(low, high);
      EXPECT_GE(ticks.size(), 2u);
      EXPECT_LE(ticks.front(), low * (1 + 1e-9)) << low << " " << high;
      EXPECT_GE(ticks.back(), high * (1 - 1e-9)) << low << " " << high;
    }
  }
}

TEST(TicksTest, TextsHaveNoTrailingZeros) {
  EXPECT_EQ(TickText(0), "0");
  EXPECT_EQ(TickText(0.05), "0.05");
  EXPECT_EQ(TickText(1.5), "1.5");
  EXPECT_EQ(TickText(20), "20");
  EXPECT_EQ(TickText(100000), "100000");
}

}  // namespace
}  // namespace tandem::cli
