// SPDX-License-Identifier: Apache-2.0
// Prometheus metrics of one process. Names start with tandem_, units are base
// units, counters end in _total; every series carries the constant labels
// role and model_name. Label values come from bounded sets: what does not fit
// is counted under "other", so that no client can make series.
//
//   Metrics metrics("decode", "tales");
//   Counter& tokens = metrics.AddCounter("tandem_generation_tokens_total",
//                                        "Tokens generated");
//   CounterSet& handoffs = metrics.AddCounters(
//       "tandem_handoff_total", "Handoffs by outcome", "outcome", 8);
//   tokens.Add(1);
//   handoffs["ok"].Add(1);
//
// Adding is for start-up; Add, Set, Observe and Text are thread-safe.

#ifndef TANDEM_COMMON_METRICS_H_
#define TANDEM_COMMON_METRICS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
class Registry;
class Collectable;
}  // namespace prometheus

namespace tandem {

using Labels = std::map<std::string, std::string>;
using Buckets = std::vector<double>;

// Where vLLM's dashboards expect the edges, in seconds.
extern const Buckets kTimeToFirstTokenBuckets;  // 1 ms to 2560 s
extern const Buckets kTokenTimeBuckets;         // 10 ms to 80 s: ITL, TPOT
extern const Buckets kRequestTimeBuckets;       // 0.3 s to 7680 s: e2e, phases
extern const Buckets kStageTimeBuckets;         // 100 us to 10 s: steps, stages
// 1, 2, 5, 10, 20, ... up to at least `max`: tokens per request.
Buckets TokenCountBuckets(int64_t max);

// Owned by prometheus; these are handles that may be copied.
class Counter {
 public:
  explicit Counter(prometheus::Counter* counter) : counter_(counter) {}
  void Add(double amount = 1);
  // To what was counted elsewhere. Not from two threads.
  void GrowTo(int64_t total);
  double value() const;

 private:
  prometheus::Counter* counter_;
};

class Gauge {
 public:
  explicit Gauge(prometheus::Gauge* gauge) : gauge_(gauge) {}
  void Set(double value);
  void Add(double amount);
  double value() const;

 private:
  prometheus::Gauge* gauge_;
};

class Histogram {
 public:
  explicit Histogram(prometheus::Histogram* histogram)
      : histogram_(histogram) {}
  void Observe(double value);

 private:
  prometheus::Histogram* histogram_;
};

// Metrics of one name that differ in one label, at most `max_values` of them
// and one "other". References stay valid.
template <typename Metric>
class MetricSet {
 public:
  using Maker = std::function<Metric(const std::string& value)>;
  MetricSet(size_t max_values, Maker maker)
      : max_values_(max_values), maker_(std::move(maker)) {}

  Metric& operator[](std::string_view value) {
    MutexLock lock(&mutex_);
    auto found = metrics_.find(value);
    if (found != metrics_.end()) return found->second;
    std::string name(value);
    if (count_ >= max_values_ && value != "other") {
      found = metrics_.find("other");
      if (found != metrics_.end()) return found->second;
      name = "other";
    } else if (value != "other") {
      ++count_;
    }
    return metrics_.emplace(name, maker_(name)).first->second;
  }

 private:
  const size_t max_values_;
  const Maker maker_;
  Mutex mutex_;
  size_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Metric, std::less<>> metrics_ ABSL_GUARDED_BY(mutex_);
};
using CounterSet = MetricSet<Counter>;
using GaugeSet = MetricSet<Gauge>;
using HistogramSet = MetricSet<Histogram>;

class Metrics {
 public:
  // `model_name` may be empty for a process without a model.
  Metrics(std::string role, std::string model_name);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // The same name may be added again with other values of the same labels.
  Counter& AddCounter(const std::string& name, const std::string& help,
                      const Labels& labels = {});
  Gauge& AddGauge(const std::string& name, const std::string& help,
                  const Labels& labels = {});
  Histogram& AddHistogram(const std::string& name, const std::string& help,
                          const Buckets& buckets, const Labels& labels = {});

  CounterSet& AddCounters(const std::string& name, const std::string& help,
                          const std::string& label, size_t max_values,
                          const Labels& labels = {});
  GaugeSet& AddGauges(const std::string& name, const std::string& help,
                      const std::string& label, size_t max_values,
                      const Labels& labels = {});
  HistogramSet& AddHistograms(const std::string& name, const std::string& help,
                              const Buckets& buckets, const std::string& label,
                              size_t max_values, const Labels& labels = {});

  // Sets whose metrics differ in several labels, which `labels_of` makes of the
  // set's value ("other" may be one).
  using LabelsOf = std::function<Labels(const std::string& value)>;
  CounterSet& AddCounters(const std::string& name, const std::string& help,
                          LabelsOf labels_of, size_t max_values);
  HistogramSet& AddHistograms(const std::string& name, const std::string& help,
                              const Buckets& buckets, LabelsOf labels_of,
                              size_t max_values);

  // Text has vLLM's names as well (common/vllm_metrics.h). For start-up.
  void ExportVllmNames() { vllm_names_ = true; }

  // All of it, and process_* of this process, in Prometheus' text format.
  std::string Text() const;
  static constexpr const char* kContentType =
      "text/plain; version=0.0.4; charset=utf-8";

 private:
  prometheus::Counter* NewCounter(const std::string& name,
                                  const std::string& help,
                                  const Labels& labels);
  prometheus::Gauge* NewGauge(const std::string& name, const std::string& help,
                              const Labels& labels);
  prometheus::Histogram* NewHistogram(const std::string& name,
                                      const std::string& help,
                                      const Buckets& buckets,
                                      const Labels& labels);

  const Labels constant_labels_;
  bool vllm_names_ = false;
  const std::shared_ptr<prometheus::Registry> registry_;
  const std::unique_ptr<prometheus::Collectable> process_;
  std::vector<std::unique_ptr<Counter>> counters_;
  std::vector<std::unique_ptr<Gauge>> gauges_;
  std::vector<std::unique_ptr<Histogram>> histograms_;
  std::vector<std::unique_ptr<CounterSet>> counter_sets_;
  std::vector<std::unique_ptr<GaugeSet>> gauge_sets_;
  std::vector<std::unique_ptr<HistogramSet>> histogram_sets_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_METRICS_H_
