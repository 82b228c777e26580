// SPDX-License-Identifier: Apache-2.0
// What `tandem serve` says of children that do not live.

#include "cli/supervisor.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tandem::cli {
namespace {

// What a shell's script was said to have ended with, for good.
std::string CauseOf(const std::string& script,
                    std::vector<std::string>* lines) {
  Supervisor supervisor(
      [&](const std::string& /*name*/, const std::string& text) {
        lines->push_back(text);
      });
  supervisor.Add({.name = "decode-0", .argv = {"/bin/sh", "-c", script}});
  absl::Status status = supervisor.StartAll();
  while (status.ok()) status = supervisor.Poll(std::chrono::milliseconds(50));
  return std::string(status.message());
}

TEST(SupervisorTest, AFlightRecordIsNoCause) {
  // As the recorder writes to standard error, before and after other lines.
  std::vector<std::string> lines;
  EXPECT_EQ(CauseOf("echo 1.5 of 2; echo 'terminate called'; "
                    "echo '# decode pid=7 monotonic=2.000000000 "
                    "wall=3.000000000 signal=6'; "
                    "echo '2.000000000 decode step sequences=1 rows=1'; "
                    "exit 1",
                    &lines),
            "decode-0 ended with exit code 1: terminate called");
  EXPECT_EQ(lines.size(), 4u);  // all are passed on
}

TEST(SupervisorTest, TheLastWordIsInTheErrorAlone) {
  std::vector<std::string> lines;
  EXPECT_EQ(CauseOf("echo one; echo 'sh: error: two'; exit 2", &lines),
            "decode-0 ended with exit code 2: sh: error: two");
  EXPECT_EQ(lines, std::vector<std::string>{"one"});
}

}  // namespace
}  // namespace tandem::cli
