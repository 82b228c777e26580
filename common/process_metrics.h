// SPDX-License-Identifier: Apache-2.0
// The process_* metrics that every Prometheus client library has, read from
// /proc at each scrape.

#ifndef TANDEM_COMMON_PROCESS_METRICS_H_
#define TANDEM_COMMON_PROCESS_METRICS_H_

#include <map>
#include <memory>
#include <string>

namespace prometheus {
class Collectable;
}

namespace tandem {

std::unique_ptr<prometheus::Collectable> MakeProcessCollector(
    const std::map<std::string, std::string>& labels);

}  // namespace tandem

#endif  // TANDEM_COMMON_PROCESS_METRICS_H_
