// SPDX-License-Identifier: Apache-2.0
// Whole blocks between a device's KV cache and host memory: what a second
// tier of memory (engine/kv/kv_offload.h) asks of an executor.

#ifndef TANDEM_ENGINE_KV_BLOCK_MOVER_H_
#define TANDEM_ENGINE_KV_BLOCK_MOVER_H_

#include <cstddef>
#include <cstdint>

#include "absl/functional/any_invocable.h"

namespace tandem::engine {

// Called on the loop, and calls back there; never inside the call. Moves run
// in the order in which they were asked for, beside the steps.
class BlockMover {
 public:
  virtual ~BlockMover() = default;

  // All layers and heads of a block in the cache's own format.
  virtual int64_t block_bytes() const = 0;

  // Copies a block whose content is settled to `to` [block_bytes()]. Whatever
  // is asked of the device after this call may write the block: it waits for
  // the copy.
  virtual void SaveBlock(int32_t block, std::byte* to,
                         absl::AnyInvocable<void()> done) = 0;

  // Fills a block that no step in flight names. Steps and copies asked for
  // after this call find the content there.
  virtual void RestoreBlock(int32_t block, const std::byte* from,
                            absl::AnyInvocable<void()> done) = 0;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_BLOCK_MOVER_H_
