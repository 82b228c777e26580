// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/shell.h"

#include <sys/wait.h>

#include <array>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "tests/integration/cluster.h"

namespace tandem::integration {

Result Shell(const std::string& command) {
  Result result;
  std::FILE* const pipe = popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  size_t count;
  while ((count = fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
    result.output.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  result.code =
      WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string Tandem(const std::string& arguments) {
  return absl::StrCat(Cluster::BinaryPath("tandem"), " ", arguments);
}

}  // namespace tandem::integration
