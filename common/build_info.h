// SPDX-License-Identifier: Apache-2.0
// What was built, and of which commit.

#ifndef TANDEM_COMMON_BUILD_INFO_H_
#define TANDEM_COMMON_BUILD_INFO_H_

#include <string>

#include "common/metrics.h"

namespace tandem {

// Twelve digits; "unknown" where the sources were in no repository.
std::string Commit();

// tandem_build_info. `backend`: what computes here, "cpu" or "cuda"; "none" of
// a process that computes nothing. For start-up.
void AddBuildInfo(const std::string& backend, Metrics* metrics);

}  // namespace tandem

#endif  // TANDEM_COMMON_BUILD_INFO_H_
