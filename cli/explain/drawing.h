// SPDX-License-Identifier: Apache-2.0
// The two curves and the grid of steps by positions, for a terminal: UTF-8, at
// most 80 columns, told apart by their characters and, with `color`, by escape
// sequences too.

#ifndef TANDEM_CLI_EXPLAIN_DRAWING_H_
#define TANDEM_CLI_EXPLAIN_DRAWING_H_

#include <string>

#include "cli/explain/counts.h"

namespace tandem::explain {

// What the grid is drawn of: the request where each cell can be seen, else 3
// and 4, of which 6 cells are computed and 12 recomputed or read.
Lengths GridLengths(Lengths request);

// K/V rows computed after each token, without a cache and with one.
std::string DrawCurves(Lengths lengths, bool color);

// REQUIRES: at most 10 positions, since each takes two columns.
std::string DrawGrid(Lengths lengths, bool color);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_DRAWING_H_
