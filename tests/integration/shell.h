// SPDX-License-Identifier: Apache-2.0
// The command line as a user types it.

#ifndef TANDEM_TESTS_INTEGRATION_SHELL_H_
#define TANDEM_TESTS_INTEGRATION_SHELL_H_

#include <string>

namespace tandem::integration {

struct Result {
  int code = -1;       // 128 + a signal that ended it
  std::string output;  // standard output
};

Result Shell(const std::string& command);

// "PATH/tandem ARGUMENTS", of this build.
std::string Tandem(const std::string& arguments);

}  // namespace tandem::integration

#endif  // TANDEM_TESTS_INTEGRATION_SHELL_H_
