// SPDX-License-Identifier: Apache-2.0
// What a step gave: first every sequence gets its tokens and scores, of guesses
// those that were right, and finishes where a rule says so; then the listener
// hears of it.

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "engine/engine.h"
#include "engine/sequence.h"

namespace tandem::engine {
namespace {

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

// ---- To the sequences

void Engine::ApplyResult(const StepResult& result) {
  ++stats_.steps;
  size_t drawn = 0;
  for (size_t i = 0; i < running_->parts.size(); ++i) {
    Plan::Part& part = running_->parts[i];
    Sequence* const sequence = part.sequence;
    const StepEntry& entry = running_->step.entries[i];
    const size_t first = drawn;
    drawn += entry.draws.size();
    TANDEM_CHECK(drawn <= result.tokens.size(),
                 "a step drew less tokens than it was asked for");
    part.surplus = sequence->finished || sequence->retired;
    part.lane = sequence->group != nullptr;
    const int own = part.tokens - part.drafts;
    stats_.prefill_tokens += own - (part.draws ? 1 : 0);
    stats_.surplus_tokens += part.draws && part.surplus ? 1 : 0;
    // The KV of a retired sequence is as good as any: others may want it. But
    // it counts only where it follows what is there, and where the token that
    // it is of is known.
    if (!sequence->retired) Count(*sequence, -1);
    if (entry.position == sequence->computed) {
      sequence->computed =
          std::min(sequence->computed + own, sequence->length());
    }
    PublishFullBlocks(sequence);
    part.appended = 0;
    if (part.scores > 0 && !part.surplus) ApplyScores(part);
    if (part.draws && !part.surplus) {
      const auto own_draws = absl::MakeConstSpan(result.tokens)
                                 .subspan(first, entry.draws.size())
                                 .subspan(static_cast<size_t>(part.scores));
      if (sequence->group != nullptr) {
        TakeCandidates(sequence, own_draws[0].top);
        ++stats_.decode_tokens;
      } else if (!sequence->fails()) {
        AppendDrawn(&part, own_draws);
        if (!sequence->spec.kv_cache && !sequence->finished) {
          sequence->computed = 0;
        }
      }
    }
    FreeBehindWindow(sequence);
    if (!sequence->retired) Count(*sequence, 1);
  }
  TANDEM_CHECK(drawn == result.tokens.size(),
               "a step drew more tokens than it was asked for");
}

void Engine::ApplyScores(const Plan::Part& part) {
  Sequence& sequence = *part.sequence;
  sequence.spec.scoring.position += part.scores;
  if (!sequence.spec.only_scores() || sequence.uncomputed() > 0) return;
  sequence.finished = true;
  sequence.finish = Finish::kLength;
}

// The first draw, and each whose row was fed with the draw before it.
void Engine::AppendDrawn(Plan::Part* part,
                         absl::Span<const SampledToken> drawn) {
  Sequence* const sequence = part->sequence;
  const std::vector<int32_t>& guesses = sequence->guesses;
  AppendToken(sequence, drawn[0].token_id);
  part->appended = 1;
  for (int i = 0; i < part->drafts && !sequence->finished; ++i) {
    if (sequence->fails()) break;
    const auto at = static_cast<size_t>(i);
    if (guesses[at] != drawn[at].token_id) break;
    if (sequence->constraint != nullptr &&
        i >= sequence->constraint->guessed()) {
      break;
    }
    ++sequence->computed;  // the guess's row
    PublishFullBlocks(sequence);
    AppendToken(sequence, drawn[at + 1].token_id);
    ++part->appended;
  }
  stats_.decode_tokens += part->appended;
  // Guesses teach as far as what they follow came true.
  const int taught = std::min(part->appended, static_cast<int>(guesses.size()));
  for (int i = 0; i < taught; ++i) {
    const bool right = guesses[static_cast<size_t>(i)] ==
                       drawn[static_cast<size_t>(i)].token_id;
    sequence->acceptance.Saw(right);
    usual_acceptance_.Saw(right);
  }
  if (taught > 0 && sequence->drafted) {
    NoteTry(sequence, sequence->length() - part->appended);
  }
  if (sequence->finished) EndDrafts(sequence);
  sequence->guesses.clear();
  if (part->drafts == 0) return;
  ++stats_.draft_steps;
  for (DraftCounts* counts : {&stats_.drafts, &sequence->drafts}) {
    counts->verified += part->drafts;
    counts->accepted += part->appended - 1;
  }
  ReturnSpareBlocks(sequence);
}

void Engine::AppendToken(Sequence* sequence, int32_t token) {
  const Stopping& stopping = sequence->spec.stopping;
  // Before min_tokens they were banned, so that none can stand here.
  const bool may_stop = sequence->new_tokens() >= stopping.min_tokens;
  sequence->spec.history.push_back(token);
  sequence->edits->Append(token);
  sequence->finish.reset();
  const bool whole =
      sequence->constraint != nullptr && sequence->constraint->Append(token);
  const bool stopped = may_stop && Contains(stopping.stop_token_ids, token);
  // A sequence of which only this is drawn goes on elsewhere, where there may
  // be more room.
  const bool full = sequence->new_tokens() >= stopping.max_tokens ||
                    (!sequence->spec.first_token_only &&
                     sequence->length() >= options_.max_model_len);
  if (sequence->spec.beams.width > 0) {
    // Candidates; what becomes of them is decided elsewhere.
  } else if (full && !stopped) {
    // Before a whole text: who holds the tokens alone can tell it as well.
    sequence->finish = Finish::kLength;
  } else if (stopped || whole) {
    sequence->finish = Finish::kStop;
  }
  sequence->finished =
      sequence->finish.has_value() || sequence->spec.first_token_only;
}

// ---- To the listener

void Engine::DeliverTokens(const StepResult& result) {
  size_t drawn = 0;
  const int64_t weight_bytes = options_.work.StepWeightBytes(
      running_->rows, static_cast<int64_t>(result.tokens.size()));
  for (size_t i = 0; i < running_->parts.size(); ++i) {
    const size_t first = drawn;
    drawn += running_->step.entries[i].draws.size();
    const Plan::Part& part = running_->parts[i];
    const Sequence& sequence = *part.sequence;
    // A lane that goes no further has worked for its search all the same.
    const bool here =
        part.lane ? beams_.contains(sequence.id) : !sequence.retired;
    if (here && !part.surplus) {
      listener_->OnWork(sequence.id, WorkOfPart(i, weight_bytes));
    }
    // The listener may retire it at any time.
    const auto scores = static_cast<size_t>(part.scores);
    if (scores > 0 && !part.surplus && !sequence.retired) {
      DeliverScores(i,
                    absl::MakeConstSpan(result.tokens).subspan(first, scores));
    }
    for (int j = 0; j < part.appended && !sequence.retired; ++j) {
      const int behind = part.appended - 1 - j;
      listener_->OnToken(sequence.id, sequence.length() - 1 - behind,
                         result.tokens[first + scores + static_cast<size_t>(j)],
                         behind == 0 ? sequence.finish : std::nullopt);
    }
  }
}

// Of the step just done, which read so many bytes of weights.
Work Engine::WorkOfPart(size_t index, int64_t weight_bytes) const {
  const StepEntry& entry = running_->step.entries[index];
  Work work = options_.work.EntryWork(entry.position,
                                      static_cast<int64_t>(entry.tokens.size()),
                                      static_cast<int64_t>(entry.draws.size()));
  // The first ones have what division leaves.
  const auto count = static_cast<int64_t>(running_->parts.size());
  work.weight_bytes =
      weight_bytes / count +
      (static_cast<int64_t>(index) < weight_bytes % count ? 1 : 0);
  return work;
}

void Engine::DeliverScores(size_t index,
                           absl::Span<const SampledToken> scores) {
  const Sequence& sequence = *running_->parts[index].sequence;
  const StepEntry& entry = running_->step.entries[index];
  // The first row that scores is that before the position it scores.
  const auto before = entry.tokens.size() - entry.draws.size();
  listener_->OnScores(
      sequence.id, entry.position + static_cast<int>(before) + 1, scores,
      sequence.spec.only_scores() ? sequence.finish : std::nullopt);
}

void Engine::DropFailed() {
  for (size_t i = 0; i < running_->parts.size(); ++i) {
    // Of others a step ahead may be making masks right now.
    if (!running_->parts[i].draws) continue;
    Sequence* const sequence = running_->parts[i].sequence;
    if (sequence->retired || !sequence->fails()) continue;
    const SequenceId id = sequence->id;
    const absl::Status status = sequence->constraint->status();
    Remove(sequence);
    listener_->OnStepFailed({id}, status);
  }
}

}  // namespace tandem::engine
