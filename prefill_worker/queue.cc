// SPDX-License-Identifier: Apache-2.0
// Which prompt is offered to its decode worker next, and which is computed.
// See core.h.

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "prefill_worker/call.h"
#include "prefill_worker/core.h"
#include "worker/convert.h"

namespace tandem::prefill_worker {
namespace {

// Without any progress, of those that wait for each other.
constexpr absl::Duration kCirclePatience = absl::Seconds(2);

absl::Status NeverFits(int blocks, int total) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "HANDOFF_FAILED",
      absl::StrCat("the decode worker wants KV of positions behind the window "
                   "as well, which takes ",
                   blocks, " blocks here, and there are ", total));
}

}  // namespace

void PrefillCore::ScheduleAdvance() {
  if (advance_scheduled_) return;
  advance_scheduled_ = true;
  loop_->Post([this] {
    advance_scheduled_ = false;
    Advance();
  });
}

void PrefillCore::Advance() {
  std::map<std::string, int> offered = Offered();
  std::vector<Call*> queued, waiting;
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kQueued) queued.push_back(call.get());
  }
  const auto sooner = [](const Call* a, const Call* b) {
    return std::tie(a->due, a->id) < std::tie(b->due, b->id);
  };
  std::sort(queued.begin(), queued.end(), sooner);
  for (Call* const call : queued) {
    int& to_worker = offered[call->decode_worker_id()];
    if (to_worker >= options_.max_offered) continue;
    ++to_worker;
    Offer(call);
  }
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kOffered && call->may_compute) {
      waiting.push_back(call.get());
    }
  }
  std::sort(waiting.begin(), waiting.end(), sooner);
  // KV that waits for a slow decode worker must not take the pool from others:
  // where its share is full the next prompt for it is not begun, nor a smaller
  // one behind that, which would keep it waiting for ever; and those for others
  // are. A single one may be larger than the share.
  const double limit = options_.waiting_share * pool_->counts().total;
  std::map<std::string, int> held = BlocksHeld();
  std::set<std::string> full;  // decode workers whose next one waits
  // One suspect at a time is begun: which of several it is that crashes workers
  // could not be told.
  bool suspect_computes =
      std::any_of(calls_.begin(), calls_.end(), [](const auto& entry) {
        return entry.second->phase == Phase::kComputing &&
               entry.second->open.suspect();
      });
  for (Call* const call : waiting) {
    const bool suspect = call->open.suspect();
    if (suspect && suspect_computes) continue;
    if (full.contains(call->decode_worker_id())) continue;
    int& blocks = held[call->decode_worker_id()];
    const int wanted = BlocksAtOnce(*call);
    if (wanted > pool_->counts().total) {
      if (call->granted)
        Retire(call->id, NeverFits(wanted, pool_->counts().total));
      continue;  // less may do once it is granted
    }
    if (blocks > 0 && blocks + wanted > limit) {
      full.insert(call->decode_worker_id());
      continue;
    }
    // For a bounded time, and in nobody's way.
    if (options_.offload != nullptr &&
        cache_.Prefetching(CacheableHashes(*call))) {
      continue;
    }
    if (!TryCompute(call)) return;
    ++progress_;
    blocks += wanted;
    suspect_computes = suspect_computes || suspect;
  }
}

std::map<std::string, int> PrefillCore::Offered() const {
  std::map<std::string, int> offered;
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kOffered) ++offered[call->decode_worker_id()];
  }
  return offered;
}

std::map<std::string, int> PrefillCore::BlocksHeld() const {
  std::map<std::string, int> held;
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kComputing || call->phase == Phase::kSending) {
      held[call->decode_worker_id()] += BlocksAtOnce(*call);
    }
  }
  return held;
}

void PrefillCore::Offer(Call* call) {
  call->phase = Phase::kOffered;
  ++progress_;
  queued_tokens_ -= call->uncached;
  if (call->only_scores()) {
    call->may_compute = true;
    return;
  }
  // Others may have computed its beginning since it came, or evicted it.
  const int positions = static_cast<int>(call->history.size());
  const int cached =
      cache_.Lookup(CacheableHashes(*call)) * pool_->block_size();
  call->uncached = positions - cached;
  TANDEM_FAILPOINT("prefill.offer", "crash");
  flight::Record(flight::Event::kOffer, {.request = call->open.request_id(),
                                         .decode = call->decode_worker_id(),
                                         .m = AttemptOf(*call).number,
                                         .n = positions});
  sender_.Offer(
      AttemptOf(*call), call->open.decode_worker(), call->open.ticket(),
      positions, cached, ExpectedPrefill(call->uncached),
      {call->open.avoid_ways().begin(), call->open.avoid_ways().end()},
      call->open.adapter());
}

engine::BlockHash PrefillCore::Root(const v1::PrefillOpen& open) const {
  return engine::RootHash(open.cache_salt(), pool_->block_size(), "",
                          worker::AdapterKey(open.adapter()));
}

std::vector<engine::BlockHash> PrefillCore::CacheableHashes(
    const Call& call) const {
  if (call.open.bypass_prefix_cache()) return {};
  const size_t positions = call.history.size();
  auto hashes =
      engine::HashBlocks(Root(call.open), call.history, pool_->block_size());
  // The last position is always computed: its logits give the first token. And
  // so is the first one whose logits are a score.
  const size_t cached = call.open.has_scoring()
                            ? call.open.scoring().position() - 1
                            : positions - 1;
  hashes.resize(std::min(hashes.size(),
                         cached / static_cast<size_t>(pool_->block_size())));
  return hashes;
}

const PrefillCore::Call* PrefillCore::YoungestInTheWay(
    const std::string* decode_worker_id) const {
  const Call* youngest = nullptr;
  for (const auto& [id, call] : calls_) {
    const bool begun =
        call->phase == Phase::kComputing || call->phase == Phase::kSending;
    if (!begun) continue;
    if (decode_worker_id != nullptr &&
        call->decode_worker_id() != *decode_worker_id) {
      continue;
    }
    const bool waits = call->phase == Phase::kSending && !call->granted &&
                       loop_->Now() - call->first_token > kCirclePatience;
    if (!waits) return nullptr;
    if (youngest == nullptr || call->due > youngest->due) youngest = call.get();
  }
  return youngest;
}

// A grant that cannot be used keeps the decode worker's blocks from all behind
// it, and what was told to start and waits for those may fill its share here:
// each would wait for the other to its deadline. So would two prefill workers
// that are full of what waits for the blocks of each other's grants.
void PrefillCore::BreakCircles() {
  std::set<std::string> stuck;  // decode workers
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kOffered && call->granted &&
        loop_->Now() - *call->granted > kCirclePatience) {
      stuck.insert(call->decode_worker_id());
    }
  }
  for (const std::string& decode_worker_id : stuck) {
    const Call* in_the_way = YoungestInTheWay(&decode_worker_id);
    if (in_the_way == nullptr) in_the_way = YoungestInTheWay(nullptr);
    if (in_the_way == nullptr) continue;
    Retire(in_the_way->id,
           MakeError(absl::StatusCode::kAborted, "HANDOFF_FAILED",
                     "its KV waited for a grant, and in the way of a prompt "
                     "that has one"));
    return;  // its blocks may do
  }
}

bool PrefillCore::TryCompute(Call* call) {
  const int positions = static_cast<int>(call->history.size());
  const std::vector<engine::BlockHash> hashes = CacheableHashes(*call);
  // What a grant wants may lie behind the window.
  engine::CachedPrefix matched = cache_.Find(hashes, call->keep_from);
  // All its blocks must fit beside what the others were promised, so that
  // nothing that was computed is ever preempted.
  const auto beside = [&] {
    return std::clamp(BlocksAtOnce(*call) - cache_.Held(matched), 0,
                      BlocksFor(positions) - matched.size());
  };
  // What was offloaded comes back with all parts: maybe more than there are.
  if (cache_.Held(matched) + beside() > pool_->counts().total) matched = {};
  const int promised = beside();
  const int wanted = engine::PrefixCache::Missing(matched) + promised;
  if (TANDEM_FAILPOINT("prefill.alloc", "crash fail")) return false;
  if (pool_->available() - promised_blocks_ < wanted) return false;
  cache_.Restore(hashes, &matched, call->open.cache_owner());

  const int cached = matched.size() * pool_->block_size();
  counters_.history_positions += positions;
  counters_.cached_positions += cached;
  call->phase = Phase::kComputing;
  call->started = loop_->Now();
  call->promised_blocks = promised;
  promised_blocks_ += promised;

  engine::SequenceSpec spec;
  spec.history = call->history;
  spec.prompt_tokens = call->open.prompt_token_ids_size();
  spec.sampling =
      worker::ToEngine(call->open.sampling(), call->open.sequence_index());
  spec.rules = worker::ToEngine(call->open.sampling().rules());
  spec.stopping = call->stopping;
  spec.attention = worker::ToEngine(call->open.sampling().attention());
  spec.beams = worker::ToEngine(call->open.sampling().beam());
  spec.root = Root(call->open);
  spec.cache_owner = call->open.cache_owner();
  spec.adapter = call->adapter_use.slot();
  spec.cache_blocks = !call->open.bypass_prefix_cache();
  spec.admitted = call->due;
  if (call->open.has_scoring()) {
    spec.scoring = worker::ToEngine(call->open.scoring());
  }
  spec.keep_from = call->keep_from;
  spec.first_token_only = true;
  spec.alone = call->open.suspect();
  const CallId id = call->id;
  const absl::Status status =
      engine_.Add(id, std::move(spec), std::move(matched.blocks), cached,
                  worker::Follow(call->grammar.get(),
                                 absl::MakeConstSpan(call->history)
                                     .subspan(static_cast<size_t>(
                                         call->open.prompt_token_ids_size()))));
  if (!status.ok()) {
    Retire(id, status);
    return true;
  }
  v1::PrefillResponse response;
  response.mutable_started()->set_cached_tokens(cached);
  response.mutable_started()->set_queue_us(
      absl::ToInt64Microseconds(call->started - call->queued));
  Say(call, std::move(response));
  if (cached > 0 && !call->only_scores()) {
    sender_.Computed(AttemptOf(*call),
                     {0, executor_->kv_shape().num_layers, 0, cached});
  }
  return true;
}

}  // namespace tandem::prefill_worker
