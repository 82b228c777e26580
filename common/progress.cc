// SPDX-License-Identifier: Apache-2.0
#include "common/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tandem {
namespace {

constexpr int kBarCells = 30;
constexpr int kLeastCells = 5;  // a shorter bar tells nothing
constexpr int kLeastName = 6;
constexpr absl::Duration kQuiet = absl::Seconds(1);
constexpr absl::Duration kRedraw = absl::Milliseconds(100);

Progress::Options WithClock(Progress::Options options) {
  if (!options.now) {
    options.now = [] {
      return absl::UnixEpoch() +
             absl::FromChrono(
                 std::chrono::steady_clock::now().time_since_epoch());
    };
  }
  return options;
}

}  // namespace

Progress::Progress(Options options)
    : options_(WithClock(std::move(options))), start_(options_.now()) {}

Progress::~Progress() {
  if (drawn_) std::fputc('\n', options_.output);
}

void Progress::Update(int64_t done_bytes) {
  if (options_.total_bytes <= 0) return;
  const int64_t done = std::clamp<int64_t>(done_bytes, 0, options_.total_bytes);
  const absl::Time now = options_.now();
  const absl::Duration elapsed = now - start_;
  if (elapsed < kQuiet) return;
  const bool complete = done == options_.total_bytes;
  if (options_.tty) {
    if (now - last_draw_ < kRedraw && !complete) return;
    last_draw_ = now;
    DrawBar(done, elapsed);
    return;
  }
  const int tenths =
      static_cast<int>(10.0 * static_cast<double>(done) /
                       static_cast<double>(options_.total_bytes));
  if (tenths <= shown_tenths_) return;
  shown_tenths_ = tenths;
  absl::FPrintF(options_.output, "%s: %d %% (%s of %s, %s/s)\n", options_.what,
                tenths * 10, HumanBytes(static_cast<double>(done)),
                HumanBytes(static_cast<double>(options_.total_bytes)),
                HumanBytes(Rate(done, elapsed)));
  std::fflush(options_.output);
}

double Progress::Rate(int64_t done, absl::Duration elapsed) const {
  return static_cast<double>(
             std::max<int64_t>(0, done - options_.begin_bytes)) /
         absl::ToDoubleSeconds(elapsed);
}

void Progress::DrawBar(int64_t done, absl::Duration elapsed) {
  const double part =
      static_cast<double>(done) / static_cast<double>(options_.total_bytes);
  const double rate = Rate(done, elapsed);
  const double left =
      rate > 0 ? static_cast<double>(options_.total_bytes - done) / rate : 0;
  std::string figures = absl::StrFormat(
      " %3d %% %s, %s/s, %ds left", static_cast<int>(part * 100),
      HumanBytes(static_cast<double>(done)), HumanBytes(rate),
      static_cast<int>(std::lround(left)));
  const int columns = options_.columns > 0 ? options_.columns
                                           : TerminalColumns(options_.output);
  // What wraps cannot be drawn over: first the bar gives way, then the end of
  // the name, then the figures behind the share.
  const int room = columns - 1 - static_cast<int>(figures.size());
  std::string name = options_.what;
  const int bar = std::min(kBarCells, room - static_cast<int>(name.size()) - 3);
  if (bar >= kLeastCells) {
    const int cells = static_cast<int>(part * bar);
    absl::StrAppend(&name, " [", std::string(cells, '#'),
                    std::string(bar - cells, '.'), "]");
  } else if (room < kLeastName) {
    figures.resize(std::min<size_t>(figures.size(), 6));  // " 100 %"
    name.resize(std::min<size_t>(name.size(), std::max(0, columns - 7)));
  } else if (static_cast<int>(name.size()) > room) {
    name.resize(static_cast<size_t>(room));
  }
  absl::FPrintF(options_.output, "\r%s%s\033[K", name, figures);
  std::fflush(options_.output);
  drawn_ = true;
}

int TerminalColumns(std::FILE* file) {
  winsize size{};
  const bool said = ioctl(fileno(file), TIOCGWINSZ, &size) == 0;
  return said && size.ws_col > 0 ? size.ws_col : 80;
}

bool IsTerminal(std::FILE* file) { return isatty(fileno(file)) == 1; }

std::string HumanBytes(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  // 1023.95 would print as 1024.0.
  while (bytes >= 1023.95 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  const int decimals = unit == 0 || bytes >= 99.95 ? 0 : 1;
  return absl::StrFormat("%.*f %s", decimals, bytes, kUnits[unit]);
}

}  // namespace tandem
