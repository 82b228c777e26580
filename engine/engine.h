// SPDX-License-Identifier: Apache-2.0
// What both workers run: sequences that grow block by block, one mixed step
// after the other. Plain single-threaded code on the worker's Loop; the
// arithmetic is behind Executor.
//
// A sequence is added with a history (prompt and output so far, all inputs)
// and the blocks that already hold its first `computed` positions. Every step
// takes from each running sequence its uncomputed positions, at most the
// step's token budget in all (a chunk of a prompt and the one new token of a
// decode are the same thing), draws a token where a history ends, and reports
// it. A sequence that meets a stopping rule is finished: it stays, without
// computing, until retired.
//
// A beam search is added like a sequence and has one id, but runs as a group of
// lanes, one for each beam, that share the blocks behind which they part. It
// reports nothing but its end, and is preempted as a whole.
//
// Scoring: rows of a prompt may also report how probable the token is that
// stands behind them. A step draws so much at most, so chunks are cut to what
// is left when everybody else may draw one token.
//
// Speculation: a decode may take guesses of its next tokens along as further
// positions of the step, which draws behind each of them. Every draw is the
// very one that a step by itself would have made (same logits, same random
// number), so as many are right as there are guesses in a row that equal the
// draw before them, and one more: a step gives several tokens, and no other
// ones. KV of guesses that were wrong is written over. A draft model that makes
// them runs between steps, and says nothing of itself.

#ifndef TANDEM_ENGINE_ENGINE_H_
#define TANDEM_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/loop.h"
#include "engine/beam_search.h"
#include "engine/draft_length.h"
#include "engine/draft_model.h"
#include "engine/drafter.h"
#include "engine/executor.h"
#include "engine/kv/kv_pool.h"
#include "engine/logit_rules.h"
#include "engine/work.h"

namespace tandem::engine {

using SequenceId = uint64_t;

enum class Finish { kStop, kLength };

struct Stopping {
  int max_tokens = 1;  // new tokens, counted from the end of the prompt
  int min_tokens = 0;
  std::vector<int32_t> stop_token_ids;
};

// Log probabilities of a prompt's tokens, each behind those before it.
struct Scoring {
  int alternatives = -1;  // reported per token; -1: the prompt is not scored
  int position = 1;       // the first token wanted, or still wanted

  bool wanted() const { return alternatives >= 0; }
};

struct SequenceSpec {
  std::vector<int32_t> history;  // prompt, then output so far
  int prompt_tokens = 0;
  Sampling sampling;
  LogitRules rules;  // rules.needs_history(): one step at a time
  Stopping stopping;
  BlockHash root;            // where its block hashes start (tenant salt)
  uint64_t cache_owner = 0;  // of its blocks (KvPool::Publish)
  int adapter = -1;          // as StepEntry has it; part of `root`
  bool cache_blocks = true;  // full blocks may be found by others
  absl::Time admitted;       // age, for preemption: the youngest goes first
  // Sample one token and finish (what a prefill worker does); its KV stays.
  bool first_token_only = false;
  bool alone = false;  // a suspect: shares its steps with nobody
  // Width above 0: a beam search over what follows the prompt, which is the
  // whole history. With first_token_only its first candidates, as `top` of the
  // token. Draws nothing at random.
  BeamOptions beams;
  // Blocks of positions from here on stay, whatever a window leaves behind, for
  // who gathers them. See KeepFrom.
  int keep_from = std::numeric_limits<int>::max();
  // Of a beam search: its first candidates, from whoever computed the history.
  // Then nothing of it is left to compute.
  std::vector<TopLogprob> first_candidates;
  // False: each token's step computes all positions again, into the sequence's
  // own blocks and in chunks as a prompt, and what `blocks` hold at Add is not
  // used: the same tokens, to show what the cache saves.
  bool kv_cache = true;
  // That its tokens bring along; such a sequence guesses none.
  AttentionAsk attention = {};
  // If wanted the history is the prompt, no beam search begins behind it, and
  // the row before scoring.position is still to be computed. max_tokens may be
  // 0 then: nothing is drawn, and the last score ends the sequence.
  Scoring scoring = {};

  bool only_scores() const {
    return scoring.wanted() && stopping.max_tokens == 0;
  }
};

// What a beam search came to.
struct BeamResult {
  std::vector<Hypothesis> best;  // as many as were wanted, if so many exist
  int tokens = 0;                // of all hypotheses, also those not in `best`
};

class DrafterFactory {
 public:
  virtual ~DrafterFactory() = default;
  virtual std::unique_ptr<Drafter> New(const SequenceSpec& spec) = 0;
};

// Guesses of tokens, verified in one step.
struct Speculation {
  int num_tokens = 0;  // of a sequence in a step at most; 0: none
  int lookup_min = 5;  // n-grams of NgramDrafter
  int lookup_max = 5;
  // As many as pay, by what is measured; else always as many as there may be.
  bool adapt = true;
  // Instead of NgramDrafter, for tests; outlives the engine.
  DrafterFactory* drafters = nullptr;
  // Instead of both, where it has an executor; both it names outlive the
  // engine.
  DraftModelOptions draft_model = {};
};

struct EngineOptions {
  int max_num_seqs = 64;             // sequences per step at most
  int max_num_batched_tokens = 512;  // rows per step at most
  int max_model_len = 0;             // positions per sequence
  int vocab_size = 0;  // above all ids that sequences name; 0: not checked
  bool prefix_caching = true;
  // Submits a step of decodes while the one before runs, so that the device
  // does not wait for the host. A prompt that comes waits for both.
  bool run_ahead = false;
  // Of blocks wholly behind it what nobody sees is let go while a sequence
  // runs.
  KvWindow window = {};
  int max_draws = 0;  // tokens drawn per step at most; 0: max_num_seqs
  Speculation speculation = {};
  WorkShape work = {};  // what EngineListener::OnWork counts by
};

// Guesses of one sequence's tokens, of all steps so far.
struct DraftCounts {
  int64_t verified = 0;
  int64_t accepted = 0;
};

// Callbacks may call every method of the engine but its destructor. A
// sequence that was retired, by whomever, is not heard of again.
class EngineListener {
 public:
  virtual ~EngineListener() = default;
  // `token` stands at `position` (from the prompt's start). `finish` is set
  // when it is the last. A step may give several, in order.
  virtual void OnToken(SequenceId sequence, int position,
                       const SampledToken& token,
                       std::optional<Finish> finish) = 0;
  // Of the prompt's tokens from `position` on, all of them before the first
  // token that is drawn. `finish` is set where these are the last, and nothing
  // is drawn.
  virtual void OnScores(SequenceId /*sequence*/, int /*position*/,
                        absl::Span<const SampledToken> /*scores*/,
                        std::optional<Finish> /*finish*/) {}
  // The beam search is over; it stays, without computing, until retired.
  virtual void OnBeams(SequenceId search, const BeamResult& result) {}
  // A step runs positions [begin, end) of the sequence, and their KV is there
  // for layers [0, layers_done).
  virtual void OnComputed(SequenceId sequence, int begin, int end,
                          int layers_done) = 0;
  // What a step did for the sequence, and its share of the weights' bytes: all
  // shares of a step make a whole. Before the step's token is told.
  virtual void OnWork(SequenceId /*sequence*/, const Work& /*work*/) {}
  // The pool ran out and this sequence gave its blocks back. It is gone from
  // the engine, as after Retire. Its tokens so far were all reported.
  virtual void OnPreempted(SequenceId sequence) = 0;
  // Blocks are short by `blocks`: the owner may free some (revoke grants
  // without progress) before a sequence is preempted. True: try again; but
  // where nothing became available, sequences are preempted all the same.
  virtual bool OnBlocksShort(int blocks) = 0;
  // Blocks that a step used and nobody needs any more have come back.
  virtual void OnBlocksFreed() {}
  // The device failed the step, or its constraint a sequence; the listed ones
  // are gone.
  virtual void OnStepFailed(const std::vector<SequenceId>& sequences,
                            const absl::Status& status) = 0;
};

// Counters of the steps so far, for metrics, load reports and liveness.
struct EngineStats {
  int64_t steps = 0;
  int64_t prefill_tokens = 0;  // computed positions that sampled nothing
  int64_t decode_tokens = 0;   // tokens drawn for sequences
  int64_t surplus_tokens = 0;  // drawn for sequences that had ended meanwhile
  int64_t draft_steps = 0;     // a sequence's guesses in a step, each
  DraftCounts drafts;
  int64_t preemptions = 0;
  int64_t window_blocks = 0;  // let go behind the window, or their parts
  int running = 0;            // sequences with something to compute
  int paused = 0;
  int pending_tokens = 0;   // uncomputed positions of running sequences
  double step_seconds = 0;  // smoothed
  // Over steps with prefill rows: smoothed rows by smoothed time, so that
  // small steps weigh as little as they are.
  double tokens_per_second = 0;
  bool step_in_flight = false;
  absl::Time step_started;
};

class Engine final : private StepListener {
 public:
  // Whether these options can run on that pool: one sequence of
  // max_model_len must fit, so that the oldest one can always finish.
  static absl::Status Validate(const EngineOptions& options,
                               const KvPool& pool);

  // REQUIRES: Validate(options, *pool) is OK. All outlive the engine.
  Engine(const EngineOptions& options, Loop* loop, Executor* executor,
         KvPool* pool, EngineListener* listener);
  // Gives all blocks back. REQUIRES: no step is in flight, or the executor
  // runs nothing any more.
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Adds a sequence. `blocks` hold positions [0, computed) of its history
  // (from the prefix cache, or landed by a handoff), block i the positions
  // from i * block_size on; computed < history.size(). Those wholly behind the
  // window may be empty. Starts a step if none
  // runs, after the task that runs now, so that sequences added together
  // start together. Blocks from computed on will be written: REQUIRES that
  // nobody else refers to them and that they are not published.
  // `constraint`, if any, says what may be drawn, the tokens behind the prompt
  // appended already; a sequence whose constraint fails is gone, as in
  // OnStepFailed. Not of a beam search.
  // Errors: INVALID_ARGUMENT (history or limits), nothing changed.
  absl::Status Add(SequenceId id, SequenceSpec spec,
                   std::vector<BlockRef> blocks, int computed,
                   std::unique_ptr<TokenConstraint> constraint = nullptr);

  // Ends a sequence in any state; its full blocks go to the prefix cache and
  // the rest back to the pool, as soon as no step in flight uses them.
  // Idempotent; unknown ids are no-ops. The id may be used again at once.
  void Retire(SequenceId id);

  // An `alone` sequence may share steps from here on: it has proved harmless.
  void ShareSteps(SequenceId id);

  // A paused sequence computes nothing and is preempted first. No-op for a beam
  // search, which has nothing to say that could be too much.
  void Pause(SequenceId id, bool paused);

  bool contains(SequenceId id) const {
    return sequences_.contains(id) || beams_.contains(id);
  }
  // The sequence's blocks in order, e.g. for gathers. Valid until it is
  // retired or preempted, or the next step is planned. Empty if unknown.
  absl::Span<const int32_t> block_table(SequenceId id) const;
  // References to the blocks of [begin, end), behind empty ones for those
  // before, each to what the sequence has of it: pins them beyond Retire.
  // REQUIRES: a sequence here, no beam search, and it has these.
  std::vector<BlockRef> ShareBlocks(SequenceId id, int begin, int end) const;
  // The sequence's keep_from is `position` now. No-op if unknown.
  void KeepFrom(SequenceId id, int position);
  // How many positions of the sequence hold finished KV. -1 if unknown, and of
  // a beam search.
  int computed(SequenceId id) const;
  // Of the sequence since it was added; none if unknown.
  DraftCounts drafts(SequenceId id) const;

  const EngineStats& stats() const { return stats_; }
  // For liveness: whether a sequence could be in the next step, if there are
  // blocks for it; and layers and steps that devices reported since the start.
  bool has_work() const;
  int64_t progress() const {
    return progress_ + (draft_model_ == nullptr ? 0 : draft_model_->progress());
  }
  // Blocks that a sequence with so many positions may hold at once, if nobody
  // keeps what is behind the window.
  static int BlocksAtOnce(const EngineOptions& options, int block_size,
                          int positions);
  int BlocksAtOnce(int positions) const {
    return BlocksAtOnce(options_, pool_->block_size(), positions);
  }
  // The first block that is not wholly behind what all layers see from
  // `position`, and what those with a window see.
  int FirstBlock(int position) const;
  int FirstWhole(int position) const;

  // Blocks that a sequence of `spec` may hold at once, if it grows as long as
  // it may.
  int MostBlocks(const SequenceSpec& spec) const;

  // The stats against a recount, every block table against its references:
  // INTERNAL with the first contradiction. For tests.
  absl::Status CheckInvariants() const;

 private:
  struct Sequence;   // engine/sequence.h
  struct BeamGroup;  // likewise

  // A step's entries, and whose they are. Kept from step to step, so that
  // planning allocates nothing once the vectors have grown.
  struct Plan {
    struct Part {
      Sequence* sequence;
      int tokens;            // positions, the guesses' included
      int drafts = 0;        // guesses among them, the last ones
      int scores = 0;        // rows that score what follows them
      bool draws = false;    // a token behind its last row
      int appended = 0;      // tokens that the step gave
      bool surplus = false;  // it ended in the step before
      bool lane = false;     // of a beam search, maybe dropped meanwhile
    };
    std::vector<Part> parts;
    int rows = 0;                           // of all parts
    std::vector<kernels::LogitEdit> edits;  // of all draws
    std::vector<RowDraw> draws;             // of all entries
    std::vector<int32_t> tokens;            // of entries with guesses
    int drafts = 0;                         // of all parts
    // When the device turned to it: the end of the step before, if it came at
    // once.
    absl::Time follows;
    absl::Duration drafting;  // what the draft model took for it,
    bool caught_up = false;   // and whether that was for prompts as well
    Step step;
  };
  enum class Kind { kShared, kAlone };
  enum class Room { kFound, kNone, kReplan };

  void OnLayersDone(uint64_t step_id, int layers_done) override;
  void OnStepDone(uint64_t step_id, absl::StatusOr<StepResult> result) override;

  // engine.cc: the end of a step.
  void RecordStepTime(absl::Duration duration);
  void FailStep(const absl::Status& status);
  void FinishStep();
  // `before`: the next older one; null: it is the oldest.
  absl::Status CheckSequence(const Sequence& sequence,
                             const Sequence* before) const;

  // sequences.cc: how sequences come and go.
  absl::Status CheckSpec(const SequenceSpec& spec,
                         absl::Span<const BlockRef> blocks, int computed) const;
  static absl::Status CheckScoring(const SequenceSpec& spec, int computed);
  static absl::Status CheckSearch(const SequenceSpec& spec);
  absl::Status CheckTokenIds(const SequenceSpec& spec) const;
  absl::Status CheckBlocks(const SequenceSpec& spec,
                           absl::Span<const BlockRef> blocks,
                           int computed) const;
  std::unique_ptr<Sequence> NewSequence(SequenceId id, SequenceSpec spec,
                                        std::vector<BlockRef> blocks,
                                        int computed);
  // What a sequence needs to grow: its edits, and room for its tokens.
  void PrepareGrowth(Sequence* sequence) const;
  void Enlist(std::unique_ptr<Sequence> sequence);
  std::unique_ptr<Sequence> Detach(Sequence* sequence);
  // Detaches it and gives its blocks back, now or when the step that uses
  // them is done.
  void Remove(Sequence* sequence);
  void Count(const Sequence& sequence, int sign);

  // sequence_blocks.cc: the blocks of a sequence.
  // Blocks that so many positions fill, the last one maybe in part.
  int BlocksFor(int64_t positions) const;
  void PublishFullBlocks(Sequence* sequence);
  void FreeBehindWindow(Sequence* sequence);
  void ReturnSpareBlocks(Sequence* sequence);
  void Release(Sequence* sequence);

  // step_results.cc: what a step gave.
  void ApplyResult(const StepResult& result);
  static void ApplyScores(const Plan::Part& part);
  void AppendDrawn(Plan::Part* part, absl::Span<const SampledToken> drawn);
  void AppendToken(Sequence* sequence, int32_t token);
  void DeliverTokens(const StepResult& result);
  Work WorkOfPart(size_t index, int64_t weight_bytes) const;
  void DeliverScores(size_t index, absl::Span<const SampledToken> scores);
  // Takes sequences out whose constraint failed.
  void DropFailed();

  // beams.cc: groups of lanes.
  // `top`: alternatives reported per token.
  void AddBeams(std::unique_ptr<Sequence> lane, int top);
  void TakeCandidates(Sequence* lane, const std::vector<TopLogprob>& top);
  // All groups whose lanes all wait with their candidates.
  void AdvanceBeams();
  void Advance(BeamGroup* group);
  std::unique_ptr<Sequence> Fork(const Sequence& lane);
  void DropLane(std::unique_ptr<Sequence> lane);
  void RetireBeams(SequenceId id);
  void DeliverBeams();
  absl::Status CheckGroups() const;

  // scheduler.cc: what the next step holds.
  void SchedulePlan();
  void StartStep();
  void Launch(Plan* plan);
  bool ComposeAny(Plan* plan);
  bool ComposeAhead(Plan* plan);
  bool EndsByLength(const Sequence& sequence) const;
  // Fills plan->parts. kReplan: the listener changed the sequences meanwhile.
  Room Compose(Kind kind, Plan* plan);
  Room TryPart(Sequence* sequence, int max_tokens, Plan* plan);
  int ScoreRoom(const Plan& plan) const;
  void TakeBlocks(Sequence* sequence, int count);
  Room MakeRoom(Sequence* sequence, int missing, Plan* plan);
  static bool HoldsBlocks(const Sequence& sequence);
  Sequence* PickVictim(const Sequence& requester) const;
  void Preempt(Sequence* victim, Plan* plan);
  void FillEntries(Plan* plan);
  void FillDraws(Plan* plan);
  static void AddScores(const Plan::Part& part, const StepEntry& entry,
                        Plan* plan);
  static absl::Span<const int32_t> TokensWithDrafts(const Plan::Part& part,
                                                    Plan* plan);
  static void DrawAfter(const Plan::Part& part, Plan* plan);
  void DeliverPreempted();

  // speculation.cc: guesses.
  bool MaySpeculate(const SequenceSpec& spec) const;
  void PrepareDrafts(Sequence* sequence);
  void EndDrafts(Sequence* sequence);
  int MostDrafts(const Sequence& sequence) const;
  bool MayDraft(Sequence* sequence);
  void LookUp(Sequence* sequence);
  void AddDrafts(Plan* plan);
  int TryDrafts(Plan::Part* part, int length);
  bool PlanWishes();
  const BlockHash* DraftRoot(const Sequence& sequence) const;
  bool MayCatchUp(const Sequence& sequence) const;
  bool IsDue(Sequence* sequence);
  static void NoteTry(Sequence* sequence, int length);
  bool StartDrafting();
  void FinishDrafting(absl::Time start);
  absl::Status CheckDrafts() const;

  const EngineOptions options_;
  Loop* const loop_;
  Executor* const executor_;
  KvPool* const pool_;
  EngineListener* const listener_;
  EngineStats stats_;
  int64_t progress_ = 0;
  DraftCosts draft_costs_;
  std::unique_ptr<DraftModel> draft_model_;          // may be null
  DraftAcceptance usual_acceptance_{0.5, 1.0 / 64};  // of all sequences
  std::vector<DraftWish> wishes_;   // of the round that runs or is planned
  std::vector<Sequence*> wishing_;  // at the same places
  std::vector<double> chances_;
  std::vector<int> lengths_;
  bool drafting_ = false;  // a round of the draft model's runs
  bool drafted_ = false;   // or is over, and no step was submitted yet
  absl::Duration drafting_took_;
  bool caught_up_ = false;
  double prefill_rows_ = 0;  // of a step, smoothed
  double prefill_seconds_ = 0;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::vector<Sequence*> by_age_;  // oldest first
  absl::flat_hash_map<SequenceId, std::unique_ptr<BeamGroup>> beams_;
  std::vector<BeamGroup*> advancing_;   // may be complete, in this step
  std::vector<SequenceId> beams_done_;  // to be reported
  // Retired while a step in flight uses them.
  std::vector<std::unique_ptr<Sequence>> leaving_;
  absl::Time step_done_;          // the last one's end
  bool finishing_ = false;        // within OnStepDone
  bool blocks_returned_ = false;  // by the step being reported
  Plan plans_[2];
  Plan* running_ = nullptr;  // its step is in flight, or being reported
  Plan* ahead_ = nullptr;    // the step after it, in flight as well
  uint64_t last_step_id_ = 0;
  uint64_t last_serial_ = 0;
  Kind last_kind_ = Kind::kAlone;
  uint64_t changes_ = 0;  // of the set of sequences, or of who is paused
  bool may_ask_ = false;  // OnBlocksShort, within one planning
  bool planning_ = false;
  std::vector<uint64_t> writers_;      // [ids] serial of who may write it
  std::vector<Sequence*> candidates_;  // of the plan being made
  std::vector<std::unique_ptr<Sequence>> preempted_;  // to be reported
  Timer plan_timer_;
  Timer beams_timer_;
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_ENGINE_H_
