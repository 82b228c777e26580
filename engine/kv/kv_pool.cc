// SPDX-License-Identifier: Apache-2.0

#include "engine/kv/kv_pool.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/failpoint.h"

namespace tandem::engine {

// ---- BlockRef, BlockHold, Reservation

BlockRef::BlockRef(BlockRef&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      id_(std::exchange(other.id_, -1)),
      whole_(std::exchange(other.whole_, false)) {}

BlockRef& BlockRef::operator=(BlockRef&& other) noexcept {
  // Through a local: the old reference is given back last, and assigning to
  // itself changes nothing.
  BlockRef taken(std::move(other));
  std::swap(pool_, taken.pool_);
  std::swap(id_, taken.id_);
  std::swap(whole_, taken.whole_);
  return *this;
}

BlockRef::~BlockRef() {
  if (pool_ != nullptr) pool_->DropReference(id_, whole_);
}

BlockRef BlockRef::Share() const {
  TANDEM_CHECK(pool_ != nullptr, "an empty BlockRef has nothing to share");
  return pool_->AddReference(id_, whole_);
}

void BlockRef::LetWindowedGo() {
  if (!std::exchange(whole_, false)) return;
  --pool_->blocks_[id_].wholes;
  pool_->SettleWindowed(id_);
}

void ReleaseBlocks(std::vector<BlockRef> blocks) {
  while (!blocks.empty()) blocks.pop_back();
}

BlockHold::BlockHold(BlockHold&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), ids_(std::move(other.ids_)) {
  other.ids_.clear();
}

BlockHold& BlockHold::operator=(BlockHold&& other) noexcept {
  BlockHold taken(std::move(other));
  std::swap(pool_, taken.pool_);
  std::swap(ids_, taken.ids_);
  return *this;
}

BlockHold::~BlockHold() {
  if (pool_ == nullptr) return;
  for (const int32_t id : ids_) pool_->DropHold(id);
}

Reservation::Reservation(Reservation&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), ids_(std::move(other.ids_)) {
  other.ids_.clear();
}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  Reservation taken(std::move(other));
  std::swap(pool_, taken.pool_);
  std::swap(ids_, taken.ids_);
  return *this;
}

Reservation::~Reservation() {
  if (pool_ == nullptr) return;
  for (const int32_t id : ids_) pool_->Abandon(id);
}

BlockHold Reservation::Hold(int begin, int end) const {
  TANDEM_CHECK(
      0 <= begin && begin <= end && end <= static_cast<int>(ids_.size()),
      "a hold is for blocks of its reservation");
  BlockHold hold;
  hold.pool_ = pool_;
  hold.ids_.assign(ids_.begin() + begin, ids_.begin() + end);
  for (const int32_t id : hold.ids_) {
    ++pool_->blocks_[id].holds;
    ++pool_->outstanding_holds_;
  }
  return hold;
}

std::vector<BlockRef> Reservation::Commit() && {
  std::vector<BlockRef> references;
  references.reserve(ids_.size());
  for (const int32_t id : ids_) {
    pool_->blocks_[id].promised = false;
    pool_->MoveTo(id, KvPool::State::kLive);
    references.push_back(pool_->AddReference(id, pool_->cells_.whole(id)));
  }
  ids_.clear();
  pool_ = nullptr;
  return references;
}

// ---- KvPool

KvPool::KvPool(int num_blocks, int block_size, double owner_share,
               KvParts parts)
    : block_size_(block_size),
      cells_(num_blocks, parts),
      blocks_(static_cast<size_t>(cells_.num_blocks())),
      owner_quota_(static_cast<int>(owner_share * num_blocks)) {
  TANDEM_CHECK(num_blocks > 0 && block_size > 0, "an empty pool serves nobody");
  for (int32_t id = cells_.num_blocks(); id-- > 0;) {
    blocks_[id].cached.next = std::exchange(free_head_, id);
  }
  found_.reserve(blocks_.size());
  changes_.reserve(2 * blocks_.size());
}

KvPool::~KvPool() {
  TANDEM_CHECK(outstanding_references_ == 0, "a BlockRef outlives its pool");
  TANDEM_CHECK(outstanding_holds_ == 0, "a BlockHold outlives its pool");
  TANDEM_CHECK(reserved_cells_ == 0, "a Reservation outlives its pool");
}

bool KvPool::AllocateInto(int count, std::vector<BlockRef>* blocks) {
  if (count > available()) return false;
  for (int i = 0; i < count; ++i) {
    blocks->push_back(
        AddReference(Take(State::kLive, /*whole=*/true), /*whole=*/true));
  }
  return true;
}

std::vector<BlockRef> KvPool::Allocate(int count) {
  std::vector<BlockRef> blocks;
  if (count > available()) return blocks;
  blocks.reserve(static_cast<size_t>(count));
  AllocateInto(count, &blocks);
  return blocks;
}

int KvPool::InWhole(int count, int lacking) const {
  const KvParts& parts = cells_.parts();
  const int64_t cells =
      int64_t{count} * parts.count() - int64_t{lacking} * parts.windowed;
  return static_cast<int>((cells + parts.count() - 1) / parts.count());
}

std::optional<Reservation> KvPool::Reserve(int count, int lacking) {
  if (InWhole(count, lacking) > available()) return std::nullopt;
  Reservation reservation;
  reservation.pool_ = this;
  reservation.ids_.reserve(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    const int32_t id = Take(State::kReserved, /*whole=*/i >= lacking);
    blocks_[id].promised = true;
    reservation.ids_.push_back(id);
  }
  return reservation;
}

std::vector<BlockRef> KvPool::Match(absl::Span<const BlockHash> hashes,
                                    bool whole) {
  std::vector<BlockRef> blocks;
  for (const BlockHash& hash : hashes) {
    const auto it = found_.find(hash);
    if (it == found_.end() || (whole && !cells_.whole(it->second))) break;
    if (blocks_[it->second].state == State::kCached) {
      MoveTo(it->second, State::kLive);
    }
    blocks.push_back(AddReference(it->second, whole));
    SettleWindowed(it->second);
  }
  return blocks;
}

bool KvPool::HasWhole(const BlockHash& hash) const {
  const auto it = found_.find(hash);
  return it != found_.end() && cells_.whole(it->second);
}

int KvPool::Lookup(absl::Span<const BlockHash> hashes) const {
  int count = 0;
  for (const BlockHash& hash : hashes) {
    if (!found_.contains(hash)) break;
    ++count;
  }
  return count;
}

void KvPool::Publish(const BlockRef& block, const BlockHash& hash,
                     uint64_t owner) {
  TANDEM_CHECK(block.pool_ == this, "a block of another pool");
  Block& entry = blocks_[block.id_];
  if (entry.published) {
    TANDEM_CHECK(entry.hash == hash, "a published block has other content");
    return;
  }
  const auto [found, fresh] = found_.try_emplace(hash, block.id_);
  if (!fresh) {
    if (cells_.whole(found->second) || !cells_.whole(block.id_)) return;
    const int32_t lacking = std::exchange(found->second, block.id_);
    blocks_[lacking].published = false;
    if (blocks_[lacking].state == State::kCached) {
      MoveTo(lacking, State::kFree);
    }
  }
  entry.published = true;
  entry.hash = hash;
  entry.owner = owner;
  NoteParts(hash);
  if (fresh && (tier_ == nullptr || !tier_->Holds(hash))) NoteChange(hash, 1);
}

bool KvPool::published(const BlockRef& block) const {
  return blocks_[block.id_].published;
}

int KvPool::references(const BlockRef& block) const {
  return blocks_[block.id_].references;
}

void KvPool::ClearCache() {
  for (int32_t id = cached_.oldest, next; id >= 0; id = next) {
    next = blocks_[id].cached.next;
    if (blocks_[id].idle) continue;
    Forget(id, /*evicted=*/false);
    MoveTo(id, State::kFree);
  }
}

void KvPool::WakeWhenAvailable(absl::AnyInvocable<void()> wake) {
  wake_ = std::move(wake);
}

CacheChanges KvPool::TakeChanges() {
  CacheChanges changes;
  for (const BlockHash& hash : parts_changed_) {
    (Lacks(hash) ? changes.lacking : changes.added).push_back(hash.Short());
    // Said above, whatever came before.
    if (const auto it = changes_.find(hash.Short());
        it != changes_.end() && it->second > 0) {
      changes_.erase(it);
    }
  }
  for (const auto& [hash, change] : changes_) {
    (change > 0 ? changes.added : changes.removed).push_back(hash);
  }
  changes_.clear();
  parts_changed_.clear();
  for (auto* list : {&changes.added, &changes.lacking, &changes.removed}) {
    std::sort(list->begin(), list->end());
  }
  return changes;
}

bool KvPool::Lacks(const BlockHash& hash) const {
  const auto it = found_.find(hash);
  return it != found_.end() && !cells_.whole(it->second) &&
         (tier_ == nullptr || !tier_->Holds(hash));
}

void KvPool::NoteParts(const BlockHash& hash) {
  if (cells_.parts().windowed > 0) parts_changed_.insert(hash);
}

std::vector<uint64_t> KvPool::LackingHashes() const {
  std::vector<uint64_t> hashes;
  for (const auto& [hash, id] : found_) {
    if (Lacks(hash)) hashes.push_back(hash.Short());
  }
  std::sort(hashes.begin(), hashes.end());
  return hashes;
}

std::vector<uint64_t> KvPool::CachedHashes(size_t most) const {
  std::vector<uint64_t> hashes;
  hashes.reserve(found_.size());
  for (const auto& [hash, id] : found_) hashes.push_back(hash.Short());
  if (tier_ != nullptr) {
    for (const BlockHash& hash : tier_->Hashes()) {
      if (hashes.size() >= most) break;
      if (!found_.contains(hash)) hashes.push_back(hash.Short());
    }
  }
  if (hashes.size() > most) hashes.resize(most);
  std::sort(hashes.begin(), hashes.end());
  return hashes;
}

// ---- The four states

KvPoolCounts KvPool::counts() const {
  const int parts = cells_.parts().count();
  KvPoolCounts counts{.total = num_blocks(),
                      .free = cells_.free() / parts,
                      .reserved = reserved_cells_ / parts,
                      .live = (live_cells_ + parts - 1) / parts};
  counts.cached = counts.total - counts.free - counts.reserved - counts.live;
  return counts;
}

int& KvPool::Cells(State state) {
  switch (state) {
    case State::kReserved:
      return reserved_cells_;
    case State::kLive:
      return live_cells_;
    case State::kCached:
      return cached_cells_;
    case State::kFree:
      break;
  }
  std::abort();
}

// The only place where a block changes its state: lists and sums follow.
void KvPool::MoveTo(int32_t id, State state) {
  Block& block = blocks_[id];
  const bool was_available =
      block.state == State::kFree || block.state == State::kCached;
  if (block.idle) EndIdle(id);
  if (block.state == State::kCached) RemoveFromCached(id);
  if (block.state != State::kFree) Cells(block.state) -= cells_.held(id);
  block.state = state;
  if (state == State::kFree) {
    cells_.DropAll(id);
    block.cached.next = std::exchange(free_head_, id);
  } else {
    Cells(state) += cells_.held(id);
  }
  if (state == State::kCached) AddToCached(id);
  if (!was_available && (state == State::kFree || state == State::kCached)) {
    TellAvailable();
  }
}

void KvPool::TellAvailable() {
  if (wake_) std::exchange(wake_, nullptr)();
}

void KvPool::Append(Links Block::*links, int32_t id, List* list) {
  Links& own = blocks_[id].*links;
  own = {.previous = std::exchange(list->newest, id), .next = -1};
  (own.previous >= 0 ? (blocks_[own.previous].*links).next : list->oldest) = id;
  ++list->size;
}

void KvPool::Remove(Links Block::*links, int32_t id, List* list) {
  Links& own = blocks_[id].*links;
  (own.previous >= 0 ? (blocks_[own.previous].*links).next : list->oldest) =
      own.next;
  (own.next >= 0 ? (blocks_[own.next].*links).previous : list->newest) =
      own.previous;
  own = {};
  --list->size;
}

void KvPool::AddToCached(int32_t id) {
  Append(&Block::cached, id, &cached_);
  const uint64_t owner = blocks_[id].owner;
  List& owned = owned_[owner];
  Append(&Block::owned, id, &owned);
  if (owned.size == owner_quota_ + 1) over_.push_back(owner);
}

void KvPool::RemoveFromCached(int32_t id) {
  Remove(&Block::cached, id, &cached_);
  const auto owned = owned_.find(blocks_[id].owner);
  Remove(&Block::owned, id, &owned->second);
  if (owned->second.size == owner_quota_) {
    over_.erase(std::find(over_.begin(), over_.end(), owned->first));
  }
  if (owned->second.size == 0) owned_.erase(owned);
}

int32_t KvPool::Victim() const {
  const List* most = nullptr;
  for (const uint64_t owner : over_) {
    const List& owned = owned_.at(owner);
    if (most == nullptr || owned.size > most->size) most = &owned;
  }
  return (most != nullptr ? *most : cached_).oldest;
}

int32_t KvPool::Take(State state, bool whole) {
  while (cells_.free() < cells_.Needed(whole)) Evict();
  const int32_t id = free_head_;
  TANDEM_CHECK(id >= 0, "whoever has no cells is free");
  free_head_ = std::exchange(blocks_[id].cached.next, -1);
  cells_.Take(id, whole);
  MoveTo(id, state);
  return id;
}

// A cached block, or the windowed parts of an idle one.
void KvPool::Evict() {
  const int32_t id = Victim();
  TANDEM_CHECK(id >= 0, "callers look at available() first");
  if (blocks_[id].idle) {
    EndIdle(id);
    live_cells_ -= cells_.parts().windowed;
    cells_.DropWindowed(id);
    NoteParts(blocks_[id].hash);
    return;
  }
  Forget(id, /*evicted=*/true);
  MoveTo(id, State::kFree);
}

void KvPool::Forget(int32_t id, bool evicted) {
  Block& block = blocks_[id];
  if (!block.published) return;
  if (evicted) TANDEM_FAILPOINT("engine.evict", "crash");
  found_.erase(block.hash);
  block.published = false;
  // A tier keeps whole blocks.
  const bool kept = evicted && cells_.whole(id);
  if (tier_ != nullptr && (kept ? tier_->Keep(id, block.hash, block.owner)
                                : tier_->Holds(block.hash))) {
    return;
  }
  parts_changed_.erase(block.hash);
  NoteChange(block.hash, -1);
}

void KvPool::TierForgot(const BlockHash& hash) {
  if (found_.contains(hash)) {
    NoteParts(hash);
  } else {
    parts_changed_.erase(hash);
    NoteChange(hash, -1);
  }
}

void KvPool::NoteChange(const BlockHash& hash, int change) {
  const auto it = changes_.try_emplace(hash.Short(), 0).first;
  it->second += change;
  if (it->second == 0) changes_.erase(it);
}

BlockRef KvPool::AddReference(int32_t id, bool whole) {
  Block& block = blocks_[id];
  TANDEM_CHECK(block.state == State::kLive, "only live blocks are shared");
  ++block.references;
  ++outstanding_references_;
  if (whole) {
    ++block.wholes;
    if (block.idle) EndIdle(id);
  }
  return BlockRef(this, id, whole);
}

void KvPool::DropReference(int32_t id, bool whole) {
  --blocks_[id].references;
  --outstanding_references_;
  if (whole) --blocks_[id].wholes;
  SettleIfUnused(id);
}

void KvPool::DropHold(int32_t id) {
  --blocks_[id].holds;
  --outstanding_holds_;
  SettleIfUnused(id);
}

void KvPool::Abandon(int32_t id) {
  blocks_[id].promised = false;
  SettleIfUnused(id);
}

void KvPool::SettleIfUnused(int32_t id) {
  const Block& block = blocks_[id];
  if (block.references > 0 || block.holds > 0 || block.promised) {
    SettleWindowed(id);
    return;
  }
  MoveTo(id, block.published ? State::kCached : State::kFree);
}

void KvPool::SettleWindowed(int32_t id) {
  Block& block = blocks_[id];
  const int windowed = cells_.parts().windowed;
  if (windowed == 0 || block.state != State::kLive || block.wholes > 0 ||
      block.holds > 0 || block.idle || !cells_.whole(id)) {
    return;
  }
  if (block.published) {
    block.idle = true;
    Append(&Block::cached, id, &cached_);
    live_cells_ -= windowed;
    cached_cells_ += windowed;
  } else {
    live_cells_ -= windowed;
    cells_.DropWindowed(id);
  }
  TellAvailable();
}

void KvPool::EndIdle(int32_t id) {
  blocks_[id].idle = false;
  Remove(&Block::cached, id, &cached_);
  cached_cells_ -= cells_.parts().windowed;
  live_cells_ += cells_.parts().windowed;
}

}  // namespace tandem::engine
