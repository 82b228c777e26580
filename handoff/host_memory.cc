// SPDX-License-Identifier: Apache-2.0
#include "handoff/host_memory.h"

#include <sys/mman.h>

#include "absl/strings/str_cat.h"

namespace tandem::handoff {

absl::StatusOr<std::unique_ptr<HostSlabs>> HostSlabs::Map(HostMemory* memory,
                                                          int count,
                                                          int64_t slab_bytes) {
  const auto size = static_cast<size_t>(count * slab_bytes);
  void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no ", size, " bytes for handoff buffers"));
  }
  if (memory != nullptr &&
      !memory->Register(static_cast<std::byte*>(data), size).ok()) {
    memory = nullptr;
  }
  return std::unique_ptr<HostSlabs>(
      new HostSlabs(memory, static_cast<std::byte*>(data), size, slab_bytes));
}

HostSlabs::~HostSlabs() {
  if (memory_ != nullptr) memory_->Unregister(data_);
  munmap(data_, size_);
}

}  // namespace tandem::handoff
