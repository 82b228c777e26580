// SPDX-License-Identifier: Apache-2.0
#include "common/progress.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"

namespace tandem {
namespace {

constexpr int kBarCells = 30;
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
  absl::FPrintF(
      options_.output, "%s: %d %% (%s of %s, %s/s)\n", options_.what,
      tenths * 10, HumanBytes(static_cast<double>(done)),
      HumanBytes(static_cast<double>(options_.total_bytes)),
      HumanBytes(static_cast<double>(done) / absl::ToDoubleSeconds(elapsed)));
  std::fflush(options_.output);
}

void Progress::DrawBar(int64_t done, absl::Duration elapsed) {
  const double part =
      static_cast<double>(done) / static_cast<double>(options_.total_bytes);
  const double rate =
      static_cast<double>(done) / absl::ToDoubleSeconds(elapsed);
  const int cells = static_cast<int>(part * kBarCells);
  const double left =
      rate > 0 ? static_cast<double>(options_.total_bytes - done) / rate : 0;
  absl::FPrintF(options_.output, "\r%s [%s%s] %3d %% %s, %s/s, %ds left \033[K",
                options_.what, std::string(cells, '#'),
                std::string(kBarCells - cells, '.'),
                static_cast<int>(part * 100),
                HumanBytes(static_cast<double>(done)), HumanBytes(rate),
                static_cast<int>(std::lround(left)));
  std::fflush(options_.output);
  drawn_ = true;
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
