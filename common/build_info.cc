// SPDX-License-Identifier: Apache-2.0
#include "common/build_info.h"

#include "common/commit.h"
#include "common/version.h"

namespace tandem {

std::string Commit() { return kCommit; }

void AddBuildInfo(const std::string& backend, Metrics* metrics) {
  metrics
      ->AddGauge(
          "tandem_build_info", "This program, 1",
          {{"version", kVersion}, {"revision", Commit()}, {"backend", backend}})
      .Set(1);
}

}  // namespace tandem
