// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "cli/bench/report.h"

namespace tandem::bench {
namespace {

// In the order written, which is the order in which one reads.
using json = nlohmann::ordered_json;

void AddLatency(const std::string& name, const Distribution& samples,
                const std::vector<double>& percentiles, json* object) {
  const auto set = [&](const std::string& what, double value) {
    (*object)[absl::StrCat(what, "_", name, "_ms")] = value;
  };
  // vLLM's names: mean_ttft_ms, p99_ttft_ms.
  set("mean", samples.mean);
  set("median", samples.median());
  set("std", samples.deviation);
  set("max", samples.max());
  for (const double percent : percentiles) {
    set(PercentileName(percent), samples.at(percent));
  }
}

json Timeline(const Summary& summary) {
  json intervals = json::array();
  for (const Interval& interval : summary.timeline) {
    intervals.push_back({{"begin_s", interval.begin_s},
                         {"output_tokens", interval.output_tokens},
                         {"completed", interval.completed},
                         {"failed", interval.failed},
                         {"in_flight", interval.in_flight}});
  }
  return {{"interval_s", summary.interval_s},
          {"intervals", std::move(intervals)}};
}

json Requests(const std::vector<RequestRecord>& records) {
  json requests = json::array();
  for (const RequestRecord& record : records) {
    if (!record.sent) continue;
    json arrivals = json::array();
    for (const TokenArrival& arrival : record.arrivals) {
      arrivals.push_back({arrival.at_s, arrival.tokens});
    }
    json request = {{"scheduled_s", record.scheduled_s},
                    {"sent_s", record.sent_s},
                    {"ended_s", record.ended_s},
                    {"status", absl::StatusCodeToString(record.status.code())},
                    {"prompt_tokens", record.prompt_tokens},
                    {"cached_tokens", record.cached_tokens},
                    {"output_tokens", record.output_tokens},
                    {"split", record.server.split},
                    {"queue_ms", record.server.queue_ms},
                    {"prefill_ms", record.server.prefill_ms},
                    {"handoff_ms", record.server.handoff_ms},
                    {"handoff_exposed_ms", record.server.handoff_exposed_ms},
                    // [seconds after the start, tokens] per message.
                    {"arrivals", std::move(arrivals)}};
    if (!record.status.ok()) {
      request["error"] = std::string(record.status.message());
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace

std::string ReportJson(const Report& report,
                       const std::vector<RequestRecord>* records) {
  const Summary& s = report.summary;
  json object = {{"date", report.date},
                 {"router", report.router},
                 {"model_id", report.model},
                 {"prefill_workers", report.prefill_workers},
                 {"decode_workers", report.decode_workers},
                 {"load", report.load},
                 {"seed", report.seed},
                 {"interrupted", report.interrupted}};
  object["flags"] = json::object();
  for (const auto& [name, value] : report.flags) object["flags"][name] = value;
  object.update(
      {{"duration", s.duration_s},
       {"num_prompts", s.planned},
       {"sent", s.sent},
       {"completed", s.completed},
       {"failed", s.failed},
       {"total_input_tokens", s.prompt_tokens},
       {"total_cached_tokens", s.cached_tokens},
       {"total_output_tokens", s.output_tokens},
       {"request_throughput", s.PerSecond(s.completed)},
       {"output_throughput", s.PerSecond(static_cast<double>(s.output_tokens))},
       {"total_token_throughput",
        s.PerSecond(static_cast<double>(s.prompt_tokens + s.output_tokens))},
       {"max_concurrent_requests", s.peak_in_flight},
       {"mean_concurrent_requests", s.mean_in_flight}});
  object["failures"] = json::object();
  for (const auto& [name, failures] : s.failures) {
    object["failures"][name] = {{"count", failures.count},
                                {"example", failures.example}};
  }
  if (!report.objectives.empty()) {
    object["request_goodput"] = s.PerSecond(s.good);
    object["good_share"] =
        s.sent > 0 ? static_cast<double>(s.good) / s.sent : 0;
    object["goodput_limits_ms"] = json::object();
    for (const Objective& objective : report.objectives) {
      object["goodput_limits_ms"][std::string(MetricName(objective.metric))] =
          objective.limit_ms;
    }
  }
  for (const Metric metric : kMetrics) {
    AddLatency(std::string(MetricName(metric)), s.latencies_ms.at(metric),
               report.percentiles, &object);
  }
  AddLatency("server_queue", s.queue_ms, report.percentiles, &object);
  AddLatency("server_prefill", s.prefill_ms, report.percentiles, &object);
  AddLatency("server_handoff", s.handoff_ms, report.percentiles, &object);
  AddLatency("server_handoff_exposed", s.handoff_exposed_ms, report.percentiles,
             &object);
  AddLatency("generator_lateness", s.lateness_ms, report.percentiles, &object);
  object.update({{"generator_cpu_s", report.generator_cpu_s},
                 {"split_requests", s.split},
                 {"retries", s.retries},
                 {"preemptions", s.preemptions},
                 {"short_outputs", s.short_outputs},
                 {"clipped",
                  {{"context_length", report.context_length},
                   {"prompts", report.clipping.prompts},
                   {"prompt_tokens", report.clipping.prompt_tokens},
                   {"outputs", report.clipping.outputs},
                   {"output_tokens", report.clipping.output_tokens}}}});
  object["timeline"] = Timeline(s);
  if (records != nullptr) object["requests"] = Requests(*records);
  // A status message may hold anything.
  return object.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace tandem::bench
