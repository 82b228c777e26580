// SPDX-License-Identifier: Apache-2.0
// Progress of something that may take long, such as loading weights: a bar on
// a terminal (bytes, rate, time left), one log line per 10 % elsewhere, and
// nothing at all if it is over within a second.

#ifndef TANDEM_COMMON_PROGRESS_H_
#define TANDEM_COMMON_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

#include "absl/time/time.h"

namespace tandem {

class Progress {
 public:
  struct Options {
    std::string what = "loading";
    int64_t total_bytes = 0;
    std::FILE* output = stderr;
    bool tty = false;                           // see IsTerminal
    std::function<absl::Time()> now = nullptr;  // the monotonic clock
    int64_t begin_bytes = 0;  // there before: no part of the rate
    int columns = 0;          // of the terminal; 0: asked for at each drawing
  };

  explicit Progress(Options options);
  // Ends the bar's line, if there was one.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done_bytes` so far. Cheap enough for every tensor. One thread.
  void Update(int64_t done_bytes);

 private:
  void DrawBar(int64_t done, absl::Duration elapsed);
  double Rate(int64_t done, absl::Duration elapsed) const;  // bytes a second

  const Options options_;
  const absl::Time start_;
  absl::Time last_draw_ = absl::InfinitePast();
  int shown_tenths_ = 0;
  bool drawn_ = false;
};

bool IsTerminal(std::FILE* file);
// As wide as it is now; 80 where it does not say.
int TerminalColumns(std::FILE* file);

// "1.5 GiB", "12 KiB", "7 B".
std::string HumanBytes(double bytes);

}  // namespace tandem

#endif  // TANDEM_COMMON_PROGRESS_H_
