// SPDX-License-Identifier: Apache-2.0
// The curves on the left, the grid of steps on the right.

#include <algorithm>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "cli/explain/drawing.h"
#include "cli/explain/report.h"
#include "cli/svg.h"

namespace tandem::explain {

using cli::Axis;
using cli::Box;
using cli::Point;
using cli::Svg;

namespace {

constexpr double kWidth = 960;
constexpr double kHeight = 480;
constexpr Box kCurves = {90, 120, 540, 410};
constexpr Point kGrid = {690, 150};
constexpr Point kGridSize = {255, 250};
constexpr double kLargestCell = 36;
constexpr std::string_view kInk = "#111827";
constexpr std::string_view kSoft = "#6b7280";
constexpr std::string_view kLines = "#e5e7eb";
constexpr std::string_view kWithoutColor = "#dc2626";
constexpr std::string_view kWithColor = "#059669";
constexpr std::string_view kAgainColor = "#fecaca";

void DrawCurve(const std::vector<double>& values, const Axis& x, const Axis& y,
               std::string_view color, Svg* svg) {
  constexpr size_t kPoints = 200;
  std::vector<Point> points;
  const size_t stride = std::max<size_t>(1, values.size() / kPoints);
  for (size_t i = 0; i < values.size(); i += stride) {
    points.push_back({x(static_cast<double>(i + 1)), y(values[i])});
  }
  points.push_back({x(static_cast<double>(values.size())), y(values.back())});
  svg->Curve(points, color);
}

void DrawCurvesOf(Lengths lengths, Svg* svg) {
  const std::vector<double> without = CumulativeKvRows(lengths, false);
  const std::vector<double> with = CumulativeKvRows(lengths, true);
  svg->Text({30, 100}, "K/V rows computed so far, one layer and head",
            {.size = 14, .color = kInk, .bold = true});
  const std::vector<double> ticks = cli::LinearTicks(without.back(), 5);
  const Axis y(0, ticks.back(), kCurves.bottom, kCurves.top);
  for (const double tick : ticks) {
    svg->Line({kCurves.left, y(tick)}, {kCurves.right, y(tick)}, kLines);
    svg->Text({kCurves.left - 8, y(tick) + 4}, Count(tick),
              {.size = 11, .color = kSoft, .anchor = "end"});
  }
  const auto output = static_cast<double>(lengths.output);
  const Axis x(1, output, kCurves.left, kCurves.right);
  for (const double tick : cli::LinearTicks(output, 6)) {
    if (tick < 1 || tick > output) continue;
    svg->Text({x(tick), kCurves.bottom + 18}, Count(tick),
              {.size = 11, .color = kSoft, .anchor = "middle"});
  }
  svg->Text({kCurves.right, kCurves.bottom + 38}, "output tokens",
            {.size = 11, .color = kSoft, .anchor = "end"});
  DrawCurve(without, x, y, kWithoutColor, svg);
  DrawCurve(with, x, y, kWithColor, svg);
  svg->Text({kCurves.left + 14, kCurves.top + 16},
            absl::StrCat("without a cache: ", Count(without.back())),
            {.color = kWithoutColor, .bold = true});
  svg->Text({kCurves.left + 14, kCurves.top + 34},
            absl::StrCat("with one: ", Count(with.back())),
            {.color = kWithColor, .bold = true});
}

void DrawGridOf(Lengths lengths, Svg* svg) {
  const auto grid = StepGrid(lengths);
  const double cell_size =
      std::min({kLargestCell, kGridSize.x / static_cast<double>(grid[0].size()),
                kGridSize.y / static_cast<double>(grid.size())});
  svg->Text({kGrid.x - 60, 100}, "Steps by positions",
            {.size = 14, .color = kInk, .bold = true});
  for (size_t i = 0; i < grid[0].size(); ++i) {
    svg->Text(
        {kGrid.x + (static_cast<double>(i) + 0.5) * cell_size, kGrid.y - 8},
        absl::StrCat(i), {.size = 11, .color = kSoft, .anchor = "middle"});
  }
  for (size_t step = 0; step < grid.size(); ++step) {
    const double top = kGrid.y + static_cast<double>(step) * cell_size;
    svg->Text({kGrid.x - 10, top + cell_size / 2 + 4},
              absl::StrCat("step ", step + 1),
              {.size = 11, .color = kSoft, .anchor = "end"});
    for (size_t i = 0; i < grid[step].size(); ++i) {
      const double left = kGrid.x + static_cast<double>(i) * cell_size;
      const Cell cell = grid[step][i];
      if (cell == Cell::kNone) continue;
      svg->Rect({left + 2, top + 2, left + cell_size - 2, top + cell_size - 2},
                cell == Cell::kComputed ? kWithColor : kAgainColor, 4);
    }
  }
  double y = kGrid.y + static_cast<double>(grid.size()) * cell_size + 28;
  svg->Text({kGrid.x - 60, y},
            absl::StrCat(CountCells(grid, Cell::kComputed),
                         " cells computed for the first time"),
            {.color = kWithColor, .bold = true});
  y += 20;
  svg->Text({kGrid.x - 60, y},
            absl::StrCat(CountCells(grid, Cell::kAgain),
                         " recomputed, or read from the cache"),
            {.color = kWithoutColor, .bold = true});
}

}  // namespace

std::string ReportSvg(const Explanation& e) {
  Svg svg(kWidth, kHeight);
  const engine::ModelSpec& spec = e.spec;
  svg.Text({30, 42}, absl::StrCat("tandem explain: ", e.model),
           {.size = 20, .color = kInk, .bold = true});
  svg.Text({30, 68},
           absl::StrCat("prompt of ", e.lengths.prompt, ", output of ",
                        e.lengths.output, "; ", spec.layers, " layers, ",
                        spec.heads, " heads, ", KvHeads(spec), "; ",
                        KvBytesPerToken(spec, e.formats.kv),
                        " bytes of KV per token in ",
                        std::string(kernels::Name(e.formats.kv))),
           {.size = 13, .color = kSoft});
  DrawCurvesOf(e.lengths, &svg);
  DrawGridOf(GridLengths(e.lengths), &svg);
  return std::move(svg).Take();
}

}  // namespace tandem::explain
