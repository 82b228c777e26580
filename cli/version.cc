// SPDX-License-Identifier: Apache-2.0
#include "cli/version.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/build_info.h"
#include "common/library.h"
#include "common/version.h"

namespace tandem::cli {
namespace {

constexpr std::array<std::string_view, 10> kFeatures = {
    "avx2",     "fma",         "f16c",        "avx_vnni", "avx512f",
    "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"};

// The value of the first line "name : value".
std::string CpuInfo(const std::string& name) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t colon = line.find(':');
    if (line.rfind(name, 0) != 0 || colon == std::string::npos) continue;
    return colon + 2 <= line.size() ? line.substr(colon + 2) : "";
  }
  return "";
}

}  // namespace

VersionInfo GetVersionInfo() {
  VersionInfo info;
  info.version = kVersion;
  info.commit = Commit();
#if defined(__clang__)
  info.build = absl::StrCat("clang ", __clang_version__);
#else
  info.build = absl::StrCat("gcc ", __VERSION__);
#endif
#ifndef NDEBUG
  info.build += ", with assertions";
#endif
  info.backends = {"cpu"};
  for (const char* const name : {"cuda", "nccl"}) {
    const std::vector<std::string> places =
        LibraryPlaces("", absl::StrCat("libtandem_", name, ".so"));
    if (std::any_of(places.begin(), places.end(), [](const std::string& place) {
          std::error_code error;
          return std::filesystem::exists(place, error);
        })) {
      info.backends.emplace_back(name);
    }
  }
  info.cpu = CpuInfo("model name");
  std::istringstream flags(CpuInfo("flags"));
  std::vector<std::string> has;
  for (std::string flag; flags >> flag;) has.push_back(flag);
  for (const std::string_view feature : kFeatures) {
    if (std::find(has.begin(), has.end(), feature) != has.end()) {
      info.cpu_features.emplace_back(feature);
    }
  }
  cpu_set_t set;
  info.cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  return info;
}

std::string VersionText(const VersionInfo& info) {
  return absl::StrCat("tandem ", info.version, "\n  commit    ", info.commit,
                      "\n  build     ", info.build, "\n  backends  ",
                      absl::StrJoin(info.backends, ", "), "\n  CPU       ",
                      info.cpu, ", ", info.cpus, " in use\n            ",
                      absl::StrJoin(info.cpu_features, " "), "\n");
}

std::string VersionJson(const VersionInfo& info) {
  return nlohmann::json{
             {"version", info.version}, {"commit", info.commit},
             {"build", info.build},     {"backends", info.backends},
             {"cpu", info.cpu},         {"cpu_features", info.cpu_features},
             {"cpus", info.cpus}}
             .dump(1) +
         "\n";
}

}  // namespace tandem::cli
