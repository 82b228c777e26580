// SPDX-License-Identifier: Apache-2.0

#include "kernels/cpu/allocator.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tandem::kernels::cpu {
namespace {

class MappedMemory final : public DeviceAllocator {
 public:
  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "cannot map ", bytes, " bytes of memory: ", std::strerror(errno)));
    }
    if (bytes >= kHugePage) madvise(data, bytes, MADV_HUGEPAGE);
    return static_cast<std::byte*>(data);
  }
  void Free(std::byte* data, size_t bytes) override { munmap(data, bytes); }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
};

}  // namespace

DeviceAllocator& HostMemory() {
  static MappedMemory memory;
  return memory;
}

absl::StatusOr<DeviceMemory> DeviceMemory::Make(DeviceAllocator& allocator,
                                                size_t bytes) {
  if (bytes == 0) bytes = 64;
  absl::StatusOr<std::byte*> data = allocator.Allocate(bytes);
  if (!data.ok()) return data.status();
  return DeviceMemory(&allocator, *data, bytes);
}

}  // namespace tandem::kernels::cpu
