// SPDX-License-Identifier: Apache-2.0
// The state machine of common/rpc/call.h over a transport of our own, whose
// operations end on two other threads as gRPC's do: what ThreadSanitizer can
// see of it, which it cannot through a distribution's gRPC.
#include "common/rpc/call.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "common/random.h"
#include "common/thread_loop.h"
#include "gtest/gtest.h"

namespace tandem::rpc {
namespace {

struct Tally {
  std::atomic<int> operations = 0, ended = 0, ended_twice = 0,
                   operations_after_end = 0;
  std::atomic<int> ended_in_flight = 0, lost = 0;
  std::atomic<int> overlapping = 0, drained = 0, destroyed = 0, wrong = 0,
                   late = 0;
};

// Reads come from one thread and writes end on another, in random time, until
// the peer breaks off or the call is cancelled.
class FakeCall final : public Call<int, int> {
 public:
  FakeCall(Side side, Loop* loop, uint64_t seed, ThreadLoop* reader,
           ThreadLoop* writer, Tally* tally)
      : Call<int, int>(side, loop),
        side_(side),
        reader_(reader),
        writer_(writer),
        tally_(tally) {
    breaks_after_ = static_cast<int>(SeededRandom(seed).Below(30));
    AddRef();  // the transport's, until its last word
  }
  ~FakeCall() override { ++tally_->destroyed; }

  int received() const { return received_; }
  bool fails() const { return cancelled_ || operations_ >= breaks_after_; }

 private:
  bool Fails() { return cancelled_ || operations_++ >= breaks_after_; }

  void ReadOp(int* message) override {
    // Long enough for the other threads to end the call meanwhile.
    if (SeededRandom(static_cast<uint64_t>(received_)).Below(4) == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    ++tally_->operations;
    if (ended_) ++tally_->operations_after_end;
    if (reads_in_flight_++ != 0) ++tally_->overlapping;
    reader_->Post([this, message] {
      const bool ok = !Fails();
      if (ok) *message = ++received_;
      --reads_in_flight_;
      ReadDone(ok);
      if (!ok && side_ == Side::kServer) Gone();
    });
  }
  void WriteOp(const int* message) override {
    ++tally_->operations;
    if (ended_) ++tally_->operations_after_end;
    if (writes_in_flight_++ != 0) ++tally_->overlapping;
    writer_->Post([this, message] {
      if (*message != ++written_) ++tally_->wrong;
      const bool ok = !Fails();
      --writes_in_flight_;
      WriteDone(ok);
    });
  }
  void End() override {
    if (ended_.exchange(true)) ++tally_->ended_twice;
    ++tally_->ended;
    if (writes_in_flight_ != 0) ++tally_->ended_in_flight;
    if (side_ == Side::kClient && reads_in_flight_ != 0) {
      ++tally_->ended_in_flight;
    }
    writer_->Post([this] {
      if (side_ == Side::kClient) Broken(absl::OkStatus());
      // As gRPC's OnDone: after the reactions of all that was started.
      reader_->Post([this] { writer_->Post([this] { DropRef(); }); });
    });
  }
  void Cancel() override {
    cancelled_ = true;
    if (side_ == Side::kServer) {
      AddRef();
      reader_->Post([this] {
        Gone();
        DropRef();
      });
    }
  }
  void CancelLater() override { Cancel(); }
  void Gone() {
    cancelled_ = true;
    Broken(absl::CancelledError("gone"));
  }

  const Side side_;
  ThreadLoop* const reader_;
  ThreadLoop* const writer_;
  Tally* const tally_;
  int breaks_after_;
  std::atomic<int> operations_ = 0, reads_in_flight_ = 0, writes_in_flight_ = 0;
  std::atomic<bool> cancelled_ = false, ended_ = false;
  std::atomic<int> received_ = 0;
  int written_ = 0;
};

struct Handler final : StreamHandler<int> {
  void OnMessage(int message) override {
    if (closed || message != ++last) ++tally->wrong;
    stream->Send(++sent);
    if (random->Below(3) == 0) stream->Send(++sent);
    // As what one call says makes another say something.
    Handler* const other = (*all)[random->Below(all->size())].get();
    if (other->stream != nullptr) other->stream->Send(++other->sent);
    switch (random->Below(25)) {
      case 0:
        stream->Close(absl::OkStatus());
        break;
      case 1:
        stream.reset();
        break;
      case 2:  // until OnDrained
        paused = stream->unsent() > 0;
        if (paused) stream->PauseReading(true);
        break;
    }
  }
  void OnDrained() override {
    if (closed) ++tally->late;
    ++tally->drained;
    paused = false;
    stream->PauseReading(false);
  }
  void OnClosed(absl::Status status) override {
    if (closed) ++tally->late;
    // A good end comes after everything.
    if (status.ok() && last != call->received()) ++tally->lost;
    closed = true;
    if (random->Below(2) == 0) stream.reset();
  }
  std::unique_ptr<Stream<int, int>> stream;
  std::vector<std::unique_ptr<Handler>>* all = nullptr;
  FakeCall* call = nullptr;
  Random* random = nullptr;
  Tally* tally = nullptr;
  int last = 0, sent = 0;
  bool closed = false, paused = false;
};

void RunCalls(Side side, int calls) {
  Tally tally;
  ThreadLoop core("core"), reader("reader"), writer("writer");
  SeededRandom random(42);
  std::vector<std::unique_ptr<Handler>> handlers;
  for (int i = 0; i < calls; ++i) {
    core.RunSync([&] {
      handlers.push_back(std::make_unique<Handler>());
      Handler* handler = handlers.back().get();
      handler->all = &handlers;
      handler->random = &random;
      handler->tally = &tally;
      handler->call =
          new FakeCall(side, &core, random.Next(), &reader, &writer, &tally);
      handler->stream =
          std::make_unique<CallStream<int, int>>(handler->call, "fake");
      handler->stream->Start(handler);
      handler->stream->Send(++handler->sent);
      const size_t other = random.Below(handlers.size());
      if (random.Below(4) == 0) handlers[other]->stream.reset();
    });
  }
  // All is written, and who waits for that was not told.
  const auto forgotten = [&] {
    int count = 0;
    core.RunSync([&] {
      for (const auto& handler : handlers) {
        count += handler->stream != nullptr && handler->paused &&
                 !handler->call->fails() && handler->stream->unsent() == 0;
      }
    });
    return count;
  };
  // Until nothing happens any more: who is told next is not forgotten.
  for (int before = -1, now = 0; before != now;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    before = std::exchange(now, tally.drained + tally.operations);
  }
  EXPECT_EQ(forgotten(), 0);
  EXPECT_GT(tally.drained, 0);
  core.RunSync([&] {
    for (auto& handler : handlers) handler->stream.reset();
  });
  for (int i = 0; i < 4000 && tally.destroyed < calls; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(tally.destroyed, calls);
  EXPECT_EQ(tally.ended, calls);
  EXPECT_EQ(tally.ended_twice, 0);
  EXPECT_EQ(tally.operations_after_end, 0);
  EXPECT_EQ(tally.ended_in_flight, 0);
  EXPECT_EQ(tally.lost, 0);
  EXPECT_EQ(tally.overlapping, 0);
  EXPECT_EQ(tally.wrong, 0);
  EXPECT_EQ(tally.late, 0);
}

TEST(CallTest, ServerCallsEndOnceUnderEveryRace) {
  RunCalls(Side::kServer, 3000);
}

TEST(CallTest, ClientCallsEndOnceUnderEveryRace) {
  RunCalls(Side::kClient, 3000);
}

}  // namespace
}  // namespace tandem::rpc
