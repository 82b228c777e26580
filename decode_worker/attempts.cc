// SPDX-License-Identifier: Apache-2.0
// Attempts from their offer to their commit, and local prefills. See core.h.

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "common/utf8.h"
#include "decode_worker/call.h"
#include "decode_worker/core.h"
#include "worker/convert.h"

namespace tandem::decode_worker {

DecodeCore::Call* DecodeCore::FindAttempt(const handoff::Attempt& attempt) {
  const auto it = attempts_.find(attempt.number);
  if (it == attempts_.end()) return nullptr;
  Call* const call = calls_.at(it->second).get();
  return call->request_id == attempt.request_id ? call : nullptr;
}

// ---- Free blocks: who gets them.

void DecodeCore::ScheduleUseFreeBlocks() {
  if (use_free_blocks_scheduled_) return;
  use_free_blocks_scheduled_ = true;
  loop_->Post([this] {
    use_free_blocks_scheduled_ = false;
    UseFreeBlocks();
  });
}

void DecodeCore::UseFreeBlocks() {
  // Oldest first, and nobody overtakes: a large one would wait for ever.
  std::vector<Call*> waiting;
  for (const auto& [id, call] : calls_) {
    if (call->waits_for_blocks()) waiting.push_back(call.get());
  }
  std::sort(waiting.begin(), waiting.end(),
            [](const Call* a, const Call* b) { return a->older_than(*b); });
  for (Call* const call : waiting) {
    if (call->phase == Phase::kLocal) {
      // For a bounded time, and in nobody's way.
      if (options_.offload != nullptr &&
          cache_.Prefetching(LocalHashes(*call))) {
        continue;
      }
      if (!TryLocal(call)) return;
      ++progress_;
      continue;
    }
    if (!TryGrant(call)) return;
    ++progress_;
    receiver_.GrantLater(
        {call->request_id, call->sequence_index, call->attempt},
        call->landing.grant);
  }
}

// What a handoff need not bring, behind empty blocks for those that nobody
// needs.
engine::CachedPrefix DecodeCore::FindForHandoff(
    const Call& call, absl::Span<const engine::BlockHash> hashes) {
  engine::CachedPrefix found = cache_.Find(hashes);
  // Windowed parts come anyway of all that the next position sees.
  const int first_whole = FirstWhole(call);
  if (options_.engine.window.frees_parts() && found.size() < first_whole) {
    engine::CachedPrefix partly = cache_.FindPartly(hashes.first(
        std::min(hashes.size(), static_cast<size_t>(first_whole))));
    if (partly.size() > found.size()) found = std::move(partly);
  }
  // All of it is behind the window, or the pool never has room for what its
  // end sees and for what comes behind it.
  const int first = FirstBlock(call);
  const int all = cache_.Held(found) + InWhole(RoomBehind(call, found.size()));
  if (found.size() <= first || all > pool_->counts().total) {
    return {std::vector<engine::BlockRef>(static_cast<size_t>(first)), first};
  }
  return found;
}

bool DecodeCore::TryGrant(Call* call) {
  if (TANDEM_FAILPOINT("decode.reserve", "crash fail")) return false;
  Landing& landing = call->landing;
  const int positions = static_cast<int>(call->history.size());
  const auto hashes = Hashes(*call, landing.formats, positions);
  engine::CachedPrefix found = FindForHandoff(*call, hashes);
  const int cached =
      found.size() > found.first ? found.size() * pool_->block_size() : 0;
  const Room room = RoomBehind(*call, found.size());
  // One block for each running sequence stays: a grant that makes the next
  // step preempt somebody has won nothing.
  const int wanted = engine::PrefixCache::Missing(found) + InWhole(room);
  if (pool_->available() < wanted + engine_.stats().running) return false;
  cache_.Restore(hashes, &found, call->cache_owner);
  landing.reserved = pool_->Reserve(room.blocks, room.lacking);
  landing.matched = std::move(found);
  TANDEM_CHECK(landing.reserved.has_value(), "they were available");
  landing.block_table.clear();
  for (const engine::BlockRef& block : landing.matched.blocks) {
    landing.block_table.push_back(block.id());
  }
  landing.block_table.insert(landing.block_table.end(),
                             landing.reserved->ids().begin(),
                             landing.reserved->ids().end());
  const kernels::KvShape& shape = executor_->kv_shape();
  landing.grant.position_begin =
      std::min(landing.matched.size() * pool_->block_size(), positions);
  landing.grant.position_end = positions;
  landing.grant.windowed_begin = std::max(
      landing.grant.position_begin, FirstWhole(*call) * pool_->block_size());
  landing.grant.head_begin = 0;
  landing.grant.head_end = shape.kv_heads;
  landing.grant.wire = shape.dtype;
  landing.grant.digest_key = random_->Next();
  landing.granted = true;
  flight::Record(flight::Event::kGranted,
                 {.request = call->request_id,
                  .m = call->attempt,
                  .n = positions - landing.grant.position_begin});
  counters_.history_positions += positions;
  counters_.cached_positions += cached;
  call->cached_tokens = cached;
  return true;
}

engine::SequenceSpec DecodeCore::SpecOf(const Call& call,
                                        const std::string& formats) const {
  engine::SequenceSpec spec;
  spec.history = call.history;
  spec.prompt_tokens = call.prompt_tokens;
  spec.sampling = call.sampling;
  spec.rules = call.rules;
  spec.stopping = call.stopping;
  spec.beams = call.beams;
  spec.root = Root(call, formats);
  spec.cache_owner = call.cache_owner;
  spec.adapter = call.adapter_use.slot();
  spec.cache_blocks = call.use_prefix_cache;
  spec.kv_cache = call.kv_cache;
  spec.attention = call.attention;
  if (call.local) spec.scoring = call.scoring;
  spec.admitted = call.admitted;
  spec.alone = call.suspect;
  return spec;
}

bool DecodeCore::TryLocal(Call* call) {
  const int positions = static_cast<int>(call->history.size());
  const auto hashes = LocalHashes(*call);
  engine::CachedPrefix matched = cache_.Find(hashes);
  // One that is only scored may have all that the pool holds, and adds nothing.
  const int end = positions + (call->stopping.max_tokens > 0 ? 1 : 0);
  // What was found is pinned, or will be, and part of what the sequence has at
  // once. Beams part behind the first token.
  const auto beside = [&] {
    const int rest = BlocksFor(end) - matched.size();
    const int at_once = BlocksAtOnce(end, call->kv_cache);
    return std::clamp(at_once - cache_.Held(matched), 0, rest) +
           std::max(call->beams.width - 1, 0);
  };
  // What was offloaded comes back with all parts: maybe more than there are.
  if (cache_.Held(matched) + beside() > pool_->counts().total) matched = {};
  const int wanted = engine::PrefixCache::Missing(matched) + beside();
  if (pool_->available() < wanted + engine_.stats().running) return false;
  cache_.Restore(hashes, &matched, call->cache_owner);
  const int computed = matched.size() * pool_->block_size();
  counters_.history_positions += positions;
  counters_.cached_positions += computed;
  call->cached_tokens = computed;
  // Not again where it was preempted behind its first token.
  if (!call->started_said) call->local_started = loop_->Now();
  // A search says nothing at its first token: its prefill counts as decoding.
  if (call->beams.width > 0) call->decode_started = loop_->Now();
  call->phase = Phase::kRunning;
  const absl::Status status = engine_.Add(
      call->id, SpecOf(*call, ""), std::move(matched.blocks), computed,
      worker::Follow(call->grammar.get(), call->output()));
  if (!status.ok()) {
    Retire(call->id, status);
  } else if (call->paused) {
    engine_.Pause(call->id, true);
  }
  return true;
}

// True if running sequences are expected to end, and give back enough for this
// one and for who is served before it, within the time.
bool DecodeCore::RoomIsExpected(const Call& waits,
                                absl::Duration within) const {
  const double step = engine_.stats().step_seconds;
  const double steps = step > 0 ? absl::ToDoubleSeconds(within) / step : 0;
  int expected = pool_->available() - BlocksAtGrant(waits);
  for (const auto& [id, call] : calls_) {
    if (call->waits_for_blocks() && call->older_than(waits)) {
      expected -= BlocksAtGrant(*call);
    }
    if (call->phase != Phase::kRunning) continue;
    const int positions = static_cast<int>(call->history.size());
    const int left =
        call->prompt_tokens + call->stopping.max_tokens - positions;
    if (left <= steps) expected += BlocksAtGrant(*call);
  }
  return expected >= 0;
}

// ---- handoff::ReceiverDelegate

// The table and the reserved blocks of a landing, for as long as the device
// works on them, whatever becomes of the attempt.
struct DecodeCore::HeldBlocks {
  explicit HeldBlocks(const Landing& landing)
      : block_table(landing.block_table),
        hold(landing.reserved->Hold(
            0, static_cast<int>(landing.reserved->ids().size()))) {}

  std::vector<int32_t> block_table;
  engine::BlockHold hold;
};

absl::StatusOr<DecodeCore::Verdict> DecodeCore::OnOffer(
    const handoff::Ticket& ticket, const v1::HandoffOffer& offer,
    const std::string& mixed, handoff::Grant* grant) {
  Call* const call = FindAttempt(ticket.attempt);
  if (call == nullptr) {
    return absl::FailedPreconditionError("the attempt has ended");
  }
  Landing& landing = call->landing;
  landing.offered = true;
  landing.windowed_apart = offer.windowed_apart();
  const int positions = static_cast<int>(call->history.size());
  const int wanted = BlocksAtGrant(*call);
  const int total = pool_->counts().total;
  absl::Status bad;
  if (TANDEM_FAILPOINT("decode.offer", "crash fail stall")) {
    bad = failpoint::Error();
  } else if (offer.positions() != positions) {
    bad = absl::InvalidArgumentError(
        absl::StrCat("offer.positions is ", offer.positions(),
                     ", the attempt's history has ", positions));
  } else if (worker::AdapterKey(offer.adapter()) !=
             worker::AdapterKey(call->adapter)) {
    bad = absl::FailedPreconditionError(absl::StrCat(
        "offer.adapter is '",
        std::string(Utf8Head(worker::AdapterKey(offer.adapter()), 128)),
        "', the attempt's is '", worker::AdapterKey(call->adapter), "'"));
  } else if (wanted > total) {
    // One of an earlier version.
    bad = absl::FailedPreconditionError(
        absl::StrCat("the prefill worker brings whole blocks, here ", wanted,
                     " of ", total, ": one that knows windows brings less"));
  }
  if (!bad.ok()) {
    EndAttempt(call, bad);
    ReportDead(call, bad, /*preempted=*/false, "");
    return bad;
  }
  flight::Record(flight::Event::kOffer, {.request = call->request_id,
                                         .m = call->attempt,
                                         .n = offer.positions()});
  if (!mixed.empty()) {
    landing.formats = absl::StrCat(mixed, ">", options_.receiver.kv_dtype);
  }
  UseFreeBlocks();
  if (landing.granted) {
    *grant = landing.grant;
    return Verdict::kGranted;
  }
  const bool soon =
      RoomIsExpected(*call, absl::Milliseconds(offer.expected_prefill_ms()));
  return soon ? Verdict::kStart : Verdict::kWait;
}

void DecodeCore::Scatter(const handoff::Attempt& attempt,
                         const handoff::SliceRange& range,
                         const handoff::Grant& grant, const std::byte* staging,
                         absl::AnyInvocable<void()> done) {
  TANDEM_FAILPOINT("decode.scatter", "crash stall");
  Call* const call = FindAttempt(attempt);
  auto held = std::make_unique<HeldBlocks>(call->landing);
  engine::KvPart part;
  part.block_table = held->block_table;
  part.position_begin = range.position_begin;
  part.position_end = range.position_end;
  part.layer_begin = range.layer_begin;
  part.layer_end = range.layer_end;
  part.head_begin = grant.head_begin;
  part.head_end = grant.head_end;
  ++copies_;
  executor_->Scatter(
      part, grant.wire, staging,
      [held = std::move(held), done = std::move(done), this]() mutable {
        --copies_;
        ++progress_;
        held.reset();
        done();
        ScheduleUseFreeBlocks();
      });
}

void DecodeCore::Digest(const handoff::Attempt& attempt,
                        const handoff::Grant& grant,
                        absl::AnyInvocable<void(kernels::KvDigest)> done) {
  TANDEM_FAILPOINT("decode.digest", "crash stall");
  Call* const call = FindAttempt(attempt);
  auto held = std::make_unique<HeldBlocks>(call->landing);
  engine::KvPart part;
  part.block_table = held->block_table;
  part.position_begin = grant.position_begin;
  part.position_end = grant.position_end;
  part.layer_begin = 0;
  part.layer_end = executor_->kv_shape().num_layers;
  part.head_begin = grant.head_begin;
  part.head_end = grant.head_end;
  part.windowed_begin = grant.windowed_begin;
  ++copies_;
  executor_->Digest(part, grant.wire, grant.digest_key,
                    [held = std::move(held), done = std::move(done),
                     this](kernels::KvDigest digest) mutable {
                      --copies_;
                      ++progress_;
                      held.reset();
                      done(digest);
                      ScheduleUseFreeBlocks();
                    });
}

absl::Status DecodeCore::CheckFirst(const Call& call,
                                    const handoff::FirstToken& first) const {
  if (TANDEM_FAILPOINT("decode.commit", "crash fail")) {
    return failpoint::Error();
  }
  const int positions = static_cast<int>(call.history.size());
  if (first.position != positions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "first_position is ", first.position, ", expected ", positions));
  }
  const int vocabulary = options_.engine.vocab_size;
  if (call.beams.width == 0) {
    const int32_t id = first.token.token_id();
    if (vocabulary == 0 || (id >= 0 && id < vocabulary)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "first_token is ", id, ", expected 0 to ", vocabulary - 1));
  }
  const auto& top = first.token.top();
  const bool ordered = std::is_sorted(
      top.begin(), top.end(),
      [](const auto& x, const auto& y) { return x.logprob() > y.logprob(); });
  // Not a number, or infinite; a bias may well lift one above 0.
  if (top.empty() || !(top[0].logprob() < HUGE_VALF) || !ordered) {
    return absl::InvalidArgumentError(absl::StrCat(
        "first_token brings ", top.size(),
        " candidates for a beam search, or not the most probable first"));
  }
  return absl::OkStatus();
}

absl::Status DecodeCore::OnCommit(const handoff::Attempt& attempt,
                                  const handoff::FirstToken& first) {
  Call* const call = FindAttempt(attempt);
  if (call == nullptr) {
    return absl::FailedPreconditionError("the attempt has ended");
  }
  const int positions = static_cast<int>(call->history.size());
  const absl::Status bad = CheckFirst(*call, first);
  if (!bad.ok()) {
    EndAttempt(call, bad);
    ReportDead(call, bad, /*preempted=*/false, "");
    return bad;
  }
  ++counters_.commits;
  flight::Record(flight::Event::kCommitted,
                 {.request = attempt.request_id, .m = attempt.number});
  // Told by the prefill worker, before it committed.
  call->scoring = engine::Scoring();
  attempts_.erase(call->attempt);
  std::vector<engine::BlockRef> blocks =
      std::move(call->landing.matched.blocks);
  for (engine::BlockRef& block : std::move(*call->landing.reserved).Commit()) {
    blocks.push_back(std::move(block));
  }
  engine::SequenceSpec spec = SpecOf(*call, call->landing.formats);
  call->landing = Landing();
  call->phase = Phase::kRunning;
  call->decode_started = loop_->Now();
  if (call->beams.width > 0) {
    for (const v1::TopLogprob& top : first.token.top()) {
      spec.first_candidates.push_back({top.token_id(), top.logprob()});
    }
  } else {
    call->history.push_back(first.token.token_id());
    spec.history = call->history;
  }
  const absl::Status added =
      engine_.Add(call->id, std::move(spec), std::move(blocks), positions,
                  worker::Follow(call->grammar.get(), call->output()));
  if (!added.ok()) {
    Retire(call->id, added);
    return added;
  }
  if (call->paused) engine_.Pause(call->id, true);
  if (call->beams.width > 0) {
    SayAttemptStarted(call);
  } else {
    SendTokens(call, first.position, first.token);
  }
  return absl::OkStatus();
}

void DecodeCore::OnFailed(const handoff::Attempt& attempt,
                          const absl::Status& status,
                          const std::string& failed_way) {
  Call* const call = FindAttempt(attempt);
  if (call == nullptr) return;
  attempts_.erase(call->attempt);
  call->landing = Landing();
  ReportDead(call, status, /*preempted=*/false, failed_way);
  ScheduleUseFreeBlocks();
}

void DecodeCore::OnFatal(const absl::Status& status) {
  // Memory that a peer may still write cannot be reused, and cannot be
  // replaced: only a fresh process is safe.
  fatal_ = status;
  loop_->Post([this, status] { CloseAll(status); });
}

}  // namespace tandem::decode_worker
