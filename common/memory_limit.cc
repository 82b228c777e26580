// SPDX-License-Identifier: Apache-2.0
#include "common/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "common/control_group.h"

namespace tandem {
namespace {

// What version 1 says where nothing is limited is near 2^63.
constexpr int64_t kUnlimited = int64_t{1} << 60;

// Of the file's one number; `most` without one, as of "max".
int64_t AtMost(const std::string& path, int64_t most) {
  std::ifstream file(path);
  std::string text;
  int64_t value = 0;
  if (!(file >> text) || !absl::SimpleAtoi(text, &value) || value <= 0) {
    return most;
  }
  return std::min(most, value);
}

// Bytes; nothing where the file is absent or says "max".
std::optional<int64_t> CgroupValue(const std::string& path) {
  std::ifstream file(path);
  int64_t bytes = 0;
  if (file >> bytes) return bytes;
  return std::nullopt;
}

// Of the group's files, clean or soon so: given back as soon as it is wanted.
int64_t PageCache(const std::string& path) {
  std::ifstream file(path);
  std::string name;
  int64_t bytes = 0, sum = 0;
  while (file >> name >> bytes) {
    if (name == "active_file" || name == "inactive_file") sum += bytes;
  }
  return sum;
}

}  // namespace

int64_t OwnMemory() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0, shared = 0;
  if (!(file >> all >> resident >> shared)) return 0;
  return (resident - shared) * sysconf(_SC_PAGESIZE);
}

int64_t ControlGroupMemoryLimit(const std::string& root) {
  int64_t limit = kUnlimited;
  ForEachControlGroup(
      root, "memory", [&](const std::string& group, int version) {
        limit = AtMost(
            group + (version == 2 ? "/memory.max" : "/memory.limit_in_bytes"),
            limit);
      });
  return limit == kUnlimited ? 0 : limit;
}

int64_t MemoryLimit() {
  const int64_t machine =
      int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const int64_t group = ControlGroupMemoryLimit();
  return group > 0 ? std::min(group, machine) : machine;
}

int64_t AvailableMemory(const std::string& meminfo, const std::string& cgroup) {
  std::ifstream file(meminfo);
  std::string name, unit;
  int64_t kibibytes = 0, available = 0;
  while (available == 0 && file >> name >> kibibytes) {
    if (name == "MemAvailable:") available = kibibytes << 10;
    std::getline(file, unit);
  }
  const std::optional<int64_t> limit = CgroupValue(cgroup + "/memory.max");
  if (!limit) return available;
  const int64_t used = CgroupValue(cgroup + "/memory.current").value_or(0) -
                       PageCache(cgroup + "/memory.stat");
  return std::min(available, std::max<int64_t>(0, *limit - used));
}

}  // namespace tandem
