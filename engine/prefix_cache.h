// SPDX-License-Identifier: Apache-2.0
// Where a prompt's cached beginning is looked for: in the pool, and behind it
// in what was offloaded, if anything is. A worker's cores ask here, not the
// pool.

#ifndef TANDEM_ENGINE_PREFIX_CACHE_H_
#define TANDEM_ENGINE_PREFIX_CACHE_H_

#include <algorithm>
#include <vector>

#include "absl/types/span.h"
#include "engine/kv_offload.h"
#include "engine/kv_pool.h"

namespace tandem::engine {

class PrefixCache {
 public:
  // `offload` may be null; both outlive this.
  PrefixCache(KvPool* pool, KvOffload* offload)
      : pool_(pool), offload_(offload) {}

  // Blocks of the longest run that starts `hashes`, pinned; empty references
  // for those that Restore would bring back.
  std::vector<BlockRef> Find(absl::Span<const BlockHash> hashes) {
    if (offload_ == nullptr) return pool_->Match(hashes);
    std::vector<BlockRef> blocks;
    for (const BlockHash& hash : hashes) {
      std::vector<BlockRef> one = pool_->Match(absl::MakeConstSpan(&hash, 1));
      if (one.empty() && !offload_->InMemory(hash)) break;
      blocks.push_back(one.empty() ? BlockRef() : std::move(one.front()));
    }
    return blocks;
  }
  // How many blocks of the pool Restore will take.
  static int Missing(absl::Span<const BlockRef> blocks) {
    return static_cast<int>(
        std::count_if(blocks.begin(), blocks.end(),
                      [](const BlockRef& block) { return !block; }));
  }
  // Fills in the empty references of `blocks`, just found. REQUIRES: the pool
  // has as many available.
  void Restore(absl::Span<const BlockHash> hashes,
               std::vector<BlockRef>* blocks) {
    if (offload_ == nullptr) return;
    offload_->Restore(hashes, absl::MakeSpan(*blocks));
  }

  // How many blocks are anywhere, at once or after a while.
  int Lookup(absl::Span<const BlockHash> hashes) const {
    if (offload_ == nullptr) return pool_->Lookup(hashes);
    int count = 0;
    for (const BlockHash& hash : hashes) {
      if (!offload_->Holds(hash) &&
          pool_->Lookup(absl::MakeConstSpan(&hash, 1)) == 0) {
        break;
      }
      ++count;
    }
    return count;
  }
  // Has what is on disk brought nearer. A sequence may wait while Prefetching.
  void Prefetch(absl::Span<const BlockHash> hashes) {
    if (offload_ != nullptr) offload_->Prefetch(hashes);
  }
  bool Prefetching(absl::Span<const BlockHash> hashes) const {
    return offload_ != nullptr && offload_->Prefetching(hashes);
  }

 private:
  KvPool* const pool_;
  KvOffload* const offload_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_PREFIX_CACHE_H_
