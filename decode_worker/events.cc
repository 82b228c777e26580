// SPDX-License-Identifier: Apache-2.0
// What the engine reports, and what the router is told of it. See core.h.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "decode_worker/call.h"
#include "decode_worker/core.h"
#include "worker/convert.h"

namespace tandem::decode_worker {

void DecodeCore::SayAttemptStarted(Call* call) {
  if (std::exchange(call->started_said, true)) return;
  if (TANDEM_FAILPOINT("decode.started", "crash drop")) return;
  v1::DecodeResponse response;
  response.mutable_started()->set_attempt(call->attempt);
  Say(call, std::move(response));
}

void DecodeCore::SendTokens(Call* call, int position, v1::Token token) {
  SayAttemptStarted(call);
  v1::DecodeResponse response;
  response.mutable_tokens()->set_position(position);
  *response.mutable_tokens()->add_tokens() = std::move(token);
  if (call->report_work) {
    *response.mutable_tokens()->mutable_work() = worker::ToWire(call->work);
  }
  const engine::DraftCounts drafts = call->all_drafts();
  response.mutable_tokens()->set_draft_tokens(
      static_cast<int32_t>(drafts.verified));
  response.mutable_tokens()->set_accepted_draft_tokens(
      static_cast<int32_t>(drafts.accepted));
  Say(call, std::move(response));
}

void DecodeCore::OnWork(CallId id, const engine::Work& work) {
  const auto it = calls_.find(id);
  if (it != calls_.end()) it->second->work += work;
}

void DecodeCore::OnToken(CallId id, int position,
                         const engine::SampledToken& token,
                         std::optional<engine::Finish> finish) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  Call* const call = it->second.get();
  if (call->local && !call->started_said) call->decode_started = loop_->Now();
  call->history.push_back(token.token_id);
  call->live_drafts = engine_.drafts(id);
  if (std::exchange(call->suspect, false)) engine_.ShareSteps(id);
  TANDEM_FAILPOINT("decode.sampled", "crash");
  SendTokens(call, position, worker::ToWire(token));
  if (finish.has_value()) {
    v1::DecodeFinished finished;
    finished.set_reason(worker::ToWire(*finish));
    finished.set_stop_token_id(
        *finish == engine::Finish::kStop
            ? worker::StopTokenOf(call->stopping, token.token_id)
            : -1);
    FinishCall(call, std::move(finished));
    return;
  }
  PauseIfUnread(call);
}

void DecodeCore::PauseIfUnread(Call* call) {
  if (call->paused || call->stream->unsent() <= options_.max_unsent) return;
  call->Pause(call->stream->unsent(), loop_->Now());
  engine_.Pause(call->id, true);
}

void DecodeCore::OnScores(CallId id, int position,
                          absl::Span<const engine::SampledToken> scores,
                          std::optional<engine::Finish> finish) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  Call* const call = it->second.get();
  for (v1::ScoredTokens& part : worker::ToWire(position, scores)) {
    v1::DecodeResponse response;
    *response.mutable_scores() = std::move(part);
    Say(call, std::move(response));
  }
  call->scoring.position = position + static_cast<int>(scores.size());
  // None are left to be asked for, should it be computed again.
  if (call->scoring.position >= call->prompt_tokens) {
    call->scoring = engine::Scoring();
  }
  if (!finish.has_value()) {
    PauseIfUnread(call);
    return;
  }
  call->decode_started = loop_->Now();
  SayAttemptStarted(call);
  v1::DecodeFinished finished;
  finished.set_reason(worker::ToWire(*finish));
  finished.set_stop_token_id(-1);
  FinishCall(call, std::move(finished));
}

void DecodeCore::FinishCall(Call* call, v1::DecodeFinished finished) {
  TANDEM_FAILPOINT("decode.finish", "crash");
  finished.set_decode_us(
      absl::ToInt64Microseconds(loop_->Now() - call->decode_started));
  if (call->local) {
    finished.set_local_queue_us(
        absl::ToInt64Microseconds(call->local_started - call->local_since));
    finished.set_local_prefill_us(
        absl::ToInt64Microseconds(call->decode_started - call->local_started));
  }
  finished.set_cached_tokens(call->cached_tokens);
  finished.set_preemptions(call->recomputed_here);
  *finished.mutable_work() = worker::ToWire(call->work);
  call->EndStay();
  finished.set_draft_tokens(static_cast<int32_t>(call->drafts.verified));
  finished.set_accepted_draft_tokens(
      static_cast<int32_t>(call->drafts.accepted));
  v1::DecodeResponse response;
  *response.mutable_finished() = std::move(finished);
  Say(call, std::move(response));
  ++counters_.finished;
  call->phase = Phase::kFinishing;
  Retire(call->id, absl::OkStatus());
}

void DecodeCore::OnBeams(CallId id, const engine::BeamResult& result) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  Call* const call = it->second.get();
  SayAttemptStarted(call);
  for (size_t i = 0; i < result.best.size(); ++i) {
    SendHypothesis(call, static_cast<int>(i), result.best[i]);
  }
  v1::DecodeFinished finished;
  finished.set_reason(!result.best.empty() && result.best[0].stopped
                          ? v1::FINISH_REASON_STOP
                          : v1::FINISH_REASON_LENGTH);
  finished.set_stop_token_id(-1);
  finished.set_completion_tokens(result.tokens);
  FinishCall(call, std::move(finished));
}

void DecodeCore::SendHypothesis(Call* call, int index,
                                const engine::Hypothesis& hypothesis) {
  for (size_t begin = 0; begin < hypothesis.tokens.size();
       begin += worker::kTokensPerMessage) {
    const size_t end =
        std::min(begin + worker::kTokensPerMessage, hypothesis.tokens.size());
    v1::DecodeResponse response;
    v1::DecodedHypothesis* const part = response.mutable_hypothesis();
    part->set_index(index);
    part->set_score(hypothesis.score);
    for (size_t i = begin; i < end; ++i) {
      *part->add_tokens() = worker::ToWire(hypothesis.tokens[i]);
    }
    if (end == hypothesis.tokens.size()) {
      part->set_reason(hypothesis.stopped ? v1::FINISH_REASON_STOP
                                          : v1::FINISH_REASON_LENGTH);
    }
    Say(call, std::move(response));
  }
}

void DecodeCore::OnPreempted(CallId id) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return;
  Call* const call = it->second.get();
  TANDEM_FAILPOINT("decode.preempt", "crash");
  call->EndStay();
  if (++call->preemptions > options_.max_preemptions) {
    Retire(id, MakeError(absl::StatusCode::kResourceExhausted, "PREEMPTED",
                         absl::StrCat("preempted ", call->preemptions,
                                      " times for want of blocks")));
    return;
  }
  const int history = static_cast<int>(call->history.size());
  if (call->local || history <= options_.local_recompute_tokens) {
    // Short enough to recompute here; or the router has chosen this worker.
    ++call->recomputed_here;
    call->phase = Phase::kLocal;
    call->local_uncached =
        history - cache_.Lookup(LocalHashes(*call)) * pool_->block_size();
    return;
  }
  ReportDead(call,
             absl::ResourceExhaustedError("preempted: the KV pool is full"),
             /*preempted=*/true, "");
}

bool DecodeCore::OnBlocksShort(int blocks) {
  // The youngest grants first, and only those to which nothing came yet.
  bool freed = false;
  std::vector<Call*> granted;
  for (const auto& [id, call] : calls_) {
    if (call->phase == Phase::kRemote && call->landing.granted) {
      granted.push_back(call.get());
    }
  }
  std::sort(granted.begin(), granted.end(), [](const Call* a, const Call* b) {
    return a->admitted > b->admitted;
  });
  for (Call* const call : granted) {
    if (pool_->available() >= blocks) break;
    if (receiver_.has_landed(
            {call->request_id, call->sequence_index, call->attempt})) {
      continue;
    }
    TANDEM_FAILPOINT("decode.revoke", "crash");
    flight::Record(flight::Event::kRevoked,
                   {.request = call->request_id, .m = call->attempt});
    ++counters_.grants_revoked;
    const absl::Status why =
        absl::ResourceExhaustedError("the grant was revoked: blocks are short");
    EndAttempt(call, why);
    ReportDead(call, why, /*preempted=*/true, "");
    freed = true;
  }
  return freed;
}

void DecodeCore::OnStepFailed(const std::vector<CallId>& ids,
                              const absl::Status& status) {
  for (const CallId id : ids) Retire(id, status);
}

}  // namespace tandem::decode_worker
