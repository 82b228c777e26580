// SPDX-License-Identifier: Apache-2.0
// What the next step holds. In order of age: first the sequences that compute
// one position (decodes), then chunks of the others, within the step's limits
// of sequences and rows. The oldest of the others has a place kept once it is
// among as many sequences as a step has places for: neither a stream of younger
// decodes starves it, nor do prompts wait for each other's whole outputs.
// Suspects (`alone`) and all others take turns.
//
// Blocks are taken when a step needs them. Where not even one row fits, the
// pool has evicted all it could already; then the owner may give some back,
// then paused sequences lose theirs, then the youngest. The oldest runnable
// one is never preempted: it waits until others (handoffs, gathers) let go.
//
// Running ahead: where all are decodes, the next step is submitted while one
// runs, and is fed with the tokens that this one draws. Which sequences end by
// length is known before; one that meets a stop token takes part in a step too
// many, of which nothing is heard. Whatever needs a decision (a prompt, a
// suspect, a block that is not there, rules that depend on the token drawn)
// waits until no step is in flight.
//
// A prompt that is scored needs logits of all its rows, of which a step has
// only so many: its chunk is cut so that every other sequence may draw a token.
//
// Where guesses come from, and how many, is decided in speculation.cc.

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "engine/engine.h"
#include "engine/sequence.h"

namespace tandem::engine {
namespace {

// Stands for the token that a step is fed with.
constexpr int32_t kUnknownToken[] = {0};

// Of rows [begin, end), those that score the token behind them.
int ScoredRows(const SequenceSpec& spec, int begin, int end) {
  if (!spec.scoring.wanted()) return 0;
  const int first = std::max(begin, spec.scoring.position - 1);
  return std::max(0, std::min(end, spec.prompt_tokens - 1) - first);
}

}  // namespace

bool Engine::has_work() const {
  return std::any_of(by_age_.begin(), by_age_.end(), [](const Sequence* s) {
    return s->runnable() && s->ready();
  });
}

void Engine::SchedulePlan() {
  if (planning_ || drafting_ || plan_timer_.running()) return;
  if (running_ != nullptr && (!options_.run_ahead || ahead_ != nullptr)) return;
  if (stats_.running == 0) return;
  plan_timer_.Start(absl::ZeroDuration(), [this] { StartStep(); });
}

void Engine::StartStep() {
  // A callback of the step just done may have scheduled a planning.
  if (planning_ || drafting_) return;
  if (running_ != nullptr && (!options_.run_ahead || ahead_ != nullptr)) return;
  plan_timer_.Stop();
  Plan* const plan = &plans_[last_step_id_ % 2];
  if (running_ != nullptr) {
    if (ComposeAhead(plan)) Launch(plan);
    return;
  }
  if (StartDrafting()) return;  // and comes back
  planning_ = true;
  may_ask_ = true;
  const uint64_t before = changes_;
  const bool composed = ComposeAny(plan);
  planning_ = false;
  if (composed) {
    pool_->WakeWhenAvailable(nullptr);
    Launch(plan);
    SchedulePlan();  // what runs ahead
  } else if (changes_ != before) {
    SchedulePlan();  // sequences came or went while this was planned
  } else if (stats_.running > 0) {
    // All blocks are with others: the next one that they free goes on.
    pool_->WakeWhenAvailable([this] { SchedulePlan(); });
  }
  DeliverPreempted();
}

void Engine::Launch(Plan* plan) {
  FillEntries(plan);
  plan->step.id = ++last_step_id_;
  plan->follows = finishing_ ? step_done_ : loop_->Now();
  plan->drafting = std::exchange(drafting_took_, absl::ZeroDuration());
  plan->caught_up = std::exchange(caught_up_, false);
  drafted_ = false;
  if (running_ != nullptr) {
    ahead_ = plan;
  } else {
    running_ = plan;
    stats_.step_in_flight = true;
    stats_.step_started = loop_->Now();
  }
  executor_->Submit(&plan->step, this);
}

// The step after the running one, if nothing has to be decided for it.
bool Engine::ComposeAhead(Plan* plan) {
  plan->parts.clear();
  plan->rows = 0;
  plan->drafts = 0;
  // Guesses are made between steps.
  if (draft_model_ != nullptr && PlanWishes()) return false;
  const int most =
      std::min(options_.max_num_seqs, options_.max_num_batched_tokens);
  for (Sequence* sequence : by_age_) {
    if (!sequence->runnable() || !sequence->ready()) continue;
    // Which lanes go on is not known.
    if (sequence->group != nullptr && sequence->drawing > 0) return false;
    if (EndsByLength(*sequence)) continue;
    // Less than one where guesses are in flight.
    if (sequence->unplanned() != 1 || sequence->spec.alone ||
        !sequence->spec.kv_cache) {
      return false;
    }
    if (sequence->drawing > 0 && sequence->needs_history()) {
      return false;
    }
    if (MayDraft(sequence)) return false;
    if (plan->rows == most) continue;
    const int next = sequence->next_position();
    const bool fits =
        next < pool_->block_size() * static_cast<int>(sequence->blocks.size());
    if (!fits && pool_->available() == 0) return false;
    TANDEM_CHECK(TryPart(sequence, 1, plan) == Room::kFound,
                 "a block is available");
  }
  return plan->rows > 0;
}

// When the steps in flight are done, whatever they draw.
bool Engine::EndsByLength(const Sequence& sequence) const {
  if (sequence.spec.only_scores()) return sequence.unplanned() == 0;
  if (sequence.drawing == 0) return false;
  return sequence.spec.first_token_only ||
         sequence.new_tokens() + sequence.drawing >=
             sequence.spec.stopping.max_tokens ||
         sequence.next_length() >= options_.max_model_len;
}

// The other kind than last time goes first.
bool Engine::ComposeAny(Plan* plan) {
  const Kind first = last_kind_ == Kind::kShared ? Kind::kAlone : Kind::kShared;
  const Kind second = first == Kind::kShared ? Kind::kAlone : Kind::kShared;
  for (const Kind kind : {first, second}) {
    while (Compose(kind, plan) == Room::kReplan) {
    }
    if (plan->parts.empty()) continue;
    last_kind_ = kind;
    AddDrafts(plan);
    return true;
  }
  return false;
}

Engine::Room Engine::Compose(Kind kind, Plan* plan) {
  plan->parts.clear();
  plan->rows = 0;
  plan->drafts = 0;
  candidates_.clear();
  const bool alone = kind == Kind::kAlone;
  const int most =
      std::min(options_.max_num_seqs, options_.max_num_batched_tokens);
  Sequence* oldest = nullptr;
  Sequence* chunk = nullptr;  // whose turn has come, the oldest such
  for (const bool decodes : {true, false}) {
    int older = 0;
    for (Sequence* sequence : by_age_) {
      if (!sequence->runnable() || !sequence->ready() ||
          sequence->spec.alone != alone) {
        continue;
      }
      if (oldest == nullptr) oldest = sequence;
      const bool is_decode = sequence->uncomputed() == 1;
      if (is_decode == decodes) candidates_.push_back(sequence);
      if (!is_decode && chunk == nullptr && older < most) chunk = sequence;
      ++older;
    }
  }
  if (oldest == nullptr) return Room::kNone;
  if (alone) return TryPart(oldest, options_.max_num_batched_tokens, plan);

  // A row and a place for the chunk until its turn comes.
  int kept = chunk != nullptr ? 1 : 0;
  for (Sequence* sequence : candidates_) {
    if (sequence->retired) continue;  // preempted for one before it
    if (sequence == chunk) kept = 0;
    const int rows = options_.max_num_batched_tokens - kept - plan->rows;
    const int places =
        options_.max_num_seqs - kept - static_cast<int>(plan->parts.size());
    if (rows < 1 || places < 1) continue;
    if (TryPart(sequence, rows, plan) == Room::kReplan) return Room::kReplan;
  }
  return Room::kFound;
}

Engine::Room Engine::TryPart(Sequence* sequence, int max_tokens, Plan* plan) {
  const int64_t size = pool_->block_size();
  const int begin = sequence->next_position();
  int wanted = std::min(max_tokens, sequence->unplanned());
  if (const Scoring& scoring = sequence->spec.scoring;
      scoring.wanted() && scoring.position < sequence->spec.prompt_tokens) {
    const int unscored = std::max(0, scoring.position - 1 - begin);
    wanted = std::min(wanted, unscored + ScoreRoom(*plan));
  }
  const auto fitting = [&] {
    const int64_t blocks =
        static_cast<int64_t>(sequence->blocks.size()) + pool_->available();
    return std::min<int64_t>(wanted, blocks * size - begin);
  };
  const auto blocks_for = [&](int64_t tokens) {
    return static_cast<int>((begin + tokens + size - 1) / size) -
           static_cast<int>(sequence->blocks.size());
  };
  if (fitting() < 1) {
    const Room room = MakeRoom(sequence, blocks_for(wanted), plan);
    if (room != Room::kFound) return room;
  }
  const int tokens = static_cast<int>(fitting());
  TakeBlocks(sequence, blocks_for(tokens));
  plan->parts.push_back({sequence, tokens});
  plan->parts.back().scores = ScoredRows(sequence->spec, begin, begin + tokens);
  plan->rows += tokens;
  return Room::kFound;
}

// Rows that one more sequence may have logits of, the last one's included,
// when every sequence in the step, and that may still come, draws a token.
int Engine::ScoreRoom(const Plan& plan) const {
  const int sequences =
      std::min(options_.max_num_seqs, static_cast<int>(candidates_.size()));
  int room = std::max(options_.max_num_seqs, options_.max_draws) -
             std::max(sequences, 1) + 1;
  for (const Plan::Part& part : plan.parts) room -= part.scores;
  return std::max(room, 1);
}

// REQUIRES: they are available.
void Engine::TakeBlocks(Sequence* sequence, int count) {
  if (count <= 0) return;
  TANDEM_CHECK(pool_->AllocateInto(count, &sequence->blocks),
               "a chunk is cut to what is available");
  for (size_t i = sequence->table.size(); i < sequence->blocks.size(); ++i) {
    sequence->table.push_back(sequence->blocks[i].id());
    writers_[sequence->table[i]] = sequence->serial;
  }
}

// Until one block is available. REQUIRES: none is.
Engine::Room Engine::MakeRoom(Sequence* sequence, int missing, Plan* plan) {
  while (pool_->available() == 0) {
    if (may_ask_) {
      const uint64_t before = changes_;
      const bool freed = listener_->OnBlocksShort(missing);
      may_ask_ = freed && pool_->available() > 0;
      if (changes_ != before) return Room::kReplan;
      continue;
    }
    Sequence* const victim = PickVictim(*sequence);
    if (victim == nullptr) return Room::kNone;
    Preempt(victim, plan);
    if (sequence->retired) return Room::kNone;
  }
  return Room::kFound;
}

// Whether there is anything to gain. A fork may have no block of its own and
// keep its parent's alive, which waits for it.
bool Engine::HoldsBlocks(const Sequence& sequence) {
  if (sequence.group == nullptr) return !sequence.blocks.empty();
  const auto& lanes = sequence.group->lanes;
  return std::any_of(lanes.begin(), lanes.end(), [](const auto& lane) {
    return !lane->blocks.empty() || lane->copied;
  });
}

// Whose blocks `requester` may have: nobody's who is older, unless paused.
// May be the requester itself.
Engine::Sequence* Engine::PickVictim(const Sequence& requester) const {
  for (size_t i = by_age_.size(); i-- > 0;) {
    Sequence* const sequence = by_age_[i];
    if (sequence->paused && !sequence->finished && !sequence->blocks.empty()) {
      return sequence;
    }
  }
  const auto oldest =
      std::find_if(by_age_.begin(), by_age_.end(),
                   [](const Sequence* s) { return s->runnable(); });
  for (size_t i = by_age_.size(); i-- > 0;) {
    Sequence* const sequence = by_age_[i];
    if (!sequence->runnable() || !HoldsBlocks(*sequence)) continue;
    const bool of_oldest =
        sequence == *oldest ||
        (sequence->group != nullptr && sequence->group == (*oldest)->group);
    if (of_oldest || sequence->older_than(requester)) return nullptr;
    return sequence;
  }
  return nullptr;
}

// With all other lanes, if it is one. What is left of them stays until it is
// reported: the plan being made may still look at it.
void Engine::Preempt(Sequence* victim, Plan* plan) {
  std::vector<Sequence*> victims = {victim};
  if (BeamGroup* const group = victim->group) {
    victims.clear();
    for (const auto& lane : group->lanes) victims.push_back(lane.get());
  }
  ++stats_.preemptions;
  for (Sequence* const lost : victims) {
    const auto part = std::find_if(
        plan->parts.begin(), plan->parts.end(),
        [lost](const Plan::Part& p) { return p.sequence == lost; });
    if (part != plan->parts.end()) {
      plan->rows -= part->tokens;
      plan->parts.erase(part);
    }
    preempted_.push_back(Detach(lost));
    Release(lost);
  }
  beams_.erase(victims.front()->id);
}

void Engine::DeliverPreempted() {
  while (!preempted_.empty()) {
    const SequenceId id = preempted_.front()->id;
    std::erase_if(preempted_,
                  [id](const auto& lost) { return lost->id == id; });
    listener_->OnPreempted(id);
  }
}

// The last known token and the guesses behind it.
absl::Span<const int32_t> Engine::TokensWithDrafts(const Plan::Part& part,
                                                   Plan* plan) {
  const Sequence& sequence = *part.sequence;
  const size_t first = plan->tokens.size();
  plan->tokens.push_back(sequence.spec.history.back());
  plan->tokens.insert(plan->tokens.end(), sequence.guesses.begin(),
                      sequence.guesses.begin() + part.drafts);
  return absl::MakeConstSpan(plan->tokens).subspan(first);
}

void Engine::FillEntries(Plan* plan) {
  plan->step.entries.resize(plan->parts.size());
  plan->step.copies.clear();
  plan->tokens.clear();
  const int size = pool_->block_size();
  for (size_t i = 0; i < plan->parts.size(); ++i) {
    Sequence* const sequence = plan->parts[i].sequence;
    const int tokens = plan->parts[i].tokens;
    const int begin = sequence->next_position();
    const int end = begin + tokens;
    const size_t blocks = static_cast<size_t>((end + size - 1) / size);
    for (size_t b = static_cast<size_t>(begin / size); b < blocks; ++b) {
      TANDEM_CHECK(writers_[sequence->table[b]] == sequence->serial &&
                       !pool_->published(sequence->blocks[b]),
                   "a step would write into a block of others");
    }
    if (sequence->copied) {
      plan->step.copies.push_back(
          {sequence->copied.id(),
           sequence->table[static_cast<size_t>(begin / size)]});
    }
    StepEntry& entry = plan->step.entries[i];
    entry.sequence = sequence->id;
    entry.position = begin;
    if (plan->parts[i].drafts > 0) {
      entry.fed = -1;
      entry.tokens = TokensWithDrafts(plan->parts[i], plan);
    } else if (begin < sequence->length()) {
      entry.fed = -1;
      entry.tokens =
          absl::MakeConstSpan(sequence->spec.history)
              .subspan(static_cast<size_t>(begin), static_cast<size_t>(tokens));
    } else {
      entry.fed = sequence->last_draw;
      entry.tokens = kUnknownToken;
    }
    entry.block_table = absl::MakeConstSpan(sequence->table).subspan(0, blocks);
    entry.sampling = sequence->spec.sampling;
    entry.adapter = sequence->spec.adapter;
    sequence->in_flight += tokens;
  }
  FillDraws(plan);
}

// What is drawn, and what for: those in flight count as drawn.
void Engine::FillDraws(Plan* plan) {
  plan->edits.clear();
  plan->draws.clear();
  for (size_t i = 0; i < plan->parts.size(); ++i) {
    Plan::Part& part = plan->parts[i];
    Sequence* const sequence = part.sequence;
    StepEntry& entry = plan->step.entries[i];
    const size_t first = plan->draws.size();
    entry.attention = nullptr;
    entry.only_edited = sequence->edits->only_edited();
    entry.constraint = nullptr;
    AddScores(part, entry, plan);
    part.draws = sequence->unplanned() <= 0 && !sequence->spec.only_scores();
    if (part.draws) {
      sequence->last_draw = static_cast<int>(plan->draws.size());
      DrawAfter(part, plan);
      entry.constraint = sequence->constraint.get();
      if (sequence->spec.attention.rows() > 0) {
        entry.attention = &sequence->spec.attention;
      }
      ++sequence->drawing;
    }
    entry.draws = absl::MakeConstSpan(plan->draws).subspan(first);
  }
  // The plan's copies now, whose place is known only when all are there.
  size_t first_edit = 0;
  for (RowDraw& draw : plan->draws) {
    draw.edits =
        absl::MakeConstSpan(plan->edits).subspan(first_edit, draw.edits.size());
    first_edit += draw.edits.size();
  }
  size_t first_draw = 0;
  for (StepEntry& entry : plan->step.entries) {
    entry.draws = absl::MakeConstSpan(plan->draws)
                      .subspan(first_draw, entry.draws.size());
    first_draw += entry.draws.size();
  }
}

// The tokens behind its rows that score, which are its last ones but for the
// one that draws.
void Engine::AddScores(const Plan::Part& part, const StepEntry& entry,
                       Plan* plan) {
  if (part.scores == 0) return;
  const SequenceSpec& spec = part.sequence->spec;
  const int first = std::max(entry.position + 1, spec.scoring.position);
  const auto given = absl::MakeConstSpan(spec.history)
                         .subspan(static_cast<size_t>(first),
                                  static_cast<size_t>(part.scores));
  for (const int32_t token : given) {
    plan->draws.push_back(
        {.given = token, .given_logprobs = spec.scoring.alternatives});
  }
}

// What is drawn behind the known tokens, and behind each guess as if it were
// one.
void Engine::DrawAfter(const Plan::Part& part, Plan* plan) {
  Sequence& sequence = *part.sequence;
  std::vector<int32_t>& history = sequence.spec.history;
  const size_t length = history.size();
  for (int i = 0; i <= part.drafts; ++i) {
    const absl::Span<const kernels::LogitEdit> edits =
        sequence.edits->Next(history, sequence.new_tokens() + sequence.drawing <
                                          sequence.spec.stopping.min_tokens);
    plan->edits.insert(plan->edits.end(), edits.begin(), edits.end());
    plan->draws.push_back(
        {.edits = edits, .constrained = sequence.constraint != nullptr});
    if (i == part.drafts) break;
    const int32_t guess = sequence.guesses[static_cast<size_t>(i)];
    history.push_back(guess);  // within what Add reserved
    sequence.edits->Guess(guess);
  }
  history.resize(length);
  sequence.edits->TakeBackGuesses();
}

}  // namespace tandem::engine
