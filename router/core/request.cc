// SPDX-License-Identifier: Apache-2.0
// The two calls of a request, as long as nothing is lost. See request.h.

#include "router/core/request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "router/core/legs.h"
#include "router/core/work.h"
#include "router/core/worker_answers.h"
#include "router/placement/compatibility.h"

namespace tandem::router {

std::string_view PhaseName(Request::Phase phase) {
  switch (phase) {
    case Request::Phase::kQueued:
      return "queued";
    case Request::Phase::kOpening:
      return "opening";
    case Request::Phase::kPrefilling:
      return "prefilling";
    case Request::Phase::kHandingOver:
      return "handing_over";
    case Request::Phase::kDecoding:
      return "decoding";
    case Request::Phase::kRetrying:
      return "retrying";
    case Request::Phase::kEnding:
    case Request::Phase::kEnded:
      return "ending";
  }
  return "";
}

Request::Request(const RequestContext& context, AdmittedRequest admitted,
                 std::string internal_id, std::unique_ptr<ClientStream> client)
    : context_(context),
      effective_(std::move(admitted.effective)),
      prompt_(std::move(admitted.prompt)),
      sequence_index_(admitted.sequence_index),
      binding_(admitted.binding != nullptr ? std::move(admitted.binding)
                                           : std::make_shared<Binding>()),
      api_(admitted.api),
      tenant_(std::move(admitted.tenant)),
      charge_(std::move(admitted.charge)),
      internal_id_(std::move(internal_id)),
      caller_(std::move(admitted.trace)),
      client_(std::move(client)),
      output_(effective_, prompt_, context.codec, client_.get()),
      next_score_(effective_.output.has_prompt_logprobs()
                      ? 1
                      : static_cast<int>(prompt_.size())),
      admitted_(admitted.since.value_or(context.loop->Now())),
      deadline_(std::max(admitted_ + admitted.deadline,
                         context.loop->Now() + absl::Milliseconds(1))),
      told_deadline_(admitted.whole_deadline.value_or(deadline_ - admitted_)),
      waiting_since_(context.loop->Now()),
      last_token_(admitted_),
      deadline_timer_(context.loop),
      judge_timer_(context.loop),
      retry_timer_(context.loop),
      ending_timer_(context.loop) {
  flight::Record(
      flight::Event::kAdmitted,
      {.request = internal_id_, .m = static_cast<int64_t>(prompt_.size())});
  for (int i = 1; effective_.beam && i < effective_.sampling.n(); ++i) {
    other_outputs_.push_back(std::make_unique<Output>(
        effective_, prompt_, context.codec, client_.get(), i));
  }
  if (context_.spans != nullptr && caller_.sampled) {
    trace_ = std::make_unique<RequestTrace>(caller_, internal_id_, admitted_);
    trace_->Enter("queue", admitted_);
  }
  client_->Start(this);
  ArmDeadline();
}

Request::~Request() = default;

void Request::Begin(const Choice& choice, int cached_tokens) {
  const absl::Time now = context_.loop->Now();
  if (!placed_) placed_ = now;
  if (charge_ != nullptr) charge_->Begun();
  decode_ref_ = choice.decode;
  prefill_ref_ = choice.prefill.value_or(v1::WorkerRef());
  adapter_ = choice.adapter;
  local_ = !choice.prefill.has_value();
  opened_ = decode_computes_ = prefill_computes_ = attempt_counted_ = false;
  decode_computed_ = false;
  phase_ = Phase::kOpening;
  asked_since_ = now;
  if (trace_ != nullptr) {
    trace_->Enter("reserve", now, decode_ref_.worker_id());
    trace_->Add("place", choice.begun, now);
  }
  flight::Record(flight::Event::kPlaced, {.request = internal_id_,
                                          .prefill = prefill_ref_.worker_id(),
                                          .decode = decode_ref_.worker_id(),
                                          .m = cached_tokens});
  NotePair();
  queued_ = context_.registry->Using(
      prefill_ref_.worker_id(), decode_ref_.worker_id(),
      std::max(1, history_tokens() - cached_tokens));
  context_.registry->Offered(decode_ref_.worker_id());
  if (decode_ref_.worker_id().empty()) {
    BeginScoring();
    return;
  }
  if (const Worker* worker = context_.registry->Find(decode_ref_.worker_id())) {
    binding_->Enter(worker->hello, adapter_);
    entered_ = true;
  }

  v1::DecodeRequest message;
  v1::DecodeOpen* const open = message.mutable_open();
  open->set_request_id(internal_id_);
  open->set_decode_incarnation(decode_ref_.incarnation());
  open->mutable_prompt_token_ids()->Add(prompt_.begin(), prompt_.end());
  open->mutable_output_token_ids()->Add(output_tokens_.begin(),
                                        output_tokens_.end());
  *open->mutable_sampling() = ToSamplingParams(effective_);
  *open->mutable_stopping() = ToStoppingParams(effective_);
  if (!local_) *open->mutable_prefill_worker() = prefill_ref_;
  open->set_sequence_index(sequence_index_);
  open->set_cache_salt(effective_.cache_salt);
  open->set_cache_owner(effective_.cache_owner);
  if (!adapter_.name().empty()) *open->mutable_adapter() = adapter_;
  open->set_bypass_prefix_cache(effective_.bypass_prefix_cache);
  open->set_deadline_ms(
      std::max<int64_t>(1, absl::ToInt64Milliseconds(Remaining())));
  open->set_age_ms(absl::ToInt64Milliseconds(now - admitted_));
  open->set_suspect(suspect());
  open->set_no_kv_cache(effective_.no_kv_cache);
  if (!scores_complete()) *open->mutable_scoring() = ScoresLeft();
  TANDEM_FAILPOINT("router.open", "crash delay");
  decode_ = std::make_unique<DecodeLeg>(
      this, context_.dialer->DialDecode(decode_ref_, Remaining(), CallTrace()),
      now);
  decode_->stream->Start(decode_.get());
  decode_->stream->Send(std::move(message));
}

void Request::OnDecode(const v1::DecodeResponse& message) {
  const absl::Status sound = CheckAnswer(message, context_.options->vocabulary);
  if (!sound.ok()) {
    if (phase_ != Phase::kEnding) DecodeLost(sound);
    return;
  }
  switch (message.event_case()) {
    case v1::DecodeResponse::kOpened:
      OnOpened(message.opened());
      return;
    case v1::DecodeResponse::kStarted:
      OnAttemptStarted(message.started().attempt());
      return;
    case v1::DecodeResponse::kDead:
      OnDead(message.dead());
      return;
    case v1::DecodeResponse::kTokens:
      // Only of a committed attempt, and nothing new after the end.
      if (phase_ != Phase::kDecoding) {
        context_.counters->set_dropped_tokens(
            context_.counters->dropped_tokens() +
            message.tokens().tokens_size());
        return;
      }
      if (effective_.beam) {
        DecodeLost(absl::InternalError("single tokens of a beam search"));
        return;
      }
      if (message.tokens().has_work()) decode_work_ = message.tokens().work();
      live_drafts_ = {message.tokens().draft_tokens(),
                      message.tokens().accepted_draft_tokens()};
      if (Take(message.tokens(), /*decoded=*/true)) Pause();
      return;
    case v1::DecodeResponse::kScores:
      OnScores(message.scores());
      return;
    case v1::DecodeResponse::kHypothesis:
      if (phase_ != Phase::kDecoding) return;
      if (!effective_.beam) {
        DecodeLost(absl::InternalError("a hypothesis without a beam search"));
        return;
      }
      OnHypothesis(message.hypothesis());
      return;
    case v1::DecodeResponse::kFinished:
      OnDecodeFinished(message.finished());
      return;
    case v1::DecodeResponse::kBeat:
    case v1::DecodeResponse::EVENT_NOT_SET:
      return;
  }
}

// A worker has taken it.
void Request::CountPlacement() {
  v1::RouterCounters& counters = *context_.counters;
  if (local_) {
    counters.set_local_placements(counters.local_placements() + 1);
  } else {
    counters.set_split_placements(counters.split_placements() + 1);
  }
  context_.observer->OnPlaced(!local_);
}

void Request::OnOpened(const v1::AttemptOpened& opened) {
  if (phase_ != Phase::kOpening && phase_ != Phase::kRetrying) return;
  judge_timer_.Stop();
  retry_timer_.Stop();
  if (phase_ == Phase::kOpening) {
    context_.observer->OnStage(Stage::kReserve,
                               context_.loop->Now() - asked_since_);
  }
  if (!opened_) {
    context_.registry->Accepted(decode_ref_.worker_id());
    CountPlacement();
  }
  opened_ = true;
  if (next_prefill_) {
    prefill_ref_ = *std::exchange(next_prefill_, std::nullopt);
    local_ = prefill_ref_.worker_id().empty();
    NotePair();
  }
  attempt_counted_ = false;
  was_computed_ = true;
  waiting_ = false;
  attempt_ = opened.attempt();
  hypotheses_.clear();
  prefill_done_.Clear();
  phase_ = Phase::kPrefilling;
  flight::Record(flight::Event::kOpened,
                 {.request = internal_id_, .m = attempt_});
  if (local_) {
    if (trace_ != nullptr) {
      trace_->Enter("prefill", context_.loop->Now(), decode_ref_.worker_id());
    }
    decode_computes_ = decode_computed_ = true;
    if (!cached_tokens_) cached_tokens_ = opened.cached_tokens();
    SayStarted();
    return;
  }
  TANDEM_FAILPOINT("router.between", "crash stall");
  OpenPrefill(opened.ticket());
}

void Request::OpenPrefill(const std::string& ticket) {
  const absl::Time now = context_.loop->Now();
  if (trace_ != nullptr) {
    trace_->Enter("prefill", now, prefill_ref_.worker_id());
  }
  v1::PrefillRequest message;
  v1::PrefillOpen* const open = message.mutable_open();
  open->set_request_id(internal_id_);
  open->set_prefill_incarnation(prefill_ref_.incarnation());
  open->set_attempt(attempt_);
  open->set_ticket(ticket);
  if (!decode_ref_.worker_id().empty()) {
    *open->mutable_decode_worker() = decode_ref_;
  }
  open->mutable_prompt_token_ids()->Add(prompt_.begin(), prompt_.end());
  open->mutable_output_token_ids()->Add(output_tokens_.begin(),
                                        output_tokens_.end());
  *open->mutable_sampling() = ToSamplingParams(effective_);
  *open->mutable_stopping() = ToStoppingParams(effective_);
  open->set_sequence_index(sequence_index_);
  open->set_cache_salt(effective_.cache_salt);
  open->set_cache_owner(effective_.cache_owner);
  if (!adapter_.name().empty()) *open->mutable_adapter() = adapter_;
  open->set_bypass_prefix_cache(effective_.bypass_prefix_cache);
  open->set_deadline_ms(
      std::max<int64_t>(1, absl::ToInt64Milliseconds(Remaining())));
  open->set_age_ms(absl::ToInt64Milliseconds(now - admitted_));
  open->set_suspect(suspect());
  for (const std::string& way : context_.registry->WaysToAvoid(
           prefill_ref_.worker_id(), decode_ref_.worker_id())) {
    open->add_avoid_ways(way);
  }
  if (!scores_complete()) *open->mutable_scoring() = ScoresLeft();
  prefill_computes_ = false;
  prefill_ = std::make_unique<PrefillLeg>(
      this,
      context_.dialer->DialPrefill(prefill_ref_, Remaining(), CallTrace()),
      now);
  prefill_->stream->Start(prefill_.get());
  prefill_->stream->Send(std::move(message));
  if (paused_) SetReading();
}

void Request::OnAttemptStarted(uint32_t attempt) {
  handoffs_failed_ = 0;
  if (attempt != attempt_) return;
  if (phase_ != Phase::kPrefilling && phase_ != Phase::kHandingOver &&
      phase_ != Phase::kRetrying) {
    return;
  }
  flight::Record(flight::Event::kStarted,
                 {.request = internal_id_, .m = attempt});
  // A retry that crossed the commit: nothing was lost after all, but for scores
  // that were on their way.
  if (!scores_complete() && prefill_ == nullptr) {
    ScoresLost(absl::UnavailableError("the prompt's scores were lost"));
    return;
  }
  judge_timer_.Stop();
  retry_timer_.Stop();
  retrying_since_.reset();
  next_prefill_.reset();
  phase_ = Phase::kDecoding;
  if (!scores_complete()) {
    waits_for_scores_ = true;
    SetReading();
  }
  decode_computes_ = decode_computed_ = true;
  prefill_computes_ = false;
  context_.registry->CallWorked(decode_ref_.worker_id());
  SayStarted();
}

void Request::OnDead(const v1::AttemptDead& dead) {
  if (dead.attempt() != attempt_ || phase_ == Phase::kEnding) return;
  // Asked for already, or about to be.
  if (phase_ == Phase::kRetrying) return;
  decode_computes_ = false;
  const absl::Status why(static_cast<absl::StatusCode>(dead.code()),
                         dead.message());
  // The prefill worker let it go with its own call, which says why; it has
  // ended well where nothing is left to decode.
  if (absl::IsCancelled(why) && prefill_ != nullptr) return;
  if (!dead.failed_way().empty() && !prefill_ref_.worker_id().empty()) {
    context_.registry->PairFailed(prefill_ref_.worker_id(),
                                  decode_ref_.worker_id(), dead.failed_way(),
                                  dead.message());
  }
  if (dead.preempted()) {
    context_.counters->set_preempted_attempts(
        context_.counters->preempted_attempts() + 1);
    flight::Record(flight::Event::kPreempted,
                   {.request = internal_id_,
                    .decode = decode_ref_.worker_id(),
                    .m = attempt_});
    if (trace_ != nullptr) {
      trace_->Note("preempted", context_.loop->Now(), decode_ref_.worker_id());
    }
    if (++preemptions_ > context_.options->max_preemptions) {
      Fail(MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                     "the sequence was preempted too often: the decode "
                     "workers have too little memory for their load",
                     {}, absl::Seconds(2)));
      return;
    }
  }
  if (why.code() == absl::StatusCode::kUnavailable && prefill_computes_) {
    // Its link broke: did the prefill worker crash with it?
    PrefillLost(why, /*call_failed=*/false);
    return;
  }
  RetryPrefill(/*counts=*/!dead.preempted(), why);
}

void Request::OnDecodeFinished(const v1::DecodeFinished& finished) {
  // Of structured output, a worker may find what others gave to be all.
  const bool whole = effective_.structured && !output_tokens_.empty() &&
                     phase_ == Phase::kOpening;
  if (phase_ != Phase::kDecoding && !whole) return;
  decode_finished_ = finished;
  AddWork(finished.work(), &work_);
  decode_work_.Clear();
  live_drafts_ = {finished.draft_tokens(), finished.accepted_draft_tokens()};
  work_lost_ = work_lost_ || !finished.has_work();
  work_known_ = true;
  if (!cached_tokens_) cached_tokens_ = finished.cached_tokens();
  if (finished.reason() == v1::FINISH_REASON_UNSPECIFIED) {
    DecodeLost(absl::InternalError("the decode worker gave no finish reason"));
    return;
  }
  if (effective_.beam) {
    FinishBeams();
  } else {
    Finish(finished.reason());
  }
}

void Request::OnPrefill(const v1::PrefillResponse& message) {
  const absl::Status sound = CheckAnswer(message, context_.options->vocabulary);
  if (!sound.ok()) return PrefillLost(sound);
  switch (message.event_case()) {
    case v1::PrefillResponse::kStarted:
      prefill_->admitted = true;
      prefill_computes_ = true;
      retrying_since_.reset();
      context_.registry->CallWorked(prefill_ref_.worker_id());
      if (!cached_tokens_) cached_tokens_ = message.started().cached_tokens();
      worker_queue_ = absl::Microseconds(message.started().queue_us());
      if (decode_ref_.worker_id().empty()) BindScores();
      if (phase_ == Phase::kPrefilling) SayStarted();
      if (effective_.only_scores()) {
        if (decode_ref_.worker_id().empty()) CountPlacement();
        was_computed_ = true;
        waiting_ = false;
      }
      return;
    case v1::PrefillResponse::kScores:
      prefill_->admitted = true;
      OnScores(message.scores());
      return;
    case v1::PrefillResponse::kFirstToken:
      prefill_->admitted = true;
      OnFirstToken(message.first_token());
      return;
    case v1::PrefillResponse::kDone:
      prefill_->done = true;
      prefill_computes_ = false;
      prefill_done_ = message.done();
      if (trace_ != nullptr && !prefill_done_.way().empty()) {
        const absl::Time now = context_.loop->Now();
        trace_->Add("handoff",
                    now - absl::Microseconds(prefill_done_.handoff_us()), now,
                    prefill_ref_.worker_id(), prefill_done_.way());
      }
      AddWork(prefill_done_.work(), &work_);
      prefill_work_.Clear();
      work_lost_ = work_lost_ || !prefill_done_.has_work();
      if (!prefill_done_.way().empty()) {
        context_.registry->PairWorked(prefill_ref_.worker_id(),
                                      decode_ref_.worker_id(),
                                      prefill_done_.way());
      }
      if (phase_ == Phase::kEnding) {
        WriteDone();
      } else if (effective_.only_scores()) {
        FinishScoring();
      }
      return;
    case v1::PrefillResponse::kBeat:
    case v1::PrefillResponse::EVENT_NOT_SET:
      return;
  }
}

void Request::OnFirstToken(const v1::PrefillFirstToken& first) {
  TANDEM_FAILPOINT("router.first_token", "crash");
  flight::Record(flight::Event::kFirstToken,
                 {.request = internal_id_, .m = attempt_});
  if (phase_ == Phase::kEnding) return;
  if (!scores_complete()) {
    PrefillLost(absl::InternalError("a token came before the last score"));
    return;
  }
  if (effective_.beam) {
    // The decode worker takes it from the commit: there is more than one.
    if (phase_ == Phase::kPrefilling) phase_ = Phase::kHandingOver;
    SayStarted();
    return;
  }
  v1::DecodedTokens tokens;
  tokens.set_position(first.position());
  *tokens.add_tokens() = first.token();
  if (phase_ == Phase::kPrefilling) phase_ = Phase::kHandingOver;
  SayStarted();
  prefill_work_ = first.work();
  if (!Take(tokens, /*decoded=*/false)) return;
  if (first.finish_reason() != v1::FINISH_REASON_UNSPECIFIED) {
    // No commit follows: the decode worker's part is over, and what it did
    // for a commit before this one stays untold.
    work_lost_ = work_lost_ || decode_computed_;
    work_known_ = true;
    Finish(first.finish_reason());
  }
}

void Request::Tick(bool judge) {
  const absl::Time now = context_.loop->Now();
  const RouterOptions& options = *context_.options;
  if (paused_) {
    // Who takes something is slow and no more.
    const size_t unsent = client_->unsent();
    if (unsent < paused_unsent_) paused_since_ = now;
    paused_unsent_ = unsent;
  }
  if (paused_ && now - paused_since_ > options.stall_limit) {
    Fail(MakeError(absl::StatusCode::kResourceExhausted, "SLOW_CLIENT",
                   absl::StrCat("the client took nothing for ",
                                absl::FormatDuration(options.stall_limit))));
    return;
  }
  if (prefill_ != nullptr) {
    if (judge && !paused_ && now - prefill_->heard > options.silence) {
      PrefillLost(absl::UnavailableError("the prefill worker went silent"));
      return;
    }
    if (prefill_->stream->unsent() == 0) {
      v1::PrefillRequest beat;
      beat.mutable_beat()->set_not_reading(paused_ && !scores_complete());
      prefill_->stream->Send(std::move(beat));
    }
  }
  if (decode_ != nullptr) {
    if (judge && !paused_ && !waits_for_scores_ &&
        now - decode_->heard > options.silence) {
      DecodeLost(absl::UnavailableError("the decode worker went silent"));
      return;
    }
    const bool asked = phase_ == Phase::kOpening || phase_ == Phase::kRetrying;
    if (judge && !paused_ && asked && now - asked_since_ > options.open_limit) {
      DecodeLost(absl::UnavailableError(
          "the decode worker did not open an attempt in time"));
      return;
    }
    if (decode_->stream->unsent() == 0) {
      v1::DecodeRequest beat;
      beat.mutable_beat()->set_not_reading(paused_ || waits_for_scores_);
      decode_->stream->Send(std::move(beat));
    }
  }
}

const TraceContext& Request::CallTrace() const {
  return trace_ != nullptr ? trace_->context() : caller_;
}

void Request::NoteLoss(std::string_view cause, const absl::Status& status) {
  const AttemptLoss loss{
      .cause = cause,
      .stage = PhaseName(phase_ == Phase::kRetrying ? lost_in_ : phase_),
      .internal_id = absl::BytesToHexString(internal_id_),
      .prefill_worker = prefill_ref_.worker_id(),
      .decode_worker = decode_ref_.worker_id(),
      .status = status};
  context_.observer->OnRetry(loss);
  flight::Record(flight::Event::kAttemptLost, {.request = internal_id_,
                                               .prefill = loss.prefill_worker,
                                               .decode = loss.decode_worker,
                                               .word = loss.stage,
                                               .m = status.raw_code()});
  if (trace_ == nullptr) return;
  trace_->Lost(context_.loop->Now(), loss);
  trace_->Enter("queue", context_.loop->Now());
}

void Request::NotePair() {
  const Worker* const prefill =
      context_.registry->Find(prefill_ref_.worker_id());
  const Worker* const decode = context_.registry->Find(decode_ref_.worker_id());
  if (prefill != nullptr && decode != nullptr &&
      !SameResults(prefill->hello, decode->hello)) {
    mixed_ = true;
  }
}

bool Request::MayContinueOn(const v1::WorkerHello& decode) const {
  return binding_->Allows(decode);
}

v1::AdapterRef Request::AdapterOn(const v1::WorkerHello& worker) const {
  v1::AdapterRef ref;
  if (effective_.adapter.empty()) return ref;
  ref.set_digest(AdapterDigest(worker, effective_.adapter));
  if (!ref.digest().empty()) ref.set_name(effective_.adapter);
  return ref;
}

bool Request::HasAdapter(const v1::WorkerHello& worker) const {
  if (effective_.adapter.empty()) return true;
  const std::string digest = AdapterDigest(worker, effective_.adapter);
  const bool begun = !output_tokens_.empty() || scored_by_;
  // A worker that was away may have what others let go since.
  const std::string wanted =
      begun ? adapter_.digest()
            : context_.host->DigestInService(effective_.adapter);
  return !digest.empty() && (wanted.empty() || digest == wanted);
}

void Request::Describe(v1::RequestStatus* status) const {
  status->set_request_id(effective_.request_id);
  status->set_internal_id(absl::BytesToHexString(internal_id_));
  status->set_phase(std::string(PhaseName(phase_)));
  const int64_t nanos =
      absl::ToInt64Nanoseconds(context_.loop->Now() - admitted_);
  status->mutable_age()->set_seconds(nanos / 1'000'000'000);
  status->mutable_age()->set_nanos(static_cast<int>(nanos % 1'000'000'000));
  status->set_prompt_tokens(static_cast<int>(prompt_.size()));
  status->set_output_tokens(static_cast<int>(output_tokens_.size()));
  status->set_prefill_worker_id(prefill_ref_.worker_id());
  status->set_decode_worker_id(decode_ref_.worker_id());
  status->set_attempts(failures_ + (opened_ ? 1 : 0));
  status->set_suspect(suspect());
}

}  // namespace tandem::router
