// SPDX-License-Identifier: Apache-2.0
// Guesses (speculation). They are added to steps that hold decodes alone: a
// step with chunks of prompts keeps the device busy as it is. They take no
// block that others wait for, and what follows them waits for their step.
//
// What was said before is looked up when a step is composed. A draft model runs
// before that: once no step is in flight, a round of its makes guesses for
// sequences of the next one (PlanWishes), and the step is composed when that is
// over. How many guesses a sequence gets follows from how often it was right
// and from what steps with drafts take, the round included. One that gets none
// is tried again after some tokens, less and less often, and then given up; and
// where most are, only a few of those that come are tried at all.

#include <algorithm>
#include <limits>
#include <utility>

#include "common/check.h"
#include "engine/engine.h"
#include "engine/sequence.h"

namespace tandem::engine {
namespace {

// A sequence without drafts is tried again after so many tokens, then after
// twice as many, and so on, and then given up.
constexpr int kTryAfter = 32;
constexpr int kMaxTries = 4;
constexpr int kTriedGuesses = 2;
// Of those that are not likely to gain anything, one in so many is tried.
constexpr uint64_t kTryOneIn = 16;
// Of the time that the tokens still to come take without guesses, this times
// the squared chance of a guess may go into catching up: about half of what
// guesses save.
constexpr double kCatchUpGain = 0.5;
// Until it is measured: rows of a chunk that take as long as one by itself.
constexpr int kRowsPerStep = 8;
// A sequence with so good guesses has none because of what they cost.
constexpr double kHopeful = 0.6;
// Share of a step's time that catching up may take in addition.
constexpr double kCatchUpShare = 0.25;

}  // namespace

// ---- Guesses

// So many of its next tokens may be guessed at most: one is drawn behind them.
int Engine::MostDrafts(const Sequence& sequence) const {
  if (sequence.drafter == nullptr && !sequence.drafted) return 0;
  int64_t most = std::min<int64_t>(
      options_.max_model_len,
      int64_t{sequence.spec.prompt_tokens} + sequence.spec.stopping.max_tokens);
  most -= sequence.length() + 1;
  if (sequence.drafted) {
    most = std::min<int64_t>(most,
                             draft_model_->max_positions() - sequence.length());
  }
  return static_cast<int>(
      std::min<int64_t>(options_.speculation.num_tokens, most));
}

// Whether guesses are likely to pay once its token in flight is known: then no
// step may run ahead. The first guess stands for that token.
bool Engine::MayDraft(Sequence* sequence) {
  const int most = MostDrafts(*sequence);
  if (most < 2 || sequence->drafter == nullptr) return false;
  std::vector<int32_t>& guesses = sequence->guesses;
  guesses.resize(static_cast<size_t>(most));
  guesses.resize(static_cast<size_t>(sequence->drafter->Propose(
      sequence->spec.history, absl::MakeSpan(guesses))));
  const int coming = static_cast<int>(guesses.size()) - 1;
  if (coming < 1 || !options_.speculation.adapt) return coming >= 1;
  const int sequences = static_cast<int>(running_->parts.size());
  return draft_costs_.Length(sequences, sequences, 0,
                             sequence->acceptance.chance(), coming) > 0;
}

void Engine::LookUp(Sequence* sequence) {
  if (sequence->drafter == nullptr) return;
  std::vector<int32_t>& guesses = sequence->guesses;
  guesses.resize(static_cast<size_t>(std::max(0, MostDrafts(*sequence))));
  if (guesses.empty()) return;
  guesses.resize(static_cast<size_t>(sequence->drafter->Propose(
      sequence->spec.history, absl::MakeSpan(guesses))));
}

// Guesses for the decodes of a plan, the oldest first.
void Engine::AddDrafts(Plan* plan) {
  const int sequences = static_cast<int>(plan->parts.size());
  if (options_.speculation.num_tokens == 0) return;
  for (const Plan::Part& part : plan->parts) {
    if (part.tokens > 1 || part.sequence->unplanned() > 1) return;
  }
  int room = std::min(options_.max_num_batched_tokens,
                      std::max(options_.max_num_seqs, options_.max_draws)) -
             plan->rows;
  double tokens = sequences;
  for (Plan::Part& part : plan->parts) {
    Sequence* const sequence = part.sequence;
    LookUp(sequence);
    const std::vector<int32_t>& guesses = sequence->guesses;
    int length = std::min(room, static_cast<int>(guesses.size()));
    if (length == 0) continue;
    const double chance = sequence->acceptance.chance();
    // A draft model made as many as pay.
    if (options_.speculation.adapt && !sequence->drafted) {
      length =
          draft_costs_.Length(sequences, tokens, plan->drafts, chance, length);
    }
    part.drafts = TryDrafts(&part, length);
    part.tokens += part.drafts;
    room -= part.drafts;
    plan->rows += part.drafts;
    plan->drafts += part.drafts;
    tokens += DraftCosts::Expected(part.drafts, chance) - 1;
  }
}

// As many of them as have blocks: nobody is to wait for one that a guess took.
int Engine::TryDrafts(Plan::Part* part, int length) {
  Sequence* const sequence = part->sequence;
  const int size = pool_->block_size();
  const int begin = sequence->next_position() + part->tokens;
  const int blocks = static_cast<int>(sequence->blocks.size());
  const int spare = std::max(0, pool_->available() - stats_.running);
  length = std::clamp((blocks + spare) * size - begin, 0, length);
  TakeBlocks(sequence, (begin + length + size - 1) / size - blocks);
  return length;
}

// ---- The draft model

// What is drafted for at all; a lane is not: which of them goes on is not
// known.
bool Engine::MaySpeculate(const SequenceSpec& spec) const {
  return options_.speculation.num_tokens > 0 && !spec.first_token_only &&
         !spec.only_scores() && spec.beams.width == 0 && spec.kv_cache &&
         spec.attention.rows() == 0;
}

void Engine::PrepareDrafts(Sequence* sequence) {
  const Speculation& speculation = options_.speculation;
  if (!MaySpeculate(sequence->spec)) return;
  sequence->guesses.reserve(static_cast<size_t>(speculation.num_tokens));
  if (draft_model_ != nullptr) {
    sequence->drafted = true;
    sequence->acceptance = DraftAcceptance(usual_acceptance_.chance());
    sequence->try_at = sequence->serial % kTryOneIn == 0
                           ? sequence->length()
                           : std::numeric_limits<int>::max();
  } else if (speculation.drafters != nullptr) {
    sequence->drafter = speculation.drafters->New(sequence->spec);
  } else {
    sequence->drafter = std::make_unique<NgramDrafter>(speculation.lookup_min,
                                                       speculation.lookup_max);
  }
}

void Engine::EndDrafts(Sequence* sequence) {
  if (!std::exchange(sequence->drafted, false)) return;
  draft_model_->Forget(sequence->serial);
}

// Fills wishes_ for the step after those in flight. False if there are none.
bool Engine::PlanWishes() {
  wishes_.clear();
  wishing_.clear();
  chances_.clear();
  lengths_.clear();
  int sequences = 0;
  for (Sequence* const sequence : by_age_) {
    if (!sequence->runnable() || sequence->spec.alone) continue;
    if (sequence->group == nullptr && EndsByLength(*sequence)) continue;
    if (sequences == options_.max_num_seqs) break;  // the others wait
    if (sequence->unplanned() > 1) return false;    // a prompt
    ++sequences;
    // What was guessed and could not be verified yet is still good.
    if (!sequence->drafted || !sequence->guesses.empty()) continue;
    if (sequence->length() >= draft_model_->max_positions()) {
      EndDrafts(sequence);
      continue;
    }
    const int most = MostDrafts(*sequence);
    if (most < 1 || !MayCatchUp(*sequence)) continue;
    wishing_.push_back(sequence);
    chances_.push_back(sequence->acceptance.chance());
    lengths_.push_back(most);
  }
  if (wishing_.empty()) return false;
  int room = std::min(options_.max_num_batched_tokens,
                      std::max(options_.max_num_seqs, options_.max_draws)) -
             sequences;
  if (options_.speculation.adapt &&
      !draft_costs_.Lengths(chances_, sequences, room,
                            absl::MakeSpan(lengths_))) {
    return false;
  }
  size_t kept = 0;
  for (size_t i = 0; i < wishing_.size(); ++i) {
    Sequence* const sequence = wishing_[i];
    if (lengths_[i] == 0 && IsDue(sequence)) {
      lengths_[i] = std::min(kTriedGuesses, MostDrafts(*sequence));
    }
    lengths_[i] = std::min(lengths_[i], room);
    if (lengths_[i] < 1) continue;
    room -= lengths_[i];
    wishing_[kept++] = sequence;  // of the wish at the same place
    wishes_.push_back({.id = sequence->serial,
                       .root = DraftRoot(*sequence),
                       .owner = sequence->spec.cache_owner,
                       .history = &sequence->spec.history,
                       .edits = &*sequence->edits,
                       .sampling = &sequence->spec.sampling,
                       .owed_until = sequence->spec.prompt_tokens +
                                     sequence->spec.stopping.min_tokens,
                       .length = lengths_[i],
                       .guesses = &sequence->guesses});
  }
  return !wishes_.empty();
}

// Where the hashes of its blocks in the draft model's cache start. An adapter
// counts, though it changes nothing there.
const BlockHash* Engine::DraftRoot(const Sequence& sequence) const {
  return options_.prefix_caching && sequence.spec.cache_blocks
             ? &sequence.spec.root
             : nullptr;
}

// Whether its cache is there, or what it lacks is worth the tokens still to
// come.
bool Engine::MayCatchUp(const Sequence& sequence) const {
  const int behind = draft_model_->Behind(sequence.serial, DraftRoot(sequence),
                                          sequence.spec.history);
  if (behind == 0 || !options_.speculation.adapt) return true;
  const int sequences = stats_.running;
  const double plain = draft_costs_.PlainSeconds(sequences);
  double row = draft_model_->row_seconds();
  if (row == 0) {
    row = plain * options_.speculation.draft_model.step_cost / kRowsPerStep;
  }
  const int64_t left = std::min<int64_t>(
      int64_t{sequence.spec.stopping.max_tokens} - sequence.new_tokens(),
      options_.max_model_len - sequence.length());
  const double chance = sequence.acceptance.chance();
  return behind * row <= kCatchUpGain * chance * chance * plain *
                             static_cast<double>(left) / sequences;
}

// Whether it is to be tried though guesses do not seem to pay, because they
// were wrong.
bool Engine::IsDue(Sequence* sequence) {
  if (sequence->length() < sequence->try_at ||
      sequence->acceptance.chance() > kHopeful) {
    return false;
  }
  if (sequence->tries < kMaxTries) return true;
  EndDrafts(sequence);
  return false;
}

// Of a sequence that had guesses of what follows its first `length` tokens.
void Engine::NoteTry(Sequence* sequence, int length) {
  sequence->tries = length >= sequence->try_at ? sequence->tries + 1 : 0;
  sequence->try_at = length + (kTryAfter << sequence->tries);
}

// True: a round runs, behind which the step is composed.
bool Engine::StartDrafting() {
  if (draft_model_ == nullptr || drafted_ || !PlanWishes()) return false;
  // Who finds no room has no guesses.
  size_t kept = 0;
  for (size_t i = 0; i < wishes_.size(); ++i) {
    const DraftWish& wish = wishes_[i];
    if (draft_model_->Reserve(wish)) {
      wishes_[kept++] = wish;
    } else {
      EndDrafts(wishing_[i]);
    }
  }
  wishes_.resize(kept);
  if (wishes_.empty()) return false;
  drafting_ = true;
  const absl::Time start = finishing_ ? step_done_ : loop_->Now();
  draft_model_->Start(wishes_,
                      kCatchUpShare * draft_costs_.PlainSeconds(stats_.running),
                      [this, start] { FinishDrafting(start); });
  return true;
}

void Engine::FinishDrafting(absl::Time start) {
  drafting_ = false;
  drafted_ = true;
  drafting_took_ = loop_->Now() - start;
  caught_up_ = draft_model_->caught_up() > 0;
  StartStep();
}

// Only who is here and may have guesses is known to the draft model.
absl::Status Engine::CheckDrafts() const {
  if (draft_model_ == nullptr) return absl::OkStatus();
  if (draft_model_->running() != drafting_) {
    return absl::InternalError("a round of drafts runs unknown, or is over");
  }
  for (const uint64_t serial : draft_model_->ids()) {
    const bool here =
        std::any_of(by_age_.begin(), by_age_.end(), [&](const Sequence* s) {
          return s->serial == serial && s->drafted && !s->finished;
        });
    if (!here) {
      return absl::InternalError(
          "the draft model knows a sequence that is over");
    }
  }
  return draft_model_->CheckInvariants();
}

}  // namespace tandem::engine
