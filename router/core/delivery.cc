// SPDX-License-Identifier: Apache-2.0
// Tokens on their way to the client: each position once and in order, and no
// faster than the client reads. See request.h.

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "router/core/legs.h"
#include "router/core/request.h"
#include "router/core/work.h"

namespace tandem::router {

bool Request::Take(const v1::DecodedTokens& tokens, bool decoded) {
  const absl::Time now = context_.loop->Now();
  int fresh = 0;
  Output::Verdict verdict = Output::Verdict::kGoesOn;
  for (int i = 0; i < tokens.tokens_size(); ++i) {
    const v1::Token& token = tokens.tokens(i);
    const int64_t position = int64_t{tokens.position()} + i;
    const int64_t next = history_tokens();
    if (position < next) {
      const int64_t nth = position - static_cast<int64_t>(prompt_.size());
      if (nth < 0 || output_tokens_[nth] != token.token_id()) {
        Fail(MakeError(absl::StatusCode::kInternal, "INTERNAL",
                       absl::StrCat("a worker contradicts the token at "
                                    "position ",
                                    position)));
        return false;
      }
      context_.counters->set_dropped_tokens(
          context_.counters->dropped_tokens() + 1);
      continue;
    }
    if (position > next) {
      DecodeLost(absl::InternalError(absl::StrCat(
          "position ", position, " came where ", next, " was due")));
      return false;
    }
    if (static_cast<int>(output_tokens_.size()) >=
        effective_.stopping.max_tokens()) {
      DecodeLost(absl::InternalError("more tokens came than were asked for"));
      return false;
    }
    output_tokens_.push_back(token.token_id());
    ++fresh;
    verdict = output_.Add(token);
    if (verdict == Output::Verdict::kStopString) break;
  }
  if (fresh == 0) return true;
  NoteFresh(fresh, decoded, now);
  if (effective_.output.work()) {
    v1::Work so_far = work_;
    AddWork(prefill_work_, &so_far);
    AddWork(decode_work_, &so_far);
    output_.Worked(std::move(so_far));
  }
  TANDEM_FAILPOINT("router.relay", "crash delay");
  output_.Flush();
  context_.observer->OnStage(Stage::kRelay, context_.loop->Now() - now);
  if (verdict == Output::Verdict::kStopString) {
    DropLegs();  // both calls end at once
    Finish(v1::FINISH_REASON_STOP);
    return false;
  }
  return true;
}

void Request::NoteFresh(int fresh, bool decoded, absl::Time now) {
  if (queued_) {
    context_.registry->Computed(*queued_);
    queued_.reset();
  }
  if (charge_ != nullptr) charge_->Generated(fresh);
  attempts_failed_ = 0;
  // What crashes decode workers may well have a first token each time.
  if (decoded || !crashed_decoding_) crashed_in_.reset();
  context_.counters->set_tokens(context_.counters->tokens() + fresh);
  if (!first_token_) {
    first_token_ = now;
    context_.observer->OnFirstToken(fresh, now - admitted_);
    context_.host->OnFirstToken();
  } else {
    context_.observer->OnTokens(fresh, now - last_token_);
  }
  last_token_ = now;
  if (trace_ != nullptr) trace_->Enter("decode", now, decode_ref_.worker_id());
}

void Request::SayStarted() {
  binding_->Keep();  // the client is told its fingerprint
  if (output_.started()) return;
  output_.Started(effective_.request_id, context_.options->model,
                  static_cast<int>(prompt_.size()), cached_tokens_.value_or(0),
                  binding_->SystemFingerprint());
}

void Request::Pause() {
  if (paused_ || (decode_ == nullptr && prefill_ == nullptr) ||
      client_->unsent() <= context_.options->max_unsent) {
    return;
  }
  paused_ = true;
  paused_since_ = context_.loop->Now();
  paused_unsent_ = client_->unsent();
  SetReading();
}

// Of the prefill worker only scores can be too many.
void Request::SetReading() {
  if (decode_ != nullptr) {
    decode_->stream->PauseReading(paused_ || waits_for_scores_);
  }
  if (prefill_ != nullptr) {
    prefill_->stream->PauseReading(paused_ && !scores_complete());
  }
}

void Request::OnDrained() {
  if (!std::exchange(paused_, false)) return;
  // It was we who did not listen.
  const absl::Time now = context_.loop->Now();
  if (decode_ != nullptr) decode_->heard = now;
  if (prefill_ != nullptr) prefill_->heard = now;
  if (asked_since_ < now) asked_since_ = now;
  SetReading();
}

}  // namespace tandem::router
