// SPDX-License-Identifier: Apache-2.0
#include "cli/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/lifecycle.h"

namespace tandem::cli {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxLine = 16 << 10;
constexpr char kDigits[] = "0123456789";
constexpr int kCannotBeExecuted = 127;  // as a shell says it

volatile sig_atomic_t to_forward = false;

// What a program says of why it ends begins with its own name.
bool IsLastWord(const ChildSpec& spec, const std::string& line) {
  const std::string& path = spec.argv.front();
  return absl::StartsWith(line,
                          absl::StrCat(path.substr(path.rfind('/') + 1), ": "));
}

// A crash writes its flight record (flight_recorder.h) after what was said of
// its cause: a head, and lines that begin with a time in seconds.
bool IsFlightRecord(const std::string& line) {
  if (absl::StartsWith(line, "# ")) {
    return absl::StrContains(line, " pid=") &&
           absl::StrContains(line, " monotonic=");
  }
  const size_t point = line.find_first_not_of(kDigits);
  if (point == 0 || point == std::string::npos || line[point] != '.') {
    return false;
  }
  const size_t end = line.find_first_not_of(kDigits, point + 1);
  return end == point + 10 && line[end] == ' ';
}

std::string HowItEnded(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    return absl::StrCat("was killed by signal ", WTERMSIG(wait_status), " (",
                        strsignal(WTERMSIG(wait_status)), ")");
  }
  return absl::StrCat("ended with exit code ", WEXITSTATUS(wait_status));
}

}  // namespace

struct Supervisor::Child {
  ChildSpec spec;
  pid_t pid = -1;
  int output = -1;  // read end of its standard output and error
  std::string partial;
  std::string last_line;
  bool held = false;  // last_line is a last word that was not passed on
  Clock::time_point started;
  Clock::time_point start_at;  // when to try again
  int starts = 0;
  int deaths = 0;  // in a row, young
  bool stopping = false;
};

Supervisor::Supervisor(OnLine line) : on_line_(std::move(line)) {}

Supervisor::~Supervisor() { KillAll(); }

void Supervisor::Add(ChildSpec spec) {
  auto child = std::make_unique<Child>();
  child->spec = std::move(spec);
  children_.push_back(std::move(child));
}

absl::Status Supervisor::StartAll() {
  for (const auto& child : children_) {
    absl::Status status = Start(child.get());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Supervisor::Start(Child* child) {
  int pipe_fds[2];
  if (pipe2(pipe_fds, O_CLOEXEC) != 0) {
    return absl::InternalError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  std::vector<char*> argv;
  for (std::string& argument : child->spec.argv) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  const std::string failed = absl::StrCat("cannot execute ", argv[0], "\n");
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    return absl::InternalError(absl::StrCat("fork: ", std::strerror(errno)));
  }
  if (pid == 0) {
    // Only what is safe between fork and exec.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    // What is forwarded must not end a child that is not ready for it yet.
    if (forwarded_ != 0) signal(forwarded_, SIG_IGN);
    const int null = open("/dev/null", O_RDONLY);
    dup2(null, STDIN_FILENO);
    dup2(pipe_fds[1], STDOUT_FILENO);
    dup2(pipe_fds[1], STDERR_FILENO);
    execv(argv[0], argv.data());
    (void)!write(STDERR_FILENO, failed.data(), failed.size());
    _exit(kCannotBeExecuted);
  }
  close(pipe_fds[1]);
  fcntl(pipe_fds[0], F_SETFL, O_NONBLOCK);
  child->pid = pid;
  child->output = pipe_fds[0];
  child->partial.clear();
  child->started = Clock::now();
  ++child->starts;
  return absl::OkStatus();
}

void Supervisor::ReadLines(Child* child) {
  char buffer[4096];
  ssize_t count;
  while ((count = read(child->output, buffer, sizeof buffer)) > 0) {
    child->partial.append(buffer, static_cast<size_t>(count));
    size_t end;
    while ((end = child->partial.find('\n')) != std::string::npos ||
           child->partial.size() > kMaxLine) {
      end = std::min(end, child->partial.size());
      TakeLine(child, child->partial.substr(0, end));
      child->partial.erase(0, end + 1);
    }
  }
}

// Last words wait for the end: where it is for good, they are in its error.
void Supervisor::TakeLine(Child* child, std::string line) {
  PassHeld(child);
  if (IsFlightRecord(line)) {
    on_line_(child->spec.name, line);
    return;
  }
  child->last_line = std::move(line);
  child->held = IsLastWord(child->spec, child->last_line);
  if (!child->held) on_line_(child->spec.name, child->last_line);
}

void Supervisor::PassHeld(Child* child) {
  if (std::exchange(child->held, false)) {
    on_line_(child->spec.name, child->last_line);
  }
}

absl::Status Supervisor::Died(Child* child, int wait_status) {
  ReadLines(child);
  if (!child->partial.empty()) {
    TakeLine(child, std::exchange(child->partial, ""));
  }
  close(std::exchange(child->output, -1));
  child->pid = -1;
  if (child->stopping) {
    PassHeld(child);
    return absl::OkStatus();
  }
  const bool young = Clock::now() - child->started < kHealthyAge;
  child->deaths = young ? child->deaths + 1 : 1;
  const std::string how = HowItEnded(wait_status);
  // What is wrong with a command line will not get better, nor will most of
  // what the first start gave up on: a model, a port, memory.
  const int code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 0;
  const bool first = young && child->starts == 1;
  const bool hopeless =
      code == kExitUsage ||
      (first && (code == kExitFailed || code == kCannotBeExecuted));
  if (child->deaths >= kMaxDeaths || hopeless) {
    child->held = false;
    const std::string why =
        absl::StrCat(child->spec.name, " ", how, ": ", child->last_line);
    return code == kExitUsage ? UsageError(why) : absl::AbortedError(why);
  }
  PassHeld(child);
  ++restarts_;
  const auto delay = std::chrono::milliseconds(100 << child->deaths);
  on_line_(child->spec.name,
           absl::StrCat(how, "; starting it again in ", delay.count(), " ms"));
  child->start_at = Clock::now() + delay;
  return absl::OkStatus();
}

absl::Status Supervisor::Reap() {
  for (const auto& child : children_) {
    int wait_status;
    if (child->pid > 0 &&
        waitpid(child->pid, &wait_status, WNOHANG) == child->pid) {
      absl::Status status = Died(child.get(), wait_status);
      if (!status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status Supervisor::Poll(std::chrono::milliseconds timeout) {
  std::vector<pollfd> fds;
  for (const auto& child : children_) {
    if (child->output >= 0) fds.push_back({child->output, POLLIN, 0});
  }
  // A child's death closes its pipe, so it wakes this too.
  poll(fds.data(), fds.size(), static_cast<int>(timeout.count()));
  SendForwarded();
  for (const auto& child : children_) {
    if (child->output >= 0) ReadLines(child.get());
  }
  absl::Status status = Reap();
  for (const auto& child : children_) {
    if (!status.ok()) break;
    if (child->pid < 0 && !child->stopping && Clock::now() >= child->start_at) {
      status = Start(child.get());
    }
  }
  return status;
}

void Supervisor::Forward(int number) {
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_handler = [](int) { to_forward = true; };
  action.sa_flags = SA_RESTART;
  sigaction(number, &action, nullptr);
  forwarded_ = number;
}

void Supervisor::SendForwarded() {
  if (!to_forward) return;
  to_forward = false;
  for (const auto& child : children_) {
    if (child->pid > 0) kill(child->pid, forwarded_);
  }
}

void Supervisor::Stop(const std::string& prefix,
                      std::chrono::milliseconds grace,
                      const std::function<bool()>& at_once) {
  std::vector<Child*> stopping;
  for (const auto& child : children_) {
    if (child->spec.name.compare(0, prefix.size(), prefix) != 0) continue;
    child->stopping = true;
    if (child->pid > 0) {
      kill(child->pid, SIGTERM);
      stopping.push_back(child.get());
    }
  }
  const auto end = Clock::now() + grace;
  const auto any_left = [&] {
    return std::any_of(stopping.begin(), stopping.end(),
                       [](const Child* child) { return child->pid > 0; });
  };
  while (any_left() && Clock::now() < end && !at_once()) {
    (void)Poll(std::chrono::milliseconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (Child* const child : stopping) {
    if (child->pid > 0) kill(child->pid, SIGKILL);
  }
  while (any_left()) (void)Poll(std::chrono::milliseconds(20));
}

void Supervisor::KillAll() {
  for (const auto& child : children_) {
    child->stopping = true;
    if (child->pid > 0) {
      kill(child->pid, SIGKILL);
      int wait_status;
      waitpid(child->pid, &wait_status, 0);
      (void)Died(child.get(), wait_status);
    }
  }
}

pid_t Supervisor::pid(const std::string& name) const {
  for (const auto& child : children_) {
    if (child->spec.name == name) return child->pid;
  }
  return -1;
}

}  // namespace tandem::cli
