// SPDX-License-Identifier: Apache-2.0
#include "common/process_metrics.h"

#include <dirent.h>
#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>
#include <sys/resource.h>
#include <unistd.h>

#include <sstream>
#include <utility>
#include <vector>

#include "common/read_file.h"

namespace tandem {
namespace {

// Field `number` (as proc(5) counts them, from 1) of /proc/self/stat. The
// second is the name in parentheses and may hold anything.
double StatField(const std::string& stat, int number) {
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(stat.substr(name_end + 1));
  std::string field;
  for (int i = 2; i < number; ++i) rest >> field;
  return field.empty() ? 0 : std::strtod(field.c_str(), nullptr);
}

int OpenDescriptors() {
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return 0;
  int count = -1;  // the directory's own
  while (const dirent* entry = readdir(directory)) {
    if (entry->d_name[0] != '.') ++count;
  }
  closedir(directory);
  return count;
}

double BootTime() {
  const std::string stat = ReadFile("/proc/stat").value_or("");
  const size_t at = stat.find("\nbtime ");
  return at == std::string::npos ? 0
                                 : std::strtod(stat.c_str() + at + 7, nullptr);
}

class ProcessCollector final : public prometheus::Collectable {
 public:
  explicit ProcessCollector(const std::map<std::string, std::string>& labels)
      : boot_time_(BootTime()) {
    for (const auto& [name, value] : labels) labels_.push_back({name, value});
  }

  std::vector<prometheus::MetricFamily> Collect() const override {
    const std::string stat = ReadFile("/proc/self/stat").value_or("");
    const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    const double page = static_cast<double>(sysconf(_SC_PAGESIZE));
    rlimit files{};
    getrlimit(RLIMIT_NOFILE, &files);
    std::vector<prometheus::MetricFamily> all;
    all.push_back(One("process_cpu_seconds_total",
                      "User and system CPU time of the process",
                      (StatField(stat, 14) + StatField(stat, 15)) / ticks,
                      prometheus::MetricType::Counter));
    const auto gauge = prometheus::MetricType::Gauge;
    all.push_back(One("process_resident_memory_bytes",
                      "Resident memory of the process",
                      StatField(stat, 24) * page, gauge));
    all.push_back(One("process_virtual_memory_bytes",
                      "Virtual memory of the process", StatField(stat, 23),
                      gauge));
    all.push_back(One("process_open_fds", "Open file descriptors",
                      OpenDescriptors(), gauge));
    all.push_back(One("process_max_fds", "Limit of open file descriptors",
                      static_cast<double>(files.rlim_cur), gauge));
    all.push_back(One("process_start_time_seconds",
                      "Start of the process in Unix time",
                      boot_time_ + StatField(stat, 22) / ticks, gauge));
    all.push_back(One("process_threads", "Threads of the process",
                      StatField(stat, 20), gauge));
    return all;
  }

 private:
  prometheus::MetricFamily One(std::string name, std::string help, double value,
                               prometheus::MetricType type) const {
    prometheus::ClientMetric metric;
    metric.label = labels_;
    if (type == prometheus::MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    return {std::move(name), std::move(help), type, {std::move(metric)}};
  }

  const double boot_time_;
  std::vector<prometheus::ClientMetric::Label> labels_;
};

}  // namespace

std::unique_ptr<prometheus::Collectable> MakeProcessCollector(
    const std::map<std::string, std::string>& labels) {
  return std::make_unique<ProcessCollector>(labels);
}

}  // namespace tandem
