// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "common/mutex.h"
#include "common/thread_loop.h"
#include "handoff/shm/arena.h"
#include "handoff/shm/shm_way.h"

namespace tandem::handoff {
namespace {

class ShmSenderChannel final : public SenderChannel {
 public:
  ShmSenderChannel(std::unique_ptr<SharedArena> arena, int64_t slab_bytes,
                   Fd socket)
      : arena_(std::move(arena)),
        slab_bytes_(slab_bytes),
        socket_(std::move(socket)) {}
  ~ShmSenderChannel() override {
    arena_.reset();  // from here no store can happen
    send(socket_.get(), &shm::kReleased, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  std::byte* Staging(uint32_t slab) override {
    return arena_->data() + int64_t{slab} * slab_bytes_;
  }
  bool may_wait() const override { return true; }
  void Send(
      v1::Slice slice, const std::byte*, size_t,
      absl::AnyInvocable<void(absl::StatusOr<v1::Slice>)> ready) override {
    ready(std::move(slice));
  }

 private:
  std::unique_ptr<SharedArena> arena_;
  const int64_t slab_bytes_;
  const Fd socket_;
};

absl::Status ReadExactly(int socket, char* out, size_t size) {
  while (size > 0) {
    const ssize_t got = recv(socket, out, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return absl::UnavailableError("refused by the receiver");
    if (got < 0) return absl::ErrnoToStatus(errno, "shm hand-over");
    out += got;
    size -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

// The one byte that carries the descriptor.
absl::StatusOr<Fd> ReadDescriptor(int socket) {
  if (TANDEM_FAILPOINT("handoff.descriptor", "fail stall")) {
    return failpoint::Error();
  }
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got;
  do {
    got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return absl::ErrnoToStatus(errno, "shm hand-over");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (got != 1 || byte != shm::kDescriptor || header == nullptr ||
      header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS ||
      header->cmsg_len != CMSG_LEN(sizeof(int))) {
    return absl::UnavailableError("the receiver handed over no descriptor");
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
  return Fd(fd);
}

class ShmSenderWay final : public SenderWay {
 public:
  ShmSenderWay(Loop* loop, HostMemory* memory) : loop_(loop), memory_(memory) {
    thread_ = std::thread([this] { Run(); });
  }
  ~ShmSenderWay() override {
    {
      MutexLock lock(&mutex_);
      stopped_ = true;
    }
    changed_.NotifyAll();
    thread_.join();
  }
  std::string_view name() const override { return "shm"; }

  void Connect(
      const v1::LinkWelcome& welcome, absl::Duration timeout,
      absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<SenderChannel>>)>
          done) override {
    MutexLock lock(&mutex_);
    jobs_.push_back({welcome, MonotonicNow() + timeout, std::move(done)});
    changed_.NotifyAll();
  }

 private:
  struct Job {
    v1::LinkWelcome welcome;
    absl::Time deadline;  // MonotonicNow: sockets know no virtual time
    absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<SenderChannel>>)>
        done;
  };

  void Run() {
    pthread_setname_np(pthread_self(), "handoff-shm");
    while (true) {
      Job job;
      {
        MutexLock lock(&mutex_);
        while (jobs_.empty() && !stopped_) changed_.Wait(&mutex_);
        if (stopped_) return;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      absl::StatusOr<std::unique_ptr<SenderChannel>> channel =
          ConnectShm(job.welcome, job.deadline - MonotonicNow(), memory_);
      loop_->Post(
          [done = std::move(job.done), channel = std::move(channel)]() mutable {
            done(std::move(channel));
          });
    }
  }

  Loop* const loop_;
  HostMemory* const memory_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Job> jobs_ ABSL_GUARDED_BY(mutex_);  // at most one per link
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SenderChannel>> ConnectShm(
    const v1::LinkWelcome& welcome, absl::Duration timeout,
    HostMemory* memory) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string& name = welcome.shm_socket();
  if (name.empty() || name.size() + 1 > sizeof(address.sun_path) ||
      welcome.shm_secret().size() != shm::kSecretBytes) {
    return absl::FailedPreconditionError("the receiver offers no shm socket");
  }
  if (memory != nullptr && welcome.slab_bytes() % 16 != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the receiver's slabs of ", welcome.slab_bytes(),
                     " bytes are not multiples of 16, as a device needs"));
  }
  if (timeout <= absl::ZeroDuration()) {
    return absl::DeadlineExceededError("no time left to share memory");
  }
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.open()) return absl::ErrnoToStatus(errno, "shm socket");
  const timeval limit = absl::ToTimeval(timeout);
  setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  // Abstract: the name begins with a zero byte and is in no file system.
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const socklen_t length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) !=
      0) {
    return absl::ErrnoToStatus(errno,
                               "connecting to the receiver's shm socket");
  }
  std::string nonce(shm::kNonceBytes, '\0');
  const absl::Status read =
      ReadExactly(socket.get(), nonce.data(), nonce.size());
  if (!read.ok()) return read;
  const std::string reply = welcome.shm_secret() + nonce;
  if (send(socket.get(), reply.data(), reply.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(reply.size())) {
    return absl::ErrnoToStatus(errno, "shm hand-over");
  }
  absl::StatusOr<Fd> fd = ReadDescriptor(socket.get());
  if (!fd.ok()) return fd.status();
  absl::StatusOr<std::unique_ptr<SharedArena>> arena = SharedArena::Map(
      *std::move(fd), static_cast<size_t>(welcome.slab_bytes()) *
                          static_cast<size_t>(welcome.num_slabs()));
  if (!arena.ok()) {
    // Nothing was mapped, so nothing will be stored.
    send(socket.get(), &shm::kReleased, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    return arena.status();
  }
  (*arena)->Register(memory);
  return std::make_unique<ShmSenderChannel>(
      *std::move(arena), welcome.slab_bytes(), std::move(socket));
}

std::unique_ptr<SenderWay> NewShmSenderWay(Loop* loop, HostMemory* memory) {
  return std::make_unique<ShmSenderWay>(loop, memory);
}

}  // namespace tandem::handoff
