// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/progress_bar.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem::bench {

std::string ProgressLine(const RunProgress& progress, double last_arrival_s,
                         int columns) {
  const double share =
      progress.planned == 0
          ? 1
          : static_cast<double>(progress.ended()) / progress.planned;
  std::string text = absl::StrFormat(
      " %3.0f %% %d/%d, %d running", std::floor(100 * share), progress.ended(),
      progress.planned, progress.sent - progress.ended());
  if (progress.failed > 0) {
    absl::StrAppend(&text, ", ", progress.failed, " failed");
  }
  if (progress.elapsed_s > 0) {
    absl::StrAppendFormat(
        &text, ", %.0f tok/s",
        static_cast<double>(progress.output_tokens) / progress.elapsed_s);
  }
  absl::StrAppendFormat(&text, ", %.0f s", progress.elapsed_s);
  if (progress.ended() > 0 && progress.ended() < progress.planned) {
    const double by_count = progress.elapsed_s / share - progress.elapsed_s;
    absl::StrAppendFormat(
        &text, ", %.0f s left",
        std::max(by_count, last_arrival_s - progress.elapsed_s));
  }
  std::string line;
  const int width = std::min(40, columns - static_cast<int>(text.size()) - 2);
  if (width >= 5) {
    const int filled = static_cast<int>(std::floor(share * width));
    line = absl::StrCat("[", std::string(filled, '#'),
                        std::string(width - filled, '.'), "]");
  }
  line += text;
  return line.substr(0, std::max(0, columns));
}

}  // namespace tandem::bench
