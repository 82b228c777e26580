// SPDX-License-Identifier: Apache-2.0
#include "router/core/sequence_group.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "router/core/work.h"
#include "router/text/tool_call_output.h"

namespace tandem::router {

class SequenceGroup::Member final : public ClientStream {
 public:
  Member(SequenceGroup* group, int index) : group_(group), index_(index) {}
  ~Member() override {
    if (group_ != nullptr) group_->OnMemberGone(index_);
  }

  void Start(StreamHandler<v1::GenerateRequest>* handler) override {
    handler_ = handler;
  }
  void Send(v1::GenerateResponse event) override {
    if (group_ != nullptr) group_->OnEvent(index_, std::move(event));
  }
  size_t unsent() const override {
    const bool relays =
        group_ != nullptr && group_->streams() && group_->client_ != nullptr;
    return relays ? group_->client_->unsent() : 0;
  }
  void PauseReading(bool) override {}
  void Close(absl::Status status) override {
    SequenceGroup* const group = std::exchange(group_, nullptr);
    if (group == nullptr) return;
    group->parts_[static_cast<size_t>(index_)].stream = nullptr;
    group->OnMemberClosed(index_, status);
  }
  std::string peer() const override {
    return group_ != nullptr && group_->client_ != nullptr
               ? group_->client_->peer()
               : "";
  }

  // The group wants nothing more of it.
  StreamHandler<v1::GenerateRequest>* Detach() {
    group_ = nullptr;
    return handler_;
  }
  StreamHandler<v1::GenerateRequest>* handler() const { return handler_; }

 private:
  SequenceGroup* group_;  // null: closed
  const int index_;
  StreamHandler<v1::GenerateRequest>* handler_ = nullptr;
};

SequenceGroup::SequenceGroup(Loop* loop, GroupHost* host,
                             AdmittedRequest admitted,
                             std::unique_ptr<ClientStream> client)
    : loop_(loop),
      host_(host),
      admitted_(std::move(admitted)),
      begun_(admitted_.since.value_or(loop->Now())),
      returned_(admitted_.effective.sampling.n()),
      client_(std::move(client)),
      parts_(static_cast<size_t>(admitted_.effective.sampling.best_of())),
      spread_timer_(loop) {
  client_->Start(this);
}

SequenceGroup::~SequenceGroup() {
  for (Part& part : parts_) {
    if (part.stream != nullptr) part.stream->Detach();
  }
}

void SequenceGroup::Start() {
  StartPart(0);
  // Without caches there is nothing to wait for.
  if (admitted_.effective.bypass_prefix_cache &&
      !admitted_.effective.output.has_prompt_logprobs()) {
    StartOthers();  // tokens come behind the prompt's scores
  }
}

void SequenceGroup::StartPart(int index) {
  AdmittedRequest admitted = admitted_;
  admitted.sequence_index = static_cast<uint32_t>(index);
  admitted.binding = binding_;
  if (index > 0) {
    const absl::Duration spent = loop_->Now() - begun_;
    admitted.since.reset();  // its own times count from now
    admitted.whole_deadline = admitted.deadline;
    admitted.deadline =
        std::max(admitted.deadline - spent, absl::Milliseconds(1));
    if (admitted.effective.max_time) {
      *admitted.effective.max_time =
          std::max(*admitted.effective.max_time - spent, absl::Milliseconds(1));
    }
    // The prompt is everybody's.
    admitted.effective.output.clear_prompt_logprobs();
  }
  if (!streams() && !admitted.effective.output.has_logprobs()) {
    admitted.effective.output.set_logprobs(0);  // what they are compared by
  }
  if (counts_ids(index)) admitted.effective.output.set_return_token_ids(true);
  auto stream = std::make_unique<Member>(this, index);
  parts_[static_cast<size_t>(index)].stream = stream.get();
  host_->StartSequence(std::move(admitted), std::move(stream));
}

void SequenceGroup::StartOthers() {
  if (std::exchange(spread_, true)) return;
  for (int i = 1; i < static_cast<int>(parts_.size()) && !ended_; ++i) {
    StartPart(i);
  }
}

void SequenceGroup::OnEvent(int index, v1::GenerateResponse event) {
  switch (event.event_case()) {
    case v1::GenerateResponse::kStarted:
      // Whichever comes first: no delta may precede it.
      if (std::exchange(started_, true)) return;
      *event.mutable_started()->mutable_output() = admitted_.effective.output;
      if (counts_ids(index)) event.mutable_started()->clear_prompt_token_ids();
      client_->Send(std::move(event));
      return;
    case v1::GenerateResponse::kDelta:
      OnDelta(index, event.mutable_delta());
      return;
    case v1::GenerateResponse::kPromptLogprobs:
      client_->Send(std::move(event));
      return;
    case v1::GenerateResponse::kFinished:
      OnFinished(index, event.mutable_finished());
      return;
    case v1::GenerateResponse::kDone:
      parts_[static_cast<size_t>(index)].done = event.done();
      return;
    case v1::GenerateResponse::EVENT_NOT_SET:
      return;
  }
}

void SequenceGroup::OnDelta(int index, v1::GenerateDelta* delta) {
  Part& part = parts_[static_cast<size_t>(index)];
  ++part.deltas;
  for (const v1::TokenLogprob& token : delta->logprobs()) {
    part.logprob += double{token.logprob()};
    ++part.tokens;
  }
  if (counts_ids(index)) delta->clear_token_ids();
  if (streams()) {
    const bool empty =
        delta->text().empty() && delta->reasoning_content().empty() &&
        delta->tool_calls().empty() && delta->logprobs().empty() &&
        delta->token_ids().empty() && delta->attention().empty();
    delta->set_index(index);
    if (!empty) SendDelta(std::move(*delta));
  } else {
    if (!admitted_.effective.output.has_logprobs()) delta->clear_logprobs();
    part.sequence.mutable_text()->append(delta->text());
    part.sequence.mutable_reasoning_content()->append(
        delta->reasoning_content());
    part.reasoning_tokens =
        std::max(part.reasoning_tokens, delta->reasoning_tokens());
    part.sequence.mutable_token_ids()->MergeFrom(delta->token_ids());
    part.sequence.mutable_logprobs()->MergeFrom(delta->logprobs());
    JoinToolCalls(delta->tool_calls(), part.sequence.mutable_tool_calls());
  }
  // Not inside the first one's own call.
  const int echoes = admitted_.effective.output.echo() ? 1 : 0;
  if (!spread_ && part.deltas > 1 + echoes && !spread_timer_.running()) {
    spread_timer_.Start(absl::ZeroDuration(), [this] { StartOthers(); });
  }
}

void SequenceGroup::OnFinished(int index, v1::GenerateFinished* finished) {
  Part& part = parts_[static_cast<size_t>(index)];
  part.finished = true;
  finished->set_index(index);
  *part.sequence.mutable_finished() = *finished;
  const v1::FinishReason reason = finished->finish_reason();
  if (streams()) SendFinished(*finished);
  if (spread_) return;
  if (reason != v1::FINISH_REASON_CANCELLED &&
      reason != v1::FINISH_REASON_TIME_LIMIT) {
    if (!spread_timer_.running()) {
      spread_timer_.Start(absl::ZeroDuration(), [this] { StartOthers(); });
    }
    return;
  }
  // What ended it ends those that have not begun.
  spread_ = true;
  spread_timer_.Stop();
  for (size_t i = 1; i < parts_.size(); ++i) {
    Part& other = parts_[i];
    other.finished = other.closed = true;
    v1::GenerateFinished* const end = other.sequence.mutable_finished();
    end->set_index(static_cast<int>(i));
    end->set_finish_reason(reason);
    if (streams()) SendFinished(*end);
  }
}

void SequenceGroup::OnMemberClosed(int index, const absl::Status& status) {
  if (ended_) return;
  if (!status.ok()) {
    End(status);
    return;
  }
  parts_[static_cast<size_t>(index)].closed = true;
  if (!std::all_of(parts_.begin(), parts_.end(),
                   [](const Part& part) { return part.closed; })) {
    return;
  }
  if (!streams()) SendBest();
  v1::GenerateResponse response;
  *response.mutable_done() = MergedDone();
  client_->Send(std::move(response));
  End(absl::OkStatus());
}

// Destroyed without an end: the router gave the sequence up.
void SequenceGroup::OnMemberGone(int index) {
  parts_[static_cast<size_t>(index)].stream = nullptr;
  if (!ended_) End(absl::CancelledError("a sequence of the request is gone"));
}

void SequenceGroup::SendDelta(v1::GenerateDelta delta) {
  v1::GenerateResponse response;
  *response.mutable_delta() = std::move(delta);
  client_->Send(std::move(response));
}

void SequenceGroup::SendFinished(v1::GenerateFinished finished) {
  v1::GenerateResponse response;
  *response.mutable_finished() = std::move(finished);
  client_->Send(std::move(response));
}

void SequenceGroup::SendBest() {
  std::vector<size_t> order(parts_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  // One that was ended before its first token is worse than all others.
  const auto score = [this](size_t i) {
    return parts_[i].tokens > 0 ? parts_[i].logprob
                                : -std::numeric_limits<double>::infinity();
  };
  std::stable_sort(order.begin(), order.end(), [&score](size_t a, size_t b) {
    return score(a) > score(b);
  });
  for (int i = 0; i < returned_; ++i) {
    Part& part = parts_[order[static_cast<size_t>(i)]];
    v1::GeneratedSequence& best = part.sequence;
    v1::GenerateDelta delta;
    delta.set_index(i);
    delta.set_text(best.text());
    delta.set_reasoning_content(best.reasoning_content());
    delta.set_reasoning_tokens(part.reasoning_tokens);
    *delta.mutable_token_ids() = best.token_ids();
    *delta.mutable_logprobs() = best.logprobs();
    SplitToolCalls(best.tool_calls(), delta.mutable_tool_calls());
    SendDelta(std::move(delta));
    best.mutable_finished()->set_index(i);
    SendFinished(best.finished());
  }
}

// The first sequence's times and workers; counts are of all.
v1::GenerateDone SequenceGroup::MergedDone() const {
  v1::GenerateDone merged = parts_[0].done;
  v1::Usage& usage = *merged.mutable_usage();
  v1::Timings& timings = *merged.mutable_timings();
  bool all_counted = merged.has_work();
  for (size_t i = 1; i < parts_.size(); ++i) {
    const v1::GenerateDone& done = parts_[i].done;
    usage.set_completion_tokens(usage.completion_tokens() +
                                done.usage().completion_tokens());
    usage.set_reasoning_tokens(usage.reasoning_tokens() +
                               done.usage().reasoning_tokens());
    usage.set_accepted_prediction_tokens(
        usage.accepted_prediction_tokens() +
        done.usage().accepted_prediction_tokens());
    usage.set_rejected_prediction_tokens(
        usage.rejected_prediction_tokens() +
        done.usage().rejected_prediction_tokens());
    timings.set_kv_bytes(timings.kv_bytes() + done.timings().kv_bytes());
    timings.set_retries(timings.retries() + done.timings().retries());
    timings.set_preemptions(timings.preemptions() +
                            done.timings().preemptions());
    AddWork(done.work(), merged.mutable_work());
    all_counted = all_counted && done.has_work();
    merged.set_not_reproducible(merged.not_reproducible() ||
                                done.not_reproducible());
  }
  if (!all_counted) merged.clear_work();
  usage.set_total_tokens(usage.prompt_tokens() + usage.completion_tokens());
  const int64_t nanos = absl::ToInt64Nanoseconds(loop_->Now() - begun_);
  timings.mutable_total()->set_seconds(nanos / 1'000'000'000);
  timings.mutable_total()->set_nanos(static_cast<int>(nanos % 1'000'000'000));
  return merged;
}

void SequenceGroup::OnDrained() {
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i].stream != nullptr) parts_[i].stream->handler()->OnDrained();
  }
}

void SequenceGroup::OnClosed(absl::Status status) {
  client_.reset();
  End(status.ok() ? absl::CancelledError("the client went away")
                  : std::move(status));
}

void SequenceGroup::End(const absl::Status& status) {
  if (std::exchange(ended_, true)) return;
  spread_timer_.Stop();
  // To sequences that still run the client is gone, whatever the cause.
  for (Part& part : parts_) {
    if (part.stream == nullptr) continue;
    std::exchange(part.stream, nullptr)->Detach()->OnClosed(status);
  }
  host_->OnGroupEnded(this);
  // Last: who has read an answer to its end finds its place free.
  if (client_ != nullptr) client_->Close(status);
}

}  // namespace tandem::router
