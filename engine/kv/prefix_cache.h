// SPDX-License-Identifier: Apache-2.0
// Where a prompt's cached beginning is looked for: in the pool, and behind it
// in what was offloaded, if anything is. A worker's cores ask here, not the
// pool.

#ifndef TANDEM_ENGINE_KV_PREFIX_CACHE_H_
#define TANDEM_ENGINE_KV_PREFIX_CACHE_H_

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/types/span.h"
#include "engine/kv/kv_offload.h"
#include "engine/kv/kv_pool.h"

namespace tandem::engine {

// Blocks [first, end) of a prefix of `end` blocks: those before are not needed,
// and those before `first_whole` without their windowed parts.
struct PrefixRange {
  int first = 0;
  int end = 0;
  int first_whole = 0;
};

// The longest prefix, of `count` blocks at most, of which all is there that the
// position behind it sees, and all positions from `keep_from` on. there(i):
// whether block i is; whole(i): and has all its parts.
template <typename There, typename Whole>
PrefixRange LongestPrefix(int count, int block_size, const KvWindow& window,
                          int keep_from, const There& there,
                          const Whole& whole) {
  PrefixRange longest;
  int run = 0;  // where the whole blocks up to now begin
  for (int end = 1; end <= count; ++end) {
    const bool is_there = there(end - 1);
    if (!is_there && !window.frees_blocks()) break;
    if (!is_there || !whole(end - 1)) run = end;
    const int seen = std::min(window.FirstSeen(end * block_size), keep_from);
    const int first = seen / block_size;
    if (run <= first && is_there) {
      longest = {window.frees_blocks() ? first : 0, end, first};
    }
  }
  return longest;
}

// The same where it is known of no block that it lacks parts.
template <typename There>
PrefixRange LongestPrefix(int count, int block_size, const KvWindow& window,
                          int keep_from, const There& there) {
  return LongestPrefix(count, block_size, window, keep_from, there, there);
}

// Blocks of a prompt's beginning, pinned. Those before `first` are not needed,
// and empty; others are empty that Restore would bring back. Let go, its head
// lives longest in the cache (ReleaseBlocks): who finds it again and again and
// cannot use it yet does not lose it.
struct CachedPrefix {
  CachedPrefix() = default;
  CachedPrefix(std::vector<BlockRef> blocks_found, int first_needed)
      : blocks(std::move(blocks_found)), first(first_needed) {}
  CachedPrefix(CachedPrefix&&) noexcept = default;
  CachedPrefix& operator=(CachedPrefix&& other) noexcept {
    std::swap(blocks, other.blocks);
    std::swap(first, other.first);
    return *this;
  }
  ~CachedPrefix() { ReleaseBlocks(std::move(blocks)); }

  int size() const { return static_cast<int>(blocks.size()); }

  std::vector<BlockRef> blocks;
  int first = 0;
};

class PrefixCache {
 public:
  static constexpr int kNobodyKeeps = std::numeric_limits<int>::max();

  // `offload` may be null; both outlive this. Of a prefix, only what the
  // position behind it sees must be there.
  PrefixCache(KvPool* pool, KvOffload* offload, const KvWindow& window = {})
      : pool_(pool), offload_(offload), window_(window) {}

  // The longest prefix of `hashes` that is usable at once. Positions from
  // `keep_from` on must be there whatever the window.
  CachedPrefix Find(absl::Span<const BlockHash> hashes,
                    int keep_from = kNobodyKeeps) {
    const PrefixRange range =
        Longest(hashes, keep_from, [this](const BlockHash& h) {
          return offload_ != nullptr && offload_->InMemory(h);
        });
    CachedPrefix found;
    found.first = range.first;
    found.blocks.resize(static_cast<size_t>(range.end));
    for (int i = range.first; i < range.end; ++i) {
      const auto at = static_cast<size_t>(i);
      std::vector<BlockRef> one =
          pool_->Match(hashes.subspan(at, 1), i >= range.first_whole);
      if (!one.empty()) found.blocks[at] = std::move(one.front());
    }
    return found;
  }
  // The longest prefix in the pool, of whole blocks and such that lack their
  // windowed parts: for whoever needs nothing of those.
  CachedPrefix FindPartly(absl::Span<const BlockHash> hashes) {
    return {pool_->Match(hashes, /*whole=*/false), 0};
  }
  // How many blocks of the pool Restore will take.
  static int Missing(const CachedPrefix& found) {
    return static_cast<int>(
        std::count_if(found.blocks.begin() + found.first, found.blocks.end(),
                      [](const BlockRef& block) { return !block; }));
  }
  // What it takes once all of it is there, in whole blocks, rounded up.
  int Held(const CachedPrefix& found) const {
    const auto partly = std::count_if(
        found.blocks.begin() + found.first, found.blocks.end(),
        [](const BlockRef& block) { return block && !block.whole(); });
    return pool_->InWhole(found.size() - found.first, static_cast<int>(partly));
  }
  // Brings back what was just found, as `owner`'s. REQUIRES: the pool has as
  // many available as are Missing.
  void Restore(absl::Span<const BlockHash> hashes, CachedPrefix* found,
               uint64_t owner) {
    if (Missing(*found) == 0) return;
    const auto first = static_cast<size_t>(found->first);
    offload_->Restore(hashes.subspan(first),
                      absl::MakeSpan(found->blocks).subspan(first), owner);
  }

  // How many blocks the longest prefix has that is usable at once or after a
  // while.
  int Lookup(absl::Span<const BlockHash> hashes) const {
    return Somewhere(hashes).end;
  }
  // Has what is on disk brought nearer. A sequence may wait while Prefetching.
  void Prefetch(absl::Span<const BlockHash> hashes) {
    if (offload_ == nullptr) return;
    const PrefixRange range = Somewhere(hashes);
    offload_->Prefetch(Part(hashes, range));
  }
  bool Prefetching(absl::Span<const BlockHash> hashes) const {
    return offload_ != nullptr &&
           offload_->Prefetching(Part(hashes, Somewhere(hashes)));
  }

 private:
  bool InPool(const BlockHash& hash) const {
    return pool_->Lookup(absl::MakeConstSpan(&hash, 1)) > 0;
  }
  PrefixRange Somewhere(absl::Span<const BlockHash> hashes) const {
    return Longest(hashes, kNobodyKeeps, [this](const BlockHash& h) {
      return offload_ != nullptr && offload_->Holds(h);
    });
  }
  static absl::Span<const BlockHash> Part(absl::Span<const BlockHash> hashes,
                                          const PrefixRange& range) {
    return hashes.subspan(static_cast<size_t>(range.first),
                          static_cast<size_t>(range.end - range.first));
  }
  // The longest prefix of which all that is needed is in the pool or
  // `offloaded`, which is of whole blocks.
  template <typename Offloaded>
  PrefixRange Longest(absl::Span<const BlockHash> hashes, int keep_from,
                      const Offloaded& offloaded) const {
    return LongestPrefix(
        static_cast<int>(hashes.size()), pool_->block_size(), window_,
        keep_from,
        [&](int i) {
          const BlockHash& hash = hashes[static_cast<size_t>(i)];
          return InPool(hash) || offloaded(hash);
        },
        [&](int i) {
          const BlockHash& hash = hashes[static_cast<size_t>(i)];
          return pool_->HasWhole(hash) || offloaded(hash);
        });
  }

  KvPool* const pool_;
  KvOffload* const offload_;
  const KvWindow window_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_KV_PREFIX_CACHE_H_
