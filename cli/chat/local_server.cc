// SPDX-License-Identifier: Apache-2.0
#include "cli/chat/local_server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cli/serve.h"
#include "cli/status.h"
#include "common/lifecycle.h"

namespace tandem::chat {
namespace {

std::string LastLine(const std::string& path) {
  std::ifstream file(path);
  std::string line, last;
  while (std::getline(file, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

bool CanAnswer(const v1::GetClusterStateResponse& state) {
  for (const v1::WorkerStatus& worker : state.workers()) {
    if (worker.placeable() && worker.hello().role() == v1::WORKER_ROLE_DECODE) {
      return true;
    }
  }
  return false;
}

}  // namespace

absl::StatusOr<std::unique_ptr<LocalServer>> LocalServer::Start(
    const std::string& model_dir, const std::vector<std::string>& arguments) {
  std::unique_ptr<LocalServer> server(new LocalServer());
  std::vector<std::string> ports;
  ports.reserve(3);
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<int> port = cli::FreePort("127.0.0.1");
    if (!port.ok()) return port.status();
    ports.push_back(absl::StrCat(*port));
  }
  server->address_ = "127.0.0.1:" + ports[0];
  std::string log =
      (std::filesystem::temp_directory_path() / "tandem-chat-XXXXXX").string();
  const int log_fd = mkostemp(log.data(), O_CLOEXEC);
  if (log_fd < 0) {
    return absl::InternalError(absl::StrCat("cannot make a file in ", log));
  }
  server->log_ = log;
  // One worker does both: there is one client.
  std::vector<std::string> words = {
      "tandem", "serve",       model_dir, "--prefill", "0",      "--decode",
      "1",      "--grpc-port", ports[0],  "--port",    ports[1], "--admin-port",
      ports[2]};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  server->pid_ = fork();
  if (server->pid_ == 0) {
    DieWithParent(parent);
    setpgid(0, 0);  // Ctrl-C is not meant for it
    dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    dup2(log_fd, STDOUT_FILENO);
    dup2(log_fd, STDERR_FILENO);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  close(log_fd);
  if (server->pid_ < 0) return absl::InternalError("cannot start a process");
  const cli::ConnectFlags admin{"127.0.0.1:" + ports[2], "", "", ""};
  while (true) {
    const absl::Status status = server->Check();
    if (!status.ok()) return status;
    const auto state = cli::FetchClusterState(admin);
    if (state.ok() && CanAnswer(*state)) return server;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

absl::Status LocalServer::Check() {
  int status;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return absl::OkStatus();
  pid_ = -1;
  return absl::AbortedError(absl::StrCat("the server ended: ", LastLine(log_)));
}

LocalServer::~LocalServer() {
  if (pid_ > 0) {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
  }
  std::remove(log_.c_str());
}

}  // namespace tandem::chat
