// SPDX-License-Identifier: Apache-2.0
#include "cli/chat/local_server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cli/serve.h"
#include "cli/status.h"
#include "common/lifecycle.h"

namespace tandem::chat {
namespace {

constexpr off_t kLastBytes = 64 << 10;

std::string LastLine(int file) {
  struct stat info {};
  if (fstat(file, &info) != 0) return "";
  std::string text(static_cast<size_t>(std::min(info.st_size, kLastBytes)), 0);
  const ssize_t size = pread(file, text.data(), text.size(),
                             info.st_size - static_cast<off_t>(text.size()));
  text.resize(size > 0 ? static_cast<size_t>(size) : 0);
  std::istringstream lines(text);
  std::string line, last;
  while (std::getline(lines, line)) {
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
  std::set<int> ours;
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<int> port = cli::OwnPort(&ours);
    if (!port.ok()) return port.status();
    ports.push_back(absl::StrCat(*port));
  }
  server->address_ = "127.0.0.1:" + ports[0];
  std::string log =
      (std::filesystem::temp_directory_path() / "tandem-chat-XXXXXX").string();
  server->log_ = mkostemp(log.data(), O_CLOEXEC);
  if (server->log_ < 0) {
    return absl::InternalError(absl::StrCat("cannot make a file in ", log));
  }
  unlink(log.c_str());  // so that no signal leaves it behind
  // One worker does both: there is one client.
  std::vector<std::string> words = {
      "tandem",   "serve",  model_dir, "--prefill",    "0",
      "--decode", "1",      "--host",  "127.0.0.1",    "--grpc-port",
      ports[0],   "--port", ports[1],  "--admin-port", ports[2]};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  // Of another server: who may reach it, and by which keys and certificates.
  // This one's only client is this program.
  for (const char* const variable :
       {"TANDEM_CONFIG", "TANDEM_API_KEYS_FILE", "TANDEM_REVISION",
        "TANDEM_SSL_CERTFILE", "TANDEM_SSL_KEYFILE", "TANDEM_SSL_CA_CERTS",
        "TANDEM_TLS_CERT", "TANDEM_TLS_KEY", "TANDEM_TLS_CA"}) {
    unsetenv(variable);
  }
  const pid_t parent = getpid();
  server->pid_ = fork();
  if (server->pid_ == 0) {
    DieWithParent(parent);
    setpgid(0, 0);  // Ctrl-C is not meant for it
    dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    dup2(server->log_, STDOUT_FILENO);
    dup2(server->log_, STDERR_FILENO);
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
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
  if (log_ >= 0) close(log_);
}

}  // namespace tandem::chat
