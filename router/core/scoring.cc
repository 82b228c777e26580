// SPDX-License-Identifier: Apache-2.0
// A request whose prompt is scored. Scores come from whoever computes the
// prompt, each is passed on once and in order, and all of them before the first
// output token: so an attempt that begins anew asks for what is missing alone,
// and one behind the first token for none.
//
// The prefill worker sends its scores before it commits, but the decode worker
// may be heard first: its tokens wait until the scores are here. A prefill
// worker that is lost between the two takes them along, and then the request
// begins again.
//
// Where nothing but scores is wanted (max_tokens 0) a prefill worker is asked
// without a decode worker, or a decode worker without a handoff.

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "router/core/legs.h"
#include "router/core/request.h"
#include "router/placement/compatibility.h"

namespace tandem::router {

v1::ScoringParams Request::ScoresLeft() const {
  v1::ScoringParams scoring;
  scoring.set_alternatives(effective_.output.prompt_logprobs());
  scoring.set_position(next_score_);
  return scoring;
}

// Begins without a decode worker.
void Request::BeginScoring() {
  ++attempt_;  // a worker may still hold an earlier call
  phase_ = Phase::kPrefilling;
  OpenPrefill("");
}

void Request::OnScores(const v1::ScoredTokens& scores) {
  if (phase_ == Phase::kEnding) return;
  std::vector<const v1::Token*> fresh;
  const int begin = next_score_;
  absl::Status wrong;
  for (int i = 0; i < scores.tokens_size() && wrong.ok(); ++i) {
    const v1::Token& token = scores.tokens(i);
    const int64_t position = int64_t{scores.position()} + i;
    if (position < next_score_) {
      context_.counters->set_dropped_tokens(
          context_.counters->dropped_tokens() + 1);
      continue;
    }
    if (position > next_score_ || scores_complete() ||
        token.token_id() != prompt_[static_cast<size_t>(position)]) {
      wrong = absl::InternalError(
          absl::StrCat("a score of position ", position, " came where ",
                       next_score_, " was due, or of another token"));
      continue;
    }
    fresh.push_back(&token);
    ++next_score_;
  }
  if (!fresh.empty()) {
    BindScores();
    SayStarted();
    output_.Scores(begin, fresh);
  }
  if (!wrong.ok()) return ComputingLost(wrong);
  if (fresh.empty()) return;
  if (scores_complete() && std::exchange(waits_for_scores_, false)) {
    decode_->heard = context_.loop->Now();  // it was we who did not listen
    SetReading();
  }
  Pause();
}

// The rest must come from the same weights and number formats, and the tokens
// behind them too.
void Request::BindScores() {
  if (scored_by_) return;
  const std::string& id =
      prefill_ != nullptr ? prefill_ref_.worker_id() : decode_ref_.worker_id();
  if (const Worker* worker = context_.registry->Find(id)) {
    *scored_by_.emplace().mutable_fingerprint() = worker->hello.fingerprint();
    if (!entered_) {  // only scores, of a prefill worker alone
      binding_->Enter(worker->hello, adapter_);
      entered_ = true;
    }
  }
}

bool Request::MayScoreOn(const v1::WorkerHello& worker) const {
  return !scored_by_ || scores_complete() || SameResults(*scored_by_, worker);
}

// Whoever computes the prompt is of no use.
void Request::ComputingLost(const absl::Status& status) {
  if (prefill_ != nullptr) {
    PrefillLost(status);
  } else {
    DecodeLost(status);
  }
}

// The sequence goes on, but nobody has its scores any more.
void Request::ScoresLost(const absl::Status& status) {
  DropLegs();
  context_.counters->set_prefill_retries(context_.counters->prefill_retries() +
                                         1);
  NoteLoss("prefill_lost", status);
  BeginRetry();
  if (CountFailure(status)) Requeue();
}

// Of a prefill worker alone.
void Request::FinishScoring() {
  if (!scores_complete()) {
    PrefillLost(
        absl::InternalError("the prefill call ended before the last score"));
    return;
  }
  work_known_ = true;
  Finish(v1::FINISH_REASON_LENGTH);
}

}  // namespace tandem::router
