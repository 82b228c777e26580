// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cli/bench/report.h"

namespace tandem::bench {
namespace {

class Table {
 public:
  void Line(std::string_view name, const std::string& value) {
    absl::StrAppendFormat(&text_, "  %-13s %s\n", std::string(name), value);
  }
  void Heading(std::string_view title) {
    absl::StrAppend(&text_, "\n", std::string(title), "\n");
  }
  void Append(const std::string& text) { text_ += text; }
  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
};

std::string Percent(double part, double whole) {
  return absl::StrFormat("%.1f %%", whole > 0 ? 100 * part / whole : 0);
}

void AddRequests(const Report& report, Table* table) {
  const Summary& s = report.summary;
  table->Line("requests",
              absl::StrCat(s.completed, " of ", s.planned, " completed in ",
                           ShortNumber(s.duration_s), " s; in flight ",
                           ShortNumber(s.mean_in_flight), " on average, ",
                           s.peak_in_flight, " at most"));
  if (s.sent < s.planned) {
    table->Line(
        "not sent",
        absl::StrCat(s.planned - s.sent,
                     report.interrupted ? ", the run was interrupted" : ""));
  }
  for (const auto& [name, failures] : s.failures) {
    table->Line("FAILED", absl::StrCat(failures.count, " ", name,
                                       failures.example.empty() ? "" : ": ",
                                       failures.example));
  }
  const Clipping& clipping = report.clipping;
  if (clipping.prompts + clipping.outputs > 0) {
    table->Line("clipped",
                absl::StrFormat("%d prompts by %d tokens, %d outputs by %d, to "
                                "the model's %d positions",
                                clipping.prompts, clipping.prompt_tokens,
                                clipping.outputs, clipping.output_tokens,
                                report.context_length));
  }
  if (s.short_outputs > 0) {
    table->Line("ended early",
                absl::StrCat(s.short_outputs, " outputs, by the model"));
  }
}

void AddThroughput(const Report& report, Table* table) {
  const Summary& s = report.summary;
  const auto tokens = static_cast<double>(s.prompt_tokens + s.output_tokens);
  table->Line("requests", ShortNumber(s.PerSecond(s.completed)) + " /s");
  if (!report.objectives.empty()) {
    table->Line("goodput",
                absl::StrCat(ShortNumber(s.PerSecond(s.good)), " requests/s; ",
                             Percent(s.good, s.sent), " of those sent kept ",
                             ObjectivesText(report.objectives)));
  }
  table->Line(
      "output",
      absl::StrCat(
          ShortNumber(s.PerSecond(static_cast<double>(s.output_tokens))),
          " tokens/s (", s.output_tokens, " in all)"));
  table->Line("with prompts",
              absl::StrCat(ShortNumber(s.PerSecond(tokens)), " tokens/s (",
                           s.prompt_tokens, " of prompts, ",
                           Percent(static_cast<double>(s.cached_tokens),
                                   static_cast<double>(s.prompt_tokens)),
                           " of them cached)"));
}

std::string Row(std::string_view name, const std::vector<std::string>& cells) {
  std::string row = absl::StrFormat("  %-21s", std::string(name));
  for (const std::string& cell : cells) {
    absl::StrAppendFormat(&row, " %9s", cell);
  }
  return row + "\n";
}

std::vector<std::string> Cells(const Distribution& samples,
                               const std::vector<double>& percentiles) {
  if (samples.count() == 0) return {"-"};
  std::vector<std::string> cells = {ShortNumber(samples.mean),
                                    ShortNumber(samples.median())};
  for (const double percent : percentiles) {
    cells.push_back(ShortNumber(samples.at(percent)));
  }
  cells.push_back(ShortNumber(samples.max()));
  return cells;
}

void AddLatencies(const Report& report, Table* table) {
  std::vector<std::string> heads = {"mean", "median"};
  for (const double percent : report.percentiles) {
    heads.push_back(PercentileName(percent));
  }
  heads.emplace_back("max");
  table->Append(absl::StrCat("\n", Row("Latency, ms", heads)));
  for (const Metric metric : report.metrics) {
    table->Append(
        Row(MetricTitle(metric),
            Cells(report.summary.latencies_ms.at(metric), report.percentiles)));
  }
  const Summary& s = report.summary;
  table->Append("\n  The server's share\n");
  const auto add = [&](std::string_view name, const Distribution& samples) {
    table->Append(Row(name, Cells(samples, report.percentiles)));
  };
  add("Queue", s.queue_ms);
  add("Prefill", s.prefill_ms);
  add("Handoff", s.handoff_ms);
  add("  after first token", s.handoff_exposed_ms);
}

}  // namespace

std::string ShortNumber(double value) {
  const int decimals = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return absl::StrFormat("%.*f", decimals, value);
}

std::string PercentileName(double percent) {
  return absl::StrCat("p", percent);
}

std::string ObjectivesText(const std::vector<Objective>& objectives) {
  std::string text;
  for (const Objective& objective : objectives) {
    absl::StrAppend(&text, text.empty() ? "" : ", ",
                    std::string(MetricName(objective.metric)), " within ",
                    objective.limit_ms, " ms");
  }
  return text;
}

std::string ReportTable(const Report& report) {
  const Summary& s = report.summary;
  Table table;
  table.Append(absl::StrCat(report.model, " at ", report.router,
                            "; workers: ", report.prefill_workers, " prefill, ",
                            report.decode_workers, " decode\n"));
  table.Line("load", absl::StrCat(report.load, "; seed ", report.seed));
  AddRequests(report, &table);
  table.Heading("Throughput");
  AddThroughput(report, &table);
  AddLatencies(report, &table);
  table.Append("\n");
  table.Line("prefilled",
             absl::StrCat(s.split, " prompts on a prefill worker, ",
                          s.completed - s.split, " on the decode worker"));
  if (s.retries + s.preemptions > 0) {
    table.Line("redone", absl::StrCat(s.retries, " attempts, ", s.preemptions,
                                      " preemptions"));
  }
  table.Line(
      "generator",
      absl::StrCat(
          "sent ", ShortNumber(s.lateness_ms.median()), " ms late (median), ",
          ShortNumber(s.lateness_ms.at(99)), " ms (p99), ",
          ShortNumber(s.lateness_ms.max()), " ms at most; used ",
          Percent(report.generator_cpu_s, s.duration_s), " of a core"));
  return table.Take();
}

}  // namespace tandem::bench
