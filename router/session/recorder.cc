// SPDX-License-Identifier: Apache-2.0
#include "router/session/recorder.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/delimited_message_util.h>

#include "absl/strings/str_cat.h"
#include "common/fnv.h"
#include "router/session/admitted.h"

namespace tandem::router::session {
namespace {

// Kept free for the entry that says why there are no more.
constexpr int64_t kEndBytes = 128;

}  // namespace

uint64_t Digest(const google::protobuf::MessageLite& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream out(&stream);
    out.SetSerializationDeterministic(true);  // of maps
    message.SerializeToCodedStream(&out);
  }
  return Fnv1a(bytes);
}

uint64_t Digest(const absl::Status& status) {
  return Fnv1a(
      absl::StrCat(status.raw_code(), " ", std::string(status.message())));
}

uint64_t Digest(const v1::WorkerRef& worker, absl::Duration deadline,
                const TraceContext& trace) {
  return Fnv1a(absl::StrCat(Digest(worker), " ", ToTicks(deadline), " ",
                            trace.Traceparent()));
}

// ---- The interfaces, each with the real one behind it.

class Recorder::RecordedLoop final : public Loop {
 public:
  RecordedLoop(Recorder* recorder, Loop* loop)
      : recorder_(recorder), loop_(loop) {}

  absl::Time Now() const override { return recorder_->Clock(loop_->Now()); }
  void Post(Task task) override { loop_->Post(Numbered(std::move(task), 0)); }
  TimerId After(absl::Duration delay, Task task) override {
    return loop_->After(delay, Numbered(std::move(task),
                                        static_cast<uint64_t>(ToTicks(delay))));
  }
  void Cancel(TimerId timer) override { loop_->Cancel(timer); }

 private:
  Task Numbered(Task task, uint64_t delay) {
    const uint64_t number = ++timers_;
    recorder_->Act(v1::SESSION_ACT_KIND_TIMER, number, delay);
    return [recorder = recorder_, number, task = std::move(task)]() mutable {
      v1::SessionEntry entry;
      entry.set_timer(number);
      const Turn turn(recorder, entry);
      task();
    };
  }

  Recorder* const recorder_;
  Loop* const loop_;
  uint64_t timers_ = 0;
};

class Recorder::RecordedRandom final : public Random {
 public:
  RecordedRandom(Recorder* recorder, Random* random)
      : recorder_(recorder), random_(random) {}
  uint64_t Next() override { return recorder_->Number(random_->Next()); }

 private:
  Recorder* const recorder_;
  Random* const random_;
};

class Recorder::RecordedText final : public TextStream {
 public:
  RecordedText(Recorder* recorder, std::unique_ptr<TextStream> text)
      : recorder_(recorder), text_(std::move(text)) {}
  std::string Push(int32_t token_id) override {
    return recorder_->Text(text_->Push(token_id));
  }
  std::string Finish() override { return recorder_->Text(text_->Finish()); }

 private:
  Recorder* const recorder_;
  const std::unique_ptr<TextStream> text_;
};

class Recorder::RecordedCodec final : public TextCodec {
 public:
  RecordedCodec(Recorder* recorder, TextCodec* codec)
      : recorder_(recorder), codec_(codec) {}
  std::unique_ptr<TextStream> NewStream(absl::Span<const int32_t> prompt,
                                        bool skip_special_tokens) override {
    return std::make_unique<RecordedText>(
        recorder_, codec_->NewStream(prompt, skip_special_tokens));
  }
  std::string TokenBytes(int32_t token_id) override {
    return recorder_->Text(codec_->TokenBytes(token_id));
  }

 private:
  Recorder* const recorder_;
  TextCodec* const codec_;
};

template <typename Out, typename In>
class Recorder::RecordedStream final : public Stream<Out, In>,
                                       private StreamHandler<In> {
 public:
  RecordedStream(Recorder* recorder, uint64_t number,
                 std::unique_ptr<Stream<Out, In>> inner)
      : recorder_(recorder), number_(number), inner_(std::move(inner)) {}
  ~RecordedStream() override {
    recorder_->Act(v1::SESSION_ACT_KIND_DROP, number_);
  }

  void Start(StreamHandler<In>* handler) override {
    handler_ = handler;
    inner_->Start(this);
  }
  void Send(Out message) override {
    if (recorder_->recording()) {
      recorder_->Act(v1::SESSION_ACT_KIND_SEND, number_, Digest(message));
    }
    inner_->Send(std::move(message));
  }
  size_t unsent() const override { return recorder_->Unsent(inner_->unsent()); }
  void PauseReading(bool paused) override {
    recorder_->Act(v1::SESSION_ACT_KIND_PAUSE, number_, paused ? 1 : 0);
    inner_->PauseReading(paused);
  }
  void Close(absl::Status status) override {
    recorder_->Act(v1::SESSION_ACT_KIND_CLOSE, number_, Digest(status));
    inner_->Close(std::move(status));
  }
  std::string peer() const override { return recorder_->Text(inner_->peer()); }

 private:
  // This may be gone when the core's handler returns.
  void OnMessage(In message) override {
    v1::SessionEntry entry;
    entry.mutable_message()->set_stream(number_);
    message.SerializeToString(entry.mutable_message()->mutable_message());
    const Turn turn(recorder_, entry);
    handler_->OnMessage(std::move(message));
  }
  void OnDrained() override {
    v1::SessionEntry entry;
    entry.set_drained(number_);
    const Turn turn(recorder_, entry);
    handler_->OnDrained();
  }
  void OnClosed(absl::Status status) override {
    v1::SessionEntry entry;
    entry.mutable_closed()->set_stream(number_);
    *entry.mutable_closed()->mutable_status() = ToEntry(status);
    const Turn turn(recorder_, entry);
    handler_->OnClosed(std::move(status));
  }

  Recorder* const recorder_;
  const uint64_t number_;
  const std::unique_ptr<Stream<Out, In>> inner_;
  StreamHandler<In>* handler_ = nullptr;
};

class Recorder::RecordedDialer final : public Dialer {
 public:
  RecordedDialer(Recorder* recorder, Dialer* dialer)
      : recorder_(recorder), dialer_(dialer) {}
  std::unique_ptr<DecodeStream> DialDecode(const v1::WorkerRef& worker,
                                           absl::Duration deadline,
                                           const TraceContext& trace) override {
    recorder_->Act(v1::SESSION_ACT_KIND_DIAL_DECODE, recorder_->next_stream(),
                   Digest(worker, deadline, trace));
    return recorder_->Wrap(dialer_->DialDecode(worker, deadline, trace));
  }
  std::unique_ptr<PrefillStream> DialPrefill(
      const v1::WorkerRef& worker, absl::Duration deadline,
      const TraceContext& trace) override {
    recorder_->Act(v1::SESSION_ACT_KIND_DIAL_PREFILL, recorder_->next_stream(),
                   Digest(worker, deadline, trace));
    return recorder_->Wrap(dialer_->DialPrefill(worker, deadline, trace));
  }

 private:
  Recorder* const recorder_;
  Dialer* const dialer_;
};

template <typename Out, typename In>
std::unique_ptr<Stream<Out, In>> Recorder::Wrap(
    std::unique_ptr<Stream<Out, In>> inner) {
  return std::make_unique<RecordedStream<Out, In>>(this, ++streams_,
                                                   std::move(inner));
}
template std::unique_ptr<ClientStream> Recorder::Wrap(
    std::unique_ptr<ClientStream> inner);
template std::unique_ptr<RegistrationStream> Recorder::Wrap(
    std::unique_ptr<RegistrationStream> inner);

// ---- Recorder

Recorder::Recorder(const RecorderOptions& options, std::ostream* out,
                   Loop* loop, Random* random, Dialer* dialer, TextCodec* codec,
                   const v1::SessionEntry& start)
    : options_(options),
      out_(out),
      loop_(std::make_unique<RecordedLoop>(this, loop)),
      random_(std::make_unique<RecordedRandom>(this, random)),
      dialer_(std::make_unique<RecordedDialer>(this, dialer)),
      codec_(codec == nullptr ? nullptr
                              : std::make_unique<RecordedCodec>(this, codec)) {
  Begin(start);
}

Recorder::~Recorder() { Finish(); }

void Recorder::Begin(const v1::SessionEntry& entry) {
  if (++depth_ > 1) {
    return Stop(absl::InternalError("an input came within another"));
  }
  if (out_ == nullptr) return;
  Write(entry);
  if (out_ != nullptr && !out_->flush()) {
    Stop(absl::DataLossError("cannot write what is recorded"));
  }
}

void Recorder::End() {
  if (--depth_ > 0 || out_ == nullptr) return;
  outcome_.mutable_outcome();
  Write(outcome_);
  outcome_.Clear();
}

void Recorder::Write(const v1::SessionEntry& entry) {
  const size_t size = entry.ByteSizeLong();
  written_ += static_cast<int64_t>(
      google::protobuf::io::CodedOutputStream::VarintSize64(size) + size);
  if (written_ > options_.max_bytes - kEndBytes) {
    return Stop(absl::ResourceExhaustedError(
        absl::StrCat("the session is longer than ", options_.max_bytes,
                     " bytes: its beginning is recorded")));
  }
  google::protobuf::util::SerializeDelimitedToOstream(entry, out_);
}

void Recorder::Finish() {
  if (out_ != nullptr) out_->flush();
  out_ = nullptr;
}

void Recorder::Stop(const absl::Status& why) {
  if (out_ == nullptr) return;
  v1::SessionEntry end;
  end.mutable_end()->set_why(std::string(why.message()));
  google::protobuf::util::SerializeDelimitedToOstream(end, out_);
  Finish();
  options_.on_end(why);
}

void Recorder::Act(v1::SessionActKind kind, uint64_t stream, uint64_t digest) {
  if (!recording()) return;
  v1::SessionAct* const act = outcome_.mutable_outcome()->add_acts();
  act->set_kind(kind);
  act->set_stream(stream);
  act->set_digest(digest);
}

absl::Time Recorder::Clock(absl::Time now) {
  if (!recording()) return now;
  const int64_t ticks = ToTicks(now - absl::UnixEpoch());
  outcome_.mutable_outcome()->add_clock(ticks - clock_);
  clock_ = ticks;
  return now;
}

uint64_t Recorder::Number(uint64_t value) {
  if (recording()) outcome_.mutable_outcome()->add_random(value);
  return value;
}

size_t Recorder::Unsent(size_t count) {
  if (recording()) outcome_.mutable_outcome()->add_unsent(count);
  return count;
}

std::string Recorder::Text(std::string text) {
  if (recording()) outcome_.mutable_outcome()->add_text(text);
  return text;
}

}  // namespace tandem::router::session
