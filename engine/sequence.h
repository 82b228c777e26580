// SPDX-License-Identifier: Apache-2.0
// One sequence as the scheduler knows it, and a beam search, whose lanes are
// sequences: private to Engine.

#ifndef TANDEM_ENGINE_SEQUENCE_H_
#define TANDEM_ENGINE_SEQUENCE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "engine/logit_edits.h"

namespace tandem::engine {

struct Engine::Sequence {
  SequenceId id = 0;
  uint64_t serial = 0;  // order of Add: breaks ties of age, never used twice
  SequenceSpec spec;    // its history grows with every token
  std::optional<LogitEdits> edits;  // what spec.rules make of the next token
  std::unique_ptr<TokenConstraint> constraint;  // null: none
  std::vector<BlockRef> blocks;
  std::vector<int32_t> table;  // ids of `blocks`
  size_t behind = 0;           // so many of `blocks` are empty: see window
  int computed = 0;            // KV of [0, computed) is there
  // What the steps in flight add: positions, and tokens behind the history.
  int in_flight = 0;
  int drawing = 0;
  bool paused = false;
  bool finished = false;  // keeps its blocks, computes nothing
  bool retired = false;   // in leaving_
  // Of a lane.
  BeamGroup* group = nullptr;
  bool waits = false;                  // for its candidates to be judged
  std::vector<TopLogprob> candidates;  // if it waits
  // The block of others that holds the positions behind the last full block,
  // until a step has copied it into a block of its own.
  BlockRef copied;
  int last_draw = -1;  // which of its step's draws is its, if drawing
  // What the step just done drew for it, until it is reported.
  std::optional<Finish> finish;
  std::unique_ptr<Drafter> drafter;  // null: no guesses are looked up
  bool drafted = false;              // by the draft model
  // Where it is tried again, if that has been given up, and how often it was.
  int try_at = 0;
  int tries = 0;
  // Its guesses of what follows the history, of which the step in flight
  // verifies the first ones.
  std::vector<int32_t> guesses;
  DraftAcceptance acceptance;
  DraftCounts drafts;
  // Blocks [0, published) were published; `tail` is the hash of the last.
  int published = 0;
  BlockHash tail;

  int length() const { return static_cast<int>(spec.history.size()); }
  // Of which KV or logits are wanted: what follows the last one is not, where
  // nothing is drawn.
  int wanted() const { return length() - (spec.only_scores() ? 1 : 0); }
  int uncomputed() const { return wanted() - computed; }
  // The same when all steps in flight are done.
  int next_position() const { return computed + in_flight; }
  int next_length() const { return length() + drawing; }
  int unplanned() const { return wanted() + drawing - next_position(); }
  int new_tokens() const { return length() - spec.prompt_tokens; }
  // Whether the next draw can only be described when all before it are known.
  bool needs_history() const {
    return spec.rules.needs_history() || constraint != nullptr;
  }
  // Its constraint could not say what may be drawn.
  bool fails() const {
    return constraint != nullptr && constraint->ready() &&
           !constraint->status().ok();
  }
  bool runnable() const { return !finished && !paused && !waits; }
  // Of those: its constraint knows what may be drawn.
  bool ready() const { return constraint == nullptr || constraint->ready(); }
  bool older_than(const Sequence& other) const {
    return spec.admitted != other.spec.admitted
               ? spec.admitted < other.spec.admitted
               : serial < other.serial;
  }
};

// A beam search. Its lanes run side by side, each in any step that has room,
// and wait for each other behind every token; then the search says which go on.
// A lane with several children is the first of them and is forked for the
// others, which share its full blocks and copy the last one when they run.
struct Engine::BeamGroup {
  BeamGroup(SequenceId id_in, BeamSearch search_in)
      : id(id_in), search(std::move(search_in)) {}

  const SequenceId id;
  BeamSearch search;
  std::vector<std::unique_ptr<Sequence>> lanes;  // in the search's order
};

}  // namespace tandem::engine

#endif  // TANDEM_ENGINE_SEQUENCE_H_
