// SPDX-License-Identifier: Apache-2.0
// Who owns which KV block. A block is in exactly one state (DESIGN.md
// section 8, rule 1): free; reserved (promised to a handoff, written by its
// scatters); live (counted references of sequences and of queued device
// work); cached (full, unreferenced, found by its hash, evicted in LRU order
// when blocks run out: first from an owner with more than an owner's share).
// Of a block with windowed parts (block_cells.h) these may be let go while the
// block lives; if it is published they stay until somebody needs the cells.
// Plain single-threaded code; knows no bytes.

#ifndef TANDEM_ENGINE_KV_KV_POOL_H_
#define TANDEM_ENGINE_KV_KV_POOL_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/kv/block_cells.h"

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
// the formats of a mixed pair ("" where both sides are equal), and the adapter
// that it is computed with (AdapterKey).
BlockHash RootHash(std::string_view salt, int block_size,
                   std::string_view formats, std::string_view adapter = "");
// A LoRA adapter by name and content; "" of none.
std::string AdapterKey(std::string_view name, std::string_view digest);
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
  // Whether it is to all parts of the block.
  bool whole() const { return whole_; }
  BlockRef Share() const;  // one more reference; REQUIRES: not empty
  // It is no longer to the windowed parts. REQUIRES: not empty
  void LetWindowedGo();

 private:
  friend class KvPool;
  BlockRef(KvPool* pool, int32_t id, bool whole)
      : pool_(pool), id_(id), whole_(whole) {}

  KvPool* pool_ = nullptr;
  int32_t id_ = -1;
  bool whole_ = false;
};

// Gives references back from the last to the first, so that of one prefix the
// deepest block is evicted first and its head lives longest. Plain
// destruction of the vector is as right, but wears the cache down faster.
void ReleaseBlocks(std::vector<BlockRef> blocks);

// Keeps blocks of a reservation from being reused while device work (a
// scatter) is queued on them, whatever becomes of the reservation meanwhile.
class BlockHold {
 public:
  BlockHold() = default;
  BlockHold(BlockHold&& other) noexcept;
  BlockHold& operator=(BlockHold&& other) noexcept;
  ~BlockHold();

  explicit operator bool() const { return pool_ != nullptr; }

 private:
  friend class Reservation;
  KvPool* pool_ = nullptr;
  std::vector<int32_t> ids_;
};

// Blocks promised to a handoff, all or nothing; some may lack their windowed
// parts from the start. Destroyed, they return to
// free (never to the prefix cache: nothing proved their content), each as
// soon as no BlockHold keeps it; until then it stays reserved.
class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();

  explicit operator bool() const { return pool_ != nullptr; }
  const std::vector<int32_t>& ids() const { return ids_; }
  // For a scatter into ids()[begin, end).
  BlockHold Hold(int begin, int end) const;
  // The commit was checked: they become live references, in order.
  std::vector<BlockRef> Commit() &&;

 private:
  friend class KvPool;
  KvPool* pool_ = nullptr;
  std::vector<int32_t> ids_;
};

// In blocks with all their parts. Where some parts were let go, what is live is
// rounded up, what is free or reserved down, and windowed parts that nobody
// refers to any more count as cached.
struct KvPoolCounts {
  int total = 0;
  int free = 0;
  int reserved = 0;
  int live = 0;
  int cached = 0;  // free + reserved + live + cached == total
};

// What changed in the prefix cache since the last TakeChanges, net: a block
// that came and went in between is in no list. All ascend.
struct CacheChanges {
  std::vector<uint64_t> added;    // BlockHash::Short(): there as a whole
  std::vector<uint64_t> lacking;  // there, but for their windowed parts
  std::vector<uint64_t> removed;
};

// A second place where the content of evicted blocks is found
// (engine/kv/kv_offload.h). Called by the pool, which it may tell TierForgot.
class KvTier {
 public:
  virtual ~KvTier() = default;
  // `block`, `owner`'s and cached under `hash`, will be written by what comes
  // next. True if the content is held here from now on, or was already.
  virtual bool Keep(int32_t block, const BlockHash& hash, uint64_t owner) = 0;
  virtual bool Holds(const BlockHash& hash) const = 0;
  // All that it holds, the newest first.
  virtual std::vector<BlockHash> Hashes() const = 0;
};

class KvPool {
 public:
  // One owner's cached blocks beyond `owner_share` of all blocks, in (0, 1],
  // are evicted before anybody else's: who floods the cache drives out himself.
  // There is room for `num_blocks` with all their parts.
  KvPool(int num_blocks, int block_size, double owner_share = 1,
         KvParts parts = {});
  ~KvPool();  // CHECKs that every reference, hold and reservation came back
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  int num_blocks() const { return cells_.num_cells() / cells_.parts().count(); }
  int block_size() const { return block_size_; }
  // Ids of blocks are below cells().num_blocks().
  const BlockCells& cells() const { return cells_; }
  // Free or evictable: what Allocate and Reserve could still give.
  int available() const {
    return (cells_.free() + cached_cells_) / cells_.parts().count();
  }

  // `count` live blocks, evicting cached ones as needed; empty if short
  // (all or nothing).
  std::vector<BlockRef> Allocate(int count);
  // As Allocate, appended to `blocks`. False, and nothing changed, if short.
  bool AllocateInto(int count, std::vector<BlockRef>* blocks);
  // As Allocate, but in state reserved, the first `lacking` of them without
  // their windowed parts. nullopt if short.
  std::optional<Reservation> Reserve(int count, int lacking = 0);
  // What takes as much as `count` blocks of which `lacking` lack their windowed
  // parts, in whole ones, rounded up.
  int InWhole(int count, int lacking) const;

  // The longest run of cached or live blocks that starts `hashes`, pinned: of
  // whole ones, or else without their windowed parts.
  std::vector<BlockRef> Match(absl::Span<const BlockHash> hashes,
                              bool whole = true);
  // Whether a block is found that has all its parts.
  bool HasWhole(const BlockHash& hash) const;
  // How many blocks Match would find; pins nothing, touches no LRU order.
  int Lookup(absl::Span<const BlockHash> hashes) const;

  // Makes a full block findable, and `owner`'s (a tenant) while it is cached.
  // If another block has the hash already, that one stays the one found, unless
  // it lacks parts that this one has, and this one becomes free when released.
  void Publish(const BlockRef& block, const BlockHash& hash,
               uint64_t owner = 0);

  // Whether the block is found by a hash: then its content is settled.
  bool published(const BlockRef& block) const;
  // References to the block, without holds.
  int references(const BlockRef& block) const;

  // Drops all cached blocks that nobody holds. What a tier holds stays.
  void ClearCache();

  // Who is asked to keep what is evicted; null: nobody. What the tier holds
  // counts as cached in TakeChanges and CachedHashes. REQUIRES: it holds
  // nothing yet, or (null) nobody asks for those any more.
  void set_tier(KvTier* tier) { tier_ = tier; }
  // The tier holds `hash` no longer.
  void TierForgot(const BlockHash& hash);

  // Calls `wake` once, when the next block becomes free or evictable. It may
  // not use the pool: it puts a task on a loop. Replaces the one before; an
  // empty one cancels. For whoever found too few blocks available.
  void WakeWhenAvailable(absl::AnyInvocable<void()> wake);

  KvPoolCounts counts() const;
  CacheChanges TakeChanges();
  // All that can be found, ascending: for a full re-publish. Equal to the
  // sum of all changes once TakeChanges has been called. Where it is more than
  // `most`, the tier's oldest are left out, and then any.
  std::vector<uint64_t> CachedHashes(size_t most = SIZE_MAX) const;
  // Those of them that lack their windowed parts, ascending.
  std::vector<uint64_t> LackingHashes() const;
  // Every block in exactly one state, sums right, references as counted:
  // INTERNAL with the first contradiction. Cheap enough for every test.
  absl::Status CheckInvariants() const;

 private:
  friend class BlockRef;
  friend class BlockHold;
  friend class Reservation;

  enum class State : uint8_t { kFree, kReserved, kLive, kCached };

  struct Links {
    int32_t previous = -1;
    int32_t next = -1;
  };
  // By when they were released.
  struct List {
    int32_t oldest = -1;
    int32_t newest = -1;
    int size = 0;
  };
  struct Block {
    State state = State::kFree;
    bool promised = false;   // a Reservation owns it
    bool published = false;  // found_[hash] is this block
    bool idle = false;       // live, and nobody refers to its windowed parts
    int32_t references = 0;  // BlockRefs
    int32_t wholes = 0;      // of them to all parts
    int32_t holds = 0;       // BlockHolds
    Links cached;  // among cached_; `next` also in the free ones' stack
    Links owned;   // among its owner's cached blocks
    uint64_t owner = 0;
    BlockHash hash;
  };

  // Cells of blocks in a state that is neither free nor cached.
  int& Cells(State state);
  void MoveTo(int32_t id, State state);
  // Takes a free block, with its windowed parts or without, evicting until
  // there are cells for it.
  int32_t Take(State state, bool whole);
  void Evict();
  // The next to be evicted.
  int32_t Victim() const;
  void Append(Links Block::*links, int32_t id, List* list);
  void Remove(Links Block::*links, int32_t id, List* list);
  void AddToCached(int32_t id);
  void RemoveFromCached(int32_t id);
  // No longer found by its hash; `evicted`: the tier may keep the content.
  void Forget(int32_t id, bool evicted);
  void NoteChange(const BlockHash& hash, int change);
  // Whether it is found, but neither here nor in the tier with all parts.
  bool Lacks(const BlockHash& hash) const;
  // It may be found with other parts than it was.
  void NoteParts(const BlockHash& hash);
  BlockRef AddReference(int32_t id, bool whole);
  void DropReference(int32_t id, bool whole);
  void DropHold(int32_t id);
  void Abandon(int32_t id);
  // kv_pool_check.cc
  absl::Status CheckLists() const;
  absl::Status CheckOwners() const;
  absl::Status CheckSums() const;
  absl::Status CheckBlock(int32_t id) const;

  // Nothing keeps the block any more: it becomes cached or free.
  void SettleIfUnused(int32_t id);
  // The same of its windowed parts: they become idle or free.
  void SettleWindowed(int32_t id);
  void EndIdle(int32_t id);
  void TellAvailable();

  const int block_size_;
  BlockCells cells_;
  std::vector<Block> blocks_;
  int reserved_cells_ = 0;
  int live_cells_ = 0;
  int cached_cells_ = 0;  // of idle parts too
  int64_t outstanding_references_ = 0;
  int64_t outstanding_holds_ = 0;
  int32_t free_head_ = -1;  // a stack: the block used last is warm
  const int owner_quota_;   // cached blocks of one owner before it is in over_
  List cached_;             // cached blocks, and idle ones
  absl::flat_hash_map<uint64_t, List> owned_;  // of cached_; none is empty
  std::vector<uint64_t> over_;  // owners with more than the quota: a few
  absl::flat_hash_map<BlockHash, int32_t> found_;
  // Net change per short hash since TakeChanges, never zero. At most what
  // was published then and is published now, so it cannot grow on.
  absl::flat_hash_map<uint64_t, int> changes_;
  // Of NoteParts since then; those in it are found.
  absl::flat_hash_set<BlockHash> parts_changed_;
  absl::AnyInvocable<void()> wake_;
  KvTier* tier_ = nullptr;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_KV_POOL_H_
