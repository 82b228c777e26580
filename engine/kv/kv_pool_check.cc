// SPDX-License-Identifier: Apache-2.0
// What must hold of a pool whatever was done to it.

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "engine/kv/kv_pool.h"

namespace tandem::engine {
namespace {

absl::Status Broken(int32_t id, absl::string_view what) {
  return absl::InternalError(absl::StrCat("KV block ", id, ": ", what));
}

}  // namespace

absl::Status KvPool::CheckInvariants() const {
  for (const absl::Status& part :
       {CheckLists(), CheckOwners(), CheckSums(), cells_.CheckInvariants()}) {
    if (!part.ok()) return part;
  }
  for (int32_t id = 0; id < cells_.num_blocks(); ++id) {
    if (absl::Status block = CheckBlock(id); !block.ok()) return block;
  }
  return absl::OkStatus();
}

// Each block in the list of its state, and in no other.
absl::Status KvPool::CheckLists() const {
  enum : uint8_t { kNone, kInFree, kInCached };
  std::vector<uint8_t> listed(blocks_.size(), kNone);
  size_t steps = 0;
  for (int32_t id = free_head_; id >= 0; id = blocks_[id].cached.next) {
    if (++steps > blocks_.size()) return Broken(id, "the free list is a ring");
    listed[id] = kInFree;
  }
  steps = 0;
  for (int32_t id = cached_.oldest, previous = -1; id >= 0;
       previous = id, id = blocks_[id].cached.next) {
    const Links& links = blocks_[id].cached;
    if (++steps > blocks_.size()) return Broken(id, "the LRU list is a ring");
    if (listed[id] != kNone) return Broken(id, "is in two lists");
    if (links.previous != previous) return Broken(id, "LRU links differ");
    if (links.next < 0 && cached_.newest != id) {
      return Broken(id, "the LRU list does not end at the newest");
    }
    listed[id] = kInCached;
  }
  for (int32_t id = 0; id < cells_.num_blocks(); ++id) {
    const Block& block = blocks_[id];
    const bool in_cached = block.state == State::kCached || block.idle;
    const uint8_t expected = block.state == State::kFree ? kInFree
                             : in_cached                 ? kInCached
                                                         : kNone;
    if (listed[id] != expected) return Broken(id, "is in another state's list");
  }
  return absl::OkStatus();
}

// Each cached block in its owner's list and in no other, in the same order.
absl::Status KvPool::CheckOwners() const {
  absl::flat_hash_map<uint64_t, int> sizes;
  absl::flat_hash_map<uint64_t, int32_t> next;  // the one expected
  for (const auto& [owner, owned] : owned_) next[owner] = owned.oldest;
  for (int32_t id = cached_.oldest; id >= 0; id = blocks_[id].cached.next) {
    if (blocks_[id].idle) continue;
    const uint64_t owner = blocks_[id].owner;
    const auto expected = next.find(owner);
    if (expected == next.end() || expected->second != id) {
      return absl::InternalError(
          absl::StrCat("KV block ", id, ": its owner's list lacks it"));
    }
    expected->second = blocks_[id].owned.next;
    ++sizes[owner];
  }
  size_t over = 0;
  for (const auto& [owner, owned] : owned_) {
    if (owned.size == 0 || owned.size != sizes[owner] || next[owner] >= 0) {
      return absl::InternalError("an owner's list holds what is not cached");
    }
    over += owned.size > owner_quota_;
  }
  return over == over_.size()
             ? absl::OkStatus()
             : absl::InternalError("owners beyond their share are miscounted");
}

// What is counted on the way is what there is.
absl::Status KvPool::CheckSums() const {
  int reserved = 0;
  int live = 0;
  int cached = 0;
  int64_t references = 0;
  int64_t holds = 0;
  size_t published = 0;
  for (int32_t id = 0; id < cells_.num_blocks(); ++id) {
    const Block& block = blocks_[id];
    references += block.references;
    holds += block.holds;
    published += block.published;
    const int held = cells_.held(id);
    const int idle = block.idle ? cells_.parts().windowed : 0;
    switch (block.state) {
      case State::kFree:
        break;
      case State::kReserved:
        reserved += held;
        break;
      case State::kLive:
        live += held - idle;
        cached += idle;
        break;
      case State::kCached:
        cached += held;
        break;
    }
  }
  if (reserved != reserved_cells_ || live != live_cells_ ||
      cached != cached_cells_ ||
      reserved + live + cached + cells_.free() != cells_.num_cells()) {
    return Broken(-1, "the counts are not the sums over the blocks");
  }
  if (references != outstanding_references_ || holds != outstanding_holds_) {
    return Broken(-1, "references or holds are lost");
  }
  if (published != found_.size()) {
    return Broken(-1, "a hash finds a block that is not published");
  }
  return absl::OkStatus();
}

// Its holders and its state; and that its hash finds it.
absl::Status KvPool::CheckBlock(int32_t id) const {
  const Block& block = blocks_[id];
  const bool used = block.references > 0 || block.holds > 0;
  bool right = block.references >= 0 && block.holds >= 0 && 0 <= block.wholes &&
               block.wholes <= block.references;
  switch (block.state) {
    case State::kFree:
      right &= !used && !block.promised && !block.published;
      break;
    case State::kReserved:
      right &= block.references == 0 && (block.promised || block.holds > 0) &&
               !block.published;
      break;
    case State::kLive:
      right &=
          used && !block.promised && (block.wholes == 0 || cells_.whole(id));
      break;
    case State::kCached:
      right &= !used && !block.promised && block.published;
      break;
  }
  right &= !block.idle || (block.state == State::kLive && block.published &&
                           block.wholes == 0 && cells_.whole(id));
  if (!right) {
    return absl::InternalError(absl::StrCat(
        "KV block ", id, ": state ", static_cast<int>(block.state),
        " contradicts its holders (", block.references, " references, ",
        block.wholes, " to all parts, ", block.holds, " holds)"));
  }
  if (!block.published) return absl::OkStatus();
  const auto it = found_.find(block.hash);
  return it != found_.end() && it->second == id
             ? absl::OkStatus()
             : absl::InternalError(absl::StrCat(
                   "KV block ", id, ": its hash finds another block"));
}

}  // namespace tandem::engine
