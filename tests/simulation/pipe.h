// SPDX-License-Identifier: Apache-2.0
// A Stream between two loops of one process, on real threads: what gRPC is to
// the cores, without gRPC, so that ThreadSanitizer can watch them.

#ifndef TANDEM_TESTS_SIMULATION_PIPE_H_
#define TANDEM_TESTS_SIMULATION_PIPE_H_

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "common/loop.h"
#include "common/stream.h"

namespace tandem::simulation {

// Copies of a status share a count that ThreadSanitizer does not see all of
// (Debian's abseil is not instrumented): no two threads may hold the same.
inline absl::Status OwnCopy(const absl::Status& status) {
  absl::Status copy(status.code(), status.message());
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    copy.SetPayload(url, absl::Cord(std::string(payload)));
  });
  return copy;
}

// The receiving half of one end. All but `waiting` belongs to `loop`.
template <typename In>
struct PipeInbox {
  explicit PipeInbox(Loop* l) : loop(l) {}

  void Deliver(In message) {
    queue.push_back(std::move(message));
    Flush();
  }
  void Flush() {
    while (handler != nullptr && !paused && !queue.empty()) {
      In message = std::move(queue.front());
      queue.pop_front();
      --waiting;
      handler->OnMessage(std::move(message));
    }
    if (handler != nullptr && queue.empty() && closed.has_value()) {
      absl::Status status = *std::move(closed);
      closed.reset();
      std::exchange(handler, nullptr)->OnClosed(std::move(status));
    }
  }

  Loop* const loop;
  StreamHandler<In>* handler = nullptr;
  bool paused = false;
  std::deque<In> queue;
  std::optional<absl::Status> closed;
  std::atomic<int> waiting = 0;  // sent and not handled
};

template <typename Out, typename In>
class PipeEnd final : public Stream<Out, In> {
 public:
  PipeEnd(std::shared_ptr<PipeInbox<In>> mine,
          std::shared_ptr<PipeInbox<Out>> theirs)
      : mine_(std::move(mine)), theirs_(std::move(theirs)) {}
  ~PipeEnd() override { Close(absl::CancelledError("stream dropped")); }

  void Start(StreamHandler<In>* handler) override {
    mine_->handler = handler;
    mine_->loop->Post([mine = mine_] { mine->Flush(); });
  }
  void Send(Out message) override {
    if (closed_) return;
    ++theirs_->waiting;
    theirs_->loop->Post([theirs = theirs_, mine = mine_,
                         message = std::move(message)]() mutable {
      theirs->Deliver(std::move(message));
      if (theirs->waiting == 0) {
        mine->loop->Post([mine] {
          if (mine->handler != nullptr) mine->handler->OnDrained();
        });
      }
    });
  }
  size_t unsent() const override {
    return static_cast<size_t>(std::max(0, theirs_->waiting - 32));
  }
  void PauseReading(bool paused) override {
    mine_->paused = paused;
    if (!paused) mine_->loop->Post([mine = mine_] { mine->Flush(); });
  }
  void Close(absl::Status status) override {
    if (std::exchange(closed_, true)) return;
    mine_->handler = nullptr;
    theirs_->loop->Post([theirs = theirs_, status = OwnCopy(status)]() mutable {
      theirs->closed = std::move(status);
      theirs->Flush();
    });
  }
  std::string peer() const override { return "pipe"; }

 private:
  const std::shared_ptr<PipeInbox<In>> mine_;
  const std::shared_ptr<PipeInbox<Out>> theirs_;
  bool closed_ = false;
};

// The client's end, for `client`'s loop; `accept` gets the server's end on
// `server`.
template <typename Request, typename Response, typename Accept>
std::unique_ptr<Stream<Request, Response>> OpenPipe(Loop* client, Loop* server,
                                                    Accept accept) {
  auto requests = std::make_shared<PipeInbox<Request>>(server);
  auto responses = std::make_shared<PipeInbox<Response>>(client);
  server->Post([=]() mutable {
    accept(std::make_unique<PipeEnd<Response, Request>>(requests, responses));
  });
  return std::make_unique<PipeEnd<Request, Response>>(responses, requests);
}

}  // namespace tandem::simulation

#endif  // TANDEM_TESTS_SIMULATION_PIPE_H_
