// SPDX-License-Identifier: Apache-2.0
#include "cli/explain/drawing.h"

#include <array>
#include <cmath>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/explain/report.h"

namespace tandem::explain {
namespace {

constexpr int kColumns = 64;
constexpr int kRows = 12;

constexpr std::string_view kWithout = "●";
constexpr std::string_view kWith = "○";
constexpr std::string_view kComputed = "■";
constexpr std::string_view kAgain = "□";

// Of the two kinds of work: what is computed for nothing, and what is not.
constexpr std::string_view kRed = "\033[31m";
constexpr std::string_view kGreen = "\033[32m";

std::string Colored(std::string_view text, std::string_view escape,
                    bool color) {
  if (!color) return std::string(text);
  return absl::StrCat(std::string(escape), std::string(text), "\033[0m");
}

enum class Mark : uint8_t { kNone, kRecomputed, kCached };

using Canvas = std::array<std::array<Mark, kColumns>, kRows>;

// `most` is at the top; row 0 is the highest.
void Plot(const std::vector<double>& values, double most, Mark mark,
          Canvas& canvas) {
  const auto last = static_cast<double>(values.size() - 1);
  for (int x = 0; x < kColumns; ++x) {
    const auto at = static_cast<size_t>(std::lround(last * x / (kColumns - 1)));
    const auto y = std::lround(values[at] / most * (kRows - 1));
    canvas[static_cast<size_t>(kRows - 1 - y)][static_cast<size_t>(x)] = mark;
  }
}

}  // namespace

std::string DrawCurves(Lengths lengths, bool color) {
  const std::vector<double> without = CumulativeKvRows(lengths, false);
  const std::vector<double> with = CumulativeKvRows(lengths, true);
  const double most = without.back();
  Canvas canvas{};
  Plot(with, most, Mark::kCached, canvas);
  Plot(without, most, Mark::kRecomputed, canvas);
  std::string text;
  for (int y = 0; y < kRows; ++y) {
    const bool labelled = y == 0 || y == kRows - 1;
    absl::StrAppendFormat(&text, "  %9s %s",
                          y == 0      ? Count(most)
                          : !labelled ? std::string()
                                      : std::string("0"),
                          labelled ? "┤" : "│");
    std::string line;
    for (const Mark mark : canvas[static_cast<size_t>(y)]) {
      absl::StrAppend(&line,
                      mark == Mark::kRecomputed ? Colored(kWithout, kRed, color)
                      : mark == Mark::kCached   ? Colored(kWith, kGreen, color)
                                                : " ");
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  }
  absl::StrAppend(&text, std::string(12, ' '), "└");
  for (int x = 0; x < kColumns; ++x) text += "─";
  absl::StrAppendFormat(&text, "\n%14s%*s\n", "1", kColumns - 1,
                        absl::StrCat(lengths.output, " output tokens"));
  absl::StrAppend(&text, "  ", Colored(kWithout, kRed, color),
                  " without a cache: ", Count(most), "   ",
                  Colored(kWith, kGreen, color),
                  " with one: ", Count(with.back()), "\n");
  return text;
}

Lengths GridLengths(Lengths request) {
  constexpr int kMostPositions = 10;
  if (request.prompt + request.output - 1 <= kMostPositions) return request;
  return {.prompt = 3, .output = 4};
}

std::string DrawGrid(Lengths lengths, bool color) {
  const auto grid = StepGrid(lengths);
  std::string text = "  position";
  for (size_t i = 0; i < grid[0].size(); ++i) absl::StrAppend(&text, " ", i);
  text += "\n";
  for (size_t step = 0; step < grid.size(); ++step) {
    std::string line = absl::StrFormat("  step %-4d", step + 1);
    for (const Cell cell : grid[step]) {
      if (cell == Cell::kNone) break;  // none after it
      absl::StrAppend(&line, " ",
                      cell == Cell::kComputed
                          ? Colored(kComputed, kGreen, color)
                          : Colored(kAgain, kRed, color));
    }
    absl::StrAppend(&text, line, "\n");
  }
  absl::StrAppend(&text, "  ", Colored(kComputed, kGreen, color), " ",
                  CountCells(grid, Cell::kComputed), " computed   ",
                  Colored(kAgain, kRed, color), " ",
                  CountCells(grid, Cell::kAgain),
                  " recomputed without a cache, read from it with one\n");
  return text;
}

}  // namespace tandem::explain
