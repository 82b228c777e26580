// SPDX-License-Identifier: Apache-2.0
#include "common/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <utility>

#include "common/process_metrics.h"
#include "common/vllm_metrics.h"

namespace tandem {
namespace {

// `labels`, and the value as `label`.
Metrics::LabelsOf With(std::string label, Labels labels) {
  return [label = std::move(label),
          labels = std::move(labels)](const std::string& value) {
    Labels all = labels;
    all[label] = value;
    return all;
  };
}

}  // namespace

const Buckets kTimeToFirstTokenBuckets = {
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
const Buckets kTokenTimeBuckets = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
                                   0.3,  0.4,   0.5,  0.75,  1,   2.5,  5,
                                   7.5,  10,    20,   40,    80};
const Buckets kRequestTimeBuckets = {0.3, 0.5, 0.8, 1,   1.5, 2,    2.5,
                                     5,   10,  15,  20,  30,  40,   50,
                                     60,  120, 240, 480, 960, 1920, 7680};
const Buckets kStageTimeBuckets = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025,
    0.05,   0.1,     0.25,   0.5,   1,      2.5,   5,    10};

Buckets TokenCountBuckets(int64_t max) {
  Buckets buckets;
  for (int64_t decade = 1;; decade *= 10) {
    for (int64_t step : {1, 2, 5}) {
      buckets.push_back(static_cast<double>(decade * step));
      if (decade * step >= max) return buckets;
    }
  }
}

void Counter::Add(double amount) { counter_->Increment(amount); }
void Counter::GrowTo(int64_t total) {
  Add(static_cast<double>(total) - value());
}
double Counter::value() const { return counter_->Value(); }
void Gauge::Set(double value) { gauge_->Set(value); }
void Gauge::Add(double amount) { gauge_->Increment(amount); }
double Gauge::value() const { return gauge_->Value(); }
void Histogram::Observe(double value) { histogram_->Observe(value); }

Metrics::Metrics(std::string role, std::string model_name)
    : constant_labels_(model_name.empty()
                           ? Labels{{"role", std::move(role)}}
                           : Labels{{"role", std::move(role)},
                                    {"model_name", std::move(model_name)}}),
      registry_(std::make_shared<prometheus::Registry>()),
      process_(MakeProcessCollector(constant_labels_)) {}

Metrics::~Metrics() = default;

// The registry returns the family that is there for the same name, help and
// constant labels.
prometheus::Counter* Metrics::NewCounter(const std::string& name,
                                         const std::string& help,
                                         const Labels& labels) {
  auto& family = prometheus::BuildCounter()
                     .Name(name)
                     .Help(help)
                     .Labels(constant_labels_)
                     .Register(*registry_);
  return &family.Add(labels);
}

prometheus::Gauge* Metrics::NewGauge(const std::string& name,
                                     const std::string& help,
                                     const Labels& labels) {
  auto& family = prometheus::BuildGauge()
                     .Name(name)
                     .Help(help)
                     .Labels(constant_labels_)
                     .Register(*registry_);
  return &family.Add(labels);
}

prometheus::Histogram* Metrics::NewHistogram(const std::string& name,
                                             const std::string& help,
                                             const Buckets& buckets,
                                             const Labels& labels) {
  auto& family = prometheus::BuildHistogram()
                     .Name(name)
                     .Help(help)
                     .Labels(constant_labels_)
                     .Register(*registry_);
  return &family.Add(labels, buckets);
}

Counter& Metrics::AddCounter(const std::string& name, const std::string& help,
                             const Labels& labels) {
  counters_.push_back(
      std::make_unique<Counter>(NewCounter(name, help, labels)));
  return *counters_.back();
}

Gauge& Metrics::AddGauge(const std::string& name, const std::string& help,
                         const Labels& labels) {
  gauges_.push_back(std::make_unique<Gauge>(NewGauge(name, help, labels)));
  return *gauges_.back();
}

Histogram& Metrics::AddHistogram(const std::string& name,
                                 const std::string& help,
                                 const Buckets& buckets, const Labels& labels) {
  histograms_.push_back(
      std::make_unique<Histogram>(NewHistogram(name, help, buckets, labels)));
  return *histograms_.back();
}

CounterSet& Metrics::AddCounters(const std::string& name,
                                 const std::string& help,
                                 const std::string& label, size_t max_values,
                                 const Labels& labels) {
  return AddCounters(name, help, With(label, labels), max_values);
}

CounterSet& Metrics::AddCounters(const std::string& name,
                                 const std::string& help, LabelsOf labels_of,
                                 size_t max_values) {
  counter_sets_.push_back(std::make_unique<CounterSet>(
      max_values,
      [=, this, labels_of = std::move(labels_of)](const std::string& value) {
        return Counter(NewCounter(name, help, labels_of(value)));
      }));
  return *counter_sets_.back();
}

GaugeSet& Metrics::AddGauges(const std::string& name, const std::string& help,
                             const std::string& label, size_t max_values,
                             const Labels& labels) {
  gauge_sets_.push_back(std::make_unique<GaugeSet>(
      max_values,
      [=, this, labels_of = With(label, labels)](const std::string& value) {
        return Gauge(NewGauge(name, help, labels_of(value)));
      }));
  return *gauge_sets_.back();
}

HistogramSet& Metrics::AddHistograms(const std::string& name,
                                     const std::string& help,
                                     const Buckets& buckets,
                                     const std::string& label,
                                     size_t max_values, const Labels& labels) {
  return AddHistograms(name, help, buckets, With(label, labels), max_values);
}

HistogramSet& Metrics::AddHistograms(const std::string& name,
                                     const std::string& help,
                                     const Buckets& buckets, LabelsOf labels_of,
                                     size_t max_values) {
  histogram_sets_.push_back(std::make_unique<HistogramSet>(
      max_values,
      [=, this, labels_of = std::move(labels_of)](const std::string& value) {
        return Histogram(NewHistogram(name, help, buckets, labels_of(value)));
      }));
  return *histogram_sets_.back();
}

std::string Metrics::Text() const {
  auto families = registry_->Collect();
  if (vllm_names_) {
    for (auto& family : VllmMetrics(constant_labels_.at("role"), families)) {
      families.push_back(std::move(family));
    }
  }
  for (auto& family : process_->Collect()) {
    families.push_back(std::move(family));
  }
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace tandem
