// SPDX-License-Identifier: Apache-2.0
// Beam searches within the engine: lanes that wait for each other, their forks
// and their ends. Which of them go on is BeamSearch's business.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "engine/engine.h"
#include "engine/sequence.h"

namespace tandem::engine {

void Engine::AddBeams(std::unique_ptr<Sequence> lane, int top) {
  const SequenceSpec& spec = lane->spec;
  const int room = options_.max_model_len - spec.prompt_tokens;
  auto group = std::make_unique<BeamGroup>(
      lane->id, BeamSearch(spec.beams, spec.stopping.stop_token_ids,
                           std::min(spec.stopping.max_tokens, room), top));
  BeamGroup* const added = group.get();
  beams_.emplace(lane->id, std::move(group));
  lane->group = added;
  Sequence* const first = lane.get();
  first->waits = !spec.first_candidates.empty();
  Enlist(std::move(lane));
  if (!first->waits) return;
  first->candidates = std::move(first->spec.first_candidates);
  advancing_.push_back(added);
  AdvanceBeams();
}

void Engine::TakeCandidates(Sequence* lane,
                            const std::vector<TopLogprob>& top) {
  lane->waits = true;
  lane->candidates = top;
  advancing_.push_back(lane->group);
}

void Engine::AdvanceBeams() {
  std::vector<BeamGroup*> groups;
  for (BeamGroup* const group : std::exchange(advancing_, {})) {
    const bool complete =
        std::all_of(group->lanes.begin(), group->lanes.end(),
                    [](const auto& lane) { return lane->waits; });
    const bool seen =
        std::find(groups.begin(), groups.end(), group) != groups.end();
    if (complete && !seen) groups.push_back(group);
  }
  for (BeamGroup* const group : groups) Advance(group);
}

void Engine::Advance(BeamGroup* group) {
  std::vector<absl::Span<const TopLogprob>> candidates;
  for (const auto& lane : group->lanes) candidates.push_back(lane->candidates);
  const std::vector<BeamSearch::Next>& next = group->search.Step(candidates);
  std::vector<std::unique_ptr<Sequence>> parents =
      std::exchange(group->lanes, {});
  // Forks first, as long as no parent has moved on.
  std::vector<std::unique_ptr<Sequence>> forks(next.size());
  std::vector<bool> has_heir(parents.size());
  for (size_t i = 0; i < next.size(); ++i) {
    const auto parent = static_cast<size_t>(next[i].parent);
    if (has_heir[parent]) forks[i] = Fork(*parents[parent]);
    has_heir[parent] = true;
  }
  for (size_t i = 0; i < next.size(); ++i) {
    std::unique_ptr<Sequence>& parent =
        parents[static_cast<size_t>(next[i].parent)];
    Sequence* const lane = forks[i] != nullptr ? forks[i].get() : parent.get();
    lane->spec.history.push_back(next[i].token_id);
    lane->edits->Append(next[i].token_id);
    lane->waits = false;
    if (forks[i] != nullptr) {
      Enlist(std::move(forks[i]));
    } else {
      Count(*lane, 1);
      group->lanes.push_back(std::move(parent));
    }
  }
  for (std::unique_ptr<Sequence>& parent : parents) {
    if (parent == nullptr) continue;
    DropLane(std::move(parent));
    blocks_returned_ = true;  // its own, and what a fork has copied
  }
  ++changes_;
  if (!group->search.done()) return;
  beams_done_.push_back(group->id);
  beams_timer_.Start(absl::ZeroDuration(), [this] { DeliverBeams(); });
}

// Another sequence with the same history and KV. What it will write itself is
// copied by the step that first computes it.
std::unique_ptr<Engine::Sequence> Engine::Fork(const Sequence& lane) {
  auto fork = std::make_unique<Sequence>();
  fork->id = lane.id;
  fork->serial = ++last_serial_;
  fork->spec = lane.spec;
  fork->group = lane.group;
  fork->computed = lane.computed;
  fork->published = lane.published;
  fork->tail = lane.tail;
  PrepareGrowth(fork.get());
  const auto full = static_cast<size_t>(lane.computed / pool_->block_size());
  fork->behind = lane.behind;
  for (size_t i = 0; i < full; ++i) {
    fork->blocks.push_back(lane.blocks[i] ? lane.blocks[i].Share()
                                          : BlockRef());
    fork->table.push_back(lane.table[i]);
  }
  if (lane.computed % pool_->block_size() != 0) {
    fork->copied = lane.blocks[full].Share();
  }
  return fork;
}

// As Remove, of a lane that its group has let go.
void Engine::DropLane(std::unique_ptr<Sequence> lane) {
  Count(*lane, -1);
  std::erase(by_age_, lane.get());
  lane->retired = true;
  lane->group = nullptr;
  if (lane->in_flight > 0) {
    leaving_.push_back(std::move(lane));
  } else {
    Release(lane.get());
  }
}

void Engine::RetireBeams(SequenceId id) {
  const auto it = beams_.find(id);
  if (it == beams_.end()) return;
  std::erase(beams_done_, id);
  for (std::unique_ptr<Sequence>& lane : it->second->lanes) {
    DropLane(std::move(lane));
  }
  beams_.erase(it);
  ++changes_;
  SchedulePlan();
}

void Engine::DeliverBeams() {
  while (!beams_done_.empty()) {
    const SequenceId id = beams_done_.front();
    beams_done_.erase(beams_done_.begin());
    const BeamSearch& search = beams_.at(id)->search;
    listener_->OnBeams(id, {search.Best(), search.tokens()});
  }
}

absl::Status Engine::CheckGroups() const {
  for (const auto& [id, group] : beams_) {
    const auto broken = [&, own = id](const char* what) {
      return absl::InternalError(absl::StrCat("beam search ", own, ": ", what));
    };
    if (group->lanes.empty() != group->search.done()) {
      return broken("has lanes and is over, or neither");
    }
    bool all_wait = !group->lanes.empty();
    for (const auto& lane : group->lanes) {
      if (lane->group != group.get() || lane->id != id || lane->retired) {
        return broken("has a lane that is not its own");
      }
      if (lane->length() != group->lanes[0]->length()) {
        return broken("has lanes of different lengths");
      }
      all_wait = all_wait && lane->waits;
    }
    if (all_wait) return broken("waits for nothing");
  }
  return absl::OkStatus();
}

}  // namespace tandem::engine
