// SPDX-License-Identifier: Apache-2.0
// `tandem version`: what this is, made of what, and what it can use here.

#ifndef TANDEM_CLI_VERSION_H_
#define TANDEM_CLI_VERSION_H_

#include <string>
#include <vector>

namespace tandem::cli {

struct VersionInfo {
  std::string version;
  std::string commit;  // "unknown" where the sources are no repository
  std::string build;   // type and compiler
  // "cpu", and "cuda" and "nccl" where their libraries lie (common/library.h).
  std::vector<std::string> backends;
  std::string cpu;                        // its name
  std::vector<std::string> cpu_features;  // of those that kernels use
  int cpus = 0;                           // that this process may run on
};

VersionInfo GetVersionInfo();
std::string VersionText(const VersionInfo& info);
std::string VersionJson(const VersionInfo& info);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_VERSION_H_
