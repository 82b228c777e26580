// SPDX-License-Identifier: Apache-2.0
// Calls and commands: admission, retries, ends. See core.h.

#include "decode_worker/core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "common/utf8.h"
#include "decode_worker/call.h"
#include "worker/convert.h"

namespace tandem::decode_worker {
namespace {

std::string RequestKey(const std::string& request_id, uint32_t index) {
  return absl::StrCat(request_id, "/", index);
}

}  // namespace

DecodeCore::DecodeCore(const DecodeOptions& options, Loop* loop, Random* random,
                       engine::Executor* executor, engine::KvPool* pool)
    : options_(options),
      loop_(loop),
      random_(random),
      executor_(executor),
      pool_(pool),
      cache_(pool, options.offload, options.engine.window),
      engine_(options.engine, loop, executor, pool, this),
      receiver_(options.receiver, loop, random, this),
      // From anywhere: two decode workers of one request hardly ever agree.
      next_attempt_(static_cast<uint32_t>(random->Below(1u << 30)) + 1),
      clock_(loop, [this](bool judge) { Tick(judge); }) {
  if (options_.offload != nullptr) {
    options_.offload->set_on_change([this] { ScheduleUseFreeBlocks(); });
  }
}

DecodeCore::~DecodeCore() {
  if (options_.offload != nullptr) options_.offload->set_on_change(nullptr);
  CloseAll(absl::UnavailableError("the decode worker is shutting down"));
}

void DecodeCore::AddCall(std::unique_ptr<DecodeStream> stream) {
  const CallId id = next_call_++;
  auto call = std::make_unique<Call>(this, id, std::move(stream));
  // A call that never opens must not keep its place by beats.
  call->times = {loop_->Now(), loop_->Now(),
                 loop_->Now() + worker::kOpenPatience};
  Call* const raw = call.get();
  calls_.emplace(id, std::move(call));
  raw->stream->Start(raw);
}

void DecodeCore::AddLink(std::unique_ptr<handoff::ReceiverStream> stream,
                         rpc::PeerIdentity peer) {
  receiver_.AddLink(std::move(stream), std::move(peer));
}

void DecodeCore::CloseAll(const absl::Status& status) {
  while (!calls_.empty()) Retire(calls_.begin()->first, status);
}

void DecodeCore::OnMessage(Call* call, const v1::DecodeRequest& message) {
  call->times.heard = loop_->Now();
  switch (message.command_case()) {
    case v1::DecodeRequest::kOpen: {
      const CallId id = call->id;
      if (call->phase != Phase::kNew || call->compiling != 0) {
        Retire(id, absl::InvalidArgumentError("a second open on one call"));
        return;
      }
      Refuse(id, Open(call, message.open()));
      return;
    }
    case v1::DecodeRequest::kRetry:
      Retry(call, message.retry());
      return;
    case v1::DecodeRequest::kBeat:
      call->OnBeat(message.beat().not_reading(), loop_->Now());
      return;
    case v1::DecodeRequest::COMMAND_NOT_SET:
      return;
  }
}

void DecodeCore::Refuse(CallId id, const absl::Status& status) {
  if (status.ok()) return;
  ++counters_.refused;
  Retire(id, status);
}

absl::Status DecodeCore::CheckOpen(const v1::DecodeOpen& open) const {
  if (open.decode_incarnation() != options_.incarnation) {
    return MakeError(absl::StatusCode::kUnavailable, "WORKER_RESTARTED",
                     "this decode worker has restarted since the router "
                     "registered it");
  }
  const v1::ScoringParams* const scoring =
      open.has_scoring() ? &open.scoring() : nullptr;
  absl::Status status = worker::CheckOpen(
      open.request_id(), open.prompt_token_ids_size(),
      open.output_token_ids_size(), open.sampling(), open.stopping(), scoring,
      open.deadline_ms(), options_.engine.max_model_len);
  if (!status.ok()) return status;
  if (open.has_prefill_worker() && open.stopping().max_tokens() == 0) {
    return absl::InvalidArgumentError(
        "prefill_worker is set, and stopping.max_tokens is 0: nothing is "
        "handed over");
  }
  status = CheckWithoutCache(open);
  if (!status.ok()) return status;
  status =
      worker::CheckStructured(open.sampling(), open.stopping().max_tokens(),
                              options_.grammars != nullptr);
  if (!status.ok()) return status;
  status = worker::CheckAttention(
      open.sampling(), options_.attention_layers,
      int64_t{open.prompt_token_ids_size()} + open.stopping().max_tokens());
  if (!status.ok() || !open.sampling().has_beam()) return status;
  if (!options_.kv_cache || open.no_kv_cache()) {
    return absl::InvalidArgumentError(
        "sampling.beam: a beam search needs the KV cache");
  }
  // One that the pool can never hold would wait for ever.
  engine::SequenceSpec spec;
  spec.prompt_tokens = open.prompt_token_ids_size();
  spec.stopping = worker::ToEngine(open.stopping());
  spec.beams = worker::ToEngine(open.sampling().beam());
  if (const int most = engine_.MostBlocks(spec); most > pool_->num_blocks()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sampling.beam.width is ", spec.beams.width, ", and ", most,
        " KV blocks may be needed: this worker has ", pool_->num_blocks()));
  }
  return absl::OkStatus();
}

// Such a sequence holds all its blocks at once, whatever the window; a pool
// that never has them would make all behind it wait for ever.
absl::Status DecodeCore::CheckWithoutCache(const v1::DecodeOpen& open) const {
  if (options_.kv_cache && !open.no_kv_cache()) return absl::OkStatus();
  const int64_t asked =
      int64_t{open.prompt_token_ids_size()} + open.stopping().max_tokens();
  const int positions =
      static_cast<int>(std::min<int64_t>(asked, options_.engine.max_model_len));
  const int total = pool_->counts().total;
  if (BlocksFor(positions) <= total) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInvalidArgument, "CONTEXT_LENGTH_EXCEEDED",
      absl::StrCat("without a KV cache, prompt and max_tokens are together at "
                   "most ",
                   total * pool_->block_size(), " tokens here, not ",
                   positions));
}

absl::Status DecodeCore::Admit(const v1::DecodeOpen& open) const {
  if (TANDEM_FAILPOINT("decode.admit", "fail")) {
    return failpoint::Error(absl::StatusCode::kResourceExhausted);
  }
  if (draining_) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING",
                     "this decode worker is draining");
  }
  if (static_cast<int>(calls_.size()) > options_.max_calls) {
    return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                     absl::StrCat("this decode worker serves its maximum of ",
                                  options_.max_calls, " sequences"));
  }
  // What is in use, what was promised, and what this one may come to.
  const engine::KvPoolCounts counts = pool_->counts();
  int expected = 0;
  for (const auto& [id, call] : calls_) {
    const bool promised =
        (call->phase == Phase::kRemote && !call->landing.granted) ||
        call->phase == Phase::kLocal || call->phase == Phase::kIdle;
    if (promised) expected += ExpectedBlocks(*call);
  }
  const int in_use = counts.live + counts.reserved;
  const int history =
      open.prompt_token_ids_size() + open.output_token_ids_size();
  const int wanted = ExpectedBlocks(history, open.sampling().beam().width(),
                                    options_.kv_cache && !open.no_kv_cache());
  const double limit = options_.admission_factor * counts.total;
  if (in_use + expected > 0 && in_use + expected + wanted > limit) {
    return MakeError(absl::StatusCode::kResourceExhausted, "NO_BLOCKS",
                     absl::StrCat(in_use, " blocks in use and ", expected,
                                  " expected leave no room for ", wanted,
                                  " of ", counts.total));
  }
  return absl::OkStatus();
}

void DecodeCore::CompileThenOpen(Call* call, const v1::DecodeOpen& open) {
  call->compiling_since = loop_->Now();
  call->times.deadline =
      call->compiling_since + absl::Milliseconds(open.deadline_ms());
  call->compiling = options_.grammars->Compile(
      {open.sampling().structured(),
       {open.output_token_ids().begin(), open.output_token_ids().end()},
       open.cache_salt()},
      [this, id = call->id, open](auto grammar) {
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

// Comes here again with the grammar, if the request has one.
absl::Status DecodeCore::Open(Call* call, const v1::DecodeOpen& open) {
  if (TANDEM_FAILPOINT("decode.open", "crash fail stall")) {
    return failpoint::Error();
  }
  absl::Status status = CheckOpen(open);
  if (!status.ok()) return status;
  if (open.sampling().has_structured() && call->grammar == nullptr) {
    CompileThenOpen(call, open);
    return absl::OkStatus();
  }
  absl::StatusOr<worker::AdapterUse> use =
      worker::UseAdapter(options_.adapters, open.adapter());
  if (!use.ok()) return use.status();
  // A second call for a live sequence retires the first: its router has
  // given that one up.
  const std::string key = RequestKey(open.request_id(), open.sequence_index());
  if (const auto it = by_request_.find(key); it != by_request_.end()) {
    Retire(it->second, absl::AbortedError("a newer call took the sequence"));
  }
  status = Admit(open);
  if (!status.ok()) return status;

  ++counters_.calls;
  flight::Record(flight::Event::kCall, {.request = open.request_id(),
                                        .m = open.prompt_token_ids_size() +
                                             open.output_token_ids_size()});
  call->request_key = key;
  call->request_id = open.request_id();
  call->sequence_index = open.sequence_index();
  call->history =
      worker::Join(open.prompt_token_ids(), open.output_token_ids());
  call->prompt_tokens = open.prompt_token_ids_size();
  call->sampling = worker::ToEngine(open.sampling(), open.sequence_index());
  call->rules = worker::ToEngine(open.sampling().rules());
  call->stopping = worker::ToEngine(open.stopping());
  call->attention = worker::ToEngine(open.sampling().attention());
  call->report_work = open.sampling().report_work();
  if (open.has_scoring()) call->scoring = worker::ToEngine(open.scoring());
  call->beams = worker::ToEngine(open.sampling().beam());
  call->cache_salt = open.cache_salt();
  call->cache_owner = open.cache_owner();
  call->adapter = open.adapter();
  call->adapter_use = *std::move(use);
  call->kv_cache = options_.kv_cache && !open.no_kv_cache();
  // Blocks of others are not computed again.
  call->use_prefix_cache = !open.bypass_prefix_cache() && call->kv_cache;
  call->suspect = open.suspect();
  const absl::Time asked =
      call->grammar == nullptr ? loop_->Now() : call->compiling_since;
  call->admitted = asked - absl::Milliseconds(open.age_ms());
  call->times.deadline = asked + absl::Milliseconds(open.deadline_ms());
  by_request_[key] = call->id;
  // A worker was lost behind the last token, and nobody else could tell.
  if (call->grammar != nullptr && call->grammar->IsWhole()) {
    call->decode_started = loop_->Now();
    v1::DecodeFinished finished;
    finished.set_reason(v1::FINISH_REASON_STOP);
    finished.set_stop_token_id(-1);
    FinishCall(call, std::move(finished));
    return absl::OkStatus();
  }
  StartAttempt(call,
               open.has_prefill_worker() ? &open.prefill_worker() : nullptr);
  return absl::OkStatus();
}

void DecodeCore::StartAttempt(Call* call, const v1::WorkerRef* prefill) {
  call->attempt = next_attempt_++;
  call->started_said = false;
  call->landing = Landing();
  call->local = prefill == nullptr;
  v1::DecodeResponse response;
  v1::AttemptOpened* const opened = response.mutable_opened();
  opened->set_attempt(call->attempt);
  const int positions = static_cast<int>(call->history.size());
  const auto hashes =
      call->local ? LocalHashes(*call) : Hashes(*call, "", positions);
  const int cached = cache_.Lookup(hashes) * pool_->block_size();
  opened->set_cached_tokens(cached);
  cache_.Prefetch(hashes);
  if (prefill != nullptr) {
    ++counters_.attempts_remote;
    call->phase = Phase::kRemote;
    attempts_[call->attempt] = call->id;
    flight::Record(flight::Event::kTicket, {.request = call->request_id,
                                            .prefill = prefill->worker_id(),
                                            .m = call->attempt});
    opened->set_ticket(receiver_.IssueTicket(
        {call->request_id, call->sequence_index, call->attempt}, *prefill,
        positions, call->times.deadline - loop_->Now()));
    if (TANDEM_FAILPOINT("decode.ticket", "crash corrupt")) {
      failpoint::Corrupt(opened->ticket().data(), opened->ticket().size());
    }
    Say(call, std::move(response));
    return;
  }
  ++counters_.attempts_local;
  call->phase = Phase::kLocal;
  call->local_since = loop_->Now();
  call->local_uncached = positions - cached;
  Say(call, std::move(response));
  ScheduleUseFreeBlocks();
}

void DecodeCore::Retry(Call* call, const v1::DecodeRetry& retry) {
  if (call->phase == Phase::kNew || call->phase == Phase::kFinishing) return;
  if (retry.attempt() != call->attempt) return;  // about one that is history
  if (call->phase == Phase::kRunning || call->phase == Phase::kLocal) {
    // It committed, or needs no prefill worker: nothing was lost.
    if (call->phase == Phase::kRunning && call->started_said) {
      v1::DecodeResponse response;
      response.mutable_started()->set_attempt(call->attempt);
      Say(call, std::move(response));
    }
    return;
  }
  TANDEM_FAILPOINT("decode.retry", "crash");
  // The router's tokens are the truth: a first token that it delivered is an
  // input now, never sampled again.
  const int held = retry.output_token_ids_size();
  const int known =
      static_cast<int>(call->history.size()) - call->prompt_tokens;
  // It crossed a commit, the tokens behind it and a preemption, all of which
  // are on their way to the router: it will ask again when it holds them.
  if (held < known) return;
  if (retry.has_scoring()) {
    const absl::Status scoring = worker::CheckScoring(
        retry.scoring(), call->prompt_tokens, held, call->beams.width);
    if (!scoring.ok()) {
      Retire(call->id, scoring);
      return;
    }
  }
  if (call->prompt_tokens + held >= options_.engine.max_model_len ||
      held >= call->stopping.max_tokens) {
    Retire(call->id, absl::InvalidArgumentError(absl::StrCat(
                         "retry.output_token_ids holds ", held,
                         " tokens, of at most ", call->stopping.max_tokens,
                         " behind a prompt of ", call->prompt_tokens)));
    return;
  }
  EndAttempt(call, absl::AbortedError("retried by the router"));
  call->scoring = engine::Scoring();
  if (retry.has_scoring()) call->scoring = worker::ToEngine(retry.scoring());
  call->history.resize(call->prompt_tokens);
  call->history.insert(call->history.end(), retry.output_token_ids().begin(),
                       retry.output_token_ids().end());
  call->suspect = call->suspect || retry.suspect();
  StartAttempt(call,
               retry.has_prefill_worker() ? &retry.prefill_worker() : nullptr);
}

void DecodeCore::EndAttempt(Call* call, const absl::Status& why) {
  if (call->phase == Phase::kRemote) {
    attempts_.erase(call->attempt);
    receiver_.EndAttempt(
        {call->request_id, call->sequence_index, call->attempt}, why);
    // Scatters still queued hold their blocks by themselves.
    call->landing = Landing();
    ScheduleUseFreeBlocks();
  }
  if (call->phase == Phase::kRemote || call->phase == Phase::kLocal) {
    call->phase = Phase::kIdle;
  }
}

void DecodeCore::ReportDead(Call* call, const absl::Status& why, bool preempted,
                            const std::string& failed_way) {
  flight::Record(
      flight::Event::kDead,
      {.request = call->request_id, .m = call->attempt, .n = why.raw_code()});
  ++counters_.attempts_dead;
  call->phase = Phase::kIdle;
  v1::DecodeResponse response;
  v1::AttemptDead* const dead = response.mutable_dead();
  dead->set_attempt(call->attempt);
  dead->set_code(static_cast<int>(why.code()));
  dead->set_message(ValidUtf8(std::string(why.message())));
  dead->set_preempted(preempted);
  dead->set_failed_way(failed_way);
  Say(call, std::move(response));
}

void DecodeCore::Retire(CallId id, const absl::Status& status) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  TANDEM_FAILPOINT("decode.retire", "crash");
  flight::Record(flight::Event::kCallEnded,
                 {.request = it->second->request_id, .m = status.raw_code()});
  const std::unique_ptr<Call> call = std::move(it->second);
  calls_.erase(it);
  if (call->compiling != 0) options_.grammars->Cancel(call->compiling);
  EndAttempt(call.get(), status.ok() ? absl::CancelledError("ended") : status);
  engine_.Retire(id);
  const auto by_request = by_request_.find(call->request_key);
  if (by_request != by_request_.end() && by_request->second == id) {
    by_request_.erase(by_request);
  }
  call->stream->Close(status);
  ScheduleUseFreeBlocks();
}

void DecodeCore::Say(Call* call, v1::DecodeResponse response) {
  TANDEM_FAILPOINT("decode.write", "crash delay");
  call->times.said = loop_->Now();
  call->stream->Send(std::move(response));
}

void DecodeCore::Call::OnDrained() {
  if (!paused) return;
  paused = false;
  core->engine_.Pause(id, false);
}

void DecodeCore::Tick(bool judge) {
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
               !TANDEM_FAILPOINT("decode.beat", "drop")) {
      v1::DecodeResponse response;
      response.mutable_beat();
      Say(call.get(), std::move(response));
    }
  }
  for (const auto& [id, status] : ended) Retire(id, status);
  UseFreeBlocks();
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kRemote && call->waits_for_blocks() &&
        RoomIsExpected(*call, worker::kBeat)) {
      receiver_.StartLater(
          {call->request_id, call->sequence_index, call->attempt});
    }
  }
}

int DecodeCore::BlocksFor(int positions) const {
  return (positions + pool_->block_size() - 1) / pool_->block_size();
}

int DecodeCore::BlocksAtOnce(int positions, bool kv_cache) const {
  return kv_cache ? engine_.BlocksAtOnce(positions) : BlocksFor(positions);
}

int DecodeCore::FirstBlock(const Call& call) const {
  const int positions = static_cast<int>(call.history.size());
  return call.kv_cache ? engine_.FirstBlock(positions) : 0;
}

int DecodeCore::FirstWhole(const Call& call) const {
  const bool parts = options_.engine.window.frees_parts();
  if (!parts || (call.landing.offered && !call.landing.windowed_apart)) {
    return FirstBlock(call);
  }
  const int positions = static_cast<int>(call.history.size());
  return call.kv_cache ? engine_.FirstWhole(positions) : 0;
}

int DecodeCore::BlocksAtGrant(const Call& call) const {
  return InWhole(RoomBehind(call, FirstBlock(call)));
}

DecodeCore::Room DecodeCore::RoomBehind(const Call& call, int there) const {
  return {BlocksFor(static_cast<int>(call.history.size())) - there,
          std::max(0, FirstWhole(call) - there)};
}

int DecodeCore::ExpectedBlocks(const Call& call) const {
  return ExpectedBlocks(static_cast<int>(call.history.size()), call.beams.width,
                        call.kv_cache);
}

// Beams share what is full of the history, and grow apart.
int DecodeCore::ExpectedBlocks(int history, int width, bool kv_cache) const {
  const int end = std::min(history + options_.expected_new_tokens,
                           options_.engine.max_model_len);
  if (width <= 1) return BlocksAtOnce(end, kv_cache);
  const int shared = history / pool_->block_size();
  return std::min(shared + width * (BlocksFor(end) - shared),
                  width * BlocksAtOnce(end, kv_cache));
}

engine::BlockHash DecodeCore::Root(const Call& call,
                                   const std::string& formats) const {
  return engine::RootHash(call.cache_salt, pool_->block_size(), formats,
                          worker::AdapterKey(call.adapter));
}

std::vector<engine::BlockHash> DecodeCore::Hashes(const Call& call,
                                                  const std::string& formats,
                                                  int positions) const {
  if (!call.use_prefix_cache) return {};
  return engine::HashBlocks(
      Root(call, formats),
      absl::MakeConstSpan(call.history).first(static_cast<size_t>(positions)),
      pool_->block_size());
}

// The last position is always computed: its logits give the next token. And so
// is the first one whose logits are a score.
int DecodeCore::CacheableTokens(const Call& call) {
  return call.scoring.wanted() ? call.scoring.position - 1
                               : static_cast<int>(call.history.size()) - 1;
}

std::vector<engine::BlockHash> DecodeCore::LocalHashes(const Call& call) const {
  return Hashes(call, "", CacheableTokens(call));
}

bool DecodeCore::has_work() const {
  if (copies_ > 0 || engine_.stats().step_in_flight) return true;
  bool waiting = false, landing = false, running = false;
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kRunning) {
      running = true;
    } else if (call->phase == Phase::kRemote && call->landing.granted) {
      landing = true;
    } else if (call->phase == Phase::kLocal ||
               (call->phase == Phase::kRemote && call->landing.offered)) {
      waiting = true;
    }
  }
  // Of blocks only those of a landing cannot be had for it.
  if (engine_.has_work()) return pool_->available() > 0 || !landing;
  // All that is running is paused, or its grammar not ready.
  return waiting && !running && !landing;
}

v1::WorkerLoad DecodeCore::Load() const {
  const engine::EngineStats& stats = engine_.stats();
  v1::WorkerLoad load =
      worker::ToWire(stats, pool_->counts(), receiver_.slabs());
  load.set_state(draining_ ? v1::WORKER_STATE_DRAINING
                           : v1::WORKER_STATE_READY);
  load.set_running(stats.running);
  int waiting = 0;           // a search of several beams is one that does not
  int64_t local_tokens = 0;  // that wait for blocks
  for (const auto& [id, call] : calls_) {
    waiting += call->phase != Phase::kRunning || call->paused;
    if (call->phase == Phase::kLocal) local_tokens += call->local_uncached;
  }
  load.set_waiting(waiting);
  load.set_queued_tokens(
      static_cast<int32_t>(local_tokens + stats.pending_tokens));
  load.set_tickets(receiver_.tickets());
  load.set_streams(static_cast<int>(calls_.size()));
  return load;
}

}  // namespace tandem::decode_worker
