// SPDX-License-Identifier: Apache-2.0
#include "common/memory_limit.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

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

}  // namespace

int64_t OwnMemory() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, resident = 0, shared = 0;
  if (!(file >> all >> resident >> shared)) return 0;
  return (resident - shared) * sysconf(_SC_PAGESIZE);
}

int64_t ControlGroupMemoryLimit(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  int64_t limit = kUnlimited;
  for (std::string line; std::getline(groups, line);) {
    // "0::/a/b" of version 2, "7:memory:/a/b" of version 1.
    const std::vector<std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const bool second = parts[0] == "0" && parts[1].empty();
    if (!second && parts[1] != "memory") continue;
    const std::string mount =
        root + (second ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
    const char* const file = second ? "/memory.max" : "/memory.limit_in_bytes";
    // A group has no more than those that it is in.
    for (std::string group = parts[2];;) {
      limit = AtMost(absl::StrCat(mount, group, file), limit);
      const size_t parent = group.rfind('/');
      if (parent == std::string::npos) break;
      group.resize(parent);
    }
  }
  return limit == kUnlimited ? 0 : limit;
}

int64_t MemoryLimit() {
  const int64_t machine =
      int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  const int64_t group = ControlGroupMemoryLimit();
  return group > 0 ? std::min(group, machine) : machine;
}

}  // namespace tandem
