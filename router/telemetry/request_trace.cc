// SPDX-License-Identifier: Apache-2.0
#include "router/telemetry/request_trace.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/error.h"

namespace tandem::router {
namespace {

// Failures of a request are bounded, but not by this file.
constexpr size_t kMaxSpans = 64;

using Attributes = google::protobuf::RepeatedPtrField<otlp::KeyValue>;

otlp::AnyValue* Put(Attributes* attributes, std::string_view key) {
  otlp::KeyValue* const entry = attributes->Add();
  entry->set_key(std::string(key));
  return entry->mutable_value();
}

void PutText(Attributes* attributes, std::string_view key,
             std::string_view value) {
  if (value.empty()) return;
  Put(attributes, key)->set_string_value(std::string(value));
}

std::string FinishName(v1::FinishReason reason) {
  const std::string name = v1::FinishReason_Name(reason);
  if (name.empty()) return "other";  // of a later version
  return absl::AsciiStrToLower(absl::StripPrefix(name, "FINISH_REASON_"));
}

uint64_t Nanos(absl::Time time) {
  return static_cast<uint64_t>(std::max<int64_t>(0, absl::ToUnixNanos(time)));
}

void SetError(otlp::Span* span, std::string_view type) {
  span->mutable_status()->set_code(otlp::Status::STATUS_CODE_ERROR);
  span->mutable_status()->set_message(std::string(type));
  PutText(span->mutable_attributes(), "error.type", type);
}

std::string ErrorType(const absl::Status& status) {
  std::string reason = ErrorReason(status);
  return reason.empty() ? absl::StatusCodeToString(status.code()) : reason;
}

double Seconds(const google::protobuf::Duration& value) {
  return static_cast<double>(value.seconds()) + value.nanos() * 1e-9;
}

// https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans
void PutRequest(const EffectiveRequest& request, Attributes* to) {
  const v1::SamplingOptions& sampling = request.sampling;
  Put(to, "gen_ai.request.temperature")
      ->set_double_value(sampling.temperature());
  Put(to, "gen_ai.request.top_p")->set_double_value(sampling.top_p());
  if (sampling.top_k() > 0) {
    Put(to, "gen_ai.request.top_k")->set_double_value(sampling.top_k());
  }
  Put(to, "gen_ai.request.max_tokens")
      ->set_int_value(request.stopping.max_tokens());
  Put(to, "gen_ai.request.seed")
      ->set_int_value(static_cast<int64_t>(sampling.seed()));
  Put(to, "gen_ai.request.frequency_penalty")
      ->set_double_value(sampling.frequency_penalty());
  Put(to, "gen_ai.request.presence_penalty")
      ->set_double_value(sampling.presence_penalty());
}

void PutAnswer(const RequestSummary& summary, Attributes* to) {
  const v1::Usage& usage = summary.done.usage();
  Put(to, "gen_ai.usage.input_tokens")->set_int_value(usage.prompt_tokens());
  Put(to, "gen_ai.usage.output_tokens")
      ->set_int_value(usage.completion_tokens());
  Put(to, "gen_ai.usage.cache_read.input_tokens")
      ->set_int_value(usage.cached_tokens());
  if (summary.status.ok()) {
    Put(to, "gen_ai.response.finish_reasons")
        ->mutable_array_value()
        ->add_values()
        ->set_string_value(FinishName(summary.finish_reason));
  }
  const v1::Timings& timings = summary.done.timings();
  // As vLLM names them.
  Put(to, "gen_ai.latency.time_in_queue")
      ->set_double_value(Seconds(timings.queue()));
  if (timings.has_time_to_first_token()) {
    Put(to, "gen_ai.latency.time_to_first_token")
        ->set_double_value(Seconds(timings.time_to_first_token()));
  }
  Put(to, "gen_ai.latency.e2e")->set_double_value(Seconds(timings.total()));
  if (timings.kv_bytes() > 0) {
    Put(to, "tandem.kv_bytes")->set_int_value(timings.kv_bytes());
  }
  Put(to, "tandem.retries")->set_int_value(timings.retries());
  Put(to, "tandem.preemptions")->set_int_value(timings.preemptions());
  PutText(to, "tandem.prefill_worker", summary.done.workers().prefill());
  PutText(to, "tandem.decode_worker", summary.done.workers().decode());
}

}  // namespace

RequestTrace::RequestTrace(const TraceContext& caller, std::string_view id,
                           absl::Time admitted)
    : context_(caller) {
  const std::string_view first = id.substr(0, 8);
  request_ = NewSpan("", admitted, admitted);
  request_.set_span_id(std::string(first));
  request_.set_parent_span_id(caller.span_id);
  request_.set_kind(otlp::Span::SPAN_KIND_SERVER);
  context_.span_id = std::string(first);
}

otlp::Span RequestTrace::NewSpan(std::string_view name, absl::Time begin,
                                 absl::Time end) {
  otlp::Span span;
  span.set_trace_id(context_.trace_id);
  // Of our own span's, counted on: unique within the trace as that is.
  std::string id = context_.span_id;
  if (!id.empty()) {
    const size_t count = done_.size() + (phase_ ? 1 : 0) + 1;
    id[6] = static_cast<char>(id[6] ^ static_cast<char>(count >> 8));
    id[7] = static_cast<char>(id[7] ^ static_cast<char>(count));
  }
  span.set_span_id(std::move(id));
  span.set_parent_span_id(context_.span_id);
  span.set_trace_state(context_.state);
  span.set_name(std::string(name));
  span.set_kind(otlp::Span::SPAN_KIND_INTERNAL);
  span.set_start_time_unix_nano(Nanos(begin));
  span.set_end_time_unix_nano(Nanos(std::max(begin, end)));
  span.set_flags(context_.sampled ? 1 : 0);
  return span;
}

void RequestTrace::Enter(std::string_view phase, absl::Time now,
                         std::string_view worker) {
  if (phase_ && phase_->name() == phase) return;
  Leave(now);
  if (done_.size() >= kMaxSpans) return;
  phase_ = NewSpan(phase, now, now);
  PutText(phase_->mutable_attributes(), "tandem.worker", worker);
}

void RequestTrace::Leave(absl::Time now) {
  if (!phase_) return;
  phase_->set_end_time_unix_nano(Nanos(now));
  done_.push_back(*std::move(phase_));
  phase_.reset();
}

void RequestTrace::Lost(absl::Time now, const AttemptLoss& loss) {
  if (phase_) SetError(&*phase_, ErrorType(loss.status));
  Leave(now);
  if (done_.size() >= kMaxSpans) return;
  otlp::Span::Event* const event = request_.add_events();
  event->set_name("retry");
  event->set_time_unix_nano(Nanos(now));
  Attributes* const attributes = event->mutable_attributes();
  PutText(attributes, "cause", loss.cause);
  PutText(attributes, "error.type", ErrorType(loss.status));
  PutText(attributes, "tandem.stage", loss.stage);
  PutText(attributes, "tandem.prefill_worker", loss.prefill_worker);
  PutText(attributes, "tandem.decode_worker", loss.decode_worker);
}

void RequestTrace::Note(std::string_view name, absl::Time now,
                        std::string_view worker) {
  if (request_.events_size() >= static_cast<int>(kMaxSpans)) return;
  otlp::Span::Event* const event = request_.add_events();
  event->set_name(std::string(name));
  event->set_time_unix_nano(Nanos(now));
  PutText(event->mutable_attributes(), "tandem.worker", worker);
}

void RequestTrace::Add(std::string_view name, absl::Time begin, absl::Time end,
                       std::string_view worker, std::string_view way) {
  if (done_.size() >= kMaxSpans) return;
  otlp::Span span = NewSpan(name, begin, end);
  PutText(span.mutable_attributes(), "tandem.worker", worker);
  PutText(span.mutable_attributes(), "tandem.way", way);
  done_.push_back(std::move(span));
}

std::vector<otlp::Span> RequestTrace::Finish(const RequestSummary& summary,
                                             const EffectiveRequest& request,
                                             std::string_view model,
                                             absl::Time now, absl::Time wall) {
  if (phase_ && !summary.status.ok()) {
    SetError(&*phase_, ErrorType(summary.status));
  }
  Leave(now);
  request_.set_end_time_unix_nano(Nanos(now));
  request_.set_name(absl::StrCat(summary.operation, " ", std::string(model)));
  Attributes* const attributes = request_.mutable_attributes();
  PutText(attributes, "gen_ai.operation.name", summary.operation);
  PutText(attributes, "gen_ai.provider.name", "tandem");
  PutText(attributes, "gen_ai.request.model", model);
  PutText(attributes, "gen_ai.response.model", model);
  PutText(attributes, "gen_ai.response.id", summary.request_id);
  PutRequest(request, attributes);
  PutAnswer(summary, attributes);
  if (!summary.status.ok()) SetError(&request_, ErrorType(summary.status));
  std::vector<otlp::Span> spans = std::move(done_);
  spans.insert(spans.begin(), std::move(request_));
  const auto shift =
      static_cast<uint64_t>(absl::ToInt64Nanoseconds(wall - now));
  for (otlp::Span& span : spans) {
    span.set_start_time_unix_nano(span.start_time_unix_nano() + shift);
    span.set_end_time_unix_nano(span.end_time_unix_nano() + shift);
    for (otlp::Span::Event& event : *span.mutable_events()) {
      event.set_time_unix_nano(event.time_unix_nano() + shift);
    }
  }
  return spans;
}

}  // namespace tandem::router
