// SPDX-License-Identifier: Apache-2.0
// How sequences come, checked before anything changes, and how they go: at
// once, or when the step in flight that uses their blocks is done. What they
// compute in between is decided in scheduler.cc.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "engine/engine.h"
#include "engine/sequence.h"

namespace tandem::engine {
namespace {

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

}  // namespace

// ---- What is refused

absl::Status Engine::CheckSpec(const SequenceSpec& spec,
                               absl::Span<const BlockRef> blocks,
                               int computed) const {
  const int64_t length = static_cast<int64_t>(spec.history.size());
  if (length == 0) return Refuse("history is empty, expected a token");
  // The last token of what is only scored is looked at, and not computed.
  if (length >= options_.max_model_len + (spec.only_scores() ? 1 : 0)) {
    return Refuse("history has ", length, " tokens, expected less than ",
                  "max_model_len, ", options_.max_model_len);
  }
  if (spec.prompt_tokens < 0 || spec.prompt_tokens > length) {
    return Refuse("prompt_tokens is ", spec.prompt_tokens,
                  ", expected 0 to the history's ", length);
  }
  if (spec.scoring.wanted()) {
    const absl::Status scoring = CheckScoring(spec, computed);
    if (!scoring.ok()) return scoring;
  }
  if (!spec.only_scores() &&
      spec.stopping.max_tokens <= length - spec.prompt_tokens) {
    return Refuse("max_tokens is ", spec.stopping.max_tokens,
                  ", expected more than the ", length - spec.prompt_tokens,
                  " that the history has behind its prompt");
  }
  const int64_t uncomputed = spec.first_candidates.empty() ? 1 : 0;
  if (computed < 0 || computed > length - uncomputed ||
      (uncomputed == 0 && computed != length)) {
    return Refuse("computed is ", computed, ", expected 0 to ", length - 1);
  }
  const absl::Status search = CheckSearch(spec);
  if (!search.ok()) return search;
  if (MostBlocks(spec) > pool_->num_blocks()) {
    return Refuse("beam.width is ", spec.beams.width, ", and ",
                  MostBlocks(spec), " KV blocks may be needed: the pool has ",
                  pool_->num_blocks());
  }
  const absl::Status ids = CheckTokenIds(spec);
  if (!ids.ok()) return ids;
  return CheckBlocks(spec, blocks, computed);
}

absl::Status Engine::CheckScoring(const SequenceSpec& spec, int computed) {
  const Scoring& scoring = spec.scoring;
  if (scoring.alternatives > kernels::kMaxTopLogprobs) {
    return Refuse("scoring.alternatives is ", scoring.alternatives,
                  ", expected at most ", kernels::kMaxTopLogprobs);
  }
  if (spec.beams.width > 0) {
    return Refuse("a beam search and a scored prompt exclude each other");
  }
  const auto length = static_cast<int64_t>(spec.history.size());
  if (spec.prompt_tokens != length) {
    return Refuse("a prompt of ", spec.prompt_tokens,
                  " tokens is to be scored with ", length - spec.prompt_tokens,
                  " tokens behind it, expected none");
  }
  if (scoring.position < 1 || scoring.position >= spec.prompt_tokens) {
    return Refuse("scoring.position is ", scoring.position,
                  ", expected 1 to the prompt's ", spec.prompt_tokens - 1);
  }
  if (computed >= scoring.position) {
    return Refuse("computed is ", computed, ", and what follows position ",
                  scoring.position - 1, " is to be scored");
  }
  return absl::OkStatus();
}

absl::Status Engine::CheckSearch(const SequenceSpec& spec) {
  const bool searches = spec.beams.width > 0 && !spec.first_token_only;
  if (searches && !spec.kv_cache) {
    return Refuse("a beam search needs a KV cache: its beams share blocks");
  }
  if (spec.beams.width > 0 && spec.attention.rows() > 0) {
    return Refuse("a beam search brings no attention weights along");
  }
  if (!spec.first_candidates.empty() && !searches) {
    return Refuse("first candidates are those of a beam search");
  }
  if (spec.beams.width != 0) {
    const absl::Status beams =
        CheckBeams(spec.beams, spec.stopping.stop_token_ids);
    if (!beams.ok()) return beams;
    const auto length = static_cast<int64_t>(spec.history.size());
    if (spec.prompt_tokens != length) {
      return Refuse("a beam search begins behind its prompt of ",
                    spec.prompt_tokens, " tokens, not behind ", length);
    }
  }
  return absl::OkStatus();
}

// A step with another id fails, and with it the others in that step.
absl::Status Engine::CheckTokenIds(const SequenceSpec& spec) const {
  if (options_.vocab_size == 0) return absl::OkStatus();
  absl::Status status;
  const auto check = [&](const char* what, int64_t id) {
    if (id >= 0 && id < options_.vocab_size) return;
    status.Update(absl::InvalidArgumentError(
        absl::StrCat(what, " has token id ", id, ", expected 0 to ",
                     options_.vocab_size - 1)));
  };
  for (const int32_t id : spec.history) check("history", id);
  for (const TokenBias& bias : spec.rules.logit_bias) {
    check("logit_bias", bias.token_id);
  }
  for (const int32_t id : spec.stopping.stop_token_ids) {
    check("stop_token_ids", id);
  }
  for (const int32_t id : spec.rules.allowed_ids) check("allowed_ids", id);
  for (const int32_t id : spec.rules.banned_ids) check("banned_ids", id);
  for (const std::vector<int32_t>& word : spec.rules.bad_words) {
    for (const int32_t id : word) check("bad_words", id);
  }
  for (const TopLogprob& top : spec.first_candidates) {
    check("first_candidates", top.token_id);
  }
  return status;
}

absl::Status Engine::CheckBlocks(const SequenceSpec& spec,
                                 absl::Span<const BlockRef> blocks,
                                 int computed) const {
  const int least = BlocksFor(computed);
  const int most = BlocksFor(options_.max_model_len);
  const int given = static_cast<int>(blocks.size());
  if (given < least || given > most) {
    return Refuse("got ", given, " blocks for ", computed,
                  " computed positions, expected ", least, " to ", most);
  }
  for (int b = 0; b < given; ++b) {
    const BlockRef& block = blocks[static_cast<size_t>(b)];
    const bool there =
        b < FirstWhole(computed) && !options_.window.frees_blocks()
            ? static_cast<bool>(block)
            : block.whole();
    const bool behind = spec.kv_cache && b < FirstBlock(computed);
    if (!there && !behind) {
      return Refuse("block ", b, " is missing, and position ", computed,
                    " sees it");
    }
  }
  return absl::OkStatus();
}

// ---- Coming

absl::Status Engine::Add(SequenceId id, SequenceSpec spec,
                         std::vector<BlockRef> blocks, int computed,
                         std::unique_ptr<TokenConstraint> constraint) {
  if (contains(id)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence ", id, " is there already: retire it first"));
  }
  const absl::Status status = CheckSpec(spec, blocks, computed);
  if (!status.ok()) return status;
  if (constraint != nullptr && spec.beams.width > 0) {
    return absl::InvalidArgumentError(
        "a beam search and a constraint of its tokens exclude each other");
  }

  const int top = spec.sampling.logprobs;
  std::unique_ptr<Sequence> sequence =
      NewSequence(id, std::move(spec), std::move(blocks), computed);
  sequence->constraint = std::move(constraint);
  if (!sequence->ready()) {
    sequence->constraint->OnReady([this] { SchedulePlan(); });
  }
  if (sequence->spec.beams.width > 0 && !sequence->spec.first_token_only) {
    AddBeams(std::move(sequence), top);
  } else {
    Enlist(std::move(sequence));
  }
  SchedulePlan();
  return absl::OkStatus();
}

std::unique_ptr<Engine::Sequence> Engine::NewSequence(
    SequenceId id, SequenceSpec spec, std::vector<BlockRef> blocks,
    int computed) {
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->serial = ++last_serial_;
  sequence->spec = std::move(spec);
  if (!sequence->spec.kv_cache) {
    sequence->spec.cache_blocks = false;
    sequence->spec.keep_from = 0;  // each step begins there
    computed = 0;
  }
  sequence->blocks = std::move(blocks);
  sequence->computed = computed;
  sequence->tail = sequence->spec.root;
  if (const int width = sequence->spec.beams.width; width > 0) {
    const Stopping& stopping = sequence->spec.stopping;
    Sampling& sampling = sequence->spec.sampling;
    sampling.edited_logprobs = true;
    sampling.logprobs = std::max(
        sampling.logprobs, CandidatesPerBeam(width, stopping.stop_token_ids));
  }
  PrepareGrowth(sequence.get());
  PrepareDrafts(sequence.get());
  for (const BlockRef& block : sequence->blocks) {
    if (!block.whole() && sequence->behind == sequence->table.size()) {
      ++sequence->behind;
    }
    if (static_cast<int>(sequence->table.size()) >=
        computed / pool_->block_size()) {
      TANDEM_CHECK(pool_->references(block) == 1 && !pool_->published(block),
                   "a block that will be written belongs to others as well");
      writers_[block.id()] = sequence->serial;
    }
    sequence->table.push_back(block.id());
  }
  PublishFullBlocks(sequence.get());
  FreeBehindWindow(sequence.get());
  return sequence;
}

void Engine::PrepareGrowth(Sequence* sequence) const {
  const Stopping& stopping = sequence->spec.stopping;
  sequence->edits.emplace(
      &sequence->spec.rules,
      absl::MakeConstSpan(stopping.stop_token_ids)
          .subspan(0, stopping.min_tokens > 0 ? absl::Span<int>::npos : 0),
      sequence->spec.history, sequence->spec.prompt_tokens);
  // All it may grow to, so that no token reallocates and spans stay valid.
  const int64_t most = std::min<int64_t>(
      options_.max_model_len, int64_t{sequence->spec.prompt_tokens} +
                                  sequence->spec.stopping.max_tokens);
  const auto blocks = static_cast<size_t>(BlocksFor(most));
  sequence->spec.history.reserve(static_cast<size_t>(most));
  sequence->blocks.reserve(blocks);
  sequence->table.reserve(blocks);
}

void Engine::Enlist(std::unique_ptr<Sequence> sequence) {
  Sequence* const added = sequence.get();
  by_age_.insert(std::upper_bound(by_age_.begin(), by_age_.end(), added,
                                  [](const Sequence* a, const Sequence* b) {
                                    return a->older_than(*b);
                                  }),
                 added);
  // A lane's owner is its group.
  if (added->group == nullptr) {
    sequences_.emplace(added->id, std::move(sequence));
  } else {
    added->group->lanes.push_back(std::move(sequence));
  }
  Count(*added, 1);
  ++changes_;
}

// ---- While they are here

void Engine::ShareSteps(SequenceId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end() || !it->second->spec.alone) return;
  it->second->spec.alone = false;
  ++changes_;
  SchedulePlan();
}

void Engine::Pause(SequenceId id, bool paused) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end() || it->second->paused == paused) return;
  Count(*it->second, -1);
  it->second->paused = paused;
  Count(*it->second, 1);
  ++changes_;
  SchedulePlan();
}

int Engine::computed(SequenceId id) const {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? -1 : it->second->computed;
}

DraftCounts Engine::drafts(SequenceId id) const {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? DraftCounts() : it->second->drafts;
}

void Engine::Count(const Sequence& sequence, int sign) {
  if (sequence.finished || sequence.waits) return;
  if (sequence.paused) {
    stats_.paused += sign;
  } else {
    stats_.running += sign;
    stats_.pending_tokens += sign * sequence.uncomputed();
  }
}

// ---- Going

void Engine::Retire(SequenceId id) {
  // Preempted, and its owner gave it up before being told.
  std::erase_if(preempted_, [id](const auto& s) { return s->id == id; });
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) {
    RetireBeams(id);
    return;
  }
  Remove(it->second.get());
  SchedulePlan();
}

std::unique_ptr<Engine::Sequence> Engine::Detach(Sequence* sequence) {
  Count(*sequence, -1);
  ++changes_;
  EndDrafts(sequence);
  std::erase(by_age_, sequence);
  sequence->retired = true;
  if (BeamGroup* const group = std::exchange(sequence->group, nullptr)) {
    const auto lane =
        std::find_if(group->lanes.begin(), group->lanes.end(),
                     [&](const auto& own) { return own.get() == sequence; });
    std::unique_ptr<Sequence> detached = std::move(*lane);
    group->lanes.erase(lane);
    return detached;
  }
  return std::move(sequences_.extract(sequence->id).mapped());
}

void Engine::Remove(Sequence* sequence) {
  std::unique_ptr<Sequence> detached = Detach(sequence);
  if (sequence->in_flight > 0) {
    leaving_.push_back(std::move(detached));
  } else {
    Release(sequence);
  }
}

}  // namespace tandem::engine
