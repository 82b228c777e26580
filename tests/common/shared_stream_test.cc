// SPDX-License-Identifier: Apache-2.0
// Two ends over a carrying stream in memory, on virtual time: what stream.h
// promises of each call, whatever the others do.
#include "common/shared_stream.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/random.h"
#include "common/testing/virtual_loop.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tandem/v1/decode.pb.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Client = SharedStream<v1::DecodeSharedRequest, v1::DecodeSharedResponse>;
using Server = SharedStream<v1::DecodeSharedResponse, v1::DecodeSharedRequest>;

// One end of a stream between two objects on one loop. Messages travel as
// bytes, within the limit that gRPC has.
template <typename Out, typename In>
class WireEnd final : public Stream<Out, In> {
 public:
  explicit WireEnd(VirtualLoop* loop) : loop_(loop) {}

  void Start(StreamHandler<In>* handler) override { handler_ = handler; }
  void Send(Out message) override {
    if (closed_) return;
    const std::string bytes = message.SerializeAsString();
    EXPECT_LE(bytes.size(), size_t{4} << 20);
    most_bytes = std::max(most_bytes, bytes.size());
    queue_.push_back(bytes);
    ++sent;
    Pump();
  }
  size_t unsent() const override { return queue_.size(); }
  void PauseReading(bool) override { FAIL(); }
  void Close(absl::Status status) override {
    if (std::exchange(closed_, true)) return;
    handler_ = nullptr;
    loop_->Post([this, status] { peer_->Closed(status); });
  }
  std::string peer() const override { return "wire"; }

  void Join(WireEnd<In, Out>* peer) { peer_ = peer; }
  // Held, nothing leaves.
  void Hold(bool held) {
    held_ = held;
    Pump();
  }
  void Closed(const absl::Status& status) {
    closed_ = true;
    if (handler_ != nullptr) {
      std::exchange(handler_, nullptr)->OnClosed(status);
    }
  }
  void Arrive(const std::string& bytes) {
    In message;
    ASSERT_TRUE(message.ParseFromString(bytes));
    if (handler_ != nullptr) handler_->OnMessage(std::move(message));
  }

  int sent = 0;
  size_t most_bytes = 0;

 private:
  void Pump() {
    if (held_ || std::exchange(pumping_, true)) return;
    loop_->Post([this] {
      pumping_ = false;
      if (held_ || queue_.empty()) return;
      const std::string bytes = std::move(queue_.front());
      queue_.pop_front();
      peer_->Arrive(bytes);
      if (!queue_.empty()) {
        Pump();
      } else if (handler_ != nullptr) {
        handler_->OnDrained();
      }
    });
  }

  VirtualLoop* const loop_;
  WireEnd<In, Out>* peer_ = nullptr;
  StreamHandler<In>* handler_ = nullptr;
  std::deque<std::string> queue_;
  bool held_ = false, pumping_ = false, closed_ = false;
};

using ClientWire = WireEnd<v1::DecodeSharedRequest, v1::DecodeSharedResponse>;
using ServerWire = WireEnd<v1::DecodeSharedResponse, v1::DecodeSharedRequest>;

// What a carrier is owned through: the wire's ends outlive their streams.
template <typename Out, typename In>
class Borrowed final : public Stream<Out, In> {
 public:
  explicit Borrowed(WireEnd<Out, In>* end) : end_(end) {}
  ~Borrowed() override { end_->Close(absl::CancelledError("dropped")); }
  void Start(StreamHandler<In>* handler) override { end_->Start(handler); }
  void Send(Out message) override { end_->Send(std::move(message)); }
  size_t unsent() const override { return end_->unsent(); }
  void PauseReading(bool paused) override { end_->PauseReading(paused); }
  void Close(absl::Status status) override { end_->Close(status); }
  std::string peer() const override { return end_->peer(); }

 private:
  WireEnd<Out, In>* const end_;
};

template <typename Out, typename In>
struct Recorder final : StreamHandler<In> {
  void OnMessage(In message) override {
    EXPECT_FALSE(status.has_value()) << "heard something after the end";
    messages.push_back(Number(message));
    if (on_message) on_message();
  }
  void OnDrained() override {
    ++drained;
    EXPECT_EQ(stream->unsent(), 0u);
  }
  void OnClosed(absl::Status s) override {
    EXPECT_FALSE(status.has_value()) << "ended twice";
    status = std::move(s);
    if (on_closed) on_closed();
  }
  static int Number(const v1::DecodeRequest& message) {
    return static_cast<int>(message.retry().attempt());
  }
  static int Number(const v1::DecodeResponse& message) {
    return message.tokens().position();
  }

  std::unique_ptr<Stream<Out, In>> stream;
  std::vector<int> messages;
  int drained = 0;
  std::optional<absl::Status> status;
  std::function<void()> on_message, on_closed;
};
using Caller = Recorder<v1::DecodeRequest, v1::DecodeResponse>;
using Callee = Recorder<v1::DecodeResponse, v1::DecodeRequest>;

v1::DecodeRequest Ask(int number) {
  v1::DecodeRequest request;
  request.mutable_retry()->set_attempt(static_cast<uint32_t>(number));
  return request;
}

v1::DecodeResponse Say(int number, int values = 0) {
  v1::DecodeResponse response;
  response.mutable_tokens()->set_position(number);
  if (values > 0) {
    auto* const weights =
        response.mutable_tokens()->add_tokens()->mutable_attention();
    weights->Resize(values, 0.5F);
  }
  return response;
}

std::vector<int> UpTo(int end) {
  std::vector<int> numbers(static_cast<size_t>(end));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

class SharedStreamTest : public ::testing::Test {
 protected:
  SharedStreamTest() {
    near_.Join(&far_);
    far_.Join(&near_);
    server_ = Server::Start(
        &loop_,
        std::make_unique<
            Borrowed<v1::DecodeSharedResponse, v1::DecodeSharedRequest>>(&far_),
        [this](auto stream) {
          if (refuse_) {
            stream->Close(absl::UnavailableError("draining"));
            return;
          }
          auto callee = std::make_unique<Callee>();
          callee->stream = std::move(stream);
          callee->stream->Start(callee.get());
          callees_.push_back(std::move(callee));
        });
    client_ = Client::Start(
        &loop_, std::make_unique<Borrowed<v1::DecodeSharedRequest,
                                          v1::DecodeSharedResponse>>(&near_));
  }
  ~SharedStreamTest() override {
    callees_.clear();
    callers_.clear();
    server_.reset();
    client_.reset();
    loop_.RunUntilIdle();
  }

  // Its first message says its number.
  Caller* Call() {
    auto caller = std::make_unique<Caller>();
    caller->stream = client_->Open();
    caller->stream->Start(caller.get());
    caller->stream->Send(Ask(static_cast<int>(callers_.size())));
    callers_.push_back(std::move(caller));
    return callers_.back().get();
  }
  void Run() { loop_.RunUntilIdle(); }

  VirtualLoop loop_;
  ClientWire near_{&loop_};
  ServerWire far_{&loop_};
  std::shared_ptr<Client> client_;
  std::shared_ptr<Server> server_;
  std::vector<std::unique_ptr<Caller>> callers_;
  std::vector<std::unique_ptr<Callee>> callees_;
  bool refuse_ = false;
};

TEST_F(SharedStreamTest, WhatOneTurnSaysIsOneMessage) {
  for (int i = 0; i < 50; ++i) Call();
  Run();
  EXPECT_EQ(near_.sent, 1);
  ASSERT_EQ(callees_.size(), 50u);
  for (int step = 0; step < 20; ++step) {
    for (const auto& callee : callees_) callee->stream->Send(Say(step));
    Run();
  }
  EXPECT_EQ(far_.sent, 20);
  for (int i = 0; i < 50; ++i) {
    EXPECT_THAT(callees_[static_cast<size_t>(i)]->messages, ElementsAre(i));
    EXPECT_EQ(callees_[static_cast<size_t>(i)]->drained, 20);
    EXPECT_EQ(callers_[static_cast<size_t>(i)]->messages, UpTo(20));
  }
}

TEST_F(SharedStreamTest, WhatIsSaidWhileAMessageIsOnItsWayWaitsForIt) {
  Call();
  Run();
  Callee* const callee = callees_[0].get();
  far_.Hold(true);
  for (int i = 0; i < 100; ++i) {
    callee->stream->Send(Say(i));
    Run();
  }
  EXPECT_EQ(far_.sent, 1);
  EXPECT_EQ(callee->stream->unsent(), 99u);
  far_.Hold(false);
  Run();
  EXPECT_EQ(far_.sent, 2);
  EXPECT_EQ(callee->stream->unsent(), 0u);
  EXPECT_EQ(callers_[0]->messages, UpTo(100));
}

TEST_F(SharedStreamTest, ACallThatPausesStopsItselfAlone) {
  Caller* const slow = Call();
  Caller* const fast = Call();
  Run();
  slow->stream->PauseReading(true);
  constexpr int kMessages = 400;
  for (int i = 0; i < kMessages; ++i) {
    for (const auto& callee : callees_) callee->stream->Send(Say(i, 100));
    Run();
  }
  EXPECT_EQ(fast->messages, UpTo(kMessages));
  EXPECT_THAT(slow->messages, IsEmpty());
  // The window, of messages of some 410 bytes, is with the reader.
  const size_t unsent = callees_[0]->stream->unsent();
  EXPECT_GT(unsent, kMessages - 2 * Client::kWindow / 410);
  EXPECT_LT(unsent, kMessages - Client::kWindow / 410 / 2);
  EXPECT_EQ(callees_[1]->stream->unsent(), 0u);
  const int drained = callees_[0]->drained;
  slow->stream->PauseReading(false);
  Run();
  EXPECT_EQ(slow->messages, UpTo(kMessages));
  EXPECT_EQ(callees_[0]->stream->unsent(), 0u);
  EXPECT_GT(callees_[0]->drained, drained);
}

TEST_F(SharedStreamTest, AGoodEndComesAfterAllThatWasSaid) {
  Caller* const caller = Call();
  Run();
  caller->stream->PauseReading(true);
  // More than the window holds: the end waits for room, too.
  for (int i = 0; i < 400; ++i) callees_[0]->stream->Send(Say(i, 100));
  callees_[0]->stream->Close(absl::OkStatus());
  callees_[0]->stream.reset();
  Run();
  EXPECT_FALSE(caller->status.has_value());
  EXPECT_EQ(server_->calls(), 0u);
  EXPECT_FALSE(server_->idle());  // who ends now cuts it short
  caller->stream->PauseReading(false);
  Run();
  EXPECT_TRUE(server_->idle());
  EXPECT_EQ(caller->messages, UpTo(400));
  ASSERT_TRUE(caller->status.has_value());
  EXPECT_TRUE(caller->status->ok());
  EXPECT_EQ(callees_[0]->status, std::nullopt);
}

// The end arrives at once here, with what the reader has not taken.
TEST_F(SharedStreamTest, AGoodEndWaitsForAReaderThatPauses) {
  Caller* const caller = Call();
  Run();
  caller->stream->PauseReading(true);
  callees_[0]->stream->Send(Say(0));
  callees_[0]->stream->Send(Say(1));
  callees_[0]->stream->Close(absl::OkStatus());
  Run();
  EXPECT_TRUE(server_->idle());
  EXPECT_FALSE(caller->status.has_value());
  caller->stream->PauseReading(false);
  Run();
  EXPECT_THAT(caller->messages, ElementsAre(0, 1));
  ASSERT_TRUE(caller->status.has_value());
  EXPECT_TRUE(caller->status->ok());
}

TEST_F(SharedStreamTest, ABadEndOvertakesWhatPausingHeldBack) {
  Caller* const caller = Call();
  Run();
  caller->stream->PauseReading(true);
  callees_[0]->stream->Send(Say(0));
  callees_[0]->stream->Close(MakeError(absl::StatusCode::kResourceExhausted,
                                       "QUEUE_FULL", "8 wait", {{"limit", "8"}},
                                       absl::Milliseconds(1500)));
  Run();
  EXPECT_THAT(caller->messages, IsEmpty());
  ASSERT_TRUE(caller->status.has_value());
  EXPECT_EQ(caller->status->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(caller->status->message(), "8 wait");
  EXPECT_EQ(ErrorReason(*caller->status), "QUEUE_FULL");
  EXPECT_EQ(RetryAfter(*caller->status), absl::Milliseconds(1500));
}

TEST_F(SharedStreamTest, ADroppedCallIsCancelledAndTheOthersGoOn) {
  Call();
  Call();
  Run();
  callers_[0]->stream.reset();
  callees_[0]->stream->Send(Say(7));  // nobody's any more
  Run();
  ASSERT_TRUE(callees_[0]->status.has_value());
  EXPECT_EQ(callees_[0]->status->code(), absl::StatusCode::kCancelled);
  callees_[0]->stream.reset();
  callees_[1]->stream->Send(Say(0));
  Run();
  EXPECT_THAT(callers_[0]->messages, IsEmpty());
  EXPECT_THAT(callers_[1]->messages, ElementsAre(0));
  EXPECT_EQ(client_->calls(), 1u);
  EXPECT_EQ(server_->calls(), 1u);
}

TEST_F(SharedStreamTest, ACallThatNeverSaidAnythingIsNotOnTheWire) {
  client_->Open();
  Run();
  EXPECT_EQ(near_.sent, 0);
  EXPECT_EQ(client_->calls(), 0u);
}

TEST_F(SharedStreamTest, ARefusedCallHearsWhy) {
  refuse_ = true;
  Caller* const caller = Call();
  caller->stream->Send(Ask(1));
  Run();
  ASSERT_TRUE(caller->status.has_value());
  EXPECT_EQ(*caller->status, absl::UnavailableError("draining"));
  EXPECT_EQ(server_->calls(), 0u);
}

TEST_F(SharedStreamTest, AllCallsEndWithTheCarrier) {
  for (int i = 0; i < 3; ++i) Call();
  Run();
  // The first one to hear of it drops the second, and calls again.
  Caller late;
  callers_[0]->on_closed = [&] {
    callers_[1]->stream.reset();
    late.stream = client_->Open();
    late.stream->Start(&late);
  };
  callers_[2]->stream->PauseReading(true);
  near_.Closed(absl::UnavailableError("connection reset"));
  far_.Closed(absl::CancelledError("the peer went away"));
  Run();
  EXPECT_EQ(*callers_[0]->status, absl::UnavailableError("connection reset"));
  EXPECT_EQ(callers_[1]->status, std::nullopt);
  EXPECT_EQ(*callers_[2]->status, absl::UnavailableError("connection reset"));
  EXPECT_EQ(*late.status, absl::UnavailableError("connection reset"));
  for (const auto& callee : callees_) {
    EXPECT_EQ(*callee->status, absl::CancelledError("the peer went away"));
  }
  EXPECT_TRUE(client_->ended());
  EXPECT_TRUE(server_->ended());
  late.stream.reset();
}

TEST_F(SharedStreamTest, AClosedEndSaysItsLastWords) {
  Call();
  Call();
  Run();
  callees_[0]->stream->Send(Say(0));
  callees_[0]->stream->Close(absl::OkStatus());
  server_->Close(absl::UnavailableError("going away"));
  EXPECT_EQ(*callees_[1]->status, absl::UnavailableError("going away"));
  Run();
  EXPECT_THAT(callers_[0]->messages, ElementsAre(0));
  EXPECT_TRUE(callers_[0]->status->ok());
  EXPECT_EQ(*callers_[1]->status, absl::UnavailableError("going away"));
}

TEST_F(SharedStreamTest, AMessageThatIsTooLargeEndsItsCallAlone) {
  Call();
  Call();
  Run();
  callees_[0]->stream->Send(Say(0, 1 << 20));
  callees_[1]->stream->Send(Say(0, (1 << 20) - 100));
  Run();
  for (const auto& status : {callers_[0]->status, callees_[0]->status}) {
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(status->code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status->message()), HasSubstr("bytes"));
  }
  EXPECT_THAT(callers_[1]->messages, ElementsAre(0));
  EXPECT_GT(far_.most_bytes, size_t{4} << 20 >> 1);
}

TEST_F(SharedStreamTest, WhatIsTooMuchForOneMessageTakesSeveral) {
  for (int i = 0; i < 10; ++i) Call();
  Run();
  for (const auto& callee : callees_) callee->stream->Send(Say(0, 1 << 18));
  Run();
  EXPECT_EQ(far_.sent, 4);  // of at most three calls' megabytes each
  EXPECT_LE(far_.most_bytes, size_t{4} << 20);
  for (const auto& caller : callers_) {
    EXPECT_THAT(caller->messages, ElementsAre(0));
  }
}

TEST_F(SharedStreamTest, AWorkerThatHeedsNoWindowLosesTheCall) {
  Caller* const caller = Call();
  Call();
  Run();
  caller->stream->PauseReading(true);
  v1::DecodeSharedResponse batch;
  batch.add_frames()->set_call(1);
  *batch.mutable_frames(0)->mutable_message() = Say(0, 1 << 18);
  for (int i = 0; i < 10; ++i) near_.Arrive(batch.SerializeAsString());
  Run();
  ASSERT_TRUE(caller->status.has_value());
  EXPECT_EQ(caller->status->code(), absl::StatusCode::kInternal);
  EXPECT_THAT(caller->messages, IsEmpty());
  ASSERT_TRUE(callees_[0]->status.has_value());
  EXPECT_EQ(callees_[0]->status->code(), absl::StatusCode::kInternal);
  callees_[1]->stream->Send(Say(0));
  Run();
  EXPECT_THAT(callers_[1]->messages, ElementsAre(0));
}

TEST_F(SharedStreamTest, AHandlerMayEndCallsInItsCallbacks) {
  for (int i = 0; i < 3; ++i) Call();
  Run();
  callers_[0]->on_message = [&] {
    callers_[0]->stream.reset();
    callers_[1]->stream->Close(absl::CancelledError("enough"));
  };
  for (const auto& callee : callees_) {
    callee->stream->Send(Say(0));
    callee->stream->Send(Say(1));
  }
  Run();
  EXPECT_THAT(callers_[0]->messages, ElementsAre(0));
  EXPECT_THAT(callers_[1]->messages, IsEmpty());
  EXPECT_THAT(callers_[2]->messages, ElementsAre(0, 1));
}

// Calls that do anything at any time, against what each end said.
TEST_F(SharedStreamTest, EveryCallHearsWhatItsPeerSaidInOrder) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SeededRandom random(seed);
    std::map<Caller*, int> asked;
    std::map<Callee*, int> said;
    const size_t first_caller = callers_.size();
    const size_t first_callee = callees_.size();
    for (int step = 0; step < 300; ++step) {
      const auto caller = [&]() -> Caller* {
        const size_t open = callers_.size() - first_caller;
        return open == 0 ? nullptr
                         : callers_[first_caller + random.Below(open)].get();
      };
      const auto callee = [&]() -> Callee* {
        const size_t open = callees_.size() - first_callee;
        return open == 0 ? nullptr
                         : callees_[first_callee + random.Below(open)].get();
      };
      Caller* const near = caller();
      Callee* const far = callee();
      switch (random.Below(10)) {
        case 0:
          asked[Call()] = 1;
          break;
        case 1:
          if (near != nullptr) near->stream->PauseReading(random.Below(3) == 0);
          break;
        case 2:
          far_.Hold(random.Below(2) == 0);
          break;
        case 3:
          if (random.Below(4) == 0 && near != nullptr) {
            near->stream->Close(absl::OkStatus());
          }
          break;
        case 4:
          if (random.Below(4) == 0 && far != nullptr) {
            far->stream->Close(absl::OkStatus());
          }
          break;
        case 5:
          Run();
          break;
        default:
          if (far == nullptr) break;
          for (size_t i = random.Below(30) + 1; i > 0; --i) {
            far->stream->Send(
                Say(said[far]++, static_cast<int>(random.Below(400))));
          }
      }
    }
    far_.Hold(false);
    for (const auto& caller : callers_) caller->stream->PauseReading(false);
    Run();
    for (size_t i = first_callee; i < callees_.size(); ++i) {
      Callee* const far = callees_[i].get();
      ASSERT_EQ(far->messages.size(), 1u);
      Caller* const near =
          callers_[static_cast<size_t>(far->messages[0])].get();
      const std::vector<int> heard = near->messages;
      EXPECT_EQ(heard, UpTo(static_cast<int>(heard.size()))) << seed;
      EXPECT_LE(heard.size(), static_cast<size_t>(said[far])) << seed;
      // Of those that nobody ended, or that ended well, nothing is missing.
      if (far->status.has_value()) continue;  // the caller left it
      EXPECT_TRUE(!near->status.has_value() || near->status->ok());
    }
  }
  EXPECT_LT(near_.most_bytes, size_t{1} << 20);
}

// Whatever frames come, nothing breaks but calls.
TEST_F(SharedStreamTest, FramesOfNoSenseEndNothingElse) {
  Caller* const caller = Call();
  Run();
  SeededRandom random(1);
  for (int i = 0; i < 3000; ++i) {
    v1::DecodeSharedRequest batch;
    for (size_t n = random.Below(4); n > 0; --n) {
      auto* const frame = batch.add_frames();
      frame->set_call(random.Below(40) + 2);
      switch (random.Below(5)) {
        case 0:
          frame->set_taken(static_cast<uint32_t>(random.Below(2) - 1));
          break;
        case 1:
          frame->mutable_end()->set_code(static_cast<int>(random.Below(40)) -
                                         20);
          break;
        case 2:
          break;
        default:
          *frame->mutable_message() = Ask(i);
      }
    }
    far_.Arrive(batch.SerializeAsString());
    for (const auto& callee : callees_) {
      if (callee->stream != nullptr) callee->stream->Send(Say(i, 10));
    }
    Run();
  }
  EXPECT_LE(callees_.size(), 42u);
  EXPECT_EQ(caller->status, std::nullopt);
  EXPECT_EQ(caller->messages, UpTo(3000));
}

}  // namespace
}  // namespace tandem
