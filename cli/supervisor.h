// SPDX-License-Identifier: Apache-2.0
// Child processes of `tandem serve`: started by exec with a pipe for their
// words, restarted when they die, drained in order, never orphaned (the
// kernel kills them with us, and each has a process group of its own, so that
// a terminal's Ctrl-C reaches only the supervisor).
//
// Single-threaded: all methods and callbacks on the caller's thread.

#ifndef TANDEM_CLI_SUPERVISOR_H_
#define TANDEM_CLI_SUPERVISOR_H_

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace tandem::cli {

struct ChildSpec {
  std::string name;               // "router", "prefill-0": before its lines
  std::vector<std::string> argv;  // argv[0] is the binary's path
};

class Supervisor {
 public:
  // `line(name, text)` is told every line that a child writes, but for the one
  // that Poll's error has.
  using OnLine =
      std::function<void(const std::string& name, const std::string& text)>;

  explicit Supervisor(OnLine line);
  ~Supervisor();  // kills what still runs
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  void Add(ChildSpec spec);
  absl::Status StartAll();

  // Waits up to `timeout` for words, deaths or signals; passes lines on and
  // restarts the dead. An error where a restart would be in vain: a child died
  // kMaxDeaths times in a row without having lived for kHealthyAge, or its
  // first start gave up by itself. It carries that child's last line before
  // a flight record.
  absl::Status Poll(std::chrono::milliseconds timeout);

  // SIGTERM to children whose names begin with `prefix`; waits until they
  // have gone, at most `grace` and no longer than until `at_once` says so, then
  // SIGKILL. Not restarted.
  void Stop(const std::string& prefix, std::chrono::milliseconds grace,
            const std::function<bool()>& at_once);
  void KillAll();

  // From here on the signals of `number` that this process gets go to every
  // child, by the next Poll. Before StartAll; one number, one supervisor.
  void Forward(int number);

  int restarts() const { return restarts_; }
  pid_t pid(const std::string& name) const;

  static constexpr int kMaxDeaths = 5;
  static constexpr std::chrono::seconds kHealthyAge{10};

 private:
  struct Child;

  absl::Status Start(Child* child);
  void ReadLines(Child* child);
  void TakeLine(Child* child, std::string line);
  void PassHeld(Child* child);
  absl::Status Died(Child* child, int wait_status);
  absl::Status Reap();
  void SendForwarded();

  OnLine on_line_;
  std::vector<std::unique_ptr<Child>> children_;
  int restarts_ = 0;
  int forwarded_ = 0;  // signal; 0: none
};

}  // namespace tandem::cli

#endif  // TANDEM_CLI_SUPERVISOR_H_
