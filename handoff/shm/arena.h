// SPDX-License-Identifier: Apache-2.0
// Memory shared by two processes: an anonymous memfd, sealed against any
// change of size, so that neither side can make the other's accesses fault.
// It has no name to leak: when both have closed it, it is gone.

#ifndef TANDEM_HANDOFF_SHM_ARENA_H_
#define TANDEM_HANDOFF_SHM_ARENA_H_

#include <unistd.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "handoff/host_memory.h"

namespace tandem::handoff {

// A file descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { Reset(); }
  void Reset() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

class SharedArena {
 public:
  // New memory, sealed and mapped. Nothing is touched yet.
  static absl::StatusOr<std::unique_ptr<SharedArena>> Create(size_t bytes);
  // Another process's. Refused unless it is sealed and of this size.
  static absl::StatusOr<std::unique_ptr<SharedArena>> Map(Fd fd, size_t bytes);

  // Lets the device of `memory` reach it for as long as it is mapped; if that
  // fails it is used all the same. `memory` may be null, else outlives it.
  void Register(HostMemory* memory);

  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  const Fd& fd() const { return fd_; }

 private:
  SharedArena(Fd fd, std::byte* data, size_t size)
      : fd_(std::move(fd)), data_(data), size_(size) {}

  Fd fd_;
  std::byte* const data_;
  const size_t size_;
  HostMemory* registered_ = nullptr;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_SHM_ARENA_H_
