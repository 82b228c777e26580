// SPDX-License-Identifier: Apache-2.0
// Host memory that slices are gathered into and scattered from. Where a device
// other than the host does that, it reaches only what it was told of.

#ifndef TANDEM_HANDOFF_HOST_MEMORY_H_
#define TANDEM_HANDOFF_HOST_MEMORY_H_

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::handoff {

// Thread-safe. A worker without such a device has none (null).
class HostMemory {
 public:
  virtual ~HostMemory() = default;
  // Whole pages that the caller has mapped. With an error slices still move,
  // by way of a copy.
  virtual absl::Status Register(std::byte* data, size_t bytes) = 0;
  // Before they are unmapped. REQUIRES: no gather or scatter uses them.
  virtual void Unregister(std::byte* data) = 0;
};

// Buffers of one size in memory of their own, not touched until used, which
// the device reaches for as long as they live.
class HostSlabs {
 public:
  // `memory` may be null, else outlives it. RESOURCE_EXHAUSTED: no room.
  static absl::StatusOr<std::unique_ptr<HostSlabs>> Map(HostMemory* memory,
                                                        int count,
                                                        int64_t slab_bytes);
  ~HostSlabs();
  HostSlabs(const HostSlabs&) = delete;
  HostSlabs& operator=(const HostSlabs&) = delete;

  std::byte* operator[](int slab) const { return data_ + slab * slab_bytes_; }
  int64_t slab_bytes() const { return slab_bytes_; }

 private:
  HostSlabs(HostMemory* memory, std::byte* data, size_t size,
            int64_t slab_bytes)
      : memory_(memory), data_(data), size_(size), slab_bytes_(slab_bytes) {}

  HostMemory* memory_;  // null: not registered
  std::byte* const data_;
  const size_t size_;
  const int64_t slab_bytes_;
};

}  // namespace tandem::handoff

#endif  // TANDEM_HANDOFF_HOST_MEMORY_H_
