// SPDX-License-Identifier: Apache-2.0
#include "router/http/openai_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/error.h"

namespace tandem::router {
namespace {

// Proxies and load balancers cut connections that say nothing for a minute.
constexpr absl::Duration kKeepAlive = absl::Seconds(15);
constexpr size_t kFewEvents = 16;
// Of one write, whose end tells that a slow client takes something.
constexpr size_t kWriteBytes = 64 << 10;

absl::Status TooLarge(size_t limit) {
  return MakeError(
      absl::StatusCode::kInvalidArgument, "ANSWER_TOO_LARGE",
      absl::StrCat("the answer is over ", limit,
                   " bytes (--max-response-bytes): stream it, or "
                   "ask for fewer sequences or log probabilities"));
}

}  // namespace

// A prompt's stream. The core owns it; the call knows it until it is gone.
class OpenAiCall::Part final : public ClientStream {
 public:
  Part(std::shared_ptr<OpenAiCall> call, int prompt)
      : call_(std::move(call)), prompt_(prompt) {
    call_->parts_[static_cast<size_t>(prompt_)] = this;
  }
  ~Part() override {
    call_->parts_[static_cast<size_t>(prompt_)] = nullptr;
    Close(absl::InternalError("dropped without an end"));
  }

  void Start(StreamHandler<v1::GenerateRequest>* handler) override {
    handler_ = handler;
    if (call_->ended_) Cancel(call_->over_);
  }
  void Send(v1::GenerateResponse event) override {
    if (!closed_) call_->OnEvent(prompt_, event);
  }
  size_t unsent() const override { return call_->unsent(); }
  void PauseReading(bool paused) override {}
  void Close(absl::Status status) override {
    if (std::exchange(closed_, true)) return;
    handler_ = nullptr;
    call_->OnPartClosed(status);
  }
  std::string peer() const override { return "http"; }

  // The client has gone, or its call has failed. Told later: this may be in
  // the midst of the core's own work.
  void Cancel(const absl::Status& status) {
    if (closed_) return;
    call_->loop_->Post([call = call_, prompt = prompt_, status] {
      Part* const part = call->parts_[static_cast<size_t>(prompt)];
      if (part == nullptr || part->handler_ == nullptr) return;
      std::exchange(part->handler_, nullptr)->OnClosed(status);
    });
  }
  void Drained() {
    if (handler_ != nullptr) handler_->OnDrained();
  }

 private:
  const std::shared_ptr<OpenAiCall> call_;
  const int prompt_;
  StreamHandler<v1::GenerateRequest>* handler_ = nullptr;
  bool closed_ = false;
};

OpenAiCall::OpenAiCall(Loop* loop, std::unique_ptr<HttpExchange> exchange,
                       OpenAiAnswer answer, int prompts, bool stream,
                       size_t max_bytes,
                       std::vector<std::pair<std::string, std::string>> headers)
    : loop_(loop),
      exchange_(std::move(exchange)),
      answer_(std::move(answer)),
      stream_(stream),
      max_bytes_(max_bytes),
      headers_(std::move(headers)),
      parts_(static_cast<size_t>(prompts), nullptr),
      open_(prompts),
      keep_alive_(loop) {}

OpenAiCall::~OpenAiCall() = default;

void OpenAiCall::Start() {
  exchange_->OnGone([loop = loop_, weak = weak_from_this()] {
    loop->Post([weak] {
      if (const auto call = weak.lock()) call->OnGone();
    });
  });
  KeepAlive();
}

std::unique_ptr<ClientStream> OpenAiCall::StreamOf(int prompt) {
  return std::make_unique<Part>(shared_from_this(), prompt);
}

void OpenAiCall::OnEvent(int prompt, const v1::GenerateResponse& event) {
  if (ended_) return;
  std::string events = answer_.Add(prompt, event);
  if (!stream_) {
    if (answer_.bytes() > max_bytes_) Fail(TooLarge(max_bytes_));
    return;
  }
  // Also where there is nothing to say yet: the request has been admitted.
  Write(std::move(events));
}

void OpenAiCall::OnPartClosed(const absl::Status& status) {
  if (ended_) return;
  if (!status.ok()) return Fail(status);
  if (--open_ > 0) return;
  std::string last = answer_.Finish();
  if (stream_) {
    Write(std::move(last));
    return End();
  }
  exchange_->Answer({.content_type = "application/json",
                     .body = std::move(last),
                     .headers = headers_});
  End();
}

void OpenAiCall::Fail(const absl::Status& status) {
  if (begun_) {
    Write(answer_.Fail(status));
    End();
    CancelParts(status);
    return;
  }
  HttpResponse response = answer_.Refuse(status);
  response.headers.insert(response.headers.end(), headers_.begin(),
                          headers_.end());
  End();
  CancelParts(status);
  // Behind the parts' ends: who has read it finds their places free.
  loop_->Post([call = shared_from_this(), response]() mutable {
    call->exchange_->Answer(std::move(response));
  });
}

void OpenAiCall::OnGone() {
  if (ended_) return;
  End();
  CancelParts(absl::CancelledError("the client has gone"));
}

void OpenAiCall::End() {
  ended_ = true;
  keep_alive_.Stop();
  if (!begun_) return;
  while (!unsent_.empty()) exchange_->Write(NextWrite(), nullptr);
  exchange_->End();
}

void OpenAiCall::CancelParts(const absl::Status& status) {
  over_ = status;
  for (Part* const part : parts_) {
    if (part != nullptr) part->Cancel(status);
  }
}

HttpResponse OpenAiCall::StreamHead() const {
  HttpResponse head{.content_type = "text/event-stream; charset=utf-8",
                    .headers = headers_};
  head.headers.emplace_back("Cache-Control", "no-cache");
  // nginx would gather events otherwise.
  head.headers.emplace_back("X-Accel-Buffering", "no");
  return head;
}

void OpenAiCall::Write(std::string bytes) {
  if (!std::exchange(begun_, true)) exchange_->Begin(StreamHead());
  if (bytes.empty()) return;
  unsent_.push_back(std::move(bytes));
  if (!writing_) Flush();
}

// Whole events: those of kWriteBytes, or one that is larger.
std::string OpenAiCall::NextWrite() {
  std::string events = std::move(unsent_.front());
  unsent_.pop_front();
  while (!unsent_.empty() &&
         events.size() + unsent_.front().size() <= kWriteBytes) {
    events += unsent_.front();
    unsent_.pop_front();
  }
  return events;
}

void OpenAiCall::Flush() {
  writing_ = true;
  const size_t before = unsent_.size();
  std::string events = NextWrite();
  events_in_flight_ = before - unsent_.size();
  exchange_->Write(std::move(events), [loop = loop_, weak = weak_from_this()] {
    loop->Post([weak] {
      if (const auto call = weak.lock()) call->OnWritten();
    });
  });
  KeepAlive();
}

void OpenAiCall::OnWritten() {
  writing_ = false;
  events_in_flight_ = 0;
  if (ended_) return;
  if (!unsent_.empty()) Flush();
  // A part that paused may go on though others keep writes busy.
  if (unsent() > kFewEvents) return;
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i] != nullptr) parts_[i]->Drained();
  }
}

void OpenAiCall::KeepAlive() {
  if (!stream_ || ended_) return;
  // Its write starts the time anew.
  keep_alive_.Start(kKeepAlive, [this] { Write(": keep-alive\n\n"); });
}

}  // namespace tandem::router
