// SPDX-License-Identifier: Apache-2.0
// Who owns which KV block. A block is in exactly one state (DESIGN.md
// section 8, rule 1): free; reserved (promised to a handoff, written by its
// scatters); live (counted references of sequences and of queued device
// work); cached (full, unreferenced, found by its hash, evicted in LRU order
// when blocks run out). Plain single-threaded code; knows no bytes.

#ifndef TANDEM_ENGINE_KV_POOL_H_
#define TANDEM_ENGINE_KV_POOL_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace tandem::engine {

class KvPool;

// Chained hash of a full block: SHA-256 over the parent's hash and the
// block's token ids (little-endian int32), cut to 16 bytes.
struct BlockHash {
  std::array<uint8_t, 16> bytes{};

  bool operator==(const BlockHash&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockHash& hash) {
    return H::combine(std::move(h), hash.bytes);
  }
  // First eight bytes, little-endian: what workers tell routers.
  uint64_t Short() const;
};

// Where the chain of a prompt starts. Differs by tenant (salt), block size,
// and the formats of a mixed pair ("" where both sides are equal).
BlockHash RootHash(std::string_view salt, int block_size,
                   std::string_view formats);
BlockHash ChildHash(const BlockHash& parent, absl::Span<const int32_t> tokens);
// Hashes of all full blocks of `tokens`.
std::vector<BlockHash> HashBlocks(const BlockHash& root,
                                  absl::Span<const int32_t> tokens,
                                  int block_size);

// One counted reference to a block; gives it back on destruction.
class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(BlockRef&& other) noexcept;
  BlockRef& operator=(BlockRef&& other) noexcept;
  ~BlockRef();

  explicit operator bool() const { return pool_ != nullptr; }
  int32_t id() const { return id_; }
  BlockRef Share() const;  // one more reference

 private:
  friend class KvPool;
  BlockRef(KvPool* pool, int32_t id) : pool_(pool), id_(id) {}

  KvPool* pool_ = nullptr;
  int32_t id_ = -1;
};

// Blocks promised to a handoff, all or nothing. Destroyed, they return to
// free (never to the prefix cache: nothing proved their content). REQUIRES
// then: no scatter into them is queued; hold `Pin()`s for those.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();

  const std::vector<int32_t>& ids() const { return ids_; }
  // The commit was checked: they become live references, in order.
  std::vector<BlockRef> Commit() &&;

 private:
  friend class KvPool;
  KvPool* pool_ = nullptr;
  std::vector<int32_t> ids_;
};

struct KvPoolCounts {
  int total = 0;
  int free = 0;
  int reserved = 0;
  int live = 0;
  int cached = 0;  // free + reserved + live + cached == total
};

// What changed in the prefix cache since the last TakeChanges.
struct CacheChanges {
  std::vector<uint64_t> added;    // BlockHash::Short()
  std::vector<uint64_t> removed;
};

class KvPool {
 public:
  KvPool(int num_blocks, int block_size);
  ~KvPool();  // CHECKs that every reference was given back
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  int block_size() const;
  // Free or evictable: what Allocate and Reserve could still give.
  int available() const;

  // `count` live blocks, evicting cached ones as needed; empty if short
  // (all or nothing).
  std::vector<BlockRef> Allocate(int count);
  // As Allocate, but in state reserved. nullopt if short.
  std::optional<Reservation> Reserve(int count);

  // The longest run of cached or live blocks that starts `hashes`, pinned.
  std::vector<BlockRef> Match(absl::Span<const BlockHash> hashes);
  // How many blocks Match would find; pins nothing, touches no LRU order.
  int Lookup(absl::Span<const BlockHash> hashes) const;

  // Makes a full block findable. If another block has the hash already, that
  // one stays the one found, and this one becomes free when released.
  void Publish(const BlockRef& block, const BlockHash& hash);

  // Drops all cached blocks that nobody holds.
  void ClearCache();

  KvPoolCounts counts() const;
  CacheChanges TakeChanges();
  std::vector<uint64_t> CachedHashes() const;  // for a full re-publish
  // Every block in exactly one state, sums right, references as counted:
  // INTERNAL with the first contradiction. Cheap enough for every test.
  absl::Status CheckInvariants() const;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_POOL_H_
