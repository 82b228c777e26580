// SPDX-License-Identifier: Apache-2.0
#include "common/control_group.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tandem {

void ForEachControlGroup(
    const std::string& root, std::string_view controller,
    absl::FunctionRef<void(const std::string& directory, int version)> visit) {
  const std::string name(controller);
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "0::/a/b" of version 2, "4:cpu,cpuacct:/a/b" of version 1.
    const std::vector<std::string> parts =
        absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const bool second = parts[0] == "0" && parts[1].empty();
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (!second && std::find(controllers.begin(), controllers.end(), name) ==
                       controllers.end()) {
      continue;
    }
    const std::string mount =
        absl::StrCat(root, "/sys/fs/cgroup", second ? "" : "/" + name);
    // A group has no more than those that it is in. In a container the path may
    // be the host's, and the group's files are those of the root.
    for (std::string group = parts[2];;) {
      visit(mount + group, second ? 2 : 1);
      const size_t parent = group.rfind('/');
      if (parent == std::string::npos) break;
      group.resize(parent);
    }
  }
}

}  // namespace tandem
