// SPDX-License-Identifier: Apache-2.0

#include "engine/kv/kv_offload.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace tandem::engine {
namespace {

// Few, so that reads, for which somebody waits, are not behind many.
constexpr int kWritesInFlight = 4;

int Quota(double share, int blocks) { return static_cast<int>(share * blocks); }

}  // namespace

KvOffload::KvOffload(const KvOffloadOptions& options, Loop* loop,
                     BlockMover* mover, KvPool* pool, std::byte* memory,
                     BlockFile* file)
    : options_(options),
      loop_(loop),
      mover_(mover),
      pool_(pool),
      memory_(memory),
      file_(file),
      memory_order_(Quota(options.owner_share, options.memory_blocks)),
      file_order_(Quota(options.owner_share, options.file_blocks)),
      read_timer_(loop) {
  TANDEM_CHECK(options.memory_blocks > 0, "no memory to keep blocks in");
  TANDEM_CHECK((file != nullptr) == (options.file_blocks > 0),
               "a file has blocks");
  for (int i = options.memory_blocks; i-- > 0;) free_memory_.push_back(i);
  for (int i = options.file_blocks; i-- > 0;) free_file_.push_back(i);
  pool_->set_tier(this);
}

KvOffload::~KvOffload() { pool_->set_tier(nullptr); }

KvOffload::Entry* KvOffload::Find(const BlockHash& hash) const {
  const auto it = entries_.find(hash);
  return it == entries_.end() ? nullptr : it->second.get();
}

bool KvOffload::InMemory(const BlockHash& hash) const {
  const Entry* entry = Find(hash);
  return entry != nullptr && entry->memory >= 0 && !entry->reading;
}

std::vector<BlockHash> KvOffload::Hashes() const {
  std::vector<BlockHash> hashes;
  hashes.reserve(entries_.size());
  for (auto it = memory_order_.all().rbegin(); it != memory_order_.all().rend();
       ++it) {
    hashes.push_back((*it)->hash);
  }
  for (auto it = file_order_.all().rbegin(); it != file_order_.all().rend();
       ++it) {
    if ((*it)->memory < 0) hashes.push_back((*it)->hash);
  }
  return hashes;
}

void KvOffload::Touch(Entry* entry) {
  if (entry->memory >= 0) memory_order_.Touch(entry->in_memory);
  if (entry->file >= 0 && !entry->writing) file_order_.Touch(entry->in_file);
}

// ---- Slots

int KvOffload::TakeMemory() {
  if (free_memory_.empty()) {
    Entry* const entry = memory_order_.First(
        [](const Entry* candidate) { return candidate->pins == 0; });
    if (entry == nullptr) return -1;
    FreeMemory(entry);
    ForgetIfNowhere(entry);
  }
  const int slot = free_memory_.back();
  free_memory_.pop_back();
  return slot;
}

int KvOffload::TakeFile() {
  const bool refuses = !file_status_.ok();
  const bool retries = refuses && loop_->Now() >= file_retry_at_;
  if (free_file_.empty() || (refuses && !retries)) {
    Entry* const entry = file_order_.First(
        [](const Entry* candidate) { return !candidate->reading; });
    if (entry == nullptr) return -1;
    FreeFile(entry);
    ForgetIfNowhere(entry);
  } else if (retries) {
    // One at a time: each costs a block where there is no room yet.
    tried_ = free_file_.back();
    file_retry_at_ = loop_->Now() + options_.file_retry;
  }
  const int slot = free_file_.back();
  free_file_.pop_back();
  return slot;
}

void KvOffload::FreeMemory(Entry* entry) {
  memory_order_.Erase(entry->in_memory);
  free_memory_.push_back(std::exchange(entry->memory, -1));
}

void KvOffload::FreeFile(Entry* entry) {
  file_order_.Erase(entry->in_file);
  free_file_.push_back(std::exchange(entry->file, -1));
}

void KvOffload::ForgetIfNowhere(Entry* entry) {
  if (entry->memory >= 0 || entry->file >= 0) return;
  const BlockHash hash = entry->hash;
  entries_.erase(hash);
  ++counters_.dropped;
  pool_->TierForgot(hash);
}

// ---- Out of the pool and back

bool KvOffload::Keep(int32_t block, const BlockHash& hash, uint64_t owner) {
  if (Entry* known = Find(hash); known != nullptr) {
    Touch(known);
    return true;
  }
  const int slot = TakeMemory();
  if (slot < 0) {
    ++counters_.declined;
    return false;
  }
  auto made = std::make_unique<Entry>();
  Entry* const entry = made.get();
  entry->hash = hash;
  entry->owner = owner;
  entry->memory = slot;
  entry->in_memory = memory_order_.Insert(entry->owner, entry);
  entry->pins = 1;
  entry->saving = true;
  entries_.emplace(hash, std::move(made));
  ++counters_.saved;
  mover_->SaveBlock(block, Slot(slot), [this, entry] {
    --entry->pins;
    entry->saving = false;
    if (file_ == nullptr) return;
    unwritten_.push_back(entry->hash);
    // What was forgotten before its turn came is among them.
    if (unwritten_.size() > static_cast<size_t>(options_.memory_blocks)) {
      unwritten_.pop_front();
    }
    WriteBehind();
  });
  return true;
}

void KvOffload::Restore(absl::Span<const BlockHash> hashes,
                        absl::Span<BlockRef> blocks, uint64_t owner) {
  // Taking blocks from the pool brings others here: nothing that is wanted may
  // have to make room for them.
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i]) continue;
    Entry* const entry = Find(hashes[i]);
    TANDEM_CHECK(entry != nullptr && entry->memory >= 0 && !entry->reading,
                 "only what is in memory is restored");
    ++entry->pins;
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i]) continue;
    Entry* const entry = Find(hashes[i]);
    Touch(entry);
    std::vector<BlockRef> taken = pool_->Allocate(1);
    TANDEM_CHECK(taken.size() == 1, "callers look at available() first");
    blocks[i] = std::move(taken.front());
    ++counters_.restored;
    // The copy holds the block, whatever becomes of the sequence.
    mover_->RestoreBlock(blocks[i].id(), Slot(entry->memory),
                         [entry, held = blocks[i].Share()] { --entry->pins; });
    pool_->Publish(blocks[i], hashes[i], owner);
  }
}

// ---- The file

void KvOffload::WriteBehind() {
  // While there is room for a while to come, nothing needs to be written.
  while (writes_ < kWritesInFlight && !unwritten_.empty() &&
         free_memory_.size() * 4 <
             static_cast<size_t>(options_.memory_blocks)) {
    Entry* const entry = Find(unwritten_.front());
    // One that is being saved was forgotten since and is kept anew: its slot
    // holds something else yet. The end of the save brings it here again.
    if (entry == nullptr || entry->saving || entry->memory < 0 ||
        entry->file >= 0) {
      unwritten_.pop_front();
      continue;
    }
    const int slot = TakeFile();
    if (slot < 0) return;
    unwritten_.pop_front();
    entry->file = slot;
    entry->writing = true;
    ++entry->pins;
    ++writes_;
    file_->Write(
        slot, entry->hash, Data(*entry),
        [this, entry](const absl::Status& status) { EndWrite(entry, status); });
  }
}

void KvOffload::EndWrite(Entry* entry, const absl::Status& status) {
  --writes_;
  --entry->pins;
  entry->writing = false;
  const bool tried = entry->file == tried_;
  if (tried) tried_ = -1;
  if (status.ok()) {
    ++counters_.written;
    entry->in_file = file_order_.Insert(entry->owner, entry);
    // Others' writes succeed on a full disk too: they have their bytes.
    if (tried) file_status_ = absl::OkStatus();
  } else {
    ++counters_.write_errors;
    if (file_status_.ok()) file_retry_at_ = loop_->Now() + options_.file_retry;
    file_status_ = status;
    free_file_.push_back(std::exchange(entry->file, -1));
  }
  WriteBehind();
}

void KvOffload::Prefetch(absl::Span<const BlockHash> hashes) {
  if (file_ == nullptr) return;
  std::vector<Entry*> wanted;
  for (const BlockHash& hash : hashes) {
    Entry* const entry = Find(hash);
    if (entry != nullptr) {
      Touch(entry);
      if (entry->memory < 0) wanted.push_back(entry);
    } else if (pool_->Lookup(absl::MakeConstSpan(&hash, 1)) == 0) {
      break;
    }
  }
  for (Entry* const entry : wanted) {
    // Half of the memory stays for what is evicted meanwhile.
    if (reads_ >= std::max(1, options_.memory_blocks / 2)) break;
    if (!StartRead(entry)) break;
  }
}

bool KvOffload::StartRead(Entry* entry) {
  entry->reading = true;  // the file's slot stays
  const int slot = TakeMemory();
  if (slot < 0) {
    entry->reading = false;
    return false;
  }
  entry->memory = slot;
  entry->in_memory = memory_order_.Insert(entry->owner, entry);
  entry->pins = 1;
  entry->read_since = loop_->Now();
  ++reads_;
  file_->Read(
      entry->file, entry->hash, Data(*entry),
      [this, entry](const absl::Status& status) { EndRead(entry, status); });
  WatchReads();
  return true;
}

void KvOffload::EndRead(Entry* entry, const absl::Status& status) {
  --reads_;
  --entry->pins;
  entry->reading = false;
  if (status.ok()) {
    ++counters_.read;
  } else {
    ++counters_.read_errors;
    FreeMemory(entry);
    FreeFile(entry);
    ForgetIfNowhere(entry);
  }
  if (reads_ == 0) read_timer_.Stop();
  if (on_change_) on_change_();
}

// Whoever waits for reads hears when they take too long.
void KvOffload::WatchReads() {
  if (read_timer_.running()) return;
  read_timer_.Start(options_.read_timeout, [this] {
    if (reads_ > 0) WatchReads();
    if (on_change_) on_change_();
  });
}

bool KvOffload::Prefetching(absl::Span<const BlockHash> hashes) const {
  if (reads_ == 0) return false;
  for (const BlockHash& hash : hashes) {
    const Entry* entry = Find(hash);
    if (entry != nullptr && entry->reading) {
      return loop_->Now() - entry->read_since < options_.read_timeout;
    }
    const bool here = (entry != nullptr && entry->memory >= 0) ||
                      pool_->Lookup(absl::MakeConstSpan(&hash, 1)) > 0;
    if (!here) return false;
  }
  return false;
}

absl::Status KvOffload::CheckInvariants() const {
  const auto broken = [](const char* what) {
    return absl::InternalError(absl::StrCat("KV offload: ", what));
  };
  std::vector<int> memory(static_cast<size_t>(options_.memory_blocks), 0);
  std::vector<int> file(static_cast<size_t>(options_.file_blocks), 0);
  for (const int slot : free_memory_) ++memory[static_cast<size_t>(slot)];
  for (const int slot : free_file_) ++file[static_cast<size_t>(slot)];
  int reading = 0, writing = 0;
  size_t in_memory = 0, in_file = 0;
  for (const auto& [hash, entry] : entries_) {
    if (!(entry->hash == hash)) return broken("an entry has another hash");
    if (entry->memory < 0 && entry->file < 0) return broken("an empty entry");
    if (entry->pins < 0 || (entry->pins > 0 && entry->memory < 0)) {
      return broken("pins without memory");
    }
    if (entry->reading && (entry->memory < 0 || entry->file < 0)) {
      return broken("reads from nowhere or to nowhere");
    }
    if (entry->memory >= 0) {
      ++memory[static_cast<size_t>(entry->memory)];
      ++in_memory;
      if (!memory_order_.Has(entry->in_memory, entry.get())) {
        return broken("memory order");
      }
    }
    if (entry->file >= 0) {
      ++file[static_cast<size_t>(entry->file)];
      in_file += entry->writing ? 0 : 1;
      if (!entry->writing && !file_order_.Has(entry->in_file, entry.get())) {
        return broken("file order");
      }
    }
    if (entry->saving && (entry->reading || entry->writing)) {
      return broken("reads or writes what is not saved yet");
    }
    reading += entry->reading;
    writing += entry->writing;
  }
  const auto once = [](int count) { return count == 1; };
  if (!std::all_of(memory.begin(), memory.end(), once)) {
    return broken("a memory slot is nobody's, or of two");
  }
  if (!std::all_of(file.begin(), file.end(), once)) {
    return broken("a file slot is nobody's, or of two");
  }
  if (in_memory != memory_order_.all().size() ||
      in_file != file_order_.all().size() || !memory_order_.Adds() ||
      !file_order_.Adds()) {
    return broken("an order holds what is not there");
  }
  if (reading != reads_ || writing != writes_) {
    return broken("reads or writes are lost");
  }
  return absl::OkStatus();
}

}  // namespace tandem::engine
