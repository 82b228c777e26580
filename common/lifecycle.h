// SPDX-License-Identifier: Apache-2.0
// How a process ends, and how others tell that it still lives.
//
//   int main(int argc, char** argv) {
//     SignalWatcher signals;             // before any thread starts
//     ThreadLoop loop("decode");
//     ...
//     signals.OnDrain(&loop, [&] { core.Drain(); });
//     core.WaitUntilDrained();
//     return signals.ExitCode(kExitOk);  // 143 after SIGTERM, 130 after SIGINT
//   }
//
// Exit codes: 0 fine; 1 failed, the last line on stderr being the root cause;
// 2 usage; 130 and 143 by signal, after the drain or by a second signal.

#ifndef TANDEM_COMMON_LIFECYCLE_H_
#define TANDEM_COMMON_LIFECYCLE_H_

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string_view>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/loop.h"
#include "common/mutex.h"

namespace tandem {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

// Takes SIGTERM and SIGINT from the moment of its construction, in every
// thread started later, and ignores SIGPIPE. The first signal drains; the
// second ends the process at once, and so does the first before OnDrain, when
// nobody is served yet and loading may take minutes. One per process.
class SignalWatcher {
 public:
  SignalWatcher();
  ~SignalWatcher();
  SignalWatcher(const SignalWatcher&) = delete;
  SignalWatcher& operator=(const SignalWatcher&) = delete;

  // Posts `drain` to `loop` at the first signal.
  // `loop` outlives this. Called once.
  void OnDrain(Loop* loop, Loop::Task drain);

  // The first signal; 0 for none yet.
  int signal() const { return signal_.load(); }

  // `code`, or 128 + signal where a signal asked for the end and all went
  // well.
  int ExitCode(int code) const;

 private:
  void Run();
  void Deliver(int number);
  [[noreturn]] static void EndAtOnce(std::string_view line, int number);

  int signal_fd_ = -1;
  int stop_fd_ = -1;
  std::atomic<int> signal_ = 0;
  Mutex mutex_;
  Loop* loop_ ABSL_GUARDED_BY(mutex_) = nullptr;
  Loop::Task drain_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// As many descriptors as the system lets this process have: often a thousand
// are allowed and half a million may be asked for. At the start of a server.
void RaiseDescriptorLimit();

// In a child between fork and exec: undoes what SignalWatcher did to the
// signal mask, which exec would hand on. Async-signal-safe.
void ResetSignalsInChild();

// In a child between fork and exec: SIGKILL for it when `parent` dies, and
// at once if it has died already. Async-signal-safe.
void DieWithParent(pid_t parent);

// About a command line that parses and yet cannot be meant, such as flags that
// exclude each other: the program ends with kExitUsage.
absl::Status UsageError(std::string_view message);

// Prints "NAME: error: MESSAGE" as the last line on stderr; returns the exit
// code, kExitFailed but for a UsageError.
int ReportFailure(std::string_view program, const absl::Status& status);

// Liveness, asked by /health from any thread. Sick when the loop does not
// beat, or when it has work and makes no progress, for `limit`.
class Watchdog {
 public:
  // INVALID_ARGUMENT for a --liveness-timeout within which beats are too few.
  static absl::Status CheckLimit(absl::Duration limit);

  Watchdog(absl::Duration limit, absl::Time now)
      : limit_(limit), beat_(ToNanos(now)), advanced_(ToNanos(now)) {}

  // The loop, about once a second. `progress`: a count of all that was done
  // since the start; `has_work`: something could be done now, and waits for
  // nobody else.
  void Beat(absl::Time now, int64_t progress = 0, bool has_work = false);

  // OK or UNAVAILABLE with what has not happened for how long.
  absl::Status Check(absl::Time now) const;

 private:
  static int64_t ToNanos(absl::Time time) { return absl::ToUnixNanos(time); }

  const absl::Duration limit_;
  std::atomic<int64_t> beat_;
  std::atomic<int64_t> advanced_;  // or had no work
  int64_t progress_ = 0;           // of the last beat; the loop's
};

}  // namespace tandem

#endif  // TANDEM_COMMON_LIFECYCLE_H_
