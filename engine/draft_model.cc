// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_model.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace tandem::engine {
namespace {

// A cache that lacks no more is fed with all of it, in any round.
constexpr int kFewRows = 8;
// Of a round's catching up: at least, and until it is measured.
constexpr int kLeastRows = 16;
constexpr int kUnmeasuredRows = 32;
constexpr double kNewestRowsWeight = 0.2;  // of the newest measurement
// A device that fails so often guesses no more.
constexpr int kMaxFailures = 3;

}  // namespace

DraftModel::DraftModel(const DraftModelOptions& options, Loop* loop)
    : options_(options), loop_(loop) {
  TANDEM_CHECK(options.executor != nullptr && options.pool != nullptr &&
                   options.max_sequences >= 1 &&
                   options.max_rows >= options.max_sequences,
               "a draft model has an executor, a pool, and room");
}

// ---- Caches

DraftModel::Cache* DraftModel::CacheOf(uint64_t id, const BlockHash* root,
                                       const std::vector<int32_t>& history) {
  std::unique_ptr<Cache>& cache = caches_[id];
  if (cache == nullptr) cache = std::make_unique<Cache>();
  const auto size = static_cast<size_t>(options_.pool->block_size());
  std::vector<BlockHash>& hashes = cache->hashes;
  while (root != nullptr && (hashes.size() + 1) * size < history.size()) {
    hashes.push_back(ChildHash(
        hashes.empty() ? *root : hashes.back(),
        absl::MakeConstSpan(history).subspan(hashes.size() * size, size)));
  }
  return cache.get();
}

int DraftModel::Behind(uint64_t id, const BlockHash* root,
                       const std::vector<int32_t>& history) {
  const Cache& cache = *CacheOf(id, root, history);
  const int size = options_.pool->block_size();
  const auto hashes = absl::MakeConstSpan(cache.hashes);
  const size_t own =
      std::min(hashes.size(), static_cast<size_t>(cache.settled / size));
  const int found =
      static_cast<int>(own) + options_.pool->Lookup(hashes.subspan(own));
  const int there = std::max(cache.computed, found * size);
  return std::max(0, static_cast<int>(history.size()) - 1 - there);
}

// What is there of the history, but for its last position, behind which the
// first guess is drawn.
void DraftModel::Settle(const std::vector<int32_t>& history, Cache* cache) {
  for (const int32_t token : cache->tail) {
    const auto at = static_cast<size_t>(cache->settled);
    if (at >= history.size() || history[at] != token) break;
    ++cache->settled;
  }
  const int last = static_cast<int>(history.size()) - 1;
  cache->settled = std::min(cache->settled, last);
  cache->computed = cache->settled;
  cache->tail.clear();
}

// Full blocks of what is sure: they are never written again.
void DraftModel::Publish(Cache* cache) {
  const int full = std::min(cache->settled / options_.pool->block_size(),
                            static_cast<int>(cache->hashes.size()));
  for (; cache->published < full; ++cache->published) {
    const auto at = static_cast<size_t>(cache->published);
    options_.pool->Publish(cache->blocks[at], cache->hashes[at], cache->owner);
  }
}

// Takes blocks that are found in place of those that it would have to compute.
// REQUIRES: it holds nothing that is not settled, and has published that.
void DraftModel::Adopt(Cache* cache) {
  const auto hashes = absl::MakeConstSpan(cache->hashes);
  for (auto at = static_cast<size_t>(cache->published); at < hashes.size();
       ++at) {
    std::vector<BlockRef> found = options_.pool->Match(hashes.subspan(at, 1));
    if (found.empty()) return;
    cache->blocks.resize(std::max(cache->blocks.size(), at + 1));
    cache->table.resize(cache->blocks.size());
    cache->table[at] = found[0].id();
    cache->blocks[at] = std::move(found[0]);
    cache->published = static_cast<int>(at) + 1;
    cache->settled = cache->published * options_.pool->block_size();
    cache->computed = cache->settled;
  }
}

bool DraftModel::Reserve(const DraftWish& wish) {
  TANDEM_CHECK(!running(), "a step in flight may use the block table");
  const int positions = static_cast<int>(wish.history->size()) + wish.length;
  TANDEM_CHECK(positions <= options_.max_positions,
               "the draft model's context has an end");
  if (failures_ == kMaxFailures) return false;
  Cache* const cache = CacheOf(wish.id, wish.root, *wish.history);
  cache->owner = wish.owner;
  // Before what is found is evicted for what is not needed then.
  if (cache->blocks.empty()) Adopt(cache);
  const int size = options_.pool->block_size();
  const int missing =
      (positions + size - 1) / size - static_cast<int>(cache->blocks.size());
  if (missing <= 0) return true;
  if (!options_.pool->AllocateInto(missing, &cache->blocks)) return false;
  for (size_t i = cache->table.size(); i < cache->blocks.size(); ++i) {
    cache->table.push_back(cache->blocks[i].id());
  }
  return true;
}

// From the last to the first: see ReleaseBlocks.
void DraftModel::Release(Cache* cache) {
  while (!cache->blocks.empty()) cache->blocks.pop_back();
}

void DraftModel::Forget(uint64_t id) {
  for (Part& part : parts_) {
    if (part.wish.id == id) part.wish = {};
  }
  const auto it = caches_.find(id);
  if (it == caches_.end()) return;
  std::unique_ptr<Cache> cache = std::move(it->second);
  caches_.erase(it);
  if (cache->in_step) {
    leaving_.push_back(std::move(cache));
  } else {
    Release(cache.get());
  }
}

// ---- Rounds

void DraftModel::Start(absl::Span<const DraftWish> wishes,
                       double catch_up_seconds,
                       absl::AnyInvocable<void()> done) {
  TANDEM_CHECK(!running(), "one round at a time");
  TANDEM_CHECK(static_cast<int>(wishes.size()) <= options_.max_sequences,
               "more wishes than a step has room for");
  done_ = std::move(done);
  caught_up_ = 0;
  for (const DraftWish& wish : wishes) {
    const auto it = caches_.find(wish.id);
    TANDEM_CHECK(it != caches_.end(), "a wish without blocks");
    Cache* const cache = it->second.get();
    Settle(*wish.history, cache);
    Publish(cache);
    Adopt(cache);
    parts_.push_back({.wish = wish, .cache = cache});
  }
  PlanFirst(catch_up_seconds);
  first_ = true;
  TANDEM_CHECK(Submit(), "a round has something to do");
}

int DraftModel::CatchUpRows(double seconds) const {
  if (row_seconds_ == 0) return kUnmeasuredRows;
  const double rows = seconds / row_seconds_;
  return static_cast<int>(
      std::clamp<double>(rows, kLeastRows, options_.max_rows));
}

// Those that are nearly there, then chunks of the others.
void DraftModel::PlanFirst(double catch_up_seconds) {
  int room = options_.max_rows;
  int spare = CatchUpRows(catch_up_seconds);
  for (const bool few : {true, false}) {
    for (Part& part : parts_) {
      const int behind =
          static_cast<int>(part.wish.history->size()) - part.cache->computed;
      if ((behind <= kFewRows) != few) continue;
      part.tokens = std::min({behind, room, few ? behind : spare});
      part.draws = part.tokens == behind;
      room -= part.tokens;
      if (few) continue;
      spare -= part.tokens;
      caught_up_ += part.tokens;
    }
  }
}

// The guesses just drawn, where more are wanted.
void DraftModel::PlanNext() {
  for (Part& part : parts_) {
    const bool more =
        part.wish.id != 0 && part.draws &&
        static_cast<int>(part.wish.guesses->size()) < part.wish.length;
    part.tokens = more ? 1 : 0;
    part.draws = more;
  }
}

// False if there is nothing to do.
bool DraftModel::Submit() {
  step_.entries.clear();
  tokens_.clear();
  edits_.clear();
  draws_.clear();
  // Spans into them must hold.
  tokens_.reserve(static_cast<size_t>(options_.max_rows));
  draws_.reserve(parts_.size());
  for (Part& part : parts_) {
    if (part.tokens > 0) AddEntry(&part);
  }
  if (step_.entries.empty()) return false;
  // Edits have their place only when all are there.
  size_t first_edit = 0;
  for (RowDraw& draw : draws_) {
    draw.edits =
        absl::MakeConstSpan(edits_).subspan(first_edit, draw.edits.size());
    first_edit += draw.edits.size();
  }
  ++step_.id;
  submitted_ = loop_->Now();
  options_.executor->Submit(&step_, this);
  return true;
}

void DraftModel::AddEntry(Part* part) {
  Cache& cache = *part->cache;
  const std::vector<int32_t>& history = *part->wish.history;
  const size_t first = tokens_.size();
  const int end = cache.computed + part->tokens;
  for (int position = cache.computed; position < end; ++position) {
    const auto at = static_cast<size_t>(position);
    const int32_t token = at < history.size()
                              ? history[at]
                              : (*part->wish.guesses)[at - history.size()];
    tokens_.push_back(token);
    cache.tail.push_back(token);
  }
  cache.in_step = true;
  const int size = options_.pool->block_size();
  StepEntry& entry = step_.entries.emplace_back();
  entry.sequence = part->wish.id;
  entry.position = cache.computed;
  entry.tokens = absl::MakeConstSpan(tokens_).subspan(first);
  entry.block_table =
      absl::MakeConstSpan(cache.table)
          .subspan(0, static_cast<size_t>((end + size - 1) / size));
  cache.computed = end;
  if (!part->draws) return;
  entry.sampling = *part->wish.sampling;
  entry.sampling.logprobs = -1;
  entry.only_edited = part->wish.edits->only_edited();
  AddDraw(*part);
  entry.draws = absl::MakeConstSpan(draws_).last(1);
}

// By the rules as they are if all guesses are right.
void DraftModel::AddDraw(const Part& part) {
  std::vector<int32_t>& history = *part.wish.history;
  LogitEdits& rules = *part.wish.edits;
  const size_t length = history.size();
  for (const int32_t guess : *part.wish.guesses) {
    history.push_back(guess);
    rules.Guess(guess);
  }
  const absl::Span<const kernels::LogitEdit> edits = rules.Next(
      history, static_cast<int>(history.size()) < part.wish.owed_until);
  edits_.insert(edits_.end(), edits.begin(), edits.end());
  draws_.push_back({.edits = edits});
  history.resize(length);
  rules.TakeBackGuesses();
}

void DraftModel::OnStepDone(uint64_t step_id,
                            absl::StatusOr<StepResult> result) {
  TANDEM_CHECK(running() && step_id == step_.id,
               "a step that nobody waits for");
  ++progress_;
  for (Part& part : parts_) {
    if (part.tokens > 0 && part.wish.id != 0) part.cache->in_step = false;
  }
  for (const auto& cache : leaving_) Release(cache.get());
  leaving_.clear();
  if (!result.ok()) {
    Fail();
    return;
  }
  if (first_ && caught_up_ >= kLeastRows) {
    const double seconds = absl::ToDoubleSeconds(loop_->Now() - submitted_) /
                           static_cast<double>(tokens_.size());
    row_seconds_ = row_seconds_ == 0 ? seconds
                                     : (1 - kNewestRowsWeight) * row_seconds_ +
                                           kNewestRowsWeight * seconds;
  }
  first_ = false;
  size_t drawn = 0;
  for (Part& part : parts_) {
    if (part.tokens == 0 || !part.draws) continue;
    const int32_t token = result->tokens[drawn++].token_id;
    if (part.wish.id != 0) part.wish.guesses->push_back(token);
  }
  TANDEM_CHECK(drawn == result->tokens.size(),
               "a step drew other than it was asked for");
  PlanNext();
  if (!Submit()) Finish();
}

// What the step wrote is unknown.
void DraftModel::Fail() {
  ++failures_;
  std::vector<uint64_t> ids;
  for (const Part& part : parts_) ids.push_back(part.wish.id);
  if (failures_ == kMaxFailures) {
    for (const auto& [id, cache] : caches_) ids.push_back(id);
  }
  for (const uint64_t id : ids) Forget(id);
  Finish();
}

void DraftModel::Finish() {
  parts_.clear();
  std::exchange(done_, nullptr)();
}

std::vector<uint64_t> DraftModel::ids() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, cache] : caches_) ids.push_back(id);
  return ids;
}

absl::Status DraftModel::CheckInvariants() const {
  absl::flat_hash_set<int32_t> blocks;  // those found are shared
  for (const auto& [id, cache] : caches_) {
    blocks.insert(cache->table.begin(), cache->table.end());
    const auto broken = [id = id](const char* what) {
      return absl::InternalError(absl::StrCat("draft cache ", id, ": ", what));
    };
    if (cache->table.size() != cache->blocks.size()) {
      return broken("its block table differs from its references");
    }
    if (cache->settled + static_cast<int>(cache->tail.size()) !=
        cache->computed) {
      return broken("holds other tokens than it knows of");
    }
    const int room =
        static_cast<int>(cache->blocks.size()) * options_.pool->block_size();
    if (cache->computed > room) return broken("has positions without blocks");
    if (cache->published * options_.pool->block_size() > cache->settled) {
      return broken("gave away what is not sure");
    }
    if (!running() && cache->in_step) return broken("waits, but no step runs");
  }
  for (const auto& cache : leaving_) {
    blocks.insert(cache->table.begin(), cache->table.end());
  }
  const int held = static_cast<int>(blocks.size());
  if (!running() && !leaving_.empty()) {
    return absl::InternalError("draft caches are leaving, but no step runs");
  }
  if (held != options_.pool->counts().live) {
    return absl::InternalError(
        absl::StrCat("draft caches hold ", held, " blocks, but ",
                     options_.pool->counts().live, " of the pool are live"));
  }
  return options_.pool->CheckInvariants();
}

}  // namespace tandem::engine
