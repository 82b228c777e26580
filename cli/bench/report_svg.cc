// SPDX-License-Identifier: Apache-2.0
// Three bands from top to bottom: key figures; the latency at every
// percentile, both axes logarithmic so that a tail shows; tokens per second
// and requests in flight over time.

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/bench/report.h"
#include "cli/svg.h"

namespace tandem::bench {

using cli::Axis;
using cli::Box;
using cli::LinearTicks;
using cli::LogarithmicTicks;
using cli::Point;
using cli::Svg;
using cli::TickText;

namespace {

constexpr double kWidth = 960;
constexpr double kHeight = 800;
constexpr Box kLatency = {70, 220, 790, 470};
constexpr Box kTimeline = {70, 570, 890, 740};
constexpr std::string_view kInk = "#111827";
constexpr std::string_view kSoft = "#6b7280";
constexpr std::string_view kGrid = "#e5e7eb";
constexpr std::string_view kTokens = "#2563eb";
constexpr std::string_view kInFlight = "#d97706";
constexpr std::string_view kFailed = "#dc2626";
constexpr double kSmallest_ms = 1e-3;  // what a logarithmic axis can show
constexpr double kMostNines = 4;       // 99.99 %

std::string_view ColorOf(Metric metric) {
  switch (metric) {
    case Metric::kTtft:
      return "#2563eb";
    case Metric::kTpot:
      return "#059669";
    case Metric::kItl:
      return "#d97706";
    case Metric::kE2el:
      return "#7c3aed";
  }
  return kInk;
}

void DrawTiles(const Report& report, Svg* svg) {
  const Summary& s = report.summary;
  struct Tile {
    std::string value, name;
  };
  const Distribution& ttft = s.latencies_ms.at(Metric::kTtft);
  const Distribution& tpot = s.latencies_ms.at(Metric::kTpot);
  std::vector<Tile> tiles = {
      {ShortNumber(s.PerSecond(s.completed)), "requests/s"},
      {ShortNumber(s.PerSecond(static_cast<double>(s.output_tokens))),
       "output tokens/s"},
      {ShortNumber(ttft.median()) + " ms", "TTFT, median"},
      {ShortNumber(ttft.at(99)) + " ms", "TTFT, p99"},
      {ShortNumber(tpot.at(99)) + " ms", "TPOT, p99"}};
  if (report.objectives.empty()) {
    tiles.push_back({absl::StrCat(s.failed), "failed"});
  } else {
    tiles.push_back({ShortNumber(s.PerSecond(s.good)) + "/s", "goodput"});
  }
  const double step = (kWidth - 60) / static_cast<double>(tiles.size());
  double left = 30;
  for (const Tile& tile : tiles) {
    svg->Rect({left, 90, left + step - 10, 158}, "#f3f4f6", 8);
    svg->Text({left + 14, 122}, tile.value,
              {.size = 20, .color = kInk, .bold = true});
    svg->Text({left + 14, 144}, tile.name, {.color = kSoft});
    left += step;
  }
}

// 0 % is 0, 90 % is 1, 99 % is 2: every nine takes as much room.
double Nines(double percent) { return -std::log10(1 - percent / 100); }
double PercentAt(double nines) { return 100 * (1 - std::pow(10, -nines)); }

struct Label {
  double y;
  std::string text;
  std::string_view color;
};

// Moves labels apart that would cover each other.
void DrawLabels(std::vector<Label> labels, double x, Svg* svg) {
  std::sort(labels.begin(), labels.end(),
            [](const Label& a, const Label& b) { return a.y < b.y; });
  for (size_t i = 1; i < labels.size(); ++i) {
    labels[i].y = std::max(labels[i].y, labels[i - 1].y + 16);
  }
  for (const Label& label : labels) {
    svg->Text({x, label.y + 4}, label.text,
              {.color = label.color, .bold = true});
  }
}

// Labels are that far apart at least.
constexpr double kLabelWidth = 44;

// The usual ones, and where the axis ends.
void DrawPercentiles(const Axis& x, Svg* svg) {
  const auto draw = [&](double percent, const std::string& label) {
    const double at = x(Nines(percent));
    svg->Line({at, kLatency.top}, {at, kLatency.bottom}, kGrid);
    svg->Text({at, kLatency.bottom + 18}, label + " %",
              {.size = 11, .color = kSoft, .anchor = "middle"});
    return at;
  };
  double right = 0;
  for (const double percent : {0.0, 50.0, 75.0, 90.0, 99.0, 99.9, 99.99}) {
    if (Nines(percent) > x.high() + 1e-9) continue;
    right = draw(percent, TickText(percent));
  }
  if (right + kLabelWidth > kLatency.right) return;
  // Every nine has a decimal more.
  draw(PercentAt(x.high()), absl::StrFormat("%.*f", static_cast<int>(x.high()),
                                            PercentAt(x.high())));
}

// The objectives whose limits lie on the axis are drawn, and returned.
std::vector<Objective> DrawLatency(const Report& report, Svg* svg) {
  svg->Text({30, 196}, "Latency by percentile",
            {.size = 15, .color = kInk, .bold = true});
  double low = 1e300, high = 0;
  size_t most = 1;
  for (const Metric metric : report.metrics) {
    const Distribution& samples = report.summary.latencies_ms.at(metric);
    if (samples.count() == 0) continue;
    // Nobody waits for the quickest: they may leave at the bottom.
    low = std::min(low, std::max(kSmallest_ms, samples.at(5)));
    high = std::max(high, std::max(kSmallest_ms, samples.max()));
    // As far as there are requests: the many samples of ITL would leave the
    // others half the width.
    if (metric != Metric::kItl || report.metrics.size() == 1) {
      most = std::max(most, samples.count());
    }
  }
  if (high == 0) {
    svg->Text({kLatency.left, 340}, "no request completed", {.color = kSoft});
    return {};
  }
  const std::vector<double> ticks = LogarithmicTicks(low, high);
  const Axis y(ticks.front(), ticks.back(), kLatency.bottom, kLatency.top,
               true);
  for (const double tick : ticks) {
    svg->Line({kLatency.left, y(tick)}, {kLatency.right, y(tick)}, kGrid);
    svg->Text({kLatency.left - 8, y(tick) + 4}, TickText(tick) + " ms",
              {.size = 11, .color = kSoft, .anchor = "end"});
  }
  const double last =
      std::clamp(std::log10(static_cast<double>(most)), 1.0, kMostNines);
  const Axis x(0, last, kLatency.left, kLatency.right);
  DrawPercentiles(x, svg);
  std::vector<Objective> drawn;
  for (const Objective& objective : report.objectives) {
    if (objective.limit_ms < y.low() || objective.limit_ms > y.high()) continue;
    drawn.push_back(objective);
    svg->Line({kLatency.left, y(objective.limit_ms)},
              {kLatency.right, y(objective.limit_ms)},
              ColorOf(objective.metric), 1, /*dashed=*/true);
  }
  std::vector<Label> labels;
  for (const Metric metric : report.metrics) {
    const Distribution& samples = report.summary.latencies_ms.at(metric);
    if (samples.count() == 0) continue;
    // A percentile that fewer samples than 1 / (1 - p) stand behind is none.
    const double end =
        std::min(last, std::log10(static_cast<double>(samples.count())));
    std::vector<Point> points;
    for (int i = 0; i <= 200; ++i) {
      const double nines = end * i / 200;
      points.push_back({x(nines), y(samples.at(PercentAt(nines)))});
    }
    svg->Curve(points, ColorOf(metric));
    labels.push_back(
        {points.back().y, std::string(MetricTitle(metric)), ColorOf(metric)});
  }
  DrawLabels(std::move(labels), kLatency.right + 10, svg);
  return drawn;
}

void DrawTimeline(const Summary& s, Svg* svg) {
  svg->Text({30, 534}, "Over time", {.size = 15, .color = kInk, .bold = true});
  if (s.timeline.empty()) return;
  double most_tokens = 0, most_in_flight = 0;
  for (const Interval& interval : s.timeline) {
    most_tokens =
        std::max(most_tokens, static_cast<double>(interval.output_tokens));
    most_in_flight = std::max(most_in_flight, interval.in_flight);
  }
  const std::vector<double> left_ticks =
      LinearTicks(most_tokens / s.interval_s, 4);
  const std::vector<double> right_ticks = LinearTicks(most_in_flight, 4);
  const Axis tokens(0, left_ticks.back(), kTimeline.bottom, kTimeline.top);
  const Axis in_flight(0, right_ticks.back(), kTimeline.bottom, kTimeline.top);
  for (const double tick : left_ticks) {
    svg->Line({kTimeline.left, tokens(tick)}, {kTimeline.right, tokens(tick)},
              kGrid);
    svg->Text({kTimeline.left - 8, tokens(tick) + 4}, TickText(tick),
              {.size = 11, .color = kTokens, .anchor = "end"});
  }
  for (const double tick : right_ticks) {
    svg->Text({kTimeline.right + 8, in_flight(tick) + 4}, TickText(tick),
              {.size = 11, .color = kInFlight});
  }
  svg->Text({kTimeline.left, 556}, "output tokens/s", {.color = kTokens});
  svg->Text({kTimeline.right, 556}, "requests in flight",
            {.color = kInFlight, .anchor = "end"});
  const Axis x(0, s.duration_s, kTimeline.left, kTimeline.right);
  for (const double tick : LinearTicks(s.duration_s, 8)) {
    if (tick > s.duration_s) break;
    svg->Text({x(tick), kTimeline.bottom + 18}, TickText(tick) + " s",
              {.size = 11, .color = kSoft, .anchor = "middle"});
  }
  std::vector<Point> steps, curve;
  for (const Interval& interval : s.timeline) {
    const double begin = x(interval.begin_s);
    const double end = x(interval.begin_s + s.interval_s);
    // The end of the run may cut the last one short.
    const double length =
        std::min(s.interval_s, s.duration_s - interval.begin_s);
    const double height =
        tokens(static_cast<double>(interval.output_tokens) / length);
    steps.push_back({begin, height});
    steps.push_back({end, height});
    curve.push_back({(begin + end) / 2, in_flight(interval.in_flight)});
  }
  svg->Area(steps, kTimeline.bottom, kTokens, 0.25);
  svg->Curve(curve, kInFlight);
  bool failed = false;
  for (const Interval& interval : s.timeline) {
    if (interval.failed == 0) continue;
    failed = true;
    svg->Rect(
        {x(interval.begin_s), kTimeline.bottom - 6,
         std::max(x(interval.begin_s + s.interval_s), x(interval.begin_s) + 2),
         kTimeline.bottom},
        kFailed);
  }
  if (failed) {
    svg->Text({(kTimeline.left + kTimeline.right) / 2, 556},
              "red: requests failed", {.color = kFailed, .anchor = "middle"});
  }
}

}  // namespace

std::string ReportSvg(const Report& report) {
  const Summary& s = report.summary;
  Svg svg(kWidth, kHeight);
  svg.Text({30, 42}, absl::StrCat("tandem bench: ", report.model),
           {.size = 20, .color = kInk, .bold = true});
  svg.Text({30, 61}, report.load, {.size = 13, .color = kSoft});
  svg.Text({30, 78},
           absl::StrCat(s.completed, " of ", s.planned,
                        " requests completed in ", ShortNumber(s.duration_s),
                        " s; workers: ", report.prefill_workers, " prefill, ",
                        report.decode_workers, " decode"),
           {.size = 13, .color = kSoft});
  DrawTiles(report, &svg);
  const std::vector<Objective> drawn = DrawLatency(report, &svg);
  DrawTimeline(s, &svg);
  std::string footer = report.date;
  if (!report.objectives.empty()) {
    absl::StrAppend(&footer, "; goodput: ", ObjectivesText(report.objectives));
  }
  if (!drawn.empty()) {
    absl::StrAppend(&footer, "; dashed: ", ObjectivesText(drawn));
  }
  svg.Text({30, 782}, footer, {.size = 11, .color = kSoft});
  return std::move(svg).Take();
}

}  // namespace tandem::bench
