// SPDX-License-Identifier: Apache-2.0
#include "handoff/shm/doorman.h"

#include <openssl/crypto.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/failpoint.h"
#include "common/thread_loop.h"
#include "handoff/shm/shm_way.h"

namespace tandem::handoff {
namespace {

// Strangers that may wait at the door, and for how long.
constexpr size_t kMaxStrangers = 64;
constexpr absl::Duration kPatience = absl::Seconds(5);
// Before it is tried again whether there are descriptors.
constexpr absl::Duration kPause = absl::Milliseconds(100);

bool SendDescriptor(int socket, int fd) {
  char byte = shm::kDescriptor;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1;
}

bool IsExhaustion(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS ||
         error == ENOMEM;
}

Fd OpenPeer(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 ||
      peer.pid <= 0) {  // 0: of another pid namespace, cannot be watched
    return Fd();
  }
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Doorman>> Doorman::Listen(
    const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) {
    return absl::InvalidArgumentError("shm socket name too long");
  }
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const socklen_t length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  Fd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.open() ||
      bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) !=
          0 ||
      listen(listener.get(), 64) != 0) {
    return absl::ErrnoToStatus(errno, "listening for shm hand-overs");
  }
  Fd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.open()) return absl::ErrnoToStatus(errno, "eventfd");
  // Exits must be noticed, or no slab would ever be proved quiet.
  if (!Fd(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0))).open()) {
    return absl::ErrnoToStatus(errno, "pidfd_open");
  }
  return std::unique_ptr<Doorman>(
      new Doorman(std::move(listener), std::move(wake)));
}

Doorman::Doorman(Fd listener, Fd wake)
    : listener_(std::move(listener)), wake_(std::move(wake)) {
  thread_ = std::thread([this] { Run(); });
}

Doorman::~Doorman() {
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
  }
  Wake();
  thread_.join();
}

void Doorman::Wake() {
  const uint64_t one = 1;
  // Cannot fail but for a full counter, which wakes as well.
  [[maybe_unused]] const ssize_t written =
      write(wake_.get(), &one, sizeof(one));
}

void Doorman::Expect(uint64_t id, const std::string& secret, Fd fd,
                     Notify notify) {
  MutexLock lock(&mutex_);
  expected_[id] = Guest{secret, std::move(fd), std::move(notify)};
}

bool Doorman::Withdraw(uint64_t id) {
  MutexLock lock(&mutex_);
  return expected_.erase(id) > 0;
}

void Doorman::Forget(uint64_t id) {
  {
    MutexLock lock(&mutex_);
    expected_.erase(id);
    if (admitted_.erase(id) == 0) return;
  }
  Wake();
}

void Doorman::Tell(const Visit& visit, Event event) {
  MutexLock lock(&mutex_);
  if (admitted_.contains(visit.id)) visit.notify(event);
}

void Doorman::Run() {
  pthread_setname_np(pthread_self(), "handoff-door");
  while (true) {
    // Out of descriptors, poll would tell of the same visitor for ever.
    const bool pauses = MonotonicNow() < accepts_again_;
    absl::Time deadline = pauses ? accepts_again_ : absl::InfiniteFuture();
    // Negative descriptors are skipped by poll.
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0},
                                  {pauses ? -1 : listener_.get(), POLLIN, 0}};
    for (const Visit& visit : visits_) {
      polled.push_back({visit.socket.get(), POLLIN, 0});
      polled.push_back({visit.process.get(), POLLIN, 0});
      if (visit.id == 0) deadline = std::min(deadline, visit.deadline);
    }
    const int timeout =
        deadline == absl::InfiniteFuture()
            ? -1
            : static_cast<int>(std::clamp<int64_t>(
                  absl::ToInt64Milliseconds(deadline - MonotonicNow()) + 1, 0,
                  60'000));
    if (poll(polled.data(), polled.size(), timeout) < 0 && errno != EINTR) {
      return;
    }
    uint64_t ignored;
    while (read(wake_.get(), &ignored, sizeof(ignored)) > 0) {
    }
    {
      MutexLock lock(&mutex_);
      if (stopped_) return;
      for (auto visit = visits_.begin(); visit != visits_.end();) {
        const bool forgotten = visit->id != 0 && !admitted_.contains(visit->id);
        visit = forgotten ? visits_.erase(visit) : std::next(visit);
      }
    }
    const absl::Time now = MonotonicNow();
    for (auto visit = visits_.begin(); visit != visits_.end();) {
      // Visits may have gone since the poll: find by descriptor.
      const auto ready = [&](int fd) {
        return fd >= 0 && std::any_of(polled.begin() + 2, polled.end(),
                                      [fd](const pollfd& p) {
                                        return p.fd == fd && p.revents != 0;
                                      });
      };
      bool stays = visit->id != 0 || now < visit->deadline;
      if (ready(visit->process.get())) {
        // The process has exited; of its memory nothing is mapped any more.
        if (visit->id != 0) Tell(*visit, Event::kQuiet);
        stays = false;
      } else if (ready(visit->socket.get())) {
        stays = Hear(&*visit) && stays;
      }
      visit = stays ? std::next(visit) : visits_.erase(visit);
    }
    if (polled[1].revents != 0) Accept();
  }
}

void Doorman::Accept() {
  Fd socket(
      accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.open()) {
    if (IsExhaustion(errno)) accepts_again_ = MonotonicNow() + kPause;
    return;
  }
  const size_t strangers = static_cast<size_t>(
      std::count_if(visits_.begin(), visits_.end(),
                    [](const Visit& visit) { return visit.id == 0; }));
  if (strangers >= kMaxStrangers) return;
  Visit visit;
  visit.process = OpenPeer(socket.get());
  if (!visit.process.open()) return;
  visit.socket = std::move(socket);
  visit.nonce = random_.Bytes(shm::kNonceBytes);
  visit.deadline = MonotonicNow() + kPatience;
  if (send(visit.socket.get(), visit.nonce.data(), visit.nonce.size(),
           MSG_NOSIGNAL) != static_cast<ssize_t>(visit.nonce.size())) {
    return;
  }
  visits_.push_back(std::move(visit));
}

bool Doorman::Hear(Visit* visit) {
  char buffer[shm::kSecretBytes + shm::kNonceBytes];
  const size_t room =
      visit->id != 0 ? sizeof(buffer) : sizeof(buffer) - visit->heard.size();
  const ssize_t got = recv(visit->socket.get(), buffer, room, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (got <= 0) {
    if (visit->id == 0) return false;
    // It closed: that proves nothing. Only its exit will.
    visit->socket.Reset();
    return true;
  }
  if (visit->id != 0) {
    if (std::find(buffer, buffer + got, shm::kReleased) == buffer + got) {
      return true;
    }
    Tell(*visit, Event::kQuiet);
    return false;
  }
  visit->heard.append(buffer, static_cast<size_t>(got));
  return visit->heard.size() < sizeof(buffer) || Admit(visit);
}

bool Doorman::Admit(Visit* visit) {
  if (TANDEM_FAILPOINT("handoff.door", "crash fail stall")) return false;
  if (CRYPTO_memcmp(visit->heard.data() + shm::kSecretBytes,
                    visit->nonce.data(), shm::kNonceBytes) != 0) {
    return false;
  }
  Guest guest;
  {
    MutexLock lock(&mutex_);
    // All of them, in constant time each: which one is near is not told.
    auto match = expected_.end();
    for (auto it = expected_.begin(); it != expected_.end(); ++it) {
      if (CRYPTO_memcmp(visit->heard.data(), it->second.secret.data(),
                        shm::kSecretBytes) == 0) {
        match = it;
      }
    }
    if (match == expected_.end()) return false;
    visit->id = match->first;
    guest = std::move(match->second);
    expected_.erase(match);
    admitted_[visit->id] = true;
  }
  visit->notify = std::move(guest.notify);
  Tell(*visit, Event::kConnected);
  if (SendDescriptor(visit->socket.get(), guest.fd.get())) return true;
  Tell(*visit, Event::kQuiet);  // it never got it
  return false;
}

}  // namespace tandem::handoff
