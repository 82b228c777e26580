// SPDX-License-Identifier: Apache-2.0
#include "prefill_worker/core.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "prefill_worker/call.h"
#include "worker/convert.h"

namespace tandem::prefill_worker {

PrefillCore::PrefillCore(const PrefillOptions& options, Loop* loop,
                         Random* random, engine::Executor* executor,
                         engine::KvPool* pool, handoff::Sender::Dial dial)
    : options_(options),
      loop_(loop),
      executor_(executor),
      pool_(pool),
      cache_(pool, options.offload, options.engine.window),
      engine_(options.engine, loop, executor, pool, this),
      sender_(options.sender, loop, random, std::move(dial), this),
      clock_(loop, [this](bool judge) { Tick(judge); }) {
  if (options_.offload != nullptr) {
    options_.offload->set_on_change([this] { ScheduleAdvance(); });
  }
}

PrefillCore::~PrefillCore() {
  if (options_.offload != nullptr) options_.offload->set_on_change(nullptr);
  CloseAll(absl::UnavailableError("the prefill worker is shutting down"));
}

void PrefillCore::AddCall(std::unique_ptr<PrefillStream> stream) {
  const CallId id = next_call_++;
  auto call = std::make_unique<Call>(this, id, std::move(stream));
  // A call that never opens must not keep its place by beats.
  call->times = {loop_->Now(), loop_->Now(),
                 loop_->Now() + worker::kOpenPatience};
  Call* const raw = call.get();
  calls_.emplace(id, std::move(call));
  raw->stream->Start(raw);
}

void PrefillCore::CloseAll(const absl::Status& status) {
  while (!calls_.empty()) Retire(calls_.begin()->first, status);
}

void PrefillCore::OnMessage(Call* call, v1::PrefillRequest message) {
  call->times.heard = loop_->Now();
  if (!message.has_open()) return;  // a beat
  const CallId id = call->id;
  Refuse(id, call->phase == Phase::kNew && call->compiling == 0
                 ? Open(call, std::move(*message.mutable_open()))
                 : absl::InvalidArgumentError("a second open on one call"));
}

void PrefillCore::Refuse(CallId id, const absl::Status& status) {
  if (status.ok()) return;
  ++counters_.refused;
  Retire(id, status);
}

absl::Status PrefillCore::CheckOpen(const v1::PrefillOpen& open) const {
  const v1::ScoringParams* const scoring =
      open.has_scoring() ? &open.scoring() : nullptr;
  absl::Status status = worker::CheckOpen(
      open.request_id(), open.prompt_token_ids_size(),
      open.output_token_ids_size(), open.sampling(), open.stopping(), scoring,
      open.deadline_ms(), options_.engine.max_model_len);
  if (!status.ok()) return status;
  if (open.has_decode_worker() != (open.stopping().max_tokens() > 0)) {
    return absl::InvalidArgumentError(
        open.has_decode_worker()
            ? "decode_worker is set, and stopping.max_tokens is 0: nothing is "
              "handed over"
            : "decode_worker is missing");
  }
  status =
      worker::CheckStructured(open.sampling(), open.stopping().max_tokens(),
                              options_.grammars != nullptr);
  if (!status.ok()) return status;
  return worker::CheckAttention(
      open.sampling(), options_.attention_layers,
      int64_t{open.prompt_token_ids_size()} + open.stopping().max_tokens());
}

void PrefillCore::CompileThenOpen(Call* call, v1::PrefillOpen open) {
  call->compiling_since = loop_->Now();
  call->times.deadline =
      call->compiling_since + absl::Milliseconds(open.deadline_ms());
  worker::GrammarOrder order{
      open.sampling().structured(),
      {open.output_token_ids().begin(), open.output_token_ids().end()},
      open.cache_salt()};
  call->compiling = options_.grammars->Compile(
      std::move(order),
      [this, id = call->id, open = std::move(open)](auto grammar) {
        const auto it = calls_.find(id);
        if (it == calls_.end()) return;
        it->second->compiling = 0;
        if (!grammar.ok()) {
          Refuse(id, grammar.status());
          return;
        }
        it->second->grammar = *std::move(grammar);
        Refuse(id, Open(it->second.get(), open));
      });
}

absl::Status PrefillCore::Open(Call* call, v1::PrefillOpen open) {
  if (TANDEM_FAILPOINT("prefill.open", "crash fail stall")) {
    return failpoint::Error();
  }
  if (open.prefill_incarnation() != options_.incarnation) {
    return MakeError(absl::StatusCode::kUnavailable, "WORKER_RESTARTED",
                     "this prefill worker has restarted since the router "
                     "registered it");
  }
  if (draining_) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                     "this prefill worker is draining");
  }
  const absl::Status status = CheckOpen(open);
  if (!status.ok()) return status;
  if (open.sampling().has_structured() && call->grammar == nullptr) {
    CompileThenOpen(call, std::move(open));
    return absl::OkStatus();
  }
  absl::StatusOr<worker::AdapterUse> use =
      worker::UseAdapter(options_.adapters, open.adapter());
  if (!use.ok()) return use.status();
  call->adapter_use = *std::move(use);
  const int positions =
      open.prompt_token_ids_size() + open.output_token_ids_size();
  // A history that the pool can never hold would wait for ever.
  if (BlocksFor(positions + 1) > pool_->counts().total) {
    return absl::InvalidArgumentError(
        absl::StrCat("a history of ", positions, " tokens does not fit into ",
                     pool_->counts().total, " blocks"));
  }
  int queued = 0;
  for (const auto& [id, other] : calls_)
    queued += other->phase == Phase::kQueued;
  call->history =
      worker::Join(open.prompt_token_ids(), open.output_token_ids());
  call->open = std::move(open);
  const std::vector<engine::BlockHash> hashes = CacheableHashes(*call);
  call->uncached = positions - cache_.Lookup(hashes) * pool_->block_size();
  if (queued >= options_.max_queue ||
      (queued > 0 &&
       queued_tokens_ + call->uncached > options_.max_queued_tokens)) {
    return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                     absl::StrCat(queued, " prompts with ", queued_tokens_,
                                  " uncached tokens are queued here already"));
  }
  ++counters_.calls;
  call->stopping = worker::ToEngine(call->open.stopping());
  const absl::Time asked =
      call->grammar == nullptr ? loop_->Now() : call->compiling_since;
  // Bounded, since rates are guesses: nobody is put off for most of its time.
  const absl::Duration patience = absl::Milliseconds(call->open.deadline_ms());
  call->due = asked - absl::Milliseconds(call->open.age_ms()) +
              std::min(WorkOf(call->uncached), patience / 4);
  call->times.deadline = asked + patience;
  call->queued = loop_->Now();
  if (call->only_scores()) call->keep_from = std::numeric_limits<int>::max();
  if (!attempts_.emplace(AttemptOf(*call), call->id).second) {
    return absl::AlreadyExistsError("the attempt is being prefilled here");
  }
  cache_.Prefetch(hashes);
  call->phase = Phase::kQueued;
  queued_tokens_ += call->uncached;
  ScheduleAdvance();
  return absl::OkStatus();
}

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
  // where its share is full the next prompt for it is not begun, and those
  // for others are. A single one may be larger than the share.
  const double limit = options_.waiting_share * pool_->counts().total;
  std::map<std::string, int> held = BlocksHeld();
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
    int& blocks = held[call->decode_worker_id()];
    const int wanted = BlocksFor(static_cast<int>(call->history.size()));
    if (blocks > 0 && blocks + wanted > limit) continue;
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
      held[call->decode_worker_id()] +=
          BlocksFor(static_cast<int>(call->history.size()));
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

bool PrefillCore::TryCompute(Call* call) {
  const int positions = static_cast<int>(call->history.size());
  const std::vector<engine::BlockHash> hashes = CacheableHashes(*call);
  // What a grant wants may lie behind the window.
  engine::CachedPrefix matched = cache_.Find(hashes, call->keep_from);
  // All its blocks must fit beside what the others were promised, so that
  // nothing that was computed is ever preempted.
  const int missing = engine::PrefixCache::Missing(matched);
  int wanted = BlocksFor(positions) - matched.size() + missing;
  if (TANDEM_FAILPOINT("prefill.alloc", "crash fail")) return false;
  if (pool_->available() - promised_blocks_ < wanted) return false;
  cache_.Restore(hashes, &matched, call->open.cache_owner());
  wanted -= missing;

  const int cached = matched.size() * pool_->block_size();
  counters_.history_positions += positions;
  counters_.cached_positions += cached;
  call->phase = Phase::kComputing;
  call->started = loop_->Now();
  call->promised_blocks = wanted;
  promised_blocks_ += wanted;

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

void PrefillCore::Retire(CallId id, const absl::Status& status) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  const std::unique_ptr<Call> call = std::move(it->second);
  calls_.erase(it);
  flight::Record(flight::Event::kCallEnded,
                 {.request = call->open.request_id(), .m = status.raw_code()});
  if (call->phase == Phase::kQueued) queued_tokens_ -= call->uncached;
  if (call->compiling != 0) options_.grammars->Cancel(call->compiling);
  promised_blocks_ -= call->promised_blocks;
  const handoff::Attempt attempt = AttemptOf(*call);
  const auto entry = attempts_.find(attempt);
  if (entry != attempts_.end() && entry->second == id) {
    attempts_.erase(entry);
    sender_.Cancel(attempt);
  }
  engine_.Retire(id);
  ++(status.ok() ? counters_.finished : counters_.failed);
  call->stream->Close(status);
  ScheduleAdvance();
}

void PrefillCore::Say(Call* call, v1::PrefillResponse response) {
  call->times.said = loop_->Now();
  call->stream->Send(std::move(response));
}

void PrefillCore::SendDone(Call* call, const handoff::HandoffTimings& timings) {
  v1::PrefillResponse response;
  v1::PrefillDone* const done = response.mutable_done();
  done->set_prefill_us(
      absl::ToInt64Microseconds(call->first_token - call->started));
  done->set_handoff_us(absl::ToInt64Microseconds(timings.transfer));
  done->set_handoff_exposed_us(absl::ToInt64Microseconds(timings.exposed));
  done->set_handoff_bytes(timings.bytes);
  done->set_way(timings.way);
  *done->mutable_work() = worker::ToWire(call->work);
  Say(call, std::move(response));
}

void PrefillCore::Tick(bool judge) {
  const absl::Time now = loop_->Now();
  std::vector<std::pair<CallId, absl::Status>> ended;
  for (const auto& [id, call] : calls_) {
    const bool opened = call->phase != Phase::kNew;
    call->LookAtReader(call->stream->unsent(), now);
    absl::Status overdue = worker::Overdue(
        *call, opened, now, judge, options_.lease, options_.stall_limit);
    if (!overdue.ok()) {
      if (overdue == worker::GrammarOverdue()) ++counters_.refused;
      ended.emplace_back(id, std::move(overdue));
    } else if (worker::OwesBeat(*call, opened, now) &&
               call->stream->unsent() == 0 &&
               !TANDEM_FAILPOINT("prefill.beat", "drop")) {
      v1::PrefillResponse response;
      response.mutable_beat();
      Say(call.get(), std::move(response));
    }
  }
  for (const auto& [id, status] : ended) Retire(id, status);
  Advance();
}

int PrefillCore::BlocksFor(int positions) const {
  return (positions + pool_->block_size() - 1) / pool_->block_size();
}

absl::Duration PrefillCore::WorkOf(int positions) const {
  const double rate = engine_.stats().tokens_per_second;
  return rate > 0 ? absl::Seconds(positions / rate) : absl::ZeroDuration();
}

absl::Duration PrefillCore::ExpectedPrefill(int positions) const {
  return WorkOf(positions + engine_.stats().pending_tokens);
}

handoff::Attempt PrefillCore::AttemptOf(const Call& call) {
  return {call.open.request_id(), call.open.sequence_index(),
          call.open.attempt()};
}

PrefillCore::Call* PrefillCore::FindAttempt(const handoff::Attempt& attempt) {
  const auto it = attempts_.find(attempt);
  return it == attempts_.end() ? nullptr : calls_.at(it->second).get();
}

bool PrefillCore::has_work() const {
  if (gathers_ > 0 || engine_.stats().step_in_flight || engine_.has_work()) {
    return true;
  }
  std::map<std::string, int> offered = Offered();
  bool may_offer = false;
  bool ready = false;
  bool held = false;  // blocks, until others go on
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kQueued) {
      may_offer |= offered[call->decode_worker_id()] < options_.max_offered;
    } else if (call->phase == Phase::kOffered) {
      ready |= call->may_compute;
    } else if (call->phase != Phase::kNew) {
      held = true;
    }
  }
  return may_offer || (ready && !held);
}

v1::WorkerLoad PrefillCore::Load() const {
  const engine::EngineStats& stats = engine_.stats();
  v1::WorkerLoad load = worker::ToWire(stats, pool_->counts(), sender_.slabs());
  load.set_state(draining_ ? v1::WORKER_STATE_DRAINING
                           : v1::WORKER_STATE_READY);
  int waiting = 0;
  int64_t offered_tokens = 0;
  for (const auto& [id, call] : calls_) {
    waiting += call->phase == Phase::kQueued || call->phase == Phase::kOffered;
    if (call->phase == Phase::kOffered) offered_tokens += call->uncached;
  }
  load.set_running(static_cast<int>(calls_.size()) - waiting);
  load.set_waiting(waiting);
  load.set_queued_tokens(static_cast<int32_t>(queued_tokens_ + offered_tokens +
                                              stats.pending_tokens));
  load.set_tickets(sender_.attempts());
  load.set_streams(static_cast<int>(calls_.size()));
  return load;
}

// ---- engine::EngineListener

void PrefillCore::OnComputed(CallId id, int begin, int end, int layers_done) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  Call* const call = it->second.get();
  TANDEM_FAILPOINT("prefill.chunk", "crash stall delay");
  // The engine has taken the blocks up to `end`.
  const int layers = executor_->kv_shape().num_layers;
  if (!call->only_scores()) {
    sender_.Computed(AttemptOf(*call),
                     {call->computed_layers, layers_done, begin, end});
  }
  call->computed_layers = layers_done == layers ? 0 : layers_done;
  const int left =
      BlocksFor(static_cast<int>(call->history.size())) - BlocksFor(end);
  const int promised = std::min(call->promised_blocks, left);
  promised_blocks_ -= call->promised_blocks - promised;
  call->promised_blocks = promised;
}

void PrefillCore::OnWork(CallId id, const engine::Work& work) {
  const auto it = calls_.find(id);
  if (it != calls_.end()) it->second->work += work;
}

void PrefillCore::OnScores(CallId id, int position,
                           absl::Span<const engine::SampledToken> scores,
                           std::optional<engine::Finish> finish) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  Call* const call = it->second.get();
  for (v1::ScoredTokens& part : worker::ToWire(position, scores)) {
    v1::PrefillResponse response;
    *response.mutable_scores() = std::move(part);
    Say(call, std::move(response));
  }
  if (finish.has_value()) {
    call->first_token = loop_->Now();
    SendDone(call, handoff::HandoffTimings());
    Retire(id, absl::OkStatus());
    return;
  }
  if (!call->paused && call->stream->unsent() > options_.max_unsent) {
    call->Pause(call->stream->unsent(), loop_->Now());
    engine_.Pause(id, true);
  }
}

void PrefillCore::Call::OnDrained() {
  if (!std::exchange(paused, false)) return;
  core->engine_.Pause(id, false);
}

void PrefillCore::OnToken(CallId id, int position,
                          const engine::SampledToken& token,
                          std::optional<engine::Finish> finish) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  Call* const call = it->second.get();
  TANDEM_FAILPOINT("prefill.sampled", "crash");
  flight::Record(flight::Event::kComputed, {.request = call->open.request_id(),
                                            .m = AttemptOf(*call).number});
  call->first_token = loop_->Now();
  call->phase = Phase::kSending;
  v1::PrefillResponse response;
  v1::PrefillFirstToken* const first = response.mutable_first_token();
  first->set_position(position);
  *first->mutable_token() = worker::ToWire(token);
  first->set_stop_token_id(-1);
  if (call->open.sampling().report_work()) {
    *first->mutable_work() = worker::ToWire(call->work);
  }
  if (finish.has_value()) {
    first->set_finish_reason(worker::ToWire(*finish));
    if (*finish == engine::Finish::kStop) {
      first->set_stop_token_id(
          worker::StopTokenOf(call->stopping, token.token_id));
    }
  }
  Say(call, std::move(response));
  if (finish.has_value()) {
    // Nothing is left to decode: no commit, and what landed is dropped.
    SendDone(call, handoff::HandoffTimings());
    Retire(id, absl::OkStatus());
    return;
  }
  TANDEM_FAILPOINT("prefill.before_commit", "crash stall");
  sender_.Commit(AttemptOf(*call), {position, worker::ToWire(token)});
  ScheduleAdvance();
}

void PrefillCore::OnPreempted(CallId id) {
  Retire(id, MakeError(absl::StatusCode::kResourceExhausted, "PREEMPTED",
                       "the prefill worker's KV pool is full"));
}

void PrefillCore::OnStepFailed(const std::vector<CallId>& ids,
                               const absl::Status& status) {
  for (const CallId id : ids) Retire(id, status);
}

// ---- handoff::SenderDelegate

void PrefillCore::OnAnswer(const handoff::Attempt& attempt, Answer answer,
                           const handoff::Grant& grant) {
  Call* const call = FindAttempt(attempt);
  if (call == nullptr) return;
  call->may_compute = answer != Answer::kWait;
  if (answer == Answer::kGranted) {
    flight::Record(flight::Event::kGranted,
                   {.request = attempt.request_id,
                    .m = attempt.number,
                    .n = grant.position_end - grant.position_begin});
    call->keep_from = grant.position_begin;
    engine_.KeepFrom(call->id, call->keep_from);
  }
  if (call->may_compute) ScheduleAdvance();
}

void PrefillCore::Gather(const handoff::Attempt& attempt,
                         const handoff::SliceRange& range,
                         const handoff::Grant& grant, std::byte* staging,
                         absl::AnyInvocable<void(kernels::KvDigest)> done) {
  TANDEM_FAILPOINT("prefill.gather", "crash stall");
  Call* const call = FindAttempt(attempt);
  // The blocks and the table live until the device is through with them,
  // whatever becomes of the attempt.
  struct Held {
    std::vector<engine::BlockRef> blocks;
    std::vector<int32_t> block_table;
  };
  auto held = std::make_unique<Held>();
  held->blocks =
      engine_.ShareBlocks(call->id, range.position_begin, range.position_end);
  for (const engine::BlockRef& block : held->blocks) {
    held->block_table.push_back(block.id());
  }
  engine::KvPart part;
  part.block_table = held->block_table;
  part.position_begin = range.position_begin;
  part.position_end = range.position_end;
  part.layer_begin = range.layer_begin;
  part.layer_end = range.layer_end;
  part.head_begin = grant.head_begin;
  part.head_end = grant.head_end;
  ++gathers_;
  executor_->Gather(part, grant.wire, grant.digest_key, staging,
                    [held = std::move(held), done = std::move(done),
                     this](kernels::KvDigest digest) mutable {
                      --gathers_;
                      ++progress_;
                      held.reset();
                      done(digest);
                      ScheduleAdvance();
                    });
}

void PrefillCore::OnAcknowledged(const handoff::Attempt& attempt,
                                 const handoff::HandoffTimings& timings) {
  Call* const call = FindAttempt(attempt);
  if (call == nullptr) return;
  attempts_.erase(attempt);
  flight::Record(flight::Event::kCommitted,
                 {.request = attempt.request_id, .m = attempt.number});
  if (options_.on_handoff) options_.on_handoff(timings);
  if (!TANDEM_FAILPOINT("prefill.done", "crash drop")) SendDone(call, timings);
  Retire(call->id, absl::OkStatus());
}

void PrefillCore::OnFailed(const handoff::Attempt& attempt,
                           const absl::Status& status,
                           const std::string& failed_way) {
  Call* const call = FindAttempt(attempt);
  if (call == nullptr) return;
  attempts_.erase(attempt);
  flight::Record(flight::Event::kDead, {.request = attempt.request_id,
                                        .m = attempt.number,
                                        .n = status.raw_code()});
  Retire(call->id,
         MakeError(status.code(), "HANDOFF_FAILED",
                   std::string(status.message()), {{"way", failed_way}}));
}

}  // namespace tandem::prefill_worker
