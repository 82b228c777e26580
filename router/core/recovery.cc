// SPDX-License-Identifier: Apache-2.0
// What a request does when something is lost, and how it ends. See request.h.
//
// Refusals (no room, draining, restarted) move on at no cost, bounded by time.
// Everything else counts: `max_attempts` without a new token in between, and
// `max_failures` in all. A worker whose call broke while it was computing the
// request makes it suspect; the second crash without a new token in between
// ends it, so that a poison prompt cannot walk through the cluster. After a
// decode worker's crash only a decode worker's token counts.

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "router/core/legs.h"
#include "router/core/request.h"
#include "router/core/set_duration.h"
#include "router/core/work.h"

namespace tandem::router {
namespace {

// The worker turned the call away before it did anything for it.
bool IsRefusal(const absl::Status& status) {
  if (status.code() == absl::StatusCode::kResourceExhausted) return true;
  const std::string reason = ErrorReason(status);
  // An adapter that it let go a moment ago.
  return reason == "DRAINING" || reason == "WORKER_RESTARTED" ||
         reason == "ADAPTER_NOT_FOUND";
}

// The request's grammar came to more than it may take: other workers, which
// would come to the same, are not asked.
bool IsStructuredFailure(const absl::Status& status) {
  return ErrorReason(status) == "STRUCTURED_FAILED";
}

}  // namespace

void Request::OnPrefillClosed(const absl::Status& status) {
  if (phase_ == Phase::kEnding) {
    DropPrefill();
    WriteDone();
    return;
  }
  if (status.ok() && prefill_->done) {
    prefill_.reset();
    if (waits_for_scores_) ScoresLost(absl::InternalError("no scores came"));
    return;
  }
  if (IsRefusal(status) && !prefill_->admitted) {
    prefill_.reset();
    if (phase_ == Phase::kDecoding) return;
    context_.counters->set_refusals(context_.counters->refusals() + 1);
    context_.registry->Refused(prefill_ref_.worker_id());
    RetryPrefill(/*counts=*/false, status);
    return;
  }
  if (IsStructuredFailure(status) && phase_ != Phase::kDecoding) {
    Fail(status);
    return;
  }
  // The decode worker says the same, but may be heard after the next attempt
  // has chosen its way.
  const bool handoff = ErrorReason(status) == "HANDOFF_FAILED";
  if (handoff) {
    const std::string way = ErrorMetadata(status)["way"];
    if (!way.empty()) {
      context_.registry->PairFailed(prefill_ref_.worker_id(),
                                    decode_ref_.worker_id(), way,
                                    std::string(status.message()));
    }
    prefill_computes_ = false;  // no crash: it could say that
  }
  PrefillLost(status.ok()
                  ? absl::InternalError("the prefill call ended without `done`")
                  : status,
              // The worker itself is well where it could say that.
              /*call_failed=*/!handoff);
}

void Request::PrefillLost(const absl::Status& status, bool call_failed) {
  const bool computed = prefill_computes_;
  prefill_computes_ = false;
  DropPrefill();
  if (phase_ == Phase::kEnding) {
    WriteDone();
    return;
  }
  if (decode_ == nullptr && ComputedToTheEnd()) return;
  const bool transport = status.code() == absl::StatusCode::kUnavailable ||
                         status.code() == absl::StatusCode::kCancelled;
  if (transport && call_failed) {
    context_.registry->CallFailed(prefill_ref_, std::string(status.message()));
  }
  // It committed: the sequence no longer needs that worker, unless for scores.
  if (phase_ == Phase::kDecoding) {
    if (!scores_complete()) ScoresLost(status);
    return;
  }
  BeginRetry();
  if (!transport || !computed) {
    RetryPrefill(/*counts=*/true, status);
    return;
  }
  Judge(prefill_ref_,
        [this, status] { RetryPrefill(/*counts=*/true, status); });
}

void Request::OnDecodeClosed(const absl::Status& status) {
  if (phase_ == Phase::kEnding) {
    decode_.reset();
    return;
  }
  if (IsStructuredFailure(status)) {
    decode_.reset();
    Fail(status);
    return;
  }
  if (!opened_ && ErrorReason(status) == "CONTEXT_LENGTH_EXCEEDED") {
    decode_.reset();  // it did nothing, and asking again would not help
    Fail(MakeError(status.code(), "CONTEXT_LENGTH_EXCEEDED",
                   std::string(status.message()),
                   {{"field", "stopping.max_tokens"}}));
    return;
  }
  if (IsRefusal(status) && !opened_) {
    decode_.reset();  // it did nothing
    DropLegs();
    context_.counters->set_refusals(context_.counters->refusals() + 1);
    context_.registry->Refused(decode_ref_.worker_id());
    Requeue();
    return;
  }
  DecodeLost(status.ok() ? absl::InternalError(
                               "the decode call ended without a finish reason")
                         : status);
}

void Request::DecodeLost(const absl::Status& status) {
  const bool computed = decode_computes_;
  // If one leg fails the other is released at once.
  DropLegs();
  if (ComputedToTheEnd()) return;
  const bool transport = status.code() == absl::StatusCode::kUnavailable ||
                         status.code() == absl::StatusCode::kCancelled;
  if (transport) {
    context_.registry->CallFailed(decode_ref_, std::string(status.message()));
  }
  context_.counters->set_decode_retries(context_.counters->decode_retries() +
                                        1);
  NoteLoss("decode_lost", status);
  BeginRetry();
  // A decode worker's crash breaks the handoff to it too, and the prefill
  // worker may be heard first: one failure, not two.
  const bool counted = std::exchange(attempt_counted_, false);
  const auto go_on = [this, counted, status] {
    if (counted || CountFailure(status)) Requeue();
  };
  if (transport && computed) {
    Judge(decode_ref_, go_on);
  } else {
    go_on();
  }
}

void Request::OnVoided(const v1::WorkerRef& worker) {
  const auto is = [&](const v1::WorkerRef& ref) {
    return ref.worker_id() == worker.worker_id() &&
           ref.incarnation() == worker.incarnation();
  };
  const absl::Status status =
      absl::UnavailableError("the worker has started anew");
  if (prefill_ != nullptr && is(prefill_ref_)) PrefillLost(status);
  if (decode_ != nullptr && is(decode_ref_)) DecodeLost(status);
}

// The first time the request goes on at once, as if the worker had crashed:
// whether it did is asked only if a second call breaks.
void Request::Judge(const v1::WorkerRef& worker, Loop::Task go_on) {
  const Registry::Life life = context_.registry->LifeOf(worker);
  if (life == Registry::Life::kLeft) {
    go_on();
    return;
  }
  if (!crashed_in_) {
    NoteCrash(worker);
    go_on();
    return;
  }
  // A crash breaks call and lease together, in either order.
  if (life == Registry::Life::kLost || life == Registry::Life::kReplaced) {
    SecondLoss(worker, std::move(go_on));
    return;
  }
  judge_timer_.Start(context_.options->crash_verdict,
                     [this, worker, go_on = std::move(go_on)]() mutable {
                       SecondLoss(worker, std::move(go_on));
                     });
}

void Request::SecondLoss(const v1::WorkerRef& worker, Loop::Task go_on) {
  AwaitProofOfLife(worker,
                   context_.loop->Now() + context_.options->proof_of_life,
                   std::move(go_on));
}

void Request::AwaitProofOfLife(const v1::WorkerRef& worker, absl::Time end,
                               Loop::Task go_on) {
  if (!BothCrashed(worker)) {
    go_on();
    return;
  }
  const auto replaced = [&](const v1::WorkerRef& ref) {
    return context_.registry->LifeOf(ref) == Registry::Life::kReplaced;
  };
  if (context_.loop->Now() >= end ||
      (replaced(*crashed_in_) && replaced(worker))) {
    context_.host->OnSuspect(*this, *crashed_in_, worker);
    Fail(MakeError(absl::StatusCode::kInternal, "SUSPECT",
                   "two workers crashed while they computed this request"));
    return;
  }
  judge_timer_.Start(context_.options->crash_verdict,
                     [this, worker, end, go_on = std::move(go_on)]() mutable {
                       AwaitProofOfLife(worker, end, std::move(go_on));
                     });
}

// The first may have been acquitted while the second was judged. They are two:
// nothing is placed again on one that has not registered since.
bool Request::BothCrashed(const v1::WorkerRef& second) {
  if (!Crashed(second)) return false;
  if (crashed_in_ && Crashed(*crashed_in_)) return true;
  NoteCrash(second);
  return false;
}

void Request::Acquit(const std::string& incarnation) {
  if (crashed_in_ && crashed_in_->incarnation() == incarnation) {
    crashed_in_.reset();
  }
}

void Request::NoteCrash(const v1::WorkerRef& worker) {
  crashed_in_ = worker;
  crashed_decoding_ = worker.worker_id() == decode_ref_.worker_id();
}

bool Request::Crashed(const v1::WorkerRef& worker) const {
  const Registry::Life life = context_.registry->LifeOf(worker);
  return life == Registry::Life::kLost || life == Registry::Life::kReplaced ||
         life == Registry::Life::kUncertain;
}

bool Request::CountFailure(const absl::Status& why) {
  ++failures_;
  ++attempts_failed_;
  last_failure_ = why;
  if (attempts_failed_ < context_.options->max_attempts &&
      failures_ < context_.options->max_failures) {
    return true;
  }
  // The workers' word stays out of it: it may speak of their insides. The log
  // has it.
  Fail(MakeError(absl::StatusCode::kUnavailable,
                 decode_ != nullptr ? "HANDOFF_FAILED" : "WORKER_LOST",
                 absl::StrCat("gave up after ", failures_,
                              " failures of workers or of links between them, "
                              "which the router's log tells")));
  return false;
}

void Request::RetryPrefill(bool counts, const absl::Status& why) {
  DropPrefill();
  prefill_computes_ = false;
  if (counts) {
    context_.counters->set_prefill_retries(
        context_.counters->prefill_retries() + 1);
    NoteLoss("prefill_lost", why);
    ++handoffs_failed_;
    if (!CountFailure(why)) return;
    attempt_counted_ = true;
  }
  if (ComputedToTheEnd()) return;
  if (decode_ == nullptr) {
    Requeue();
    return;
  }
  BeginRetry();
  if (trace_ != nullptr) trace_->Enter("queue", context_.loop->Now());
  SendRetry();
}

void Request::BeginRetry() {
  lost_in_ = std::exchange(phase_, Phase::kRetrying);
  asked_since_ = absl::InfiniteFuture();  // nothing yet
}

void Request::SendRetry() {
  const absl::Time now = context_.loop->Now();
  if (!retrying_since_) retrying_since_ = now;
  // Then the decode worker does it, lest it tries to its deadline.
  const bool for_long = now - *retrying_since_ >= context_.options->queue_wait;
  bool full = false;
  const std::optional<v1::WorkerRef> prefill =
      last_attempt() || for_long ? std::nullopt
                                 : context_.host->ChoosePrefill(this, &full);
  const bool waits =
      !prefill && full && effective_.placement == v1::PLACEMENT_SPLIT;
  // Asked to wait for one rather than to go without; or too many try again.
  if (!for_long && (waits || !context_.host->TakeRetry(*this))) {
    retry_timer_.Start(context_.options->refusal_pause,
                       [this] { SendRetry(); });
    return;
  }
  v1::DecodeRequest message;
  v1::DecodeRetry* const retry = message.mutable_retry();
  retry->set_attempt(attempt_);
  retry->mutable_output_token_ids()->Add(output_tokens_.begin(),
                                         output_tokens_.end());
  if (prefill) *retry->mutable_prefill_worker() = *prefill;
  retry->set_suspect(suspect());
  if (!scores_complete()) *retry->mutable_scoring() = ScoresLeft();
  next_prefill_ = prefill.value_or(v1::WorkerRef());
  queued_ = context_.registry->Using(next_prefill_->worker_id(),
                                     decode_ref_.worker_id(), history_tokens());
  asked_since_ = context_.loop->Now();
  if (TANDEM_FAILPOINT("router.retry", "crash drop")) return;
  decode_->stream->Send(std::move(message));
}

void Request::Requeue() {
  TANDEM_FAILPOINT("router.requeue", "crash");
  if (ComputedToTheEnd()) return;
  phase_ = Phase::kQueued;
  if (!was_computed_) placed_.reset();  // it goes on waiting
  if (trace_ != nullptr) trace_->Enter("queue", context_.loop->Now());
  if (!std::exchange(waiting_, true)) waiting_since_ = context_.loop->Now();
  context_.host->OnWaits(this);
}

// A worker lost behind its last token, but before it could say so.
bool Request::ComputedToTheEnd() {
  const int count = static_cast<int>(output_tokens_.size());
  if (count == 0) {
    if (!effective_.only_scores() || !scores_complete()) return false;
    DropLegs();
    Finish(v1::FINISH_REASON_LENGTH);
    return true;
  }
  const bool full = count >= effective_.stopping.max_tokens();
  // As the engine says it: where it is full a whole text has no say.
  const bool may_stop = !full || count > effective_.stopping.min_tokens();
  if (may_stop && output_.EndsSequence(output_tokens_.back(), count)) {
    DropLegs();
    Finish(v1::FINISH_REASON_STOP);
    return true;
  }
  if (full) {
    DropLegs();
    Finish(v1::FINISH_REASON_LENGTH);
    return true;
  }
  return false;
}

void Request::Abort() {
  DropLegs();
  Finish(v1::FINISH_REASON_CANCELLED);
}

void Request::OnClosed(absl::Status status) {
  TANDEM_FAILPOINT("router.client_gone", "crash");
  client_.reset();
  End(status.ok() ? absl::CancelledError("the client went away") : status);
}

void Request::Fail(const absl::Status& status) {
  if (phase_ == Phase::kEnded) return;
  End(status);
  // By its name people find it in the logs.
  client_->Close(
      absl::IsInternal(status)
          ? WithMessage(status, absl::StrCat(status.message(), " (request ",
                                             client_id(), ")"))
          : status);
}

void Request::Finish(v1::FinishReason reason) {
  if (phase_ == Phase::kEnding || phase_ == Phase::kEnded) return;
  BeginEnding();
  finish_reason_ = output_.Finished(reason);
  for (const auto& other : other_outputs_) other->Finished(reason);
  EndCalls();
}

void Request::BeginEnding() {
  SayStarted();  // an abort may come before anything was computed
  phase_ = Phase::kEnding;
  judge_timer_.Stop();
  retry_timer_.Stop();
  decode_.reset();
  paused_ = false;
}

// Waits for the prefill worker's timings, if they are still to come.
void Request::EndCalls() {
  if (prefill_ == nullptr || prefill_->done) {
    WriteDone();
    return;
  }
  ending_timer_.Start(context_.options->timings_wait, [this] { WriteDone(); });
}

void Request::WriteDone() {
  if (phase_ != Phase::kEnding) return;
  v1::GenerateDone done = Summary();
  End(absl::OkStatus());
  output_.Done(std::move(done));
  client_->Close(absl::OkStatus());
}

int Request::ReasoningTokens() const {
  int tokens = output_.reasoning_tokens();
  for (const auto& output : other_outputs_) {
    tokens += output->reasoning_tokens();
  }
  return tokens;
}

v1::GenerateDone Request::Summary() const {
  const absl::Time now = context_.loop->Now();
  v1::GenerateDone done;
  v1::Usage* const usage = done.mutable_usage();
  const int prompt = static_cast<int>(prompt_.size());
  const int completion = effective_.beam
                             ? decode_finished_.completion_tokens()
                             : static_cast<int>(output_tokens_.size());
  usage->set_prompt_tokens(prompt);
  usage->set_completion_tokens(completion);
  usage->set_total_tokens(prompt + completion);
  usage->set_cached_tokens(std::min(prompt, cached_tokens_.value_or(0)));
  usage->set_reasoning_tokens(ReasoningTokens());

  Drafts drafts = drafts_;
  drafts += live_drafts_;
  usage->set_accepted_prediction_tokens(drafts.accepted);
  usage->set_rejected_prediction_tokens(drafts.verified - drafts.accepted);

  v1::Timings* const timings = done.mutable_timings();
  const bool split = !prefill_ref_.worker_id().empty();
  SetDuration(
      placed_.value_or(now) - admitted_ +
          (split ? worker_queue_
                 : absl::Microseconds(decode_finished_.local_queue_us())),
      timings->mutable_queue());
  if (split && prefill_done_.prefill_us() > 0) {
    SetDuration(absl::Microseconds(prefill_done_.prefill_us()),
                timings->mutable_prefill());
    SetDuration(absl::Microseconds(prefill_done_.handoff_us()),
                timings->mutable_handoff());
    SetDuration(absl::Microseconds(prefill_done_.handoff_exposed_us()),
                timings->mutable_handoff_exposed());
    timings->set_kv_bytes(prefill_done_.handoff_bytes());
    timings->set_way(prefill_done_.way());
  } else if (!split && decode_finished_.local_prefill_us() > 0) {
    SetDuration(absl::Microseconds(decode_finished_.local_prefill_us()),
                timings->mutable_prefill());
  }
  if (first_token_) {
    SetDuration(*first_token_ - admitted_,
                timings->mutable_time_to_first_token());
    SetDuration(last_token_ - *first_token_, timings->mutable_decode());
    if (completion > 1) {
      SetDuration((last_token_ - *first_token_) / (completion - 1),
                  timings->mutable_time_per_output_token());
    }
  }
  SetDuration(now - admitted_, timings->mutable_total());
  timings->set_retries(failures_);
  timings->set_preemptions(preemptions_ + decode_finished_.preemptions());
  done.mutable_workers()->set_prefill(prefill_ref_.worker_id());
  done.mutable_workers()->set_decode(decode_ref_.worker_id());
  done.set_not_reproducible(mixed_);
  const bool prefill_told = !split || prefill_done_.has_work();
  if (work_known_ && !work_lost_ && prefill_told) {
    *done.mutable_work() = work_;
  }
  return done;
}

// Before the client learns of it: who has read an answer to its end finds its
// place free.
void Request::End(const absl::Status& status) {
  if (phase_ == Phase::kEnded) return;
  // What fails names a reason, so too where another sequence of a group did.
  const bool client_gone =
      client_ == nullptr && !status.ok() && ErrorReason(status).empty();
  DropLegs();
  deadline_timer_.Stop();
  ending_timer_.Stop();
  RequestSummary summary;
  summary.last_failure = last_failure_;
  summary.request_id = effective_.request_id;
  summary.internal_id = absl::BytesToHexString(internal_id_);
  summary.api = api_;
  summary.operation = effective_.chat ? "chat" : "text_completion";
  summary.trace_id = absl::BytesToHexString(caller_.trace_id);
  summary.tenant = tenant_;
  summary.status = status;
  summary.client_gone = client_gone;
  summary.finish_reason = finish_reason_;
  summary.done = Summary();
  summary.failures = failures_;
  phase_ = Phase::kEnded;
  flight::Record(flight::Event::kEnded,
                 {.request = internal_id_,
                  .m = status.raw_code(),
                  .n = static_cast<int>(output_tokens_.size())});
  v1::RouterCounters& counters = *context_.counters;
  if (status.ok()) {
    counters.set_finished_ok(counters.finished_ok() + 1);
  } else if (client_gone) {
    counters.set_cancelled(counters.cancelled() + 1);
  } else {
    counters.set_failed(counters.failed() + 1);
  }
  context_.observer->OnEnded(summary);
  if (trace_ != nullptr) {
    context_.spans->Export(trace_->Finish(summary, effective_,
                                          effective_.adapter.empty()
                                              ? context_.options->model
                                              : effective_.adapter,
                                          context_.loop->Now(), absl::Now()));
  }
  context_.host->OnEnded(this);
}

// Destroying a stream cancels its call. What its worker may have computed and
// has not told of is lost.
void Request::DropPrefill() {
  if (prefill_ != nullptr && !prefill_->done) work_lost_ = true;
  AddWork(std::exchange(prefill_work_, v1::Work()), &work_);
  prefill_.reset();
}

void Request::DropLegs() {
  judge_timer_.Stop();
  retry_timer_.Stop();
  paused_ = waits_for_scores_ = false;
  opened_ = decode_computes_ = prefill_computes_ = false;
  next_prefill_.reset();
  DropPrefill();
  if (decode_ != nullptr) work_lost_ = true;
  AddWork(std::exchange(decode_work_, v1::Work()), &work_);
  drafts_ += std::exchange(live_drafts_, {});
  decode_.reset();
  if (std::exchange(entered_, false)) binding_->Leave();
}

absl::Duration Request::Remaining() const {
  return deadline_ - context_.loop->Now();
}

void Request::ArmDeadline() {
  const absl::Time time_limit = effective_.max_time
                                    ? admitted_ + *effective_.max_time
                                    : absl::InfiniteFuture();
  const absl::Time now = context_.loop->Now();
  if (time_limit < deadline_) {
    deadline_timer_.Start(std::max(time_limit - now, absl::ZeroDuration()),
                          [this] {
                            if (phase_ == Phase::kEnding) return;
                            DropLegs();
                            Finish(v1::FINISH_REASON_TIME_LIMIT);
                          });
    return;
  }
  deadline_timer_.Start(deadline_ - now, [this] {
    if (phase_ == Phase::kEnding) return;
    Fail(MakeError(
        absl::StatusCode::kDeadlineExceeded, "DEADLINE",
        absl::StrCat("not done within ", absl::FormatDuration(told_deadline_),
                     ", in phase ", std::string(PhaseName(phase_)))));
  });
}

}  // namespace tandem::router
