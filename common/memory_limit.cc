// SPDX-License-Identifier: Apache-2.0
#include "common/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
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

// Of the group's files, clean or soon so: given back as soon as it is wanted.
int64_t PageCache(const std::string& group, int version) {
  const std::string all = version == 2 ? "" : "total_";  // its subgroups', too
  std::ifstream file(group + "/memory.stat");
  std::string name;
  int64_t bytes = 0, sum = 0;
  while (file >> name >> bytes) {
    if (name == all + "active_file" || name == all + "inactive_file") {
      sum += bytes;
    }
  }
  return sum;
}

std::string LimitFile(const std::string& group, int version) {
  return group + (version == 2 ? "/memory.max" : "/memory.limit_in_bytes");
}

// Of it and of what else is in the group.
int64_t Used(const std::string& group, int version) {
  std::ifstream file(
      group + (version == 2 ? "/memory.current" : "/memory.usage_in_bytes"));
  int64_t bytes = 0;
  file >> bytes;
  return bytes - PageCache(group, version);
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
  ForEachControlGroup(root, "memory",
                      [&](const std::string& group, int version) {
                        limit = AtMost(LimitFile(group, version), limit);
                      });
  return limit == kUnlimited ? 0 : limit;
}

int64_t MemoryLimit() {
  const int64_t machine =
      int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const int64_t group = ControlGroupMemoryLimit();
  return group > 0 ? std::min(group, machine) : machine;
}

int64_t AvailableMemory(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string name, unit;
  int64_t kibibytes = 0, available = 0;
  while (available == 0 && file >> name >> kibibytes) {
    if (name == "MemAvailable:") available = kibibytes << 10;
    std::getline(file, unit);
  }
  ForEachControlGroup(
      root, "memory", [&](const std::string& group, int version) {
        const int64_t limit = AtMost(LimitFile(group, version), kUnlimited);
        if (limit == kUnlimited) return;
        available = std::min(
            available, std::max<int64_t>(1, limit - Used(group, version)));
      });
  return available;
}

}  // namespace tandem
