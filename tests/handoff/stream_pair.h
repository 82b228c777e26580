// SPDX-License-Identifier: Apache-2.0
// Both ends of a stream within one process. Messages are delivered by tasks
// on the ends' loops (virtual or real), in order; a filter may drop, repeat or
// change each, and the pair may be cut or stalled.

#ifndef TANDEM_TESTS_HANDOFF_STREAM_PAIR_H_
#define TANDEM_TESTS_HANDOFF_STREAM_PAIR_H_

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/loop.h"
#include "common/mutex.h"
#include "common/stream.h"

namespace tandem::testing {

// One direction: messages on their way to `loop`.
template <typename Message>
struct Direction {
  explicit Direction(Loop* to_loop) : loop(to_loop) {}

  Loop* const loop;  // of the reader
  // Runs on the writer's loop for every message, those of a batch one by one:
  // how often it arrives.
  std::function<int(int index, Message* message)> filter;
  int sent = 0;                              // messages; writer's loop
  int written = 0;                           // a batch counts once
  StreamHandler<Message>* reader = nullptr;  // reader's loop

  Mutex mutex;
  std::deque<Message> queue ABSL_GUARDED_BY(mutex);
  std::optional<absl::Status> end ABSL_GUARDED_BY(mutex);  // after the queue
  bool stalled ABSL_GUARDED_BY(mutex) = false;
  bool dead ABSL_GUARDED_BY(mutex) = false;
};

template <typename Request, typename Response>
class StreamPair
    : public std::enable_shared_from_this<StreamPair<Request, Response>> {
 public:
  StreamPair(Loop* client_loop, Loop* server_loop)
      : requests(server_loop), responses(client_loop) {}

  std::unique_ptr<Stream<Request, Response>> Client() {
    return std::make_unique<End<Request, Response>>(
        this->shared_from_this(), &requests, &responses, /*client=*/true);
  }
  std::unique_ptr<Stream<Response, Request>> Server() {
    return std::make_unique<End<Response, Request>>(
        this->shared_from_this(), &responses, &requests, /*client=*/false);
  }

  // Both ends learn that the connection broke; what was on its way is lost.
  void Cut() {
    CutOne(&requests);
    CutOne(&responses);
  }
  void Stall(bool stalled) {
    SetStalled(&requests, stalled);
    SetStalled(&responses, stalled);
  }

  Direction<Request> requests;
  Direction<Response> responses;

 private:
  template <typename Out, typename In>
  class End final : public Stream<Out, In> {
   public:
    End(std::shared_ptr<StreamPair> pair, Direction<Out>* out,
        Direction<In>* in, bool client)
        : pair_(std::move(pair)), out_(out), in_(in), client_(client) {}
    ~End() override { Close(absl::CancelledError("stream destroyed")); }

    void Start(StreamHandler<In>* handler) override {
      in_->reader = handler;
      pair_->Wake(in_, out_);
    }
    void Send(Out message) override {
      if (closed_) return;
      ++out_->written;
      const int copies = Filter(&message);
      if (copies == 0) return;
      {
        MutexLock lock(&out_->mutex);
        if (out_->dead || out_->end.has_value()) return;
        for (int i = 1; i < copies; ++i) out_->queue.push_back(message);
        out_->queue.push_back(std::move(message));
      }
      for (int i = 0; i < copies; ++i) pair_->Wake(out_, in_);
    }
    size_t unsent() const override {
      MutexLock lock(&out_->mutex);
      return out_->queue.size();
    }
    void PauseReading(bool paused) override {
      pair_->SetStalled(in_, paused);
      if (!paused) pair_->Wake(in_, out_);
    }
    void Close(absl::Status status) override {
      if (std::exchange(closed_, true)) return;
      in_->reader = nullptr;
      {
        MutexLock lock(&in_->mutex);
        in_->dead = true;
        in_->queue.clear();
      }
      {
        MutexLock lock(&out_->mutex);
        if (out_->end.has_value()) return;
        // A client's end cancels; a server's lets what is queued go first.
        if (client_) out_->queue.clear();
        out_->end = client_ ? absl::CancelledError("the client cancelled")
                            : std::move(status);
      }
      pair_->Wake(out_, in_);
    }
    std::string peer() const override {
      return client_ ? "the server" : "the client";
    }

   private:
    int Filter(Out* message) {
      if constexpr (requires { message->batch(); }) {
        if (!message->batch().empty()) {
          Out passed;
          for (Out& one : *message->mutable_batch()) {
            const int copies = Filter(&one);
            for (int i = 0; i < copies; ++i) *passed.add_batch() = one;
          }
          *message = std::move(passed);
          return message->batch().empty() ? 0 : 1;
        }
      }
      const int index = out_->sent++;
      return out_->filter ? out_->filter(index, message) : 1;
    }

    const std::shared_ptr<StreamPair> pair_;
    Direction<Out>* const out_;
    Direction<In>* const in_;
    const bool client_;
    bool closed_ = false;
  };

  template <typename Message>
  void CutOne(Direction<Message>* direction) {
    {
      MutexLock lock(&direction->mutex);
      direction->queue.clear();
      direction->stalled = false;
      if (!direction->end.has_value()) {
        direction->end = absl::UnavailableError("connection lost");
      }
    }
    direction->loop->Post([self = this->shared_from_this(), direction] {
      self->Deliver(direction);
    });
  }

  template <typename Message>
  void SetStalled(Direction<Message>* direction, bool stalled) {
    {
      MutexLock lock(&direction->mutex);
      direction->stalled = stalled;
    }
    if (stalled) return;
    direction->loop->Post([self = this->shared_from_this(), direction] {
      while (self->Deliver(direction)) {
      }
    });
  }

  template <typename Message, typename Back>
  void Wake(Direction<Message>* direction, Direction<Back>* back) {
    direction->loop->Post([self = this->shared_from_this(), direction, back] {
      if (!self->Deliver(direction)) return;
      MutexLock lock(&direction->mutex);
      if (!direction->queue.empty()) return;
      back->loop->Post([self, back] {
        if (back->reader != nullptr) back->reader->OnDrained();
      });
    });
  }

  // Hands one message over; false if there was none.
  template <typename Message>
  bool Deliver(Direction<Message>* direction) {
    if (direction->reader == nullptr) return false;
    std::optional<Message> message;
    absl::Status end;
    {
      MutexLock lock(&direction->mutex);
      if (direction->dead || direction->stalled) return false;
      if (!direction->queue.empty()) {
        message = std::move(direction->queue.front());
        direction->queue.pop_front();
      } else if (direction->end.has_value()) {
        end = *direction->end;
        direction->dead = true;
      } else {
        return false;
      }
    }
    StreamHandler<Message>* reader = direction->reader;
    if (message.has_value()) {
      reader->OnMessage(*std::move(message));
      return true;
    }
    direction->reader = nullptr;
    reader->OnClosed(end);
    return false;
  }
};

}  // namespace tandem::testing

#endif  // TANDEM_TESTS_HANDOFF_STREAM_PAIR_H_
