// SPDX-License-Identifier: Apache-2.0
// The few SVG elements that a chart needs, and the arithmetic of its axes.

#ifndef TANDEM_CLI_SVG_H_
#define TANDEM_CLI_SVG_H_

#include <string>
#include <string_view>
#include <vector>

namespace tandem::cli {

struct Point {
  double x = 0, y = 0;
};

struct Box {
  double left = 0, top = 0, right = 0, bottom = 0;
};

struct TextStyle {
  double size = 12;
  std::string_view color = "#374151";
  std::string_view anchor = "start";  // start, middle, end
  bool bold = false;
};

// Pixels from the top left; text is escaped.
class Svg {
 public:
  Svg(double width, double height);

  void Rect(const Box& box, std::string_view fill, double radius = 0);
  void Line(Point from, Point to, std::string_view color, double width = 1,
            bool dashed = false);
  void Curve(const std::vector<Point>& points, std::string_view color);
  // What lies between the points and `bottom`.
  void Area(const std::vector<Point>& points, double bottom,
            std::string_view color, double opacity);
  void Text(Point at, std::string_view text, const TextStyle& style = {});

  std::string Take() &&;

 private:
  std::string text_;
};

// Maps values to pixels. A logarithmic axis takes positive values only.
class Axis {
 public:
  Axis(double low, double high, double low_pixel, double high_pixel,
       bool logarithmic = false);

  double operator()(double value) const;  // clamped to the axis
  double low() const { return low_; }
  double high() const { return high_; }

 private:
  double low_, high_, low_pixel_, high_pixel_;
  bool logarithmic_;
};

// Round values from 0 to at least `high`: about `count` steps of 1, 2 or 5
// times a power of ten.
std::vector<double> LinearTicks(double high, int count);

// 1, 2 and 5 times the powers of ten (over three decades: the powers alone)
// that enclose low..high. REQUIRES: 0 < low <= high.
std::vector<double> LogarithmicTicks(double low, double high);

// "0.05", "1.5", "20", "1500" : a tick without trailing zeros.
std::string TickText(double value);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_SVG_H_
