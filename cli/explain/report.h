// SPDX-License-Identifier: Apache-2.0
// What `tandem explain` has to say, and its three forms: text for a terminal,
// JSON for programs, SVG for pages.

#ifndef TANDEM_CLI_EXPLAIN_REPORT_H_
#define TANDEM_CLI_EXPLAIN_REPORT_H_

#include <optional>
#include <string>
#include <vector>

#include "cli/explain/counts.h"
#include "cli/explain/roofline.h"
#include "cli/explain/timed_pairs.h"
#include "cli/explain/timing.h"
#include "engine/checkpoint/model_config.h"

namespace tandem::explain {

struct Explanation {
  std::string model;  // for headings
  engine::ModelSpec spec;
  Formats formats = {};
  Lengths lengths = {};
  int block_size = 16;
  std::optional<Machine> machine = std::nullopt;
  std::optional<Timing> timing = std::nullopt;
  std::vector<TimedPair> pairs = {};  // kQuotedLengths; empty: no timing
};

// "6 225"; from ten millions on as Short.
std::string Count(double value);
// "150", "6.23 k", "1.25 G".
std::string Short(double value);

// At most 80 columns. `color`: with escape sequences of a terminal.
std::string ReportText(const Explanation& explanation, bool color);
std::string ReportJson(const Explanation& explanation);
// The curves and the grid of steps.
std::string ReportSvg(const Explanation& explanation);

}  // namespace tandem::explain

#endif  // TANDEM_CLI_EXPLAIN_REPORT_H_
