// SPDX-License-Identifier: Apache-2.0
#include "common/rpc/listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/error.h"

namespace tandem::rpc {
namespace {

constexpr int kBacklog = 4096;  // the kernel has a limit of its own
// Before it is tried again whether there are descriptors.
constexpr int kPauseMs = 100;
// Before it is looked who has gone.
constexpr int kAcceptsPerTurn = 64;
// Of what was sent and nobody acknowledges, as gRPC sets it beside keepalive.
constexpr int kUserTimeoutMs = 10'000;

absl::Status CannotListen(const std::string& address, const std::string& why) {
  return MakeError(absl::StatusCode::kUnavailable, "CANNOT_LISTEN",
                   absl::StrCat("cannot listen on ", address, ": ", why));
}

void SetInt(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));
}

// The bytes of the address alone.
std::string PeerOf(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return {reinterpret_cast<const char*>(&v4.sin_addr), sizeof(v4.sin_addr)};
  }
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  return {reinterpret_cast<const char*>(&v6.sin6_addr), sizeof(v6.sin6_addr)};
}

in_port_t& PortIn(sockaddr* address) {
  return address->sa_family == AF_INET
             ? reinterpret_cast<sockaddr_in*>(address)->sin_port
             : reinterpret_cast<sockaddr_in6*>(address)->sin6_port;
}

int PortOf(int socket) {
  sockaddr_storage bound = {};
  socklen_t size = sizeof(bound);
  auto* const address = reinterpret_cast<sockaddr*>(&bound);
  getsockname(socket, address, &size);
  return ntohs(PortIn(address));
}

// A listening socket, or -1 with errno.
int Open(const addrinfo& address, int port) {
  const int fd =
      socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  SetInt(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  // "[::]" is all addresses of this host.
  if (address.ai_family == AF_INET6) SetInt(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  // Connections inherit these.
  SetInt(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetInt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kUserTimeoutMs);
  PortIn(address.ai_addr) = htons(static_cast<uint16_t>(port));
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0 &&
      listen(fd, kBacklog) == 0) {
    return fd;
  }
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

bool IsExhaustion(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS ||
         error == ENOMEM;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(
    const std::string& address, ConnectionLimits limits,
    const std::string& port_flag) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  int number = -1;
  if (colon == std::string::npos ||
      !absl::SimpleAtoi(address.substr(colon + 1), &number) || number < 0 ||
      number > 0xffff) {
    return CannotListen(address, "not host:port");
  }
  addrinfo hints = {};
  hints.ai_flags = AI_PASSIVE;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(
          host.c_str(), std::to_string(number).c_str(), &hints, &found);
      error != 0) {
    return CannotListen(address, gai_strerror(error));
  }
  std::unique_ptr<Listener> listener(new Listener());
  listener->port_ = number;
  int failure = 0;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    const int socket = Open(*a, listener->port_);
    if (socket < 0) {
      failure = errno;
      continue;
    }
    listener->sockets_.push_back(socket);
    listener->port_ = PortOf(socket);
  }
  freeaddrinfo(found);
  if (listener->sockets_.empty()) {
    return CannotListen(
        address,
        absl::StrCat(strerror(failure),
                     failure == EADDRINUSE
                         ? absl::StrCat(": end what listens there, or take "
                                        "another --",
                                        port_flag)
                         : ""));
  }
  listener->limits_ = limits;
  listener->epoll_ = epoll_create1(EPOLL_CLOEXEC);
  listener->stop_ = eventfd(0, EFD_CLOEXEC);
  if (listener->epoll_ < 0 || listener->stop_ < 0) {
    return CannotListen(address, strerror(errno));
  }
  return listener;
}

Listener::~Listener() {
  Stop();
  for (const int fd : {epoll_, stop_}) {
    if (fd >= 0) close(fd);
  }
}

void Listener::Start(
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  epoll_event event = {.events = EPOLLIN, .data = {.fd = stop_}};
  TANDEM_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, stop_, &event) == 0,
               "the kernel watches an eventfd of ours");
  Listen(true);
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "grpc-accept");
    Run();
  });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    eventfd_write(stop_, 1);
    thread_.join();
  }
  while (!watched_.empty()) Forget(watched_.begin()->first);
  // New connections hear at once that nobody is here.
  for (const int socket : sockets_) close(socket);
  sockets_.clear();
}

void Listener::Listen(bool on) {
  for (const int socket : sockets_) {
    epoll_event event = {.events = EPOLLIN, .data = {.fd = socket}};
    TANDEM_CHECK(epoll_ctl(epoll_, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, socket,
                           &event) == 0,
                 "the kernel watches a socket of ours");
  }
}

void Listener::Run() {
  std::array<epoll_event, 64> events;
  while (true) {
    const int count = epoll_wait(epoll_, events.data(), events.size(),
                                 exhausted_ ? kPauseMs : -1);
    if (std::exchange(exhausted_, false)) Listen(true);
    // What has gone first: it makes room.
    for (int i = 0; i < count; ++i) {
      if (events[i].data.fd == stop_) return;
      if (watched_.contains(events[i].data.fd) &&
          (events[i].events & EPOLLHUP) != 0) {
        Forget(events[i].data.fd);
      }
    }
    for (const int socket : sockets_) {
      for (int i = 0; i < kAcceptsPerTurn && Accept(socket); ++i) {
      }
    }
  }
}

bool Listener::Accept(int socket) {
  if (exhausted_) return false;
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  const int connection = accept4(socket, reinterpret_cast<sockaddr*>(&address),
                                 &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (connection < 0) {
    const int error = errno;
    exhausted_ = IsExhaustion(error);
    if (exhausted_) Listen(false);  // it would be told of at once, for ever
    return error == EINTR || error == ECONNABORTED;
  }
  const std::string peer = PeerOf(address);
  if (!HasRoom(peer) || !Watch(connection, peer)) {
    ++refused_;
    close(connection);
    return true;
  }
  grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters taken;
  taken.fd = connection;
  acceptor_->HandleNewConnection(&taken);
  return true;
}

bool Listener::HasRoom(const std::string& peer) const {
  if (limits_.all > 0 && open_ >= limits_.all) return false;
  const auto of_peer = per_peer_.find(peer);
  return limits_.per_peer == 0 || of_peer == per_peer_.end() ||
         of_peer->second < limits_.per_peer;
}

// The server closes its descriptor without a word. It shuts the connection
// before, which a second descriptor shows; of bytes this one is not told.
bool Listener::Watch(int connection, const std::string& peer) {
  const int second = fcntl(connection, F_DUPFD_CLOEXEC, 0);
  if (second < 0) return false;
  epoll_event event = {.events = EPOLLET, .data = {.fd = second}};
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, second, &event) != 0) {
    close(second);
    return false;
  }
  watched_[second] = peer;
  ++per_peer_[peer];
  ++open_;
  return true;
}

void Listener::Forget(int watched) {
  const auto it = watched_.find(watched);
  const auto of_peer = per_peer_.find(it->second);
  if (--of_peer->second == 0) per_peer_.erase(of_peer);
  watched_.erase(it);
  // Closed alone it would stay watched while the server has the connection, and
  // what is told of it would be taken for the next one's with this number.
  epoll_ctl(epoll_, EPOLL_CTL_DEL, watched, nullptr);
  close(watched);
  --open_;
}

}  // namespace tandem::rpc
