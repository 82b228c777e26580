// SPDX-License-Identifier: Apache-2.0
// The metrics that vLLM's dashboards, autoscalers and endpoint pickers read,
// under its names (--metrics-compat vllm): copies of ours, made when they are
// asked for.

#ifndef TANDEM_COMMON_VLLM_METRICS_H_
#define TANDEM_COMMON_VLLM_METRICS_H_

#include <string>
#include <vector>

namespace prometheus {
struct MetricFamily;
}

namespace tandem {

// What of `families` vLLM has, with its labels: model_name and engine ("0").
// Series that differ in other labels alone are added up. Each name comes from
// one kind of process, so that sums over a cluster count nothing twice: what
// requests feel and count from the router, queues and caches from workers.
std::vector<prometheus::MetricFamily> VllmMetrics(
    const std::string& role,
    const std::vector<prometheus::MetricFamily>& families);

}  // namespace tandem

#endif  // TANDEM_COMMON_VLLM_METRICS_H_
