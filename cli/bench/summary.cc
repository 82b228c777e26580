// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/summary.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"

namespace tandem::bench {
namespace {

constexpr int kMostIntervals = 120;
constexpr double kShortestInterval = 0.01;  // seconds

std::string FailureName(const RequestRecord& record) {
  // A stream that ended well without its last message breaks the contract.
  if (record.status.ok()) return "OK without a finish reason";
  const std::string reason = ErrorReason(record.status);
  return absl::StrCat(absl::StatusCodeToString(record.status.code()),
                      reason.empty() ? "" : " ", reason);
}

int PeakInFlight(const std::vector<RequestRecord>& records) {
  std::vector<std::pair<double, int>> changes;
  for (const RequestRecord& record : records) {
    if (!record.sent) continue;
    changes.emplace_back(record.sent_s, 1);
    changes.emplace_back(record.ended_s, -1);
  }
  // At one moment the ends come first, as they do in a closed loop.
  std::sort(changes.begin(), changes.end());
  int now = 0, peak = 0;
  for (const auto& [at_s, change] : changes) {
    now += change;
    peak = std::max(peak, now);
  }
  return peak;
}

void FillTimeline(const std::vector<RequestRecord>& records, Summary* summary) {
  if (summary->duration_s <= 0) return;
  const double length = IntervalLength(summary->duration_s, kMostIntervals);
  summary->interval_s = length;
  auto& timeline = summary->timeline;
  timeline.resize(static_cast<size_t>(std::ceil(summary->duration_s / length)));
  for (size_t i = 0; i < timeline.size(); ++i) {
    timeline[i].begin_s = static_cast<double>(i) * length;
  }
  const auto at = [&](double seconds) -> size_t {
    return std::min(static_cast<size_t>(std::max(0.0, seconds) / length),
                    timeline.size() - 1);
  };
  for (const RequestRecord& record : records) {
    if (!record.sent) continue;
    for (const TokenArrival& arrival : record.arrivals) {
      timeline[at(arrival.at_s)].output_tokens += arrival.tokens;
    }
    Interval& end = timeline[at(record.ended_s)];
    ++(record.completed() ? end.completed : end.failed);
    for (size_t i = at(record.sent_s); i <= at(record.ended_s); ++i) {
      const double from = std::max(record.sent_s, timeline[i].begin_s);
      const double to = std::min(record.ended_s, timeline[i].begin_s + length);
      // The last interval may be cut short by the end of the run.
      const double whole =
          std::min(length, summary->duration_s - timeline[i].begin_s);
      if (whole > 0) timeline[i].in_flight += std::max(0.0, to - from) / whole;
    }
  }
}

}  // namespace

double IntervalLength(double duration_s, int most) {
  double length = kShortestInterval;
  for (int step = 0; duration_s / length > most; ++step) {
    length *= step % 3 == 1 ? 2.5 : 2;
  }
  return length;
}

Summary Summarize(const std::vector<RequestRecord>& records,
                  const std::vector<Objective>& objectives, double ran_s) {
  Summary summary;
  summary.duration_s = ran_s;
  summary.planned = static_cast<int>(records.size());
  std::map<Metric, std::vector<double>> latencies;
  std::vector<double> lateness, queue, prefill, handoff, exposed;
  double busy_s = 0;
  for (const RequestRecord& record : records) {
    if (!record.sent) continue;
    ++summary.sent;
    summary.duration_s = std::max(summary.duration_s, record.ended_s);
    busy_s += record.ended_s - record.sent_s;
    lateness.push_back((record.sent_s - record.due_s) * 1e3);
    if (!record.completed()) {
      ++summary.failed;
      Failures& failures = summary.failures[FailureName(record)];
      if (failures.count++ == 0) {
        failures.example = std::string(record.status.message());
      }
      continue;
    }
    ++summary.completed;
    summary.good += Good(record, objectives);
    summary.short_outputs +=
        record.output_tokens < record.planned_output_tokens;
    summary.prompt_tokens += record.prompt_tokens;
    summary.cached_tokens += record.cached_tokens;
    summary.output_tokens += record.output_tokens;
    for (const Metric metric : kMetrics) {
      const std::vector<double> samples = Samples(record, metric);
      latencies[metric].insert(latencies[metric].end(), samples.begin(),
                               samples.end());
    }
    const ServerTimes& server = record.server;
    queue.push_back(server.queue_ms);
    prefill.push_back(server.prefill_ms);
    if (server.split) {
      handoff.push_back(server.handoff_ms);
      exposed.push_back(server.handoff_exposed_ms);
    }
    summary.split += server.split;
    summary.retries += server.retries;
    summary.preemptions += server.preemptions;
  }
  for (const Metric metric : kMetrics) {
    summary.latencies_ms[metric] = Describe(std::move(latencies[metric]));
  }
  summary.lateness_ms = Describe(std::move(lateness));
  summary.queue_ms = Describe(std::move(queue));
  summary.prefill_ms = Describe(std::move(prefill));
  summary.handoff_ms = Describe(std::move(handoff));
  summary.handoff_exposed_ms = Describe(std::move(exposed));
  summary.mean_in_flight = summary.PerSecond(busy_s);
  summary.peak_in_flight = PeakInFlight(records);
  FillTimeline(records, &summary);
  return summary;
}

}  // namespace tandem::bench
