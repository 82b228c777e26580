// SPDX-License-Identifier: Apache-2.0
// The two curves and the grid of steps by positions, for a terminal: UTF-8, at
// most 80 columns, told apart by their characters and, with `color`, by escape
// sequences too.

#ifndef TANDEM_CLI_EXPLAIN_DRAWING_H_
#define TANDEM_CLI_EXPLAIN_DRAWING_H_

#include <string>

#include "cli/explain/counts.h"

namespace tandem::explain {

// Small enough to see each cell: 6 computed, 12 recomputed or read.
inline constexpr Lengths kGridLengths{.prompt = 3, .output = 4};

// K/V rows computed after each token, without a cache and with one.
std::string DrawCurves(Lengths lengths, bool color);

// REQUIRES: few positions, since each takes two columns.
std::string DrawGrid(Lengths lengths, bool color);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_DRAWING_H_
