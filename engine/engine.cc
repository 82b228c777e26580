// SPDX-License-Identifier: Apache-2.0
// What becomes of sequences: they are added, get their tokens, finish, fail
// and are retired. What a step holds is decided in scheduler.cc.

#include "engine/engine.h"

#include <algorithm>
#include <limits>
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

int CeilDiv(int64_t value, int64_t by) {
  return static_cast<int>((value + by - 1) / by);
}

bool Contains(const std::vector<int32_t>& ids, int32_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
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
  if (options.window < 0) {
    return refuse("window", options.window, "at least 0");
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
      writers_(static_cast<size_t>(pool->num_blocks()), 0),
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

// ---- Coming and going

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

absl::Status Engine::CheckSpec(const SequenceSpec& spec,
                               absl::Span<const BlockRef> blocks,
                               int computed) const {
  const int64_t length = static_cast<int64_t>(spec.history.size());
  const auto refuse = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  if (length == 0) return refuse("history is empty, expected a token");
  // The last token of what is only scored is looked at, and not computed.
  if (length >= options_.max_model_len + (spec.only_scores() ? 1 : 0)) {
    return refuse("history has ", length, " tokens, expected less than ",
                  "max_model_len, ", options_.max_model_len);
  }
  if (spec.prompt_tokens < 0 || spec.prompt_tokens > length) {
    return refuse("prompt_tokens is ", spec.prompt_tokens,
                  ", expected 0 to the history's ", length);
  }
  if (spec.scoring.wanted()) {
    const absl::Status scoring = CheckScoring(spec, computed);
    if (!scoring.ok()) return scoring;
  }
  if (!spec.only_scores() &&
      spec.stopping.max_tokens <= length - spec.prompt_tokens) {
    return refuse("max_tokens is ", spec.stopping.max_tokens,
                  ", expected more than the ", length - spec.prompt_tokens,
                  " that the history has behind its prompt");
  }
  const int64_t uncomputed = spec.first_candidates.empty() ? 1 : 0;
  if (computed < 0 || computed > length - uncomputed ||
      (uncomputed == 0 && computed != length)) {
    return refuse("computed is ", computed, ", expected 0 to ", length - 1);
  }
  const bool searches = spec.beams.width > 0 && !spec.first_token_only;
  if (searches && !spec.kv_cache) {
    return refuse("a beam search needs a KV cache: its beams share blocks");
  }
  if (spec.beams.width > 0 && spec.attention.rows() > 0) {
    return refuse("a beam search brings no attention weights along");
  }
  if (!spec.first_candidates.empty() && !searches) {
    return refuse("first candidates are those of a beam search");
  }
  if (spec.beams.width != 0) {
    const absl::Status beams =
        CheckBeams(spec.beams, spec.stopping.stop_token_ids);
    if (!beams.ok()) return beams;
    if (spec.prompt_tokens != length) {
      return refuse("a beam search begins behind its prompt of ",
                    spec.prompt_tokens, " tokens, not behind ", length);
    }
  }
  if (MostBlocks(spec) > pool_->num_blocks()) {
    return refuse("beam.width is ", spec.beams.width, ", and ",
                  MostBlocks(spec), " KV blocks may be needed: the pool has ",
                  pool_->num_blocks());
  }
  const absl::Status ids = CheckTokenIds(spec);
  if (!ids.ok()) return ids;
  const int least = CeilDiv(computed, pool_->block_size());
  const int most = CeilDiv(options_.max_model_len, pool_->block_size());
  const int given = static_cast<int>(blocks.size());
  if (given < least || given > most) {
    return refuse("got ", given, " blocks for ", computed,
                  " computed positions, expected ", least, " to ", most);
  }
  for (int b = 0; b < given; ++b) {
    const bool behind = spec.kv_cache && b < FirstBlock(computed);
    if (!blocks[static_cast<size_t>(b)] && !behind) {
      return refuse("block ", b, " is missing, and position ", computed,
                    " sees it");
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::CheckScoring(const SequenceSpec& spec, int computed) {
  const auto refuse = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  const Scoring& scoring = spec.scoring;
  if (scoring.alternatives > kernels::kMaxTopLogprobs) {
    return refuse("scoring.alternatives is ", scoring.alternatives,
                  ", expected at most ", kernels::kMaxTopLogprobs);
  }
  if (spec.beams.width > 0) {
    return refuse("a beam search and a scored prompt exclude each other");
  }
  const auto length = static_cast<int64_t>(spec.history.size());
  if (spec.prompt_tokens != length) {
    return refuse("a prompt of ", spec.prompt_tokens,
                  " tokens is to be scored with ", length - spec.prompt_tokens,
                  " tokens behind it, expected none");
  }
  if (scoring.position < 1 || scoring.position >= spec.prompt_tokens) {
    return refuse("scoring.position is ", scoring.position,
                  ", expected 1 to the prompt's ", spec.prompt_tokens - 1);
  }
  if (computed >= scoring.position) {
    return refuse("computed is ", computed, ", and what follows position ",
                  scoring.position - 1, " is to be scored");
  }
  return absl::OkStatus();
}

int Engine::BlocksAtOnce(const EngineOptions& options, int block_size,
                         int positions) {
  const int all = CeilDiv(positions, block_size);
  if (options.window == 0) return all;
  // A step's rows and what the first of them sees, from anywhere in a block.
  const int64_t seen = int64_t{options.window} + options.max_num_batched_tokens;
  return std::min(all, CeilDiv(seen, block_size) + 1);
}

int Engine::FirstBlock(int position) const {
  if (options_.window == 0) return 0;
  return std::max(0, position - options_.window + 1) / pool_->block_size();
}

// Lanes share what is full of the prompt; Validate has seen to single ones.
int Engine::MostBlocks(const SequenceSpec& spec) const {
  const int size = pool_->block_size();
  const int shared = spec.prompt_tokens / size;
  const int64_t end =
      std::min<int64_t>(int64_t{spec.prompt_tokens} + spec.stopping.max_tokens,
                        options_.max_model_len);
  const int lanes = spec.first_token_only ? 1 : std::max(spec.beams.width, 1);
  const int whole = shared + lanes * (CeilDiv(end, size) - shared);
  if (!spec.kv_cache) return whole;
  // None has more than what is not behind the window.
  return std::min(whole, lanes * BlocksAtOnce(static_cast<int>(end)));
}

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
    if (!block && sequence->behind == sequence->table.size()) {
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
  const auto blocks = static_cast<size_t>(CeilDiv(most, pool_->block_size()));
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

void Engine::Release(Sequence* sequence) {
  // From the last to the first: see ReleaseBlocks.
  while (!sequence->blocks.empty()) sequence->blocks.pop_back();
  sequence->table.clear();
  sequence->copied = BlockRef();
}

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
  const size_t count = static_cast<size_t>(CeilDiv(end, pool_->block_size()));
  TANDEM_CHECK(count <= blocks.size(), "these positions have no blocks yet");
  TANDEM_CHECK(first >= it->second->behind, "these blocks were let go");
  std::vector<BlockRef> shared(count);
  for (size_t i = first; i < count; ++i) shared[i] = blocks[i].Share();
  return shared;
}

void Engine::KeepFrom(SequenceId id, int position) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return;
  it->second->spec.keep_from = position;
  FreeBehindWindow(it->second.get());
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

// ---- A step's results

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

// Those that only wrong guesses needed.
void Engine::ReturnSpareBlocks(Sequence* sequence) {
  const auto needed =
      static_cast<size_t>(CeilDiv(sequence->length(), pool_->block_size()));
  while (sequence->blocks.size() > needed) {
    sequence->blocks.pop_back();
    sequence->table.pop_back();
    blocks_returned_ = true;
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
  const bool full = sequence->new_tokens() >= stopping.max_tokens ||
                    sequence->length() >= options_.max_model_len;
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
    if (running_->step.entries[i].draws.empty()) continue;
    Sequence* const sequence = running_->parts[i].sequence;
    if (sequence->retired || !sequence->fails()) continue;
    const SequenceId id = sequence->id;
    const absl::Status status = sequence->constraint->status();
    Remove(sequence);
    listener_->OnStepFailed({id}, status);
  }
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

void Engine::PublishFullBlocks(Sequence* sequence) {
  if (!options_.prefix_caching || !sequence->spec.cache_blocks) return;
  const int size = pool_->block_size();
  while ((sequence->published + 1) * size <= sequence->computed) {
    const size_t index = static_cast<size_t>(sequence->published++);
    sequence->tail = ChildHash(sequence->tail,
                               absl::MakeConstSpan(sequence->spec.history)
                                   .subspan(index * static_cast<size_t>(size),
                                            static_cast<size_t>(size)));
    if (index < sequence->behind) continue;
    pool_->Publish(sequence->blocks[index], sequence->tail,
                   sequence->spec.cache_owner);
  }
}

// Steps in flight may name what is let go here, but none reads it, since their
// rows come later. Whoever gathers has references of its own.
void Engine::FreeBehindWindow(Sequence* sequence) {
  if (options_.window == 0) return;
  const int keep = sequence->spec.keep_from / pool_->block_size();
  const size_t end =
      static_cast<size_t>(std::min(FirstBlock(sequence->computed), keep));
  for (; sequence->behind < end; ++sequence->behind) {
    sequence->blocks[sequence->behind] = BlockRef();
    sequence->table[sequence->behind] = -1;
    blocks_returned_ = true;
    ++stats_.window_blocks;
  }
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

absl::Status Engine::CheckInvariants() const {
  EngineStats recount;
  for (size_t i = 0; i < by_age_.size(); ++i) {
    const Sequence& sequence = *by_age_[i];
    const auto broken = [&](const char* what) {
      return absl::InternalError(
          absl::StrCat("sequence ", sequence.id, ": ", what));
    };
    if (i > 0 && !by_age_[i - 1]->older_than(sequence)) {
      return broken("stands before an older one");
    }
    if (sequence.retired) return broken("is retired and still listed");
    if (sequence.runnable()) {
      ++recount.running;
      recount.pending_tokens += sequence.uncomputed();
    }
    recount.paused += !sequence.finished && sequence.paused;
    if (sequence.table.size() != sequence.blocks.size()) {
      return broken("its block table differs from its references");
    }
    if (static_cast<int>(sequence.behind) > FirstBlock(sequence.computed)) {
      return broken("has let go of what its next position sees");
    }
    for (size_t b = 0; b < sequence.blocks.size(); ++b) {
      if (static_cast<bool>(sequence.blocks[b]) == (b < sequence.behind)) {
        return broken("has blocks behind its window, or none before it");
      }
      if (sequence.blocks[b].id() != sequence.table[b]) {
        return broken("its block table differs from its references");
      }
    }
    if (CeilDiv(sequence.computed, pool_->block_size()) >
        static_cast<int>(sequence.blocks.size()) + (sequence.copied ? 1 : 0)) {
      return broken("has computed positions without blocks");
    }
    if (running_ == nullptr && (sequence.in_flight | sequence.drawing) != 0) {
      return broken("waits for a step, but none runs");
    }
    if (sequence.uncomputed() < (sequence.finished || sequence.waits ? 0 : 1)) {
      return broken("has nothing to compute");
    }
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

}  // namespace tandem::engine
