// SPDX-License-Identifier: Apache-2.0
#include "tests/integration/serve_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/integration/shell.h"

namespace tandem::integration {

ServeProcess::ServeProcess(const std::string& model,
                           const std::string& arguments, bool admin) {
  base_ = 32000 + static_cast<int>(getpid() % 150) * 4;
  log_ = absl::StrCat(testing::TempDir(), "/tandem-serve-", getpid(), ".log");
  std::remove(log_.c_str());  // an earlier one's
  pid_ = fork();
  if (pid_ == 0) {
    setpgid(0, 0);
    // By environment, which the workers inherit, and must not heed.
    setenv("TANDEM_GRPC_PORT", absl::StrCat(base_).c_str(), 1);
    setenv("TANDEM_PORT", absl::StrCat(base_ + 1).c_str(), 1);
    const std::string command =
        absl::StrCat("exec ",
                     Tandem(absl::StrCat(
                         "serve ", model, " ",
                         admin ? absl::StrCat("--admin-port ", base_ + 2) : "",
                         " ", arguments)),
                     " >", log_, " 2>&1");
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
}

ServeProcess::~ServeProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

bool ServeProcess::WaitUntilReady() {
  for (int i = 0; i < 600; ++i) {
    if (Log().find("Tandem is ready") != std::string::npos) return true;
    if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
      pid_ = -1;
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return false;
}

int ServeProcess::Stop(int signal) {
  kill(pid_, signal);
  int status;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string ServeProcess::Log() const {
  std::ifstream file(log_);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string ServeProcess::Router() const {
  return absl::StrCat("--router 127.0.0.1:", base_);
}

std::string ServeProcess::Admin() const {
  return absl::StrCat("--admin 127.0.0.1:", base_ + 2);
}

std::string ServeProcess::Http() const {
  return absl::StrCat("127.0.0.1:", base_ + 1);
}

std::vector<pid_t> ServeProcess::Children() const {
  std::vector<pid_t> children;
  const Result ps = Shell(absl::StrCat("ps -o pid= --ppid ", pid_));
  std::istringstream lines(ps.output);
  pid_t child;
  while (lines >> child) children.push_back(child);
  return children;
}

}  // namespace tandem::integration
