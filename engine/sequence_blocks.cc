// SPDX-License-Identifier: Apache-2.0
// The KV blocks of a sequence: how many it may need, who else may have them,
// and what becomes of them as it grows. Full ones are published, so that others
// find them, and those behind the window are let go, or their windowed parts.
// The scheduler takes them as steps need them.

#include <algorithm>

#include "common/check.h"
#include "engine/engine.h"
#include "engine/sequence.h"

namespace tandem::engine {
namespace {

int CeilDiv(int64_t value, int64_t by) {
  return static_cast<int>((value + by - 1) / by);
}

}  // namespace

int Engine::BlocksFor(int64_t positions) const {
  return CeilDiv(positions, pool_->block_size());
}

int Engine::BlocksAtOnce(const EngineOptions& options, int block_size,
                         int positions) {
  const int all = CeilDiv(positions, block_size);
  const KvWindow& window = options.window;
  if (window.positions == 0) return all;
  // A step's rows and what the first of them sees, from anywhere in a block.
  const int64_t seen =
      int64_t{window.positions} + options.max_num_batched_tokens;
  const int in_window = std::min(all, CeilDiv(seen, block_size) + 1);
  if (window.frees_blocks()) return in_window;
  return CeilDiv(int64_t{all} * window.parts.full +
                     int64_t{in_window} * window.parts.windowed,
                 window.parts.count());
}

int Engine::FirstBlock(int position) const {
  return options_.window.frees_blocks() ? FirstWhole(position) : 0;
}

int Engine::FirstWhole(int position) const {
  return options_.window.FirstSeen(position) / pool_->block_size();
}

// Lanes share what is full of the prompt; Validate has seen to single ones.
int Engine::MostBlocks(const SequenceSpec& spec) const {
  const int shared = spec.prompt_tokens / pool_->block_size();
  const int64_t end =
      std::min<int64_t>(int64_t{spec.prompt_tokens} + spec.stopping.max_tokens,
                        options_.max_model_len);
  const int lanes = spec.first_token_only ? 1 : std::max(spec.beams.width, 1);
  const int whole = shared + lanes * (BlocksFor(end) - shared);
  if (!spec.kv_cache) return whole;
  // None has more than what is not behind the window.
  return std::min(whole, lanes * BlocksAtOnce(static_cast<int>(end)));
}

absl::Span<const int32_t> Engine::block_table(SequenceId id) const {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return {};
  return it->second->table;
}

std::vector<BlockRef> Engine::ShareBlocks(SequenceId id, int begin,
                                          int end) const {
  const auto it = sequences_.find(id);
  TANDEM_CHECK(it != sequences_.end(),
               "only a sequence here, and no beam search, shares blocks");
  const std::vector<BlockRef>& blocks = it->second->blocks;
  const size_t first = static_cast<size_t>(begin / pool_->block_size());
  const size_t count = static_cast<size_t>(BlocksFor(end));
  TANDEM_CHECK(count <= blocks.size(), "these positions have no blocks yet");
  TANDEM_CHECK(options_.window.frees_parts() || first >= it->second->behind,
               "these blocks were let go");
  std::vector<BlockRef> shared(count);
  for (size_t i = first; i < count; ++i) shared[i] = blocks[i].Share();
  return shared;
}

void Engine::PublishFullBlocks(Sequence* sequence) {
  if (!options_.prefix_caching || !sequence->spec.cache_blocks) return;
  const int size = pool_->block_size();
  while ((sequence->published + 1) * size <= sequence->computed) {
    const size_t index = static_cast<size_t>(sequence->published++);
    sequence->tail = ChildHash(sequence->tail,
                               absl::MakeConstSpan(sequence->spec.history)
                                   .subspan(index * static_cast<size_t>(size),
                                            static_cast<size_t>(size)));
    if (!sequence->blocks[index]) continue;  // behind the window
    pool_->Publish(sequence->blocks[index], sequence->tail,
                   sequence->spec.cache_owner);
  }
}

// Steps in flight may name what is let go here, but none reads it, since their
// rows come later. Whoever gathers has references of its own.
void Engine::FreeBehindWindow(Sequence* sequence) {
  const int keep = sequence->spec.keep_from / pool_->block_size();
  const size_t end =
      static_cast<size_t>(std::min(FirstWhole(sequence->computed), keep));
  for (; sequence->behind < end; ++sequence->behind) {
    BlockRef& block = sequence->blocks[sequence->behind];
    if (options_.window.frees_parts()) {
      block.LetWindowedGo();
    } else {
      block = BlockRef();
      sequence->table[sequence->behind] = -1;
    }
    blocks_returned_ = true;
    ++stats_.window_blocks;
  }
}

void Engine::KeepFrom(SequenceId id, int position) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return;
  it->second->spec.keep_from = position;
  FreeBehindWindow(it->second.get());
}

// Those that only wrong guesses needed.
void Engine::ReturnSpareBlocks(Sequence* sequence) {
  const auto needed = static_cast<size_t>(BlocksFor(sequence->length()));
  while (sequence->blocks.size() > needed) {
    sequence->blocks.pop_back();
    sequence->table.pop_back();
    blocks_returned_ = true;
  }
}

void Engine::Release(Sequence* sequence) {
  // From the last to the first: see ReleaseBlocks.
  while (!sequence->blocks.empty()) sequence->blocks.pop_back();
  sequence->table.clear();
  sequence->copied = BlockRef();
}

}  // namespace tandem::engine
