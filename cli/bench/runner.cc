// SPDX-License-Identifier: Apache-2.0
#include "cli/bench/runner.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem::bench {
namespace {

// Requests sent before the loop turns to what has come back.
constexpr int kSentAtOnce = 16;

double Milliseconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) * 1e3 +
         static_cast<double>(duration.nanos()) * 1e-6;
}

ServerTimes ReadServerTimes(const v1::GenerateDone& done) {
  const v1::Timings& timings = done.timings();
  return {.queue_ms = Milliseconds(timings.queue()),
          .prefill_ms = Milliseconds(timings.prefill()),
          .handoff_ms = Milliseconds(timings.handoff()),
          .handoff_exposed_ms = Milliseconds(timings.handoff_exposed()),
          .retries = timings.retries(),
          .preemptions = timings.preemptions(),
          .split = !done.workers().prefill().empty()};
}

}  // namespace

struct Runner::InFlight final : public StreamHandler<v1::GenerateResponse> {
  InFlight(Runner* the_runner, size_t the_index)
      : runner(the_runner), index(the_index) {}

  void OnMessage(v1::GenerateResponse message) override {
    runner->OnMessage(this, message);
  }
  void OnClosed(absl::Status status) override {
    runner->OnClosed(this, std::move(status));
  }

  Runner* const runner;
  const size_t index;
  std::unique_ptr<GenerateStream> stream;
  int usage_tokens = 0;  // generated, as the server counts them
};

Runner::Runner(Loop* loop, const RunOptions& options,
               const std::vector<PlannedRequest>* plan, Hooks hooks)
    : loop_(loop),
      options_(options),
      plan_(*plan),
      hooks_(std::move(hooks)),
      next_due_(loop),
      records_(plan->size()),
      in_flight_(plan->size()) {
  counts_.planned = static_cast<int>(plan->size());
}

Runner::~Runner() = default;

double Runner::Elapsed() const {
  return absl::ToDoubleSeconds(loop_->Now() - start_);
}

RunProgress Runner::progress() const {
  RunProgress progress = counts_;
  progress.elapsed_s = Elapsed();
  return progress;
}

void Runner::Start() {
  start_ = loop_->Now();
  SendDue();
  FinishIfDone();
}

void Runner::SendDue() {
  for (int burst = 0; next_ < plan_.size(); ++burst) {
    if (options_.max_concurrency > 0 && running_ >= options_.max_concurrency) {
      held_back_ = true;  // goes on when one ends
      return;
    }
    const double wait_s = plan_[next_].at_s - Elapsed();
    if (wait_s > 0) {
      // Never less than the clock can tell apart, or it would not get there.
      next_due_.Start(std::max(absl::Seconds(wait_s), absl::Microseconds(1)),
                      [this] { SendDue(); });
      return;
    }
    if (burst == kSentAtOnce) {
      next_due_.Start(absl::ZeroDuration(), [this] { SendDue(); });
      return;
    }
    Send(next_++);
  }
}

void Runner::Send(size_t index) {
  RequestRecord& record = records_[index];
  record.scheduled_s = plan_[index].at_s;
  record.due_s = record.scheduled_s;
  if (held_back_) record.due_s = std::max(record.due_s, place_free_s_);
  held_back_ = false;
  if (options_.closed_loop) record.scheduled_s = record.due_s;
  record.planned_output_tokens = plan_[index].output_tokens;
  record.sent = true;

  in_flight_[index] = std::make_unique<InFlight>(this, index);
  InFlight* const request = in_flight_[index].get();
  ++running_;
  ++counts_.sent;
  v1::GenerateRequest message = hooks_.compose(index);
  request->stream = hooks_.open();
  request->stream->Start(request);
  record.sent_s = Elapsed();
  request->stream->Send(std::move(message));
}

void Runner::OnMessage(InFlight* request, const v1::GenerateResponse& message) {
  RequestRecord& record = records_[request->index];
  switch (message.event_case()) {
    case v1::GenerateResponse::kStarted:
      record.prompt_tokens = message.started().prompt_tokens();
      record.cached_tokens = message.started().cached_tokens();
      break;
    case v1::GenerateResponse::kDelta:
      if (const int tokens = message.delta().token_ids_size(); tokens > 0) {
        record.arrivals.push_back({Elapsed(), tokens});
        record.output_tokens += tokens;
        counts_.output_tokens += tokens;
      }
      break;
    case v1::GenerateResponse::kFinished:
      record.finish_reason =
          v1::FinishReason_Name(message.finished().finish_reason());
      break;
    case v1::GenerateResponse::kDone:
      request->usage_tokens = message.done().usage().completion_tokens();
      record.cached_tokens = message.done().usage().cached_tokens();
      record.server = ReadServerTimes(message.done());
      break;
    case v1::GenerateResponse::kPromptLogprobs:
    case v1::GenerateResponse::EVENT_NOT_SET:
      break;
  }
}

void Runner::OnClosed(InFlight* request, absl::Status status) {
  RequestRecord& record = records_[request->index];
  if (status.ok() && request->usage_tokens != record.output_tokens) {
    status = absl::DataLossError(
        absl::StrCat("the server counts ", request->usage_tokens,
                     " generated tokens, ", record.output_tokens, " came"));
  }
  record.status = std::move(status);
  record.ended_s = place_free_s_ = Elapsed();
  ++(record.completed() ? counts_.completed : counts_.failed);
  --running_;
  in_flight_[request->index] = nullptr;  // `request` is gone
  if (held_back_) SendDue();
  FinishIfDone();
}

void Runner::Stop() {
  next_ = plan_.size();
  next_due_.Stop();
  held_back_ = false;
  for (size_t i = 0; i < in_flight_.size(); ++i) {
    if (in_flight_[i] == nullptr) continue;
    in_flight_[i] = nullptr;  // cancels the call
    records_[i].status = absl::CancelledError("the run was interrupted");
    records_[i].ended_s = Elapsed();
    ++counts_.failed;
    --running_;
  }
  FinishIfDone();
}

void Runner::FinishIfDone() {
  if (finished_ || running_ > 0 || next_ < plan_.size()) return;
  finished_ = true;
  hooks_.finished();
}

}  // namespace tandem::bench
