// SPDX-License-Identifier: Apache-2.0
// A second tier behind the KV pool: what the prefix cache evicts stays in host
// memory, and what falls out of that in a file, found by the same hashes. Both
// are LRU, with a quota for each owner. Plain single-threaded code on the
// worker's loop; a device copies beside the steps, a file's thread reads and
// writes beside both.
//
// A block is kept when the pool hands it out anew: the device copies it before
// it is written again. It comes back by Restore, into a block of the pool,
// before the steps that read it. What is in the file alone has to be brought
// into memory first (Prefetch), for which no step waits, and a sequence for a
// bounded time. Whatever cannot be kept or read is forgotten: a miss.
//
// A slot of memory is free or of one entry; an entry whose slot is used by a
// copy, a read or a write (`pins`) keeps it until that is done.

#ifndef TANDEM_ENGINE_KV_KV_OFFLOAD_H_
#define TANDEM_ENGINE_KV_KV_OFFLOAD_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/loop.h"
#include "engine/kv/block_file.h"
#include "engine/kv/block_mover.h"
#include "engine/kv/kv_pool.h"
#include "engine/kv/owned_lru.h"

namespace tandem::engine {

struct KvOffloadOptions {
  int memory_blocks = 0;  // at least 1
  int file_blocks = 0;    // 0: no file
  // Of either, for one owner (as KvPool has it).
  double owner_share = 1;
  // So long may a sequence wait for a block to come out of the file.
  absl::Duration read_timeout = absl::Milliseconds(100);
  // So long a file that refused a block is not asked to grow. By the clock, as
  // others make room on a disk: a busy worker would try for every block.
  absl::Duration file_retry = absl::Minutes(1);
};

// Of blocks, since the start.
struct KvOffloadCounters {
  int64_t saved = 0;     // copied out of the pool
  int64_t declined = 0;  // evicted while all memory was being copied
  int64_t restored = 0;  // copied back
  int64_t dropped = 0;   // forgotten for others
  int64_t written = 0;   // to the file
  int64_t read = 0;      // from it
  int64_t write_errors = 0;
  int64_t read_errors = 0;  // corrupt ones too
};

class KvOffload final : public KvTier {
 public:
  // `memory` [options.memory_blocks, mover->block_bytes()], of a kind that the
  // device reaches; `file` may be null. All outlive this, and so do the copies
  // that it asked for. Becomes the pool's tier.
  KvOffload(const KvOffloadOptions& options, Loop* loop, BlockMover* mover,
            KvPool* pool, std::byte* memory, BlockFile* file);
  ~KvOffload() override;
  KvOffload(const KvOffload&) = delete;
  KvOffload& operator=(const KvOffload&) = delete;

  // Runs when blocks came out of the file, or the wait for them is over.
  void set_on_change(absl::AnyInvocable<void()> on_change) {
    on_change_ = std::move(on_change);
  }

  // Whether Restore would find it.
  bool InMemory(const BlockHash& hash) const;
  // For each empty one of `blocks`: takes a block from the pool, puts the
  // content of its hash there and publishes it. REQUIRES: those hashes are
  // InMemory and not in the pool, and it has so many blocks available.
  void Restore(absl::Span<const BlockHash> hashes, absl::Span<BlockRef> blocks,
               uint64_t owner);
  // Starts to bring into memory what follows in the file, while pool, memory
  // and file together hold the chain.
  void Prefetch(absl::Span<const BlockHash> hashes);
  // Whether something of it is on its way, and worth waiting for.
  bool Prefetching(absl::Span<const BlockHash> hashes) const;

  // KvTier
  bool Keep(int32_t block, const BlockHash& hash, uint64_t owner) override;
  bool Holds(const BlockHash& hash) const override {
    return entries_.contains(hash);
  }
  std::vector<BlockHash> Hashes() const override;

  const KvOffloadCounters& counters() const { return counters_; }
  int64_t block_bytes() const { return mover_->block_bytes(); }
  int memory_blocks_used() const {
    return options_.memory_blocks - static_cast<int>(free_memory_.size());
  }
  int file_blocks_used() const {
    return options_.file_blocks - static_cast<int>(free_file_.size());
  }
  // OK, or with what the file refused a block: until it takes one more, blocks
  // go to slots that it has written, the one used longest ago first.
  const absl::Status& file_status() const { return file_status_; }
  // Every slot free or of one entry, every entry in the lists that it should
  // be in: INTERNAL with the first contradiction. For tests.
  absl::Status CheckInvariants() const;

 private:
  struct Entry {
    BlockHash hash;
    int memory = -1;       // slot
    int file = -1;         // slot
    int pins = 0;          // operations that use the memory slot
    bool saving = false;   // its memory is being filled from the pool
    bool reading = false;  // its memory is being filled from the file
    bool writing = false;  // its file slot is being written
    absl::Time read_since;
    uint64_t owner = 0;
    OwnedLru<Entry>::Place in_memory;  // if memory >= 0
    OwnedLru<Entry>::Place in_file;    // if file >= 0 and not writing
  };

  std::byte* Slot(int slot) const { return memory_ + slot * block_bytes(); }
  absl::Span<std::byte> Data(const Entry& entry) const {
    return {Slot(entry.memory), static_cast<size_t>(block_bytes())};
  }
  Entry* Find(const BlockHash& hash) const;
  void Touch(Entry* entry);
  // A slot that is free, or that of the entry that is to go; -1: all are in
  // use.
  int TakeMemory();
  // Of the file the free ones only while it grows.
  int TakeFile();
  void FreeMemory(Entry* entry);
  void FreeFile(Entry* entry);
  void ForgetIfNowhere(Entry* entry);
  bool StartRead(Entry* entry);
  void EndRead(Entry* entry, const absl::Status& status);
  void WriteBehind();
  void EndWrite(Entry* entry, const absl::Status& status);
  void WatchReads();

  const KvOffloadOptions options_;
  Loop* const loop_;
  BlockMover* const mover_;
  KvPool* const pool_;
  std::byte* const memory_;
  BlockFile* const file_;
  KvOffloadCounters counters_;
  absl::flat_hash_map<BlockHash, std::unique_ptr<Entry>> entries_;
  std::vector<int> free_memory_;
  std::vector<int> free_file_;
  OwnedLru<Entry> memory_order_;
  OwnedLru<Entry> file_order_;
  std::deque<BlockHash> unwritten_;  // saved and never written, oldest first
  int reads_ = 0;                    // in flight
  int writes_ = 0;
  absl::Status file_status_;
  absl::Time file_retry_at_;  // unless file_status_ is OK
  int tried_ = -1;  // a slot on its way there that shows whether it grows
  absl::AnyInvocable<void()> on_change_;
  Timer read_timer_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_KV_OFFLOAD_H_
