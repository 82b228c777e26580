// SPDX-License-Identifier: Apache-2.0
#include "common/available_cpus.h"

#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>

#include "common/control_group.h"

namespace tandem {
namespace {

int AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) {
    return CPU_COUNT(&set);
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Microseconds of CPU time in each period of so many; false: no quota ("max",
// or -1 in version 1).
bool ReadQuota(const std::string& group, int version, int64_t* quota,
               int64_t* period) {
  if (version == 2) {
    std::ifstream file(group + "/cpu.max");
    return file >> *quota >> *period && *quota > 0 && *period > 0;
  }
  return std::ifstream(group + "/cpu.cfs_quota_us") >> *quota &&
         std::ifstream(group + "/cpu.cfs_period_us") >> *period && *quota > 0 &&
         *period > 0;
}

}  // namespace

int AvailableCpus(const std::string& root) {
  int64_t cpus = AllowedCpus();
  ForEachControlGroup(root, "cpu", [&](const std::string& group, int version) {
    int64_t quota = 0, period = 0;
    if (ReadQuota(group, version, &quota, &period)) {
      cpus = std::min(cpus, std::max<int64_t>(1, quota / period));
    }
  });
  return static_cast<int>(cpus);
}

}  // namespace tandem
