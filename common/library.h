// SPDX-License-Identifier: Apache-2.0
// Parts of an installation that are loaded when they are asked for: beside the
// program, or in ../lib/tandem from there.

#ifndef TANDEM_COMMON_LIBRARY_H_
#define TANDEM_COMMON_LIBRARY_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace tandem {

// Where library `name` may be: `given` and nowhere else, unless it is empty.
std::vector<std::string> LibraryPlaces(const std::string& given,
                                       const std::string& name);

// The handle of the first that exists. Never closed: threads of what it loads
// in turn live in it until the process ends. NOT_FOUND: "this installation has
// no `what`"; FAILED_PRECONDITION: it cannot be loaded.
absl::StatusOr<void*> LoadLibrary(const std::vector<std::string>& places,
                                  std::string_view what);

}  // namespace tandem

#endif  // TANDEM_COMMON_LIBRARY_H_
