// SPDX-License-Identifier: Apache-2.0
// Where a CPU backend's "device" memory comes from. Tests inject one that
// hides it from the host (kernels/testing/late_backend.h).

#ifndef TANDEM_KERNELS_CPU_ALLOCATOR_H_
#define TANDEM_KERNELS_CPU_ALLOCATOR_H_

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"

namespace tandem::kernels::cpu {

// Thread-safe.
class DeviceAllocator {
 public:
  virtual ~DeviceAllocator() = default;
  // Zeroed, aligned to 64 bytes. `bytes` > 0.
  virtual absl::StatusOr<std::byte*> Allocate(size_t bytes) = 0;
  virtual void Free(std::byte* data, size_t bytes) = 0;
};

// Anonymous mappings with transparent huge pages; never freed itself.
DeviceAllocator& HostMemory();

// One allocation, given back at the end of its life.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  static absl::StatusOr<DeviceMemory> Make(DeviceAllocator& allocator,
                                           size_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept
      : allocator_(std::exchange(other.allocator_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory() {
    if (data_ != nullptr) allocator_->Free(data_, size_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  DeviceMemory(DeviceAllocator* allocator, std::byte* data, size_t size)
      : allocator_(allocator), data_(data), size_(size) {}

  DeviceAllocator* allocator_ = nullptr;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tandem::kernels::cpu

#endif  // TANDEM_KERNELS_CPU_ALLOCATOR_H_
