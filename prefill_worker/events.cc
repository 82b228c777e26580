// SPDX-License-Identifier: Apache-2.0
// What the engine and the sender report. See core.h.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/failpoint.h"
#include "common/flight_recorder.h"
#include "prefill_worker/call.h"
#include "prefill_worker/core.h"
#include "worker/convert.h"

namespace tandem::prefill_worker {

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
  // It has what the chunk's end sees; rounded down.
  const int first = engine_.FirstBlock(end);
  const int taken =
      pool_->InWhole(BlocksFor(end) - first, engine_.FirstWhole(end) - first) -
      1;
  const int promised =
      std::min({call->promised_blocks, left, BlocksAtOnce(*call) - taken});
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
    call->granted = loop_->Now();
    call->keep_from = options_.engine.window.frees_parts()
                          ? grant.windowed_begin
                          : grant.position_begin;
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
