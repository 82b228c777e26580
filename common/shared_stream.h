// SPDX-License-Identifier: Apache-2.0
// Many Streams over one. What one turn of the loop says on all of them leaves
// as one message, so that a step of a batch costs its reader one read, not one
// for each sequence.
//
// A call begins with its first message and has a number, which the client's end
// draws and never uses twice. A message of the carrying stream is a list of
// frames, each of one call:
//
//   message  as the call's own stream would carry it
//   taken    bytes of messages that this end's handler took since it last said
//   end      the server's status, or the client's cancellation; the last one
//
// A call may have kWindow bytes of messages that its other end did not take
// (plus the message that crossed the line): a handler that pauses stops its own
// call alone. All calls end with the carrying stream, as calls end with their
// connection.
//
// Frames are of Protobuf types with `frames`: `call`, and one of `message`,
// `taken`, and `end` (a CallEnd). Lives on one Loop; its calls keep it alive.

#ifndef TANDEM_COMMON_SHARED_STREAM_H_
#define TANDEM_COMMON_SHARED_STREAM_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/loop.h"
#include "common/stream.h"

namespace tandem {

template <typename OutFrames, typename InFrames>
class SharedStream final
    : public std::enable_shared_from_this<SharedStream<OutFrames, InFrames>>,
      private StreamHandler<InFrames> {
 public:
  using Out = std::decay_t<decltype(OutFrames().frames(0).message())>;
  using In = std::decay_t<decltype(InFrames().frames(0).message())>;
  using CallEnd = std::decay_t<decltype(OutFrames().frames(0).end())>;
  using Carrier = Stream<OutFrames, InFrames>;
  // A call that the peer began; it has not been started.
  using OnCall = std::function<void(std::unique_ptr<Stream<Out, In>>)>;

  static constexpr int64_t kWindow = 16 << 10;
  // Of one message: gRPC's limit for what carries it, and room for its frame.
  static constexpr size_t kMaxMessage = (size_t{4} << 20) - 64;

  // The client's end, or with `on_call` the server's.
  static std::shared_ptr<SharedStream> Start(Loop* loop,
                                             std::unique_ptr<Carrier> carrier,
                                             OnCall on_call = nullptr) {
    std::shared_ptr<SharedStream> shared(
        new SharedStream(loop, std::move(carrier), std::move(on_call)));
    shared->carrier_->Start(shared.get());
    return shared;
  }
  SharedStream(const SharedStream&) = delete;
  SharedStream& operator=(const SharedStream&) = delete;

  // REQUIRES: the client's end. On a stream that has ended, a call that ends
  // as that did.
  std::unique_ptr<Stream<Out, In>> Open() {
    auto call = std::make_unique<Call>(this->shared_from_this(), ++newest_);
    if (ended_) call->end = end_;
    calls_.emplace(newest_, call.get());
    return call;
  }

  // Takes and brings no call any more.
  bool ended() const { return ended_; }
  size_t calls() const { return calls_.size(); }
  // No call is left, and nothing that one has still to say.
  bool idle() const {
    return ended_ || (calls_.empty() && tails_.empty() &&
                      batch_.frames().empty() && carrier_->unsent() == 0);
  }

  // Ends all calls, and the carrying stream with `status`.
  void Close(const absl::Status& status) {
    if (ended_) return;
    const auto self = this->shared_from_this();
    FlushNow();
    carrier_->Close(status);
    EndCalls(status);
  }

 private:
  // What this end says on a call.
  struct Outgoing {
    uint64_t call;
    std::deque<Out> waiting = {};  // for room in the peer's window
    size_t batched = 0;   // messages in the batch, which has not left yet
    int64_t untaken = 0;  // bytes that the peer has not taken
    bool said = false;    // the peer knows of the call
  };
  // Of a call that this end closed: what is to be said before its end.
  struct Tail {
    Outgoing out;
    absl::Status end;
  };

  struct Call final : Stream<Out, In> {
    Call(std::shared_ptr<SharedStream> shared_in, uint64_t id_in)
        : shared(std::move(shared_in)), id(id_in), out{.call = id_in} {}
    ~Call() override { Close(absl::CancelledError("stream dropped")); }

    void Start(StreamHandler<In>* handler_in) override {
      handler = handler_in;
      if (!queue.empty() || end.has_value()) shared->PostDeliver(id);
    }
    void Send(Out message) override {
      if (closed || end.has_value()) return;
      shared->Send(this, std::move(message));
    }
    size_t unsent() const override { return out.waiting.size() + out.batched; }
    void PauseReading(bool paused_in) override {
      if (paused == paused_in) return;
      paused = paused_in;
      // Not delivered from here: the caller may be in its own callback.
      if (!paused) shared->PostDeliver(id);
    }
    void Close(absl::Status status) override {
      if (closed) return;
      closed = true;
      handler = nullptr;
      shared->EndCall(this, status);
    }
    std::string peer() const override { return shared->carrier_->peer(); }

    const std::shared_ptr<SharedStream> shared;
    const uint64_t id;
    StreamHandler<In>* handler = nullptr;  // null: not started, or closed
    bool closed = false;                   // by this end, or its end was told
    bool paused = false;

    Outgoing out;

    // What the peer said.
    std::deque<In> queue;
    int64_t queued = 0;               // bytes in it
    int64_t taken = 0;                // bytes that the peer was not told of
    std::optional<absl::Status> end;  // the peer's, or the failure of the call
  };

  SharedStream(Loop* loop, std::unique_ptr<Carrier> carrier, OnCall on_call)
      : loop_(loop),
        carrier_(std::move(carrier)),
        on_call_(std::move(on_call)) {}

  Call* Find(uint64_t id) const {
    const auto found = calls_.find(id);
    return found == calls_.end() ? nullptr : found->second;
  }

  // ---- What this end says.

  void Send(Call* call, Out message) {
    const size_t bytes = message.ByteSizeLong();
    if (bytes > kMaxMessage) {
      Fail(call, absl::ResourceExhaustedError(
                     absl::StrCat("a message of ", bytes, " bytes, where ",
                                  kMaxMessage, " are allowed")));
    } else if (call->out.waiting.empty() && call->out.untaken < kWindow) {
      AddMessage(&call->out, std::move(message), bytes);
    } else {
      call->out.waiting.push_back(std::move(message));
    }
  }

  void SendWaiting(Outgoing* out) {
    while (!out->waiting.empty() && out->untaken < kWindow) {
      Out message = std::move(out->waiting.front());
      out->waiting.pop_front();
      const size_t bytes = message.ByteSizeLong();
      AddMessage(out, std::move(message), bytes);
    }
  }

  void AddMessage(Outgoing* out, Out message, size_t bytes) {
    *AddFrame(out->call, bytes)->mutable_message() = std::move(message);
    out->untaken += static_cast<int64_t>(bytes);
    out->said = true;
    ++out->batched;
  }

  // A frame of `bytes` and what a frame adds.
  auto* AddFrame(uint64_t call, size_t bytes) {
    if (batch_bytes_ + bytes > kMaxMessage) FlushNow();
    batch_bytes_ += bytes + kFrameBytes;
    if (!std::exchange(flush_posted_, true)) {
      loop_->Post([self = this->shared_from_this()] {
        self->flush_posted_ = false;
        self->Flush();
      });
    }
    auto* const frame = batch_.add_frames();
    frame->set_call(call);
    return frame;
  }

  // One batch is on its way at a time: meanwhile the next one grows.
  void Flush() {
    if (!ended_ && carrier_->unsent() == 0) FlushNow();
  }

  void FlushNow() {
    if (ended_ || batch_.frames_size() == 0) return;
    for (const auto& frame : batch_.frames()) {
      if (!frame.has_message()) continue;
      Call* const call = Find(frame.call());
      if (call == nullptr || --call->out.batched > 0) continue;
      if (call->out.waiting.empty()) drained_.push_back(frame.call());
    }
    batch_bytes_ = 0;
    carrier_->Send(std::exchange(batch_, OutFrames()));
    if (drained_.empty() || std::exchange(drain_posted_, true)) return;
    loop_->Post([self = this->shared_from_this()] { self->TellDrained(); });
  }

  void TellDrained() {
    drain_posted_ = false;
    for (const uint64_t id : std::exchange(drained_, {})) {
      Call* const call = Find(id);
      if (call != nullptr && call->handler != nullptr && call->unsent() == 0) {
        call->handler->OnDrained();
      }
    }
  }

  // From this side.
  void EndCall(Call* call, const absl::Status& status) {
    calls_.erase(call->id);
    if (ended_ || call->end.has_value()) return;
    if (on_call_ == nullptr || call->out.waiting.empty()) {
      SayEnd(call->out, status);
    } else {
      tails_.emplace(call->id, Tail{std::move(call->out), status});
    }
  }

  // It goes on for neither end.
  void Fail(Call* call, const absl::Status& status) {
    SayEnd(call->out, status);
    call->end = status;
    PostDeliver(call->id);
  }

  void SayEnd(const Outgoing& out, const absl::Status& status) {
    if (on_call_ == nullptr && !out.said) return;
    CallEnd end;
    end.set_code(status.raw_code());
    end.set_message(std::string(status.message()));
    status.ForEachPayload([&](absl::string_view type, const absl::Cord& bytes) {
      (*end.mutable_details())[std::string(type)] = std::string(bytes);
    });
    const size_t bytes = end.ByteSizeLong();
    *AddFrame(out.call, bytes)->mutable_end() = std::move(end);
  }

  // ---- What the peer says.

  void OnMessage(InFrames batch) override {
    const auto self = this->shared_from_this();
    for (auto& frame : *batch.mutable_frames()) {
      if (ended_) return;  // a handler closed it
      Call* call = Find(frame.call());
      if (frame.has_message()) {
        if (call == nullptr) call = Accept(frame.call());
        if (call != nullptr) Take(call, std::move(*frame.mutable_message()));
      } else if (call == nullptr) {
        OnTail(frame);
      } else if (frame.has_taken()) {
        Taken(&call->out, frame.taken());
      } else if (frame.has_end()) {
        call->end = StatusOf(frame.end());
        Deliver(call->id);
      }
    }
  }

  void Taken(Outgoing* out, uint32_t bytes) {
    out->untaken = std::max<int64_t>(out->untaken - int64_t{bytes}, 0);
    SendWaiting(out);
  }

  // A frame of a call that was closed here.
  template <typename Frame>
  void OnTail(const Frame& frame) {
    const auto found = tails_.find(frame.call());
    if (found == tails_.end()) return;
    Tail& tail = found->second;
    if (frame.has_taken()) Taken(&tail.out, frame.taken());
    if (tail.out.waiting.empty()) SayEnd(tail.out, tail.end);
    if (tail.out.waiting.empty() || frame.has_end()) tails_.erase(found);
  }

  static absl::Status StatusOf(const CallEnd& end) {
    absl::Status status(static_cast<absl::StatusCode>(end.code()),
                        end.message());
    for (const auto& [type, bytes] : end.details()) {
      status.SetPayload(type, absl::Cord(bytes));
    }
    return status;
  }

  // The peer's first message of a new call.
  Call* Accept(uint64_t id) {
    if (on_call_ == nullptr || id <= newest_) return nullptr;
    newest_ = id;
    auto call = std::make_unique<Call>(this->shared_from_this(), id);
    calls_.emplace(id, call.get());
    on_call_(std::move(call));
    return Find(id);  // none: refused at once
  }

  void Take(Call* call, In message) {
    if (call->end.has_value()) return;  // it failed
    const auto bytes = static_cast<int64_t>(message.ByteSizeLong());
    if (call->handler != nullptr && !call->paused && call->queue.empty()) {
      Hand(call, std::move(message), bytes);
      return;
    }
    call->queued += bytes;
    if (call->queued > kWindow + static_cast<int64_t>(kMaxMessage)) {
      Fail(call, absl::InternalError("the peer sent more than was asked for"));
      return;
    }
    call->queue.push_back(std::move(message));
  }

  // May end the call.
  void Hand(Call* call, In message, int64_t bytes) {
    call->taken += bytes;
    if (call->taken >= kWindow / 2 && !ended_ && !call->end.has_value()) {
      AddFrame(call->id, 0)
          ->set_taken(static_cast<uint32_t>(std::exchange(call->taken, 0)));
    }
    call->handler->OnMessage(std::move(message));
  }

  void PostDeliver(uint64_t id) {
    loop_->Post([self = this->shared_from_this(), id] { self->Deliver(id); });
  }

  // Tells the handler all there is to tell. Any of its callbacks may end the
  // call.
  void Deliver(uint64_t id) {
    Call* call = Find(id);
    while (call != nullptr && call->handler != nullptr && !call->paused &&
           !call->queue.empty()) {
      In message = std::move(call->queue.front());
      call->queue.pop_front();
      const auto bytes = static_cast<int64_t>(message.ByteSizeLong());
      call->queued -= bytes;
      Hand(call, std::move(message), bytes);
      call = Find(id);
    }
    if (call == nullptr || call->handler == nullptr || !call->end.has_value()) {
      return;
    }
    // A good end comes after all that was said. A bad one overtakes what
    // pausing held back, or a paused call would never hear of it.
    if (call->end->ok() && !call->queue.empty()) return;
    calls_.erase(id);
    call->closed = true;
    std::exchange(call->handler, nullptr)->OnClosed(*call->end);
  }

  void OnDrained() override { Flush(); }

  void OnClosed(absl::Status status) override {
    const auto self = this->shared_from_this();
    // Its calls did not end well, whatever the stream did.
    EndCalls(status.ok() ? absl::UnavailableError("the peer ended the stream")
                         : status);
  }

  void EndCalls(const absl::Status& status) {
    ended_ = true;
    end_ = status;
    tails_.clear();
    std::vector<uint64_t> ids;
    for (const auto& [id, call] : calls_) ids.push_back(id);
    std::sort(ids.begin(), ids.end());  // in one order for one seed
    for (const uint64_t id : ids) {
      Call* const call = Find(id);
      if (call == nullptr) continue;
      if (!call->end.has_value()) call->end = status;
      Deliver(id);
    }
  }

  // What a frame adds: its own tag and length, the call's number, another tag
  // and length.
  static constexpr size_t kFrameBytes = 32;

  Loop* const loop_;
  const std::unique_ptr<Carrier> carrier_;
  const OnCall on_call_;                        // null: the client's end
  absl::flat_hash_map<uint64_t, Call*> calls_;  // by their numbers
  absl::flat_hash_map<uint64_t, Tail> tails_;   // the server's end
  uint64_t newest_ = 0;
  OutFrames batch_;  // not with the carrier yet
  size_t batch_bytes_ = 0;
  bool flush_posted_ = false;
  std::vector<uint64_t> drained_;  // calls that are to be told
  bool drain_posted_ = false;
  bool ended_ = false;
  absl::Status end_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_SHARED_STREAM_H_
