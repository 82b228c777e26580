// SPDX-License-Identifier: Apache-2.0
#include "common/lifecycle.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/error.h"
#include "common/utf8.h"

namespace tandem {
namespace {

constexpr std::string_view kUsage = "USAGE";

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

SignalWatcher::SignalWatcher() {
  const sigset_t set = StopSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  // Writes that fail say so themselves: to a peer that is gone, and to a file
  // beyond the limit of its size.
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);
  signal_fd_ = signalfd(-1, &set, SFD_CLOEXEC);
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  // Without descriptors at the very start nothing else would work either.
  if (signal_fd_ < 0 || stop_fd_ < 0) std::abort();
  thread_ = std::thread([this] { Run(); });
}

SignalWatcher::~SignalWatcher() {
  const uint64_t one = 1;
  while (write(stop_fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  thread_.join();
  close(signal_fd_);
  close(stop_fd_);
}

void SignalWatcher::Run() {
  pthread_setname_np(pthread_self(), "signals");
  for (;;) {
    pollfd fds[] = {{signal_fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
    if (poll(fds, 2, -1) < 0) continue;  // EINTR
    if (fds[1].revents != 0) return;
    signalfd_siginfo info;
    if (read(signal_fd_, &info, sizeof(info)) != sizeof(info)) continue;
    const int number = static_cast<int>(info.ssi_signo);
    int none = 0;
    if (!signal_.compare_exchange_strong(none, number)) {
      EndAtOnce("second signal: ending at once\n", number);
    }
    Deliver(number);
  }
}

void SignalWatcher::EndAtOnce(std::string_view line, int number) {
  (void)!write(STDERR_FILENO, line.data(), line.size());
  _exit(128 + number);
}

void SignalWatcher::OnDrain(Loop* loop, Loop::Task drain) {
  MutexLock lock(&mutex_);
  loop_ = loop;
  drain_ = std::move(drain);
}

void SignalWatcher::Deliver(int number) {
  MutexLock lock(&mutex_);
  if (loop_ == nullptr) {
    EndAtOnce("signal before the start was over: ending at once\n", number);
  }
  loop_->Post(std::exchange(drain_, nullptr));
}

int SignalWatcher::ExitCode(int code) const {
  return code == kExitOk && signal_ != 0 ? 128 + signal_ : code;
}

void RaiseDescriptorLimit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);  // if not, then not
}

void ResetSignalsInChild() {
  const sigset_t set = StopSignals();
  // In a forked child of many threads: sigprocmask is on POSIX's list,
  // pthread_sigmask is the same call.
  sigprocmask(SIG_UNBLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_DFL);
  ::signal(SIGXFSZ, SIG_DFL);
}

void DieWithParent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExitFailed);
}

absl::Status UsageError(std::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, kUsage, message);
}

int ReportFailure(std::string_view program, const absl::Status& status) {
  const std::string line = absl::StrCat(
      std::string(program), ": error: ",
      JsonEscaped(
          std::string_view(status.message().data(), status.message().size()),
          /*quotes=*/false),
      "\n");
  std::fflush(stdout);
  std::fputs(line.c_str(), stderr);
  std::fflush(stderr);
  return ErrorReason(status) == kUsage ? kExitUsage : kExitFailed;
}

absl::Status Watchdog::CheckLimit(absl::Duration limit) {
  if (limit >= absl::Seconds(3)) return absl::OkStatus();
  return UsageError(
      "--liveness-timeout is below 3s: a process looks at itself each second");
}

void Watchdog::Beat(absl::Time now, int64_t progress, bool has_work) {
  // Nothing could advance while the process itself was stopped.
  const bool late = now - absl::FromUnixNanos(beat_) > limit_ / 2;
  if (late || !has_work || progress != progress_) advanced_ = ToNanos(now);
  progress_ = progress;
  beat_ = ToNanos(now);
}

absl::Status Watchdog::Check(absl::Time now) const {
  const absl::Duration since_beat = now - absl::FromUnixNanos(beat_);
  if (since_beat > limit_) {
    return absl::UnavailableError(absl::StrFormat(
        "the loop has not run for %.1f s", absl::ToDoubleSeconds(since_beat)));
  }
  const absl::Duration since_progress = now - absl::FromUnixNanos(advanced_);
  if (since_progress > limit_) {
    return absl::UnavailableError(
        absl::StrFormat("work is waiting, but nothing has advanced for %.1f s",
                        absl::ToDoubleSeconds(since_progress)));
  }
  return absl::OkStatus();
}

}  // namespace tandem
