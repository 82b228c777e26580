// SPDX-License-Identifier: Apache-2.0
#include "handoff/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/status/status.h"

namespace tandem::handoff {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

absl::StatusOr<std::unique_ptr<SharedArena>> SharedArena::Create(size_t bytes) {
  Fd fd(memfd_create("tandem-slabs", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.open()) return absl::ErrnoToStatus(errno, "memfd_create for slabs");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return absl::ErrnoToStatus(errno, "sizing the slabs' memfd");
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return absl::ErrnoToStatus(errno, "sealing the slabs' memfd");
  }
  return Map(std::move(fd), bytes);
}

absl::StatusOr<std::unique_ptr<SharedArena>> SharedArena::Map(Fd fd,
                                                              size_t bytes) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return absl::FailedPreconditionError("shared slabs are not sealed");
  }
  struct stat status;
  if (fstat(fd.get(), &status) != 0 ||
      status.st_size != static_cast<off_t>(bytes)) {
    return absl::FailedPreconditionError("shared slabs have another size");
  }
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return absl::ErrnoToStatus(errno, "mapping slabs");
  // A child of this process must not go on holding what this one gave back.
  madvise(data, bytes, MADV_DONTFORK);
  return std::unique_ptr<SharedArena>(
      new SharedArena(std::move(fd), static_cast<std::byte*>(data), bytes));
}

void SharedArena::Register(HostMemory* memory) {
  if (memory != nullptr && memory->Register(data_, size_).ok()) {
    registered_ = memory;
  }
}

SharedArena::~SharedArena() {
  if (registered_ != nullptr) registered_->Unregister(data_);
  munmap(data_, size_);
}

}  // namespace tandem::handoff
