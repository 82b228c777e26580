// SPDX-License-Identifier: Apache-2.0
// The engine as a whole: which options it can run with, the end of each step,
// after which the next one begins, and what must always hold. How sequences
// come and go is in sequences.cc, what a step holds in scheduler.cc, what it
// gave in step_results.cc.

#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/failpoint.h"
#include "engine/sequence.h"

namespace tandem::engine {
namespace {

constexpr double kSmoothing = 0.1;  // weight of the newest step
// A step that something held up, as a process that stood still, counts as one
// so many times as slow as those before: who sees a rate a hundred times too
// low gives no work that would show it to be wrong.
constexpr double kSlowestStep = 4;

void Smooth(double sample, double* average) {
  *average = *average == 0 ? sample
                           : (1 - kSmoothing) * *average + kSmoothing * sample;
}

}  // namespace

absl::Status Engine::Validate(const EngineOptions& options,
                              const KvPool& pool) {
  const auto refuse = [](const char* what, int value, const char* expected) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is ", value, ", expected ", expected));
  };
  if (options.max_num_seqs < 1) {
    return refuse("max_num_seqs", options.max_num_seqs, "at least 1");
  }
  if (options.max_num_batched_tokens < 1) {
    return refuse("max_num_batched_tokens", options.max_num_batched_tokens,
                  "at least 1");
  }
  if (options.max_model_len < 2) {
    return refuse("max_model_len", options.max_model_len, "at least 2");
  }
  const Speculation& speculation = options.speculation;
  if (speculation.num_tokens < 0) {
    return refuse("num_speculative_tokens", speculation.num_tokens,
                  "at least 0");
  }
  if (speculation.lookup_min < 1) {
    return refuse("prompt_lookup_min", speculation.lookup_min, "at least 1");
  }
  if (speculation.lookup_max < speculation.lookup_min) {
    return refuse("prompt_lookup_max", speculation.lookup_max,
                  "at least prompt_lookup_min");
  }
  if (options.window.positions < 0) {
    return refuse("window", options.window.positions, "at least 0");
  }
  if (options.window.frees_parts() &&
      options.window.parts != pool.cells().parts()) {
    return absl::InvalidArgumentError(
        "window: its parts of a block are not the pool's");
  }
  const int needed =
      BlocksAtOnce(options, pool.block_size(), options.max_model_len);
  if (needed > pool.num_blocks()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_model_len is ", options.max_model_len, ", which takes ", needed,
        " KV blocks of ", pool.block_size(), ", but the pool has ",
        pool.num_blocks(), ": lower max_model_len or give KV more memory"));
  }
  return absl::OkStatus();
}

Engine::Engine(const EngineOptions& options, Loop* loop, Executor* executor,
               KvPool* pool, EngineListener* listener)
    : options_(options),
      loop_(loop),
      executor_(executor),
      pool_(pool),
      listener_(listener),
      draft_costs_(options.speculation.draft_model.executor == nullptr
                       ? 0
                       : options.speculation.draft_model.step_cost),
      writers_(static_cast<size_t>(pool->cells().num_blocks()), 0),
      plan_timer_(loop),
      beams_timer_(loop) {
  TANDEM_CHECK(Validate(options, *pool).ok(), "see Engine::Validate");
  if (options.speculation.num_tokens > 0 &&
      options.speculation.draft_model.executor != nullptr) {
    draft_model_ =
        std::make_unique<DraftModel>(options.speculation.draft_model, loop);
  }
  const size_t sequences = static_cast<size_t>(options.max_num_seqs);
  const size_t draws =
      static_cast<size_t>(std::max(options.max_num_seqs, options.max_draws));
  for (Plan& plan : plans_) {
    plan.parts.reserve(sequences);
    plan.draws.reserve(draws);
    // Each guess has a draw, and each sequence one more.
    if (options.speculation.num_tokens > 0) plan.tokens.reserve(draws);
    plan.step.entries.reserve(sequences);
  }
}

Engine::~Engine() {
  pool_->WakeWhenAvailable(nullptr);
  for (Sequence* sequence : by_age_) Release(sequence);
  for (const auto& sequence : leaving_) Release(sequence.get());
}

// ---- A step ends

void Engine::OnLayersDone(uint64_t step_id, int layers_done) {
  TANDEM_CHECK(running_ != nullptr && running_->step.id == step_id,
               "layers of a step that is not in flight");
  ++progress_;
  // By value: the listener may retire the sequence, but parts stay.
  for (const Plan::Part part : running_->parts) {
    const Sequence& sequence = *part.sequence;
    if (sequence.retired || sequence.group != nullptr) continue;
    listener_->OnComputed(sequence.id, sequence.computed,
                          sequence.computed + part.tokens - part.drafts,
                          layers_done);
  }
}

void Engine::OnStepDone(uint64_t step_id, absl::StatusOr<StepResult> result) {
  TANDEM_CHECK(running_ != nullptr && running_->step.id == step_id,
               "the end of a step that is not in flight");
  switch (TANDEM_FAILPOINT("engine.step", "crash fail stall drop")) {
    case failpoint::kFail:
      result = failpoint::Error(absl::StatusCode::kInternal);
      break;
    case failpoint::kDrop:
      return;  // a step that never ends
    default:
      break;
  }
  ++progress_;
  step_done_ = loop_->Now();
  finishing_ = true;
  if (result.ok()) {
    // First all sequences, then the listener: whatever it asks or changes, it
    // meets the state after the step.
    RecordStepTime(loop_->Now() - stats_.step_started + running_->drafting);
    ApplyResult(*result);
    AdvanceBeams();
    DeliverTokens(*result);
    DropFailed();
    FinishStep();
  } else {
    FailStep(result.status());
  }
  StartStep();
  finishing_ = false;
}

void Engine::RecordStepTime(absl::Duration duration) {
  double seconds = absl::ToDoubleSeconds(duration);
  if (seconds <= 0) return;
  Smooth(seconds, &stats_.step_seconds);
  int rows = 0;
  bool prefill = false;
  for (size_t i = 0; i < running_->parts.size(); ++i) {
    const Plan::Part& part = running_->parts[i];
    const int tokens = part.tokens - part.drafts;
    rows += part.tokens;
    prefill |= tokens > 1 || !part.draws;
  }
  if (!prefill) {
    const int drafts = running_->drafts;
    absl::Duration took = step_done_ - running_->follows;
    // Guesses cost what making them took; catching up for them says nothing.
    if (drafts > 0 && running_->caught_up) return;
    if (drafts > 0) took += running_->drafting;
    draft_costs_.Saw(static_cast<int>(running_->parts.size()), drafts,
                     absl::ToDoubleSeconds(took));
    return;
  }
  if (prefill_rows_ > 0) {
    const double share = std::max(1.0, rows / prefill_rows_);
    seconds = std::min(seconds, kSlowestStep * share * prefill_seconds_);
  }
  Smooth(rows, &prefill_rows_);
  Smooth(seconds, &prefill_seconds_);
  stats_.tokens_per_second = prefill_rows_ / prefill_seconds_;
}

void Engine::FailStep(const absl::Status& status) {
  std::vector<SequenceId> failed;
  for (const Plan::Part& part : running_->parts) {
    if (part.sequence->retired) continue;
    failed.push_back(part.sequence->id);
    if (part.sequence->group != nullptr) {
      RetireBeams(part.sequence->id);
    } else {
      Remove(part.sequence);
    }
  }
  // Their blocks come back before the listener hears of it.
  FinishStep();
  listener_->OnStepFailed(failed, status);
}

void Engine::FinishStep() {
  for (size_t i = 0; i < running_->parts.size(); ++i) {
    Sequence* const sequence = running_->parts[i].sequence;
    sequence->in_flight -= running_->parts[i].tokens;
    if (sequence->in_flight == 0) sequence->copied = BlockRef();
    if (running_->parts[i].draws) --sequence->drawing;
  }
  running_ = std::exchange(ahead_, nullptr);
  if (running_ != nullptr) running_->follows = step_done_;
  stats_.step_in_flight = running_ != nullptr;
  stats_.step_started = loop_->Now();
  const size_t left = std::erase_if(leaving_, [this](const auto& sequence) {
    if (sequence->in_flight > 0) return false;
    Release(sequence.get());
    return true;
  });
  const bool returned = std::exchange(blocks_returned_, false);
  if (left > 0 || returned) listener_->OnBlocksFreed();
}

// ---- Invariants

absl::Status Engine::CheckInvariants() const {
  EngineStats recount;
  const Sequence* before = nullptr;
  for (const Sequence* const sequence : by_age_) {
    const absl::Status status = CheckSequence(*sequence, before);
    if (!status.ok()) return status;
    if (sequence->runnable()) {
      ++recount.running;
      recount.pending_tokens += sequence->uncomputed();
    }
    recount.paused += !sequence->finished && sequence->paused;
    before = sequence;
  }
  size_t lanes = 0;
  for (const auto& [id, group] : beams_) lanes += group->lanes.size();
  if (by_age_.size() != sequences_.size() + lanes ||
      recount.running != stats_.running || recount.paused != stats_.paused ||
      recount.pending_tokens != stats_.pending_tokens) {
    return absl::InternalError("the stats differ from a recount");
  }
  if (running_ == nullptr && !leaving_.empty()) {
    return absl::InternalError("sequences are leaving, but no step runs");
  }
  const absl::Status drafts = CheckDrafts();
  return drafts.ok() ? CheckGroups() : drafts;
}

absl::Status Engine::CheckSequence(const Sequence& sequence,
                                   const Sequence* before) const {
  const auto broken = [&](const char* what) {
    return absl::InternalError(
        absl::StrCat("sequence ", sequence.id, ": ", what));
  };
  if (before != nullptr && !before->older_than(sequence)) {
    return broken("stands before an older one");
  }
  if (sequence.retired) return broken("is retired and still listed");
  if (sequence.table.size() != sequence.blocks.size()) {
    return broken("its block table differs from its references");
  }
  if (static_cast<int>(sequence.behind) > FirstWhole(sequence.computed)) {
    return broken("has let go of what its next position sees");
  }
  for (size_t b = 0; b < sequence.blocks.size(); ++b) {
    const BlockRef& block = sequence.blocks[b];
    const bool behind = b < sequence.behind;
    if (block.whole() == behind ||
        static_cast<bool>(block) ==
            (behind && options_.window.frees_blocks())) {
      return broken("has blocks behind its window, or none before it");
    }
    if (sequence.blocks[b].id() != sequence.table[b]) {
      return broken("its block table differs from its references");
    }
  }
  if (BlocksFor(sequence.computed) >
      static_cast<int>(sequence.blocks.size()) + (sequence.copied ? 1 : 0)) {
    return broken("has computed positions without blocks");
  }
  if (running_ == nullptr && (sequence.in_flight | sequence.drawing) != 0) {
    return broken("waits for a step, but none runs");
  }
  if (sequence.uncomputed() < (sequence.finished || sequence.waits ? 0 : 1)) {
    return broken("has nothing to compute");
  }
  return absl::OkStatus();
}

}  // namespace tandem::engine
