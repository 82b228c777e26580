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
  if (!message.has_open()) {
    call->OnBeat(message.beat().not_reading(), loop_->Now());
    return;
  }
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
  const int end = positions + (open.stopping().max_tokens() > 0 ? 1 : 0);
  if (engine_.BlocksAtOnce(end) > pool_->counts().total) {
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
  BreakCircles();
  Advance();
}

int PrefillCore::BlocksFor(int positions) const {
  return (positions + pool_->block_size() - 1) / pool_->block_size();
}

int PrefillCore::BlocksAtOnce(const Call& call) const {
  const int positions = static_cast<int>(call.history.size());
  const int all = BlocksFor(positions);
  const int kept = std::max(
      0, engine_.FirstWhole(positions) - call.keep_from / pool_->block_size());
  const int least = std::min(all, engine_.BlocksAtOnce(positions) + kept);
  // A second chunk may be on its way, if there is room for it.
  const int ahead = options_.engine.run_ahead
                        ? BlocksFor(options_.engine.max_num_batched_tokens)
                        : 0;
  return std::max(least, std::min({all, least + ahead, pool_->counts().total}));
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

}  // namespace tandem::prefill_worker
