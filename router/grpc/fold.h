// SPDX-License-Identifier: Apache-2.0
// A unary answer made of a stream's events: the core writes to a ClientStream
// as always, and this one collects until the end, or until it is more than a
// client may be sent at once. On the router's loop.

#ifndef TANDEM_ROUTER_GRPC_FOLD_H_
#define TANDEM_ROUTER_GRPC_FOLD_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/error.h"
#include "common/loop.h"
#include "router/core/dialer.h"
#include "router/text/tool_call_output.h"

namespace tandem::router {

using UnaryStream = Stream<v1::GenerateOnceResponse, v1::GenerateRequest>;

class FoldingStream final : public ClientStream {
 public:
  FoldingStream(Loop* loop, std::unique_ptr<UnaryStream> call, size_t max_bytes)
      : call_(std::move(call)), max_bytes_(max_bytes), gone_(loop) {}

  void Start(StreamHandler<v1::GenerateRequest>* handler) override {
    handler_ = handler;
    call_->Start(handler);
  }
  void Send(v1::GenerateResponse event) override {
    if (bytes_ > max_bytes_) return;
    bytes_ += event.ByteSizeLong();
    if (bytes_ > max_bytes_) return Refuse();
    if (!event.request_id().empty()) {
      answer_.set_request_id(event.request_id());
    }
    switch (event.event_case()) {
      case v1::GenerateResponse::kStarted:
        *answer_.mutable_started() = std::move(*event.mutable_started());
        // What has begun is not to be repeated: this sends the headers.
        call_->Send({});
        return;
      case v1::GenerateResponse::kDelta: {
        v1::GeneratedSequence* const s = Sequence(event.delta().index());
        s->mutable_text()->append(event.delta().text());
        s->mutable_reasoning_content()->append(
            event.delta().reasoning_content());
        s->mutable_token_ids()->MergeFrom(event.delta().token_ids());
        s->mutable_logprobs()->MergeFrom(event.delta().logprobs());
        JoinToolCalls(event.delta().tool_calls(), s->mutable_tool_calls());
        return;
      }
      case v1::GenerateResponse::kPromptLogprobs:
        answer_.mutable_prompt_logprobs()->MergeFrom(
            event.prompt_logprobs().tokens());
        return;
      case v1::GenerateResponse::kFinished:
        *Sequence(event.finished().index())->mutable_finished() =
            event.finished();
        return;
      case v1::GenerateResponse::kDone:
        *answer_.mutable_done() = std::move(*event.mutable_done());
        return;
      case v1::GenerateResponse::EVENT_NOT_SET:
        return;
    }
  }
  size_t unsent() const override { return 0; }
  void PauseReading(bool paused) override {}
  void Close(absl::Status status) override {
    if (call_ == nullptr) return;
    gone_.Stop();
    if (bytes_ > max_bytes_) status = TooLarge();
    if (status.ok()) call_->Send(std::move(answer_));
    call_->Close(std::move(status));
  }
  std::string peer() const override {
    return call_ == nullptr ? "" : call_->peer();
  }

 private:
  v1::GeneratedSequence* Sequence(int index) {
    while (answer_.sequences_size() <= index) {
      answer_.add_sequences()->set_index(answer_.sequences_size() - 1);
    }
    return answer_.mutable_sequences(index);
  }

  // Ends the request, which is in the midst of writing, and then the call.
  void Refuse() {
    answer_.Clear();
    gone_.Start(absl::ZeroDuration(), [this] {
      const std::unique_ptr<UnaryStream> call = std::move(call_);
      const absl::Status status = TooLarge();
      handler_->OnClosed(status);
      call->Close(status);  // this is gone
    });
  }
  absl::Status TooLarge() const {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "ANSWER_TOO_LARGE",
        absl::StrCat("the answer is longer than ", max_bytes_,
                     " bytes (--max-response-bytes): ask for less, or call "
                     "Generate, which streams"));
  }

  std::unique_ptr<UnaryStream> call_;  // null: refused
  const size_t max_bytes_;
  StreamHandler<v1::GenerateRequest>* handler_ = nullptr;
  v1::GenerateOnceResponse answer_;
  size_t bytes_ = 0;  // of the events that it is made of
  Timer gone_;
};

}  // namespace tandem::router

#endif  // TANDEM_ROUTER_GRPC_FOLD_H_
