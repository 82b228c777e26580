// SPDX-License-Identifier: Apache-2.0
// `tandem serve` in the background.

#ifndef TANDEM_TESTS_INTEGRATION_SERVE_PROCESS_H_
#define TANDEM_TESTS_INTEGRATION_SERVE_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <vector>

namespace tandem::integration {

class ServeProcess {
 public:
  // Without `admin` it chooses that port, too.
  ServeProcess(const std::string& model, const std::string& arguments,
               bool admin = true);
  ~ServeProcess();  // kills it

  bool WaitUntilReady();
  int Stop(int signal);  // the exit code, or 128 + a signal that ended it
  std::string Log() const;
  // Flags and an address for the other commands.
  std::string Router() const;
  std::string Admin() const;
  std::string Http() const;
  pid_t pid() const { return pid_; }
  // Processes whose parent is the supervisor.
  std::vector<pid_t> Children() const;

 private:
  pid_t pid_ = -1;
  int base_ = 0;  // the first of three ports
  std::string log_;
};

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_SERVE_PROCESS_H_
