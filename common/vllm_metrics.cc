// SPDX-License-Identifier: Apache-2.0
#include "common/vllm_metrics.h"

#include <prometheus/metric_family.h>

#include <algorithm>
#include <map>
#include <utility>

namespace tandem {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;

struct Rename {
  const char* ours;
  const char* theirs;
  bool router;
  std::map<std::string, std::string> labels = {};  // ours to theirs
  std::map<std::string, std::string> only = {};    // series of these labels
};

const std::vector<Rename>& Table() {
  static const std::vector<Rename> table = {
      {"tandem_num_requests_running", "vllm:num_requests_running", false},
      {"tandem_num_requests_waiting", "vllm:num_requests_waiting", false},
      {"tandem_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", false},
      {"tandem_prefix_cache_queries_tokens_total",
       "vllm:prefix_cache_queries_total", false},
      {"tandem_prefix_cache_hits_tokens_total", "vllm:prefix_cache_hits_total",
       false},
      {"tandem_preemptions_total", "vllm:num_preemptions_total", false},
      {"tandem_cache_config_info",
       "vllm:cache_config_info",
       false,
       {{"block_size", "block_size"},
        {"num_blocks", "num_gpu_blocks"},
        {"dtype", "cache_dtype"}}},
      {"tandem_spec_decode_num_drafts_total",
       "vllm:spec_decode_num_drafts_total", false},
      {"tandem_spec_decode_num_draft_tokens_total",
       "vllm:spec_decode_num_draft_tokens_total", false},
      {"tandem_spec_decode_num_accepted_tokens_total",
       "vllm:spec_decode_num_accepted_tokens_total", false},
      {"tandem_prompt_tokens_total", "vllm:prompt_tokens_total", true},
      {"tandem_prompt_tokens_total",
       "vllm:prompt_tokens_cached_total",
       true,
       {},
       {{"source", "cached"}}},
      {"tandem_generation_tokens_total", "vllm:generation_tokens_total", true},
      {"tandem_requests_finished_total",
       "vllm:request_success_total",
       true,
       {{"finish_reason", "finished_reason"}}},
      {"tandem_time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
       true},
      {"tandem_inter_token_latency_seconds", "vllm:inter_token_latency_seconds",
       true},
      {"tandem_time_per_output_token_seconds",
       "vllm:request_time_per_output_token_seconds", true},
      {"tandem_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds",
       true},
      {"tandem_request_queue_time_seconds", "vllm:request_queue_time_seconds",
       true},
      {"tandem_request_prefill_time_seconds",
       "vllm:request_prefill_time_seconds", true},
      {"tandem_request_decode_time_seconds", "vllm:request_decode_time_seconds",
       true},
      {"tandem_request_prompt_tokens", "vllm:request_prompt_tokens", true},
      {"tandem_request_generation_tokens", "vllm:request_generation_tokens",
       true},
  };
  return table;
}

void Add(const ClientMetric& from, ClientMetric* to) {
  to->counter.value += from.counter.value;
  to->gauge.value += from.gauge.value;
  to->histogram.sample_count += from.histogram.sample_count;
  to->histogram.sample_sum += from.histogram.sample_sum;
  // Of one name all have the same edges.
  for (size_t i = 0; i < to->histogram.bucket.size(); ++i) {
    to->histogram.bucket[i].cumulative_count +=
        from.histogram.bucket[i].cumulative_count;
  }
}

// None where the series is not one of those that `rename` wants.
bool SetLabels(const Rename& rename, ClientMetric* series) {
  std::vector<ClientMetric::Label> labels = {{"engine", "0"}};
  size_t matched = 0;
  for (const ClientMetric::Label& label : series->label) {
    if (label.name == "model_name") labels.push_back(label);
    const auto renamed = rename.labels.find(label.name);
    if (renamed != rename.labels.end()) {
      labels.push_back({renamed->second, label.value});
    }
    const auto only = rename.only.find(label.name);
    matched += only != rename.only.end() && only->second == label.value ? 1 : 0;
  }
  std::sort(labels.begin(), labels.end());
  series->label = std::move(labels);
  return matched == rename.only.size();
}

}  // namespace

std::vector<MetricFamily> VllmMetrics(
    const std::string& role, const std::vector<MetricFamily>& families) {
  std::vector<MetricFamily> out;
  for (const Rename& rename : Table()) {
    if (rename.router != (role == "router")) continue;
    std::map<std::vector<ClientMetric::Label>, ClientMetric> series;
    const MetricFamily* found = nullptr;
    // One name may be there several times, with other constant labels.
    for (const MetricFamily& family : families) {
      if (family.name != rename.ours) continue;
      found = &family;
      for (ClientMetric metric : family.metric) {
        if (!SetLabels(rename, &metric)) continue;
        const auto [it, fresh] = series.try_emplace(metric.label, metric);
        if (!fresh) Add(metric, &it->second);
      }
    }
    if (found == nullptr) continue;
    MetricFamily renamed;
    renamed.name = rename.theirs;
    renamed.help = found->help;
    renamed.type = found->type;
    for (auto& [labels, metric] : series) {
      renamed.metric.push_back(std::move(metric));
    }
    out.push_back(std::move(renamed));
  }
  return out;
}

}  // namespace tandem
