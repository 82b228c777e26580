// SPDX-License-Identifier: Apache-2.0
// A screen that is drawn again and again until q or Ctrl-C.

#ifndef TANDEM_CLI_WATCH_H_
#define TANDEM_CLI_WATCH_H_

#include <chrono>
#include <functional>
#include <string>

namespace tandem::cli {

// On a terminal a page of its own, cut to its size and drawn anew when that
// changes; the screen is as before when this returns, after q, Ctrl-C or
// SIGTERM. Elsewhere `draw` is printed each time, with an empty line behind.
void Watch(std::chrono::milliseconds interval,
           const std::function<std::string()>& draw);

// The first `rows` lines of at most `columns` characters each.
std::string CutToScreen(const std::string& text, int columns, int rows);

}  // namespace tandem::cli

#endif  // TANDEM_CLI_WATCH_H_
