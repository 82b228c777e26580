// SPDX-License-Identifier: Apache-2.0
#include "common/self_connect.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"

namespace tandem {
namespace {

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
};

bool Parse(const std::string& text, Address* out) {
  const size_t colon = text.rfind(':');
  int port = 0;
  if (colon == std::string::npos ||
      !absl::SimpleAtoi(text.substr(colon + 1), &port)) {
    return false;
  }
  std::string host = text.substr(0, colon);
  if (host.size() > 1 && host.front() == '[') {
    host = host.substr(1, host.size() - 2);
  }
  if (host == "0.0.0.0" || host == "localhost") host = "127.0.0.1";
  if (host == "::") host = "::1";
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    std::memcpy(&out->bytes, &v4, sizeof v4);
    out->size = sizeof v4;
    return true;
  }
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(static_cast<uint16_t>(port));
  if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) != 1) return false;
  std::memcpy(&out->bytes, &v6, sizeof v6);
  out->size = sizeof v6;
  return true;
}

using Clock = std::chrono::steady_clock;

bool Becomes(int fd, short event, Clock::time_point end) {
  pollfd waits{.fd = fd, .events = event, .revents = 0};
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - Clock::now());
    const int ready =
        poll(&waits, 1, static_cast<int>(std::max<int64_t>(0, left.count())));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

int ErrorOf(int fd) {
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : 0;
}

}  // namespace

bool Answers(const std::string& address, absl::Duration timeout) {
  Address to;
  if (!Parse(address, &to)) return true;  // a name: not ours to look up
  const int fd =
      socket(to.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return true;
  const auto end = Clock::now() + absl::ToChronoNanoseconds(timeout);
  int error = 0;
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to.bytes), to.size) != 0 &&
      errno != EINPROGRESS) {
    error = errno;
  }
  bool answers = error != 0 || Becomes(fd, POLLOUT, end);
  if (answers && error == 0) error = ErrorOf(fd);
  if (answers && error == 0) {
    // The kernel took the connection; that the process did, only it can show.
    shutdown(fd, SHUT_WR);
    answers = Becomes(fd, POLLIN, end);
  }
  answers = answers && error != ECONNREFUSED;
  close(fd);
  return answers;
}

SelfConnect::SelfConnect(std::vector<std::string> addresses,
                         SelfConnectOptions options,
                         std::function<void(const std::string& address)> deaf)
    : addresses_(std::move(addresses)),
      options_(options),
      deaf_(std::move(deaf)),
      thread_([this] { Run(); }) {}

SelfConnect::~SelfConnect() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  stop_.NotifyAll();
  thread_.join();
}

bool SelfConnect::Pause() {
  const auto end = Clock::now() + absl::ToChronoNanoseconds(options_.interval);
  MutexLock lock(&mutex_);
  while (!stopping_) {
    const auto left = end - Clock::now();
    if (left.count() <= 0) return true;
    stop_.WaitFor(&mutex_, left);
  }
  return false;
}

void SelfConnect::Run() {
  pthread_setname_np(pthread_self(), "self-connect");
  // Who never answered cannot be reached from here, as a firewall may have it.
  constexpr int kUnknown = -1;
  std::vector<int> failures(addresses_.size(), kUnknown);
  while (Pause()) {
    for (size_t i = 0; i < addresses_.size(); ++i) {
      if (Answers(addresses_[i], options_.timeout)) {
        failures[i] = 0;
      } else if (failures[i] != kUnknown) {
        ++failures[i];
      }
      if (failures[i] < options_.failures) continue;
      deaf_(addresses_[i]);
      return;
    }
  }
}

}  // namespace tandem
