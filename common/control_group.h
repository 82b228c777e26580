// SPDX-License-Identifier: Apache-2.0
// The control groups (version 1 or 2) that this process is in, as containers
// and services are: what limits one of them limits the process.

#ifndef TANDEM_COMMON_CONTROL_GROUP_H_
#define TANDEM_COMMON_CONTROL_GROUP_H_

#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"

namespace tandem {

// Calls visit(directory, version) for each group that `controller` ("cpu",
// "memory") limits this process by, the narrowest first and the root last;
// directories need not exist. `root` is where /proc and /sys are.
void ForEachControlGroup(
    const std::string& root, std::string_view controller,
    absl::FunctionRef<void(const std::string& directory, int version)> visit);

}  // namespace tandem

#endif  // TANDEM_COMMON_CONTROL_GROUP_H_
