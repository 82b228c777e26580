// SPDX-License-Identifier: Apache-2.0
// Blocks of KV in a file, read and written by a thread of its own. The file
// has no name from the moment it is open, so no other process can open it, and
// it is gone with this one, however that ends. What is read back is checked
// against a SHA-256 of the block's hash and bytes that stays in memory.

#ifndef TANDEM_ENGINE_KV_BLOCK_FILE_H_
#define TANDEM_ENGINE_KV_BLOCK_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/loop.h"
#include "engine/kv/kv_pool.h"

namespace tandem::engine {

// Slots of one block each. Called on the loop, and calls back there, in
// order; `data` lives until then.
class BlockFile {
 public:
  using Done = absl::AnyInvocable<void(absl::Status)>;
  virtual ~BlockFile() = default;

  // Errors: the operating system's, e.g. RESOURCE_EXHAUSTED on a full disk;
  // then the slot holds nothing.
  virtual void Write(int slot, const BlockHash& hash,
                     absl::Span<const std::byte> data, Done done) = 0;
  // Errors: DATA_LOSS if the slot does not hold what was last written there
  // under this hash. Then `data` is undefined.
  virtual void Read(int slot, const BlockHash& hash, absl::Span<std::byte> data,
                    Done done) = 0;
};

// In `directory`, which must exist. Destroyed, it waits for the operation that
// runs and forgets the others.
class TemporaryBlockFile final : public BlockFile {
 public:
  static absl::StatusOr<std::unique_ptr<TemporaryBlockFile>> Create(
      const std::string& directory, int slots, int64_t block_bytes, Loop* loop);
  ~TemporaryBlockFile() override;

  void Write(int slot, const BlockHash& hash, absl::Span<const std::byte> data,
             Done done) override;
  void Read(int slot, const BlockHash& hash, absl::Span<std::byte> data,
            Done done) override;

  int descriptor() const;  // for tests

 private:
  struct Impl;
  explicit TemporaryBlockFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_BLOCK_FILE_H_
