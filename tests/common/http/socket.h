// SPDX-License-Identifier: Apache-2.0
// A client's end of a connection, byte for byte.

#ifndef TANDEM_TESTS_COMMON_HTTP_SOCKET_H_
#define TANDEM_TESTS_COMMON_HTTP_SOCKET_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

namespace tandem {

class Socket {
 public:
  // Connected to nothing yet.
  Socket() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    const timeval limit{20, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  // `from`: another address of this host than the usual one.
  explicit Socket(int port, const std::string& from = "") : Socket() {
    if (!from.empty()) {
      sockaddr_in own = Loopback(0);
      inet_pton(AF_INET, from.c_str(), &own.sin_addr);
      (void)bind(fd_, reinterpret_cast<sockaddr*>(&own), sizeof(own));
    }
    Connect(port);
  }
  ~Socket() { close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void Connect(int port) {
    const sockaddr_in address = Loopback(port);
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address),
                         sizeof(address)) == 0;
  }

  int fd() const { return fd_; }
  bool connected() const { return connected_; }
  // Says that no more will be sent.
  void Finish() { shutdown(fd_, SHUT_WR); }
  void Send(const std::string& text) {
    // The peer may have refused and gone by now.
    (void)send(fd_, text.data(), text.size(), MSG_NOSIGNAL);
  }
  // Until `end` was seen or the peer closed.
  std::string Receive(const std::string& end = "") {
    std::string text;
    char buffer[16384];
    while (true) {
      const ssize_t n = recv(fd_, buffer, sizeof(buffer), 0);
      ended_ = n == 0;
      if (n <= 0) return text;
      const size_t seen = text.size() - std::min(text.size(), end.size());
      text.append(buffer, static_cast<size_t>(n));
      if (!end.empty() && text.find(end, seen) != std::string::npos) {
        return text;
      }
    }
  }

  // Whether the peer closed; where nothing came for long, it did not.
  bool ended() const { return ended_; }

  // How many bytes came, `most` at most, before the peer closed.
  size_t Take(size_t most) {
    std::string bytes(most, 0);
    const ssize_t n = recv(fd_, bytes.data(), most, MSG_WAITALL);
    return n > 0 ? static_cast<size_t>(n) : 0;
  }

  // As many as come when `most` are taken in twelve parts with rests between,
  // all in all more than twice as long as `patience`, and then up to `end`.
  size_t TakeSlowly(size_t most, std::chrono::milliseconds patience,
                    const std::string& end = "") {
    size_t taken = 0;
    for (int i = 0; i < 12; ++i) {
      std::this_thread::sleep_for(patience / 5);
      taken += Take(most / 12);
    }
    return taken + Receive(end).size();
  }

 private:
  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  const int fd_;
  bool connected_ = false;
  bool ended_ = false;
};

// Whether some patience of a server suffices for what a peer does within it:
// short ones do, unless the machine itself stands still for as long.
template <typename Attempt>
bool WithSomePatience(Attempt attempt) {
  for (std::chrono::milliseconds patience(300); patience.count() < 10'000;
       patience *= 2) {
    if (attempt(patience)) return true;
  }
  return false;
}

}  // namespace tandem

#endif  // TANDEM_TESTS_COMMON_HTTP_SOCKET_H_
