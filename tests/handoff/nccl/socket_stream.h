// SPDX-License-Identifier: Apache-2.0
// A stream between two processes over a connected Unix socket: messages with
// their length before them, a thread that reads and one that writes.

#ifndef TANDEM_TESTS_HANDOFF_NCCL_SOCKET_STREAM_H_
#define TANDEM_TESTS_HANDOFF_NCCL_SOCKET_STREAM_H_

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "common/loop.h"
#include "common/mutex.h"
#include "common/stream.h"

namespace tandem::handoff::nccl::testing {

inline bool ReadAll(int fd, void* to, size_t bytes) {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = read(fd, at, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<size_t>(got);
  }
  return true;
}

inline bool WriteAll(int fd, const void* from, size_t bytes) {
  const char* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t put = send(fd, at, bytes, MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    at += put;
    bytes -= static_cast<size_t>(put);
  }
  return true;
}

inline bool ReadFrame(int fd, std::string* bytes) {
  uint32_t size = 0;
  if (!ReadAll(fd, &size, sizeof(size))) return false;
  bytes->resize(size);
  return ReadAll(fd, bytes->data(), size);
}

inline bool WriteFrame(int fd, const std::string& bytes) {
  const uint32_t size = static_cast<uint32_t>(bytes.size());
  return WriteAll(fd, &size, sizeof(size)) && WriteAll(fd, bytes.data(), size);
}

template <typename Out, typename In>
class SocketStream final : public Stream<Out, In> {
 public:
  SocketStream(Loop* loop, int fd) : loop_(loop), fd_(fd) {}
  ~SocketStream() override {
    Close(absl::OkStatus());
    reader_.join();
    writer_.join();
    close(fd_);
  }

  void Start(StreamHandler<In>* handler) override {
    shared_->handler = handler;
    reader_ = std::thread([this] { Read(); });
    writer_ = std::thread([this] { Write(); });
  }
  void Send(Out message) override {
    MutexLock lock(&mutex_);
    queue_.push_back(message.SerializeAsString());
    changed_.NotifyAll();
  }
  size_t unsent() const override {
    MutexLock lock(&mutex_);
    return queue_.size();
  }
  void PauseReading(bool) override {}
  void Close(absl::Status) override {
    shared_->handler = nullptr;
    {
      MutexLock lock(&mutex_);
      if (std::exchange(closed_, true)) return;
      changed_.NotifyAll();
    }
    shutdown(fd_, SHUT_RDWR);
  }
  std::string peer() const override { return "the other process"; }

 private:
  struct Shared {  // of the loop
    StreamHandler<In>* handler = nullptr;
  };

  void Read() {
    std::string bytes;
    while (ReadFrame(fd_, &bytes)) {
      In message;
      if (!message.ParseFromString(bytes)) break;
      loop_->Post([shared = shared_, message = std::move(message)]() mutable {
        if (shared->handler != nullptr) {
          shared->handler->OnMessage(std::move(message));
        }
      });
    }
    loop_->Post([shared = shared_] {
      if (shared->handler != nullptr) {
        std::exchange(shared->handler, nullptr)
            ->OnClosed(absl::UnavailableError("the connection broke"));
      }
    });
  }
  void Write() {
    while (true) {
      std::string bytes;
      {
        MutexLock lock(&mutex_);
        while (queue_.empty() && !closed_) changed_.Wait(&mutex_);
        if (closed_) return;
        bytes = queue_.front();
      }
      if (!WriteFrame(fd_, bytes)) return;
      MutexLock lock(&mutex_);
      queue_.pop_front();
      if (!queue_.empty()) continue;
      loop_->Post([shared = shared_] {
        if (shared->handler != nullptr) shared->handler->OnDrained();
      });
    }
  }

  Loop* const loop_;
  const int fd_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::thread reader_;
  std::thread writer_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tandem::handoff::nccl::testing

#endif  // TANDEM_TESTS_HANDOFF_NCCL_SOCKET_STREAM_H_
