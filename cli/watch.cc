// SPDX-License-Identifier: Apache-2.0
#include "cli/watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <iostream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace tandem::cli {
namespace {

volatile sig_atomic_t ended = 0;
volatile sig_atomic_t resized = 0;

void Take(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  sigaction(signal, &action, nullptr);  // no SA_RESTART: poll is to return
}

// The alternate screen, without a cursor, and keys as they are pressed.
class LiveScreen {
 public:
  LiveScreen() {
    tcgetattr(STDIN_FILENO, &before_);
    termios now = before_;
    now.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    tcsetattr(STDIN_FILENO, TCSANOW, &now);
    std::cout << "\033[?1049h\033[?25l" << std::flush;
  }
  ~LiveScreen() {
    std::cout << "\033[?25h\033[?1049l" << std::flush;
    tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  LiveScreen(const LiveScreen&) = delete;
  LiveScreen& operator=(const LiveScreen&) = delete;

  void Draw(const std::string& text) {
    winsize size{};
    ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    const int columns = size.ws_col > 0 ? size.ws_col : 80;
    const int rows = size.ws_row > 0 ? size.ws_row : 24;
    std::string page = "\033[H";
    for (absl::string_view line :
         absl::StrSplit(CutToScreen(text, columns, rows - 1), '\n')) {
      absl::StrAppend(&page, line, "\033[K\n");
    }
    absl::StrAppend(&page, "\033[Jq ends");
    std::cout << page << std::flush;
  }

 private:
  termios before_{};
};

// True: it is to end.
bool WaitForKey(std::chrono::milliseconds interval) {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  if (poll(&input, 1, static_cast<int>(interval.count())) <= 0) return false;
  char key = 0;
  return read(STDIN_FILENO, &key, 1) <= 0 || key == 'q' || key == 'Q';
}

}  // namespace

std::string CutToScreen(const std::string& text, int columns, int rows) {
  std::vector<std::string> lines = absl::StrSplit(text, '\n');
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  std::string cut;
  for (size_t i = 0; i < lines.size() && i < static_cast<size_t>(rows); ++i) {
    absl::StrAppend(&cut, i > 0 ? "\n" : "",
                    lines[i].substr(0, static_cast<size_t>(columns)));
  }
  return cut;
}

void Watch(std::chrono::milliseconds interval,
           const std::function<std::string()>& draw) {
  if (isatty(STDIN_FILENO) == 0 || isatty(STDOUT_FILENO) == 0) {
    while (std::cout << draw() << "\n" << std::flush) {
      std::this_thread::sleep_for(interval);
    }
    return;
  }
  ended = 0;
  Take(SIGINT, [](int) { ended = 1; });
  Take(SIGTERM, [](int) { ended = 1; });
  Take(SIGWINCH, [](int) { resized = 1; });
  LiveScreen screen;
  while (ended == 0) {
    const std::string text = draw();
    do {
      resized = 0;
      screen.Draw(text);
      if (WaitForKey(interval)) ended = 1;
    } while (resized != 0 && ended == 0);
  }
}

}  // namespace tandem::cli
