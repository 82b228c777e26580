// SPDX-License-Identifier: Apache-2.0
#include "cli/svg.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem::cli {
namespace {

// A tenth of a pixel is as fine as anybody sees.
std::string Pixels(double value) {
  std::string text = absl::StrFormat("%.1f", value);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

std::string Escaped(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        // Other control characters are not allowed in XML at all.
        escaped += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
  }
  return escaped;
}

std::string Joined(const std::vector<Point>& points) {
  std::string text;
  for (const Point& point : points) {
    absl::StrAppend(&text, text.empty() ? "M" : "L", Pixels(point.x), " ",
                    Pixels(point.y));
  }
  return text;
}

}  // namespace

Svg::Svg(double width, double height) {
  text_ =
      absl::StrCat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"",
                   Pixels(width), "\" height=\"", Pixels(height),
                   "\" viewBox=\"0 0 ", Pixels(width), " ", Pixels(height),
                   "\" font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, "
                   "sans-serif\">\n");
  Rect({0, 0, width, height}, "#ffffff");
}

void Svg::Rect(const Box& box, std::string_view fill, double radius) {
  absl::StrAppend(&text_, "<rect x=\"", Pixels(box.left), "\" y=\"",
                  Pixels(box.top), "\" width=\"", Pixels(box.right - box.left),
                  "\" height=\"", Pixels(box.bottom - box.top), "\" rx=\"",
                  Pixels(radius), "\" fill=\"", std::string(fill), "\"/>\n");
}

void Svg::Line(Point from, Point to, std::string_view color, double width,
               bool dashed) {
  absl::StrAppend(&text_, "<line x1=\"", Pixels(from.x), "\" y1=\"",
                  Pixels(from.y), "\" x2=\"", Pixels(to.x), "\" y2=\"",
                  Pixels(to.y), "\" stroke=\"", std::string(color),
                  "\" stroke-width=\"", Pixels(width), "\"",
                  dashed ? " stroke-dasharray=\"5 4\"" : "", "/>\n");
}

void Svg::Curve(const std::vector<Point>& points, std::string_view color) {
  absl::StrAppend(&text_, "<path d=\"", Joined(points),
                  "\" fill=\"none\" stroke=\"", std::string(color),
                  "\" stroke-width=\"2\" stroke-linejoin=\"round\" "
                  "stroke-linecap=\"round\"/>\n");
}

void Svg::Area(const std::vector<Point>& points, double bottom,
               std::string_view color, double opacity) {
  if (points.empty()) return;
  absl::StrAppend(&text_, "<path d=\"", Joined(points), "L",
                  Pixels(points.back().x), " ", Pixels(bottom), "L",
                  Pixels(points.front().x), " ", Pixels(bottom), "Z\" fill=\"",
                  std::string(color), "\" fill-opacity=\"", opacity, "\"/>\n");
}

void Svg::Text(Point at, std::string_view text, const TextStyle& style) {
  absl::StrAppend(&text_, "<text x=\"", Pixels(at.x), "\" y=\"", Pixels(at.y),
                  "\" font-size=\"", Pixels(style.size), "\" fill=\"",
                  std::string(style.color), "\" text-anchor=\"",
                  std::string(style.anchor), "\"",
                  style.bold ? " font-weight=\"600\"" : "", ">", Escaped(text),
                  "</text>\n");
}

std::string Svg::Take() && { return std::move(text_) + "</svg>\n"; }

Axis::Axis(double low, double high, double low_pixel, double high_pixel,
           bool logarithmic)
    : low_(low),
      high_(high),
      low_pixel_(low_pixel),
      high_pixel_(high_pixel),
      logarithmic_(logarithmic) {}

double Axis::operator()(double value) const {
  value = std::clamp(value, low_, high_);
  const double share = high_ <= low_ ? 0
                       : logarithmic_
                           ? std::log(value / low_) / std::log(high_ / low_)
                           : (value - low_) / (high_ - low_);
  return low_pixel_ + share * (high_pixel_ - low_pixel_);
}

std::vector<double> LinearTicks(double high, int count) {
  if (!(high > 0)) high = 1;
  const double rough = high / count;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {5, 2, 1}) {
    if (factor * power >= rough * (1 - 1e-9)) step = factor * power;
  }
  std::vector<double> ticks = {0};
  while (ticks.back() < high * (1 - 1e-9)) {
    ticks.push_back(static_cast<double>(ticks.size()) * step);
  }
  return ticks;
}

std::vector<double> LogarithmicTicks(double low, double high) {
  const int first = static_cast<int>(std::floor(std::log10(low) + 1e-9));
  const int last = static_cast<int>(std::ceil(std::log10(high) - 1e-9));
  std::vector<double> ticks;
  for (int power = first; power <= std::max(last, first + 1); ++power) {
    for (const double factor : {1, 2, 5}) {
      if (factor > 1 && last - first > 3) continue;
      ticks.push_back(factor * std::pow(10, power));
    }
  }
  // Only the last below `low` and the first above `high` are wanted.
  while (ticks.size() > 2 && ticks[1] <= low * (1 + 1e-9)) {
    ticks.erase(ticks.begin());
  }
  while (ticks.size() > 2 && ticks[ticks.size() - 2] >= high * (1 - 1e-9)) {
    ticks.pop_back();
  }
  return ticks;
}

std::string TickText(double value) {
  std::string text = absl::StrFormat("%.6f", value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}

}  // namespace tandem::cli
