// SPDX-License-Identifier: Apache-2.0
// "Did you mean": the known name that a mistyped one is closest to.

#ifndef TANDEM_COMMON_NEAREST_H_
#define TANDEM_COMMON_NEAREST_H_

#include <string>
#include <vector>

namespace tandem {

// By edit distance, the first of equals; empty where more than about a third
// of the letters would have to change, which is no typo.
std::string Nearest(const std::string& typed,
                    const std::vector<std::string>& known);

}  // namespace tandem

#endif  // TANDEM_COMMON_NEAREST_H_
